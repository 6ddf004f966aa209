"""The backend contract over a FrameTransport: frames as bytes, and goodbyes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.backends.framed.frames import packed, parse, unpacked
from unisono.backends.framed.transport import FrameTransport
from unisono.backends.registry import Closable
from unisono.config import Config
from unisono.core.envelope import UNTYPED, Any_
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.errors import ClosedError, ProtocolError
from unisono.messaging.actions import Frame, Kind, Transmit
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import BROKEN, PeerDown
from unisono.messaging.protocol import Protocol
from unisono.messaging.protocol_backend import ProtocolBackend

__all__ = ["FramedBackend"]

_log = logging.getLogger("unisono.backend")


class FramedBackend(ProtocolBackend, Closable):
    """A backend over a transport, which a subclass sets as `_transport`."""

    # Length of a piece of a rendezvous: 4 MiB delay what waits behind a piece by some milliseconds at most.
    piece_bytes = 4 << 20

    _transport: FrameTransport

    def __init__(self, rank: int, size: int, config: Config, runtime: Runtime) -> None:
        endpoint = Endpoint(Protocol(rank, config, self.piece_bytes), self._carry)
        super().__init__(endpoint, size, config, runtime)
        self._pid = os.getpid()
        self._changed = threading.Condition(endpoint.lock)
        self._goodbye_acks: set[int] = set()
        self._after_close: list[Callable[[], None]] = []

    # -- the contract -------------------------------------------------------------------------------------

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        """Send, except in a forked child."""
        return _failed(dst) if self.is_forked() else super().start_send(dst, context, tag, data, **how)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive, except in a forked child."""
        return _failed(src) if self.is_forked() else super().start_recv(src, context, tag, into, dtype=dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe, except in a forked child."""
        return _failed(src) if self.is_forked() else super().probe(src, context, tag)

    def close(self) -> None:
        """Leave: finish sends that have a CTS, withdraw the others, and say goodbye to all ranks."""
        if self.is_forked() or not self.endpoint.close():
            return
        protocol = self.endpoint.protocol
        can_wait = not self._transport.is_own_thread()
        deadline = self._runtime.deadline(self._config.flush_s)
        if can_wait:
            self._wait_until(lambda: not protocol.is_sending(), deadline.at)
        others = [peer for peer in range(self._size) if peer != self._rank and peer not in protocol.down]
        for peer in others:
            self._transport.send(peer, packed(Frame(Kind.GOODBYE)), None, None)
        if can_wait:
            # Closing a socket with unread bytes may reset it, and destroy the goodbye on its way.
            self._wait_until(lambda: all(map(self.is_over, others)), deadline.at)
        self._transport.close()
        self.endpoint.cut()
        for call in self._after_close:
            call()

    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that made it: threads and locks stayed behind."""
        return os.getpid() != self._pid

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once the transport is closed: for resources that must outlive it."""
        self._after_close.append(call)

    # -- called by the transport --------------------------------------------------------------------------

    def arrive(self, peer: int, frame: memoryview) -> tuple[memoryview, Callable[[], None]] | None:
        """Handle a frame of a peer.

        Returns None, or if a payload follows: the memory for it, and a function to call when it is filled.

        Raises:
            ProtocolError: the frame is invalid; pass the error to `broken`.
        """
        head, body = parse(frame)
        came = unpacked(peer, head, body, self._config)
        match came.kind:
            case Kind.DATA:
                return self._on_data(peer, came, head.nbytes)
            case Kind.GOODBYE:
                self._transport.send(peer, packed(Frame(Kind.GOODBYE_ACK)), None, None)
                self._peer_down(PeerDown(peer, "left", left=True))
            case Kind.GOODBYE_ACK:
                self._goodbye_acks.add(peer)
                self._notify()
            case _:
                self.endpoint.arrive(peer, came)
                if came.kind is Kind.FIN:
                    self._notify()
        return None

    def arrive_logged(self, peer: int, frame: memoryview) -> tuple[memoryview, Callable[[], None]] | None:
        """`arrive` for a transport's own thread, which goes on if a callback raises: the error is logged."""
        try:
            return self.arrive(peer, frame)
        except ProtocolError:
            raise
        except Exception:
            _log.exception("rank %d: a callback failed", self._rank)
            return None

    def is_over(self, peer: int) -> bool:
        """Whether nothing more comes from a peer."""
        return peer in self._goodbye_acks or peer in self.endpoint.protocol.down

    def lost(self, peer: int, cause: str) -> None:
        """Nothing more can arrive from a peer, and all that had arrived was passed on."""
        self._peer_down(PeerDown(peer, cause))

    def broken(self, peer: int, error: ProtocolError) -> None:
        """A peer broke the protocol: nothing more from it can be trusted."""
        self._peer_down(PeerDown(peer, f"{BROKEN}: {error}"))

    # -- frames and endings -------------------------------------------------------------------------------

    def _carry(self, outgoing: Transmit) -> tuple[()]:
        _, peer, frame = outgoing
        payload = frame.data if frame.kind is Kind.DATA and len(frame.data) else None
        assert payload is None or isinstance(payload, memoryview)
        self._transport.send(peer, packed(frame), payload, frame.lane)
        return ()

    def _on_data(self, peer: int, frame: Frame, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        with self.endpoint.lock:
            memory = self.endpoint.protocol.place(peer, frame, nbytes)
        if memory is None:  # the receive ended when this rank was closed: discard the bytes
            return (memoryview(bytearray(nbytes)), lambda: None) if nbytes else None
        if nbytes:
            return memory, partial(self.endpoint.placed, peer, frame, nbytes)
        self.endpoint.placed(peer, frame, 0)
        return None

    def _peer_down(self, down: PeerDown) -> None:
        self.endpoint.peer_down(down)
        self._notify()

    def _notify(self) -> None:
        """What `close` waits for may have changed."""
        with self._changed:
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool], until: float | None) -> None:
        with self._changed:
            while not condition():
                left = None if until is None else until - self._runtime.now()
                if left is not None and left <= 0:
                    return
                self._changed.wait(left)


def _failed(peer: int | Any_) -> Request:
    """A failed request, for a forked child."""
    request = Request(peer)
    request.fail(
        ClosedError("this communicator belongs to the parent process", next_step="make a new one after fork")
    )
    return request
