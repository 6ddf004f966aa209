"""The part of a FramedBackend that a library implements: it carries frames and payloads in order."""

from __future__ import annotations

from abc import ABC, abstractmethod

from unisono.core.envelope import Lane

__all__ = ["FrameTransport"]


class FrameTransport(ABC):
    """Carries frames between ranks.

    It passes each frame of a peer to `FramedBackend.arrive`: in the order of its lane, and never two frames
    of one peer at a time. It calls `FramedBackend.lost` once nothing more can arrive from a peer, and stops
    reading from a peer once `FramedBackend.is_over(peer)`.
    """

    @abstractmethod
    def send(self, peer: int, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        """Send a frame and the payload behind it. Does not block.

        A transport with lanes keeps the order of frames within each lane, and may deliver payloads in any
        order. A transport without lanes keeps the order of everything.

        Args:
            peer: the receiver, another rank.
            frame: a frame of at most `frame_bytes_max` bytes.
            payload: memory that stays valid until the peer has confirmed it; None if none follows.
            lane: None for a frame that must come after all frames before it, in any lane.
        """

    @abstractmethod
    def is_own_thread(self) -> bool:
        """Whether the calling thread is one that delivers frames: such a thread must not wait for frames."""

    @abstractmethod
    def close(self) -> None:
        """Stop. The backend has received the last frame of every peer, or its time for that is over."""
