"""The quic backend: QUIC by iroh.

It needs the extra `quic`.
"""
