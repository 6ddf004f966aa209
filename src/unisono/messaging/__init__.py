"""Messages between ranks: the contract of a backend, and matching.

Pure: no sockets, no threads, no clock of its own. Every backend and everything above stands on this contract.
"""
