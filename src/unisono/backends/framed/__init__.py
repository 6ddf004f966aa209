"""The whole backend contract over any library that carries frames in order.

A library (Gloo, MPI, iroh) implements `FrameTransport`; its backend is a subclass of `FramedBackend`.
"""

from unisono.backends.framed.backend import FramedBackend
from unisono.backends.framed.frames import frame_bytes_max
from unisono.backends.framed.transport import FrameTransport

__all__ = ["FrameTransport", "FramedBackend", "frame_bytes_max"]
