"""Ranks inside one process, for threads and tests.

Knows how a message gets from one inbox to another in the same memory, and who in this process waits for whom.
Does not know collectives. Sends are bounded as on a real link: small ones travel at once under a credit per
pair of ranks, others wait for their receive. A program that needs endless buffers fails here too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.backends.registry import BackendInfo
from unisono.config import Config
from unisono.contract import (
    ENVELOPE_BYTES,
    UNTYPED,
    Backend,
    Capabilities,
    Envelope,
    Lane,
    PeerDown,
    Request,
    eager_limits,
    withdrawn,
)
from unisono.errors import ClosedError, Deadlock, UnisonoError, UsageError
from unisono.inbox import Inbox, Parcel
from unisono.matching import Posted
from unisono.runtime import Event, RealRuntime, Runtime, Waiting
from unisono.values import Any_

__all__ = ["DESCRIPTION", "LocalBackend"]

_CAPABILITIES = Capabilities("local")


class LocalBackend(Backend):
    """One of n ranks that share this process."""

    @classmethod
    def create(cls, size: int, config: Config | None = None) -> list[LocalBackend]:
        """Make `size` ranks that know each other."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"n={size!r}; allowed: an integer >= 1")
        hub = _Hub(size, config if config is not None else Config())
        return [cls(hub, rank) for rank in range(size)]

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        # A rank that is simply forgotten must not leave the others waiting for it.
        gone = PeerDown(rank, "left without closing", left=True)
        self._forgotten = weakref.finalize(self, hub.leave_later, gone)
        self._forgotten.atexit = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks share the process."""
        return self._hub.size

    @property
    def capabilities(self) -> Capabilities:
        """Everything but the fast paths."""
        return _CAPABILITIES

    @property
    def runtime(self) -> Runtime:
        """The clock, with a watch for deadlocks."""
        return self._hub.runtime

    @property
    def config(self) -> Config:
        """The settings of all ranks."""
        return self._hub.config

    def start_send(
        self,
        dst: int,
        context: int,
        tag: int,
        data: memoryview,
        *,
        dtype: int = UNTYPED,
        header: bytes = b"",
        lane: Lane = Lane.BULK,
        sync: bool = False,
    ) -> Request:
        """Put a message into the other's inbox: a copy if the credit allows, else a reference."""
        self.check_peer(dst, "dst")
        self._hub.runtime.note_user(self._rank)
        request = Request(dst)
        down = self._hub.down_of(self._rank, dst)
        if down is not None:
            request.fail(down)
            return request
        envelope = Envelope(self._rank, context, tag, data.nbytes, dtype, header)
        pair = self._hub.pair(self._rank, dst, lane)
        parcel = _Parcel(data, request, pair, self._hub)
        if pair.take(data.nbytes, is_own=dst == self._rank):
            parcel.data, parcel.cost = memoryview(bytes(data)), data.nbytes + ENVELOPE_BYTES
        inbox = self._hub.inboxes[dst]
        request.withdraw_by(lambda _: parcel.take_back(inbox, withdrawn()))
        # An eager send ends before its arrival: the receiver may answer at once, on this very thread.
        if parcel.cost and not sync:
            parcel.request = None
            inbox.arrive(envelope, parcel)
            request.complete()
        else:
            inbox.arrive(envelope, parcel)
            if (closed := self._hub.down_of(self._rank, self._rank)) is not None:
                parcel.take_back(inbox, closed)  # this rank was closed meanwhile and has not seen the parcel
        return request

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive in this rank's inbox."""
        self.check_peer(src, "src")
        return self._hub.inboxes[self._rank].receive(src, context, tag, into, dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe in this rank's inbox."""
        self.check_peer(src, "src")
        return self._hub.inboxes[self._rank].probe(src, context, tag)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Tell the listener of ranks that are or go down."""
        self._hub.watch(self._rank, listener)

    def close(self) -> None:
        """Leave. What was sent before stays receivable."""
        if self._forgotten.detach() is not None:
            self._hub.leave(PeerDown(self._rank, "left", left=True))

    def kill(self, cause: str = "killed") -> None:
        """End this rank as a crash would: the others see it die."""
        if self._forgotten.detach() is not None:
            self._hub.leave(PeerDown(self._rank, cause))


@dataclass(slots=True)
class _Pair:
    """The credit that one rank has with another on one lane."""

    limit: int
    eager_bytes: int
    used: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int, is_own: bool) -> bool:
        """Use credit for a message; False if it must wait for its receive instead.

        A rank may always send to itself: it could never wait for its own receive.
        """
        cost = nbytes + ENVELOPE_BYTES
        with self.lock:
            if not is_own and (nbytes > self.eager_bytes or self.used + cost > self.limit):
                return False
            self.used += cost
            return True

    def give_back(self, cost: int) -> None:
        with self.lock:
            self.used -= cost


class _Parcel(Parcel):
    """A message in this process; `request` is the sender's, if it still waits."""

    def __init__(self, data: memoryview, request: Request, pair: _Pair, hub: _Hub) -> None:
        self.data = data
        self.request: Request | None = request
        self.cost = 0
        self._pair = pair
        self._hub = hub

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        self._hub.note_activity()
        taken = None
        if posted.into is None:
            taken = bytearray(self.data)
        elif envelope.nbytes:
            posted.into[: envelope.nbytes] = self.data
        self._settle()
        if self.request is not None:
            self.request.complete()
        posted.request.complete(envelope, taken)

    def refuse(self, error: UnisonoError) -> None:
        self._settle()
        if self.request is not None:
            self.request.fail(error)

    def take_back(self, inbox: Inbox, error: UnisonoError) -> bool:
        """End the sender's request and let the message vanish; False if it has met its receive or ended."""
        if self.request is None or not inbox.withdraw_parcel(self):
            return False
        self.refuse(error)
        return True

    def _settle(self) -> None:
        cost, self.cost = self.cost, 0
        if cost:
            self._pair.give_back(cost)


class _Hub:
    """What the ranks of one process share."""

    def __init__(self, size: int, config: Config) -> None:
        self.size = size
        self.config = config
        self.inboxes = [Inbox(rank) for rank in range(size)]
        self.runtime = _WatchfulRuntime(size, config.deadlock_after_s)
        self._lock = threading.Lock()
        self._pairs: dict[tuple[int, int, Lane], _Pair] = {}
        self._down: dict[int, PeerDown] = {}
        self._listeners: dict[int, list[Callable[[PeerDown], None]]] = {rank: [] for rank in range(size)}

    def pair(self, src: int, dst: int, lane: Lane) -> _Pair:
        """The credit of a lane between two ranks."""
        pair = self._pairs.get((src, dst, lane))
        if pair is None:
            eager_bytes, limit = eager_limits(self.config, lane)
            pair = self._pairs.setdefault((src, dst, lane), _Pair(limit, eager_bytes))
        return pair

    def down_of(self, rank: int, peer: int) -> UnisonoError | None:
        """Why `rank` can send nothing to `peer`, if so."""
        down = self._down
        if rank in down:
            return ClosedError(f"rank {rank} is closed")
        return down[peer].error() if peer in down else None

    def watch(self, rank: int, listener: Callable[[PeerDown], None]) -> None:
        with self._lock:
            self._listeners[rank].append(listener)
            known = list(self._down.values())
        for down in known:
            listener(down)

    def leave(self, down: PeerDown) -> None:
        with self._lock:
            if down.rank in self._down:
                return
            self._down[down.rank] = down
            self._listeners[down.rank] = []
            listeners = [fn for fns in self._listeners.values() for fn in fns]
        self.runtime.note_left(down.rank)
        closed = ClosedError(f"rank {down.rank} is closed")
        for inbox in self.inboxes:
            for parcel in inbox.parcels_from(down.rank):
                assert isinstance(parcel, _Parcel)
                parcel.take_back(inbox, closed)
        self.inboxes[down.rank].close(closed, down.error())
        for inbox in self.inboxes:
            if inbox.rank != down.rank:
                inbox.peer_down(down)
        for listener in listeners:
            listener(down)

    def leave_later(self, down: PeerDown) -> None:
        """Leave soon: the collector strikes anywhere, also where a lock of ours is held."""
        self.runtime.call_soon(lambda: self.leave(down))

    def note_activity(self) -> None:
        self.runtime.activity += 1


@dataclass(eq=False, slots=True)
class _Blocked:
    """A thread that waits without a limit."""

    thread: threading.Thread
    event: Event
    waiting: Callable[[], Waiting]
    deadlock: Deadlock | None = None


class _WatchfulRuntime(RealRuntime):
    """The real runtime, and an eye on threads that can never go on.

    The rule, which errs on the side of patience: every rank that has not left has a thread that waits
    without a limit; so does every thread that could help, unless it has ended; and nothing at all has moved
    for `grace_s`. Then all of them are told. A thread could help if it was started after this world was made,
    or has sent or waited here, and not only for ranks that have left.
    """

    def __init__(self, size: int, grace_s: float) -> None:
        super().__init__()
        self.activity = 0
        self._grace_s = grace_s
        self._watch_lock = threading.Lock()
        self._blocked: list[_Blocked] = []
        self._ranks_here = set(range(size))
        self._ranks_of: weakref.WeakKeyDictionary[threading.Thread, set[int]] = weakref.WeakKeyDictionary()
        self._bystanders = weakref.WeakSet(threading.enumerate())

    def note_user(self, rank: int) -> None:
        """The calling thread does something for a rank."""
        thread = threading.current_thread()
        with self._watch_lock:
            self._ranks_of.setdefault(thread, set()).add(rank)

    def note_left(self, rank: int) -> None:
        """A rank will do nothing any more."""
        self.activity += 1
        with self._watch_lock:
            self._ranks_here.discard(rank)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait; without a limit only as long as somebody may still end it."""
        self.note_user(waiting().rank)
        if is_limited or not self._grace_s:
            self.activity += 1
            return super().block(event, timeout, waiting)
        mine = _Blocked(threading.current_thread(), event, waiting)
        with self._watch_lock:
            self._blocked.append(mine)
        end = None if timeout is None else self.now() + timeout
        try:
            while True:
                before = self.activity
                left = self._grace_s if end is None else min(self._grace_s, end - self.now())
                woken = left > 0 and super().block(event, left, waiting)
                if woken or left < self._grace_s:
                    break
                if self.activity == before:
                    self._look()
        finally:
            with self._watch_lock:
                self._blocked.remove(mine)
        if mine.deadlock is not None:
            raise mine.deadlock
        return woken

    def _look(self) -> None:
        with self._watch_lock:
            blocked = [b for b in self._blocked if not b.event.is_set()]
            threads = {b.thread for b in blocked}
            if any(thread not in threads and self._could_help(thread) for thread in threading.enumerate()):
                return
            waits = [b.waiting() for b in blocked]
            if {w.rank for w in waits} != self._ranks_here:
                return
            lines = "; ".join(str(w) for w in sorted(waits, key=lambda w: w.rank))
            for entry in blocked:
                entry.deadlock = Deadlock(
                    "no rank can go on",
                    cause=lines,
                    next_step="break the cycle: pair every send with a receive",
                )
        for entry in blocked:
            entry.event.set()

    def _could_help(self, thread: threading.Thread) -> bool:
        """Whether a thread may yet do something for a rank; the caller holds the lock."""
        ranks = self._ranks_of.get(thread)
        return thread not in self._bystanders if ranks is None else bool(ranks & self._ranks_here)


DESCRIPTION = BackendInfo(
    name="local",
    summary="ranks as threads of one process",
    check=lambda: None,
    install="part of unisono",
    capabilities=_CAPABILITIES,
)
