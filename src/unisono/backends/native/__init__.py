"""The native backend: the C++ engine behind the contract.

Shared memory within a host, TCP or TLS between hosts.
"""
