"""The iroh backend: QUIC by iroh.

It needs the extra `iroh`.
"""
