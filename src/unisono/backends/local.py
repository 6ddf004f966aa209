"""Ranks inside one process, in Python: the reference for backends, and for the executor of plans.

`uni.local` lets the engine host its ranks instead: native/local_ranks.py. Sends are bounded as on a real
link: short messages are eager under a credit per pair of ranks, others wait for their receive. So a program
that needs unbounded buffers fails here too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.backends.thread_watch import ThreadUsers, ThreadWatch
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.core.envelope import UNTYPED, Any_
from unisono.core.request import Request
from unisono.core.runtime import Event, Waiting
from unisono.messaging.actions import Action, Transmit, finish
from unisono.messaging.backend import Capabilities
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol
from unisono.messaging.protocol_backend import ProtocolBackend

__all__ = ["LocalBackend"]

_CAPABILITIES = Capabilities("local")


class LocalBackend(ProtocolBackend):
    """One of n ranks that share this process."""

    @classmethod
    def create(cls, size: int, config: Config | None = None) -> list[LocalBackend]:
        """Make `size` connected ranks.

        Raises:
            UsageError: `size` is not an integer of at least 1.
        """
        hub = _Hub(size, config if config is not None else Config())
        return [cls(hub, rank) for rank in range(size)]

    def __init__(self, hub: _Hub, rank: int) -> None:
        super().__init__(hub.endpoints[rank], len(hub.endpoints), hub.config, hub.runtime)
        self._hub = hub
        # A rank that is garbage-collected without `close` must not leave the others waiting for it.
        gone = PeerDown(rank, "left without closing", left=True)
        self._finalizer = self._runtime.finalizer(self, partial(hub.leave, gone))

    @property
    def capabilities(self) -> Capabilities:
        """Everything but the fast paths."""
        return _CAPABILITIES

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        """Send; the calling thread belongs to this rank from now on."""
        self._hub.watch_threads.note_user(self._rank)
        return super().start_send(dst, context, tag, data, **how)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive: a sign of life for the detector of deadlocks, even if no frame is sent."""
        self._hub.activity += 1
        return super().start_recv(src, context, tag, into, dtype=dtype)

    def close(self) -> None:
        """Leave. Messages that were sent before can still be received."""
        if self._finalizer.detach():
            self._hub.leave(PeerDown(self._rank, "left", left=True))

    def kill(self, cause: str = "killed") -> None:
        """End this rank as a crash would."""
        if self._finalizer.detach():
            self._hub.leave(PeerDown(self._rank, cause))


class _Hub:
    """What the ranks of one process share: a lock, under which a frame is handled as soon as it is sent."""

    def __init__(self, size: int, config: Config) -> None:
        self.config = config
        self.activity = 0
        self.watch_threads = ThreadWatch(size, config.deadlock_after_s, self)
        self.runtime = _WatchfulRuntime(self.watch_threads)
        self._lock = threading.Lock()
        self.endpoints = [
            Endpoint(Protocol(rank, config, shares_memory=True), self._carry, self._lock)
            for rank in range(size)
        ]

    def leave(self, down: PeerDown) -> None:
        """A rank leaves. All ranks learn of it before any of them can act on it and report it."""
        me = self.endpoints[down.rank]
        others = [endpoint for endpoint in self.endpoints if endpoint is not me]
        with self._lock:
            if me.protocol.is_closed:
                return
            me.listeners.clear()
            ends = me.run(me.protocol.close())
            for endpoint in others:
                ends += endpoint.run(endpoint.protocol.peer_down(down))
            listeners = [listener for endpoint in others for listener in endpoint.listeners]
        self.watch_threads.note_left(down.rank)
        for listener in listeners:
            listener(down)
        finish(ends)

    def moves(self) -> int:
        """How many frames were carried and receives posted."""
        return self.activity

    def is_quiet(self) -> bool:
        """Whether no message is under way: each frame is handled by the thread that sends it."""
        return True

    def users(self, rank: int) -> ThreadUsers:
        """None but those that have said so."""
        return ThreadUsers()

    def has_pending(self, rank: int) -> bool:
        """Whether a rank has a receive without a message, or a send that waits for its receive."""
        protocol = self.endpoints[rank].protocol
        with self._lock:
            return protocol.inbox.is_awaited() or protocol.is_sending()

    def _carry(self, outgoing: Transmit) -> list[Action]:
        self.activity += 1
        return self.endpoints[outgoing.peer].take(outgoing.source, outgoing.frame)


class _WatchfulRuntime(RealRuntime):
    """The real runtime, with the watch for threads that can never go on."""

    sees_deadlocks = True

    def __init__(self, watch: ThreadWatch) -> None:
        super().__init__()
        self._watch = watch

    def used(self, rank: int) -> None:
        """The calling thread waits for an operation of a rank: it belongs to the rank."""
        self._watch.used(rank)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait; without a time limit, raise Deadlock once no thread can end the wait."""
        return self._watch.block(super().block, self.now, event, timeout, waiting, is_limited=is_limited)
