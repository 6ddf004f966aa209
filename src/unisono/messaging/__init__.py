"""Messages between ranks: the contract of a backend, matching and flow control.

Pure: no sockets, no threads, no clock. Every backend, and everything above, is built on this contract.
"""
