"""Ranks inside one process, for threads and tests.

Sends are bounded as on a real link: short messages are eager under a credit per pair of ranks, others wait
for their receive. So a program that needs unbounded buffers fails here too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from unisono.backends.registry import BackendInfo
from unisono.config import Config
from unisono.core.clock import (
    Event,
    Parked,
    RealRuntime,
    Waiting,
    parked_threads,
)
from unisono.core.envelope import UNTYPED, Any_
from unisono.core.request import Request
from unisono.errors import Deadlock, UsageError, ranks_text
from unisono.messaging.actions import Action, Transmit, finish
from unisono.messaging.backend import Capabilities, PeerDown
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.protocol import Protocol
from unisono.messaging.protocol_backend import ProtocolBackend

__all__ = ["DESCRIPTION", "LocalBackend"]

_CAPABILITIES = Capabilities("local")
_ThreadRef: TypeAlias = weakref.ref[threading.Thread]


class LocalBackend(ProtocolBackend):
    """One of n ranks that share this process."""

    @classmethod
    def create(cls, size: int, config: Config | None = None) -> list[LocalBackend]:
        """Make `size` connected ranks.

        Raises:
            UsageError: `size` is not an integer of at least 1.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"n={size!r}; allowed: an integer >= 1")
        hub = _Hub(size, config if config is not None else Config())
        return [cls(hub, rank) for rank in range(size)]

    def __init__(self, hub: _Hub, rank: int) -> None:
        super().__init__(hub.endpoints[rank], len(hub.endpoints), hub.config, hub.runtime)
        self._hub = hub
        # A rank that is garbage-collected without `close` must not leave the others waiting for it.
        gone = PeerDown(rank, "left without closing", left=True)
        self._finalizer = weakref.finalize(self, hub.leave_later, gone)
        self._finalizer.atexit = False

    @property
    def capabilities(self) -> Capabilities:
        """Everything but the fast paths."""
        return _CAPABILITIES

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        """Send; the calling thread belongs to this rank from now on."""
        self._hub.runtime.note_user(self._rank)
        return super().start_send(dst, context, tag, data, **how)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive: a sign of life for the detector of deadlocks, even if no frame is sent."""
        self._hub.runtime.activity += 1
        return super().start_recv(src, context, tag, into, dtype=dtype)

    def close(self) -> None:
        """Leave. Messages that were sent before can still be received."""
        if self._finalizer.detach() is not None:
            self._hub.leave(PeerDown(self._rank, "left", left=True))

    def kill(self, cause: str = "killed") -> None:
        """End this rank as a crash would."""
        if self._finalizer.detach() is not None:
            self._hub.leave(PeerDown(self._rank, cause))


class _Hub:
    """What the ranks of one process share: a lock, under which a frame is handled as soon as it is sent."""

    def __init__(self, size: int, config: Config) -> None:
        self.config = config
        self.runtime = _WatchfulRuntime(size, config.deadlock_after_s, self.has_pending)
        self._lock = threading.Lock()
        self.endpoints = [
            Endpoint(Protocol(rank, config, shares_memory=True), self._carry, self._lock)
            for rank in range(size)
        ]

    def leave(self, down: PeerDown) -> None:
        """A rank leaves. All ranks learn of it before any of them can act on it and tell the others."""
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
        self.runtime.note_left(down.rank)
        for listener in listeners:
            listener(down)
        finish(ends)

    def leave_later(self, down: PeerDown) -> None:
        """Leave soon: the garbage collector may run while a lock of ours is held."""
        self.runtime.call_soon(lambda: self.leave(down))

    def has_pending(self, rank: int) -> bool:
        """Whether a rank has a receive without a message, or a send that waits for its receive."""
        protocol = self.endpoints[rank].protocol
        with self._lock:
            return protocol.inbox.is_awaited() or protocol.is_sending()

    def _carry(self, outgoing: Transmit) -> list[Action]:
        self.runtime.activity += 1
        return self.endpoints[outgoing.peer].take(outgoing.source, outgoing.frame)


@dataclass(eq=False, slots=True)
class _Blocked:
    """A thread that waits without a time limit."""

    thread: threading.Thread
    event: Event
    waiting: Callable[[], Waiting]
    deadlock: Deadlock | None = None
    deserted: set[int] = field(default_factory=set)  # ranks that were deserted at the last check


class _WatchfulRuntime(RealRuntime):
    """The real runtime, with a detector for threads that can never go on.

    A waiting thread checks two rules every `grace_s`. Both rather miss a deadlock than report a false one.

    *No rank can go on*: each rank that has not left has a thread that waits without a time limit, or only
    threads that have ended; each thread that could help waits without a limit too, or has ended; and nothing
    has moved for `grace_s`. Then all waiting threads get Deadlock. A thread could help if it was started
    after this world was made, or has sent or waited here for a rank that has not left. The rule also holds,
    whatever the ranks do, if every other thread of the process waits for threads (in `join`, on a future,
    idle in a pool).

    *A rank is deserted*: it has not left, every thread that has started an operation of it has ended, and it
    has no operation pending; for `grace_s` no new thread has used it. Then every thread that waits for this
    rank without a time limit gets Deadlock.
    """

    sees_deadlocks = True

    def __init__(self, size: int, grace_s: float, has_pending: Callable[[int], bool]) -> None:
        super().__init__()
        self.activity = 0
        self._grace_s = grace_s
        self._has_pending = has_pending
        self._watch_lock = threading.Lock()
        self._blocked: list[_Blocked] = []
        self._ranks_here = set(range(size))
        # Threads by references without callbacks: a callback would swallow a Ctrl-C that strikes in it.
        self._ranks_of: dict[_ThreadRef, set[int]] = {}
        self._users: dict[int, set[_ThreadRef]] = {}
        self._mine = _Mine()
        self._bystanders = frozenset(map(weakref.ref, threading.enumerate()))

    def used(self, rank: int) -> None:
        """The calling thread waits for an operation of a rank: it belongs to the rank."""
        if rank in self._mine.ranks:
            return
        self._mine.ranks.add(rank)
        with self._watch_lock:
            users = self._users.get(rank, ())
            here = {weakref.ref(threading.current_thread())}
            self._users[rank] = here.union(user for user in users if user() is not None)

    def note_user(self, rank: int) -> None:
        """The calling thread sends or waits for a rank."""
        if rank in self._mine.noted:
            return
        self._mine.noted.add(rank)
        thread = weakref.ref(threading.current_thread())
        with self._watch_lock:
            if thread not in self._ranks_of:
                self._ranks_of = {user: ranks for user, ranks in self._ranks_of.items() if user() is not None}
            self._ranks_of.setdefault(thread, set()).add(rank)

    def note_left(self, rank: int) -> None:
        """A rank has left."""
        self.activity += 1
        with self._watch_lock:
            self._ranks_here.discard(rank)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait; without a time limit, raise Deadlock once no thread can end the wait."""
        rank = waiting().rank
        self.used(rank)
        self.note_user(rank)
        if is_limited or not self._grace_s:
            self.activity += 1
            return super().block(event, timeout, waiting)
        mine = _Blocked(threading.current_thread(), event, waiting)
        with self._watch_lock:
            self._blocked.append(mine)
        end = None if timeout is None else self.now() + timeout
        check_s = min(_FIRST_CHECK_S, self._grace_s / 2)
        try:
            while True:
                before = self.activity
                left = check_s if end is None else min(check_s, end - self.now())
                woken = left > 0 and super().block(event, left, waiting)
                if woken or left < check_s:
                    break
                self._check_deserted(mine)
                if check_s == self._grace_s and self.activity == before:
                    self._check_all()
                check_s = self._grace_s
        finally:
            with self._watch_lock:
                self._blocked.remove(mine)
        if mine.deadlock is not None:
            raise mine.deadlock
        return woken

    def _check_all(self) -> None:
        with self._watch_lock:
            blocked = [b for b in self._blocked if not b.event.is_set()]
            waits = [b.waiting() for b in blocked]
            quiet = self._ranks_here - {w.rank for w in waits}
            others = set(threading.enumerate()) - {b.thread for b in blocked}
            if not self._are_all_parked(others) and (
                any(self._could_help(thread) for thread in others)
                or any(not self._is_deserted(rank) for rank in quiet)
            ):
                return
            lines = [str(w) for w in sorted(waits, key=lambda w: w.rank)]
            lines += [self._why_quiet(rank) for rank in sorted(quiet)]
            for entry in blocked:
                entry.deadlock = Deadlock(
                    "no rank can go on",
                    cause="; ".join(lines),
                    next_step=_CLOSE_RANKS if quiet else "break the cycle: pair every send with a receive",
                )
        for entry in blocked:
            entry.event.set()

    def _check_deserted(self, mine: _Blocked) -> None:
        """End a wait that needs a rank which was deserted at the last check already."""
        wait = mine.waiting()
        with self._watch_lock:
            others = self._ranks_here - {wait.rank}
            deserted = {rank for rank in others if self._is_deserted(rank)}
        # Any other rank may end a wait that names none.
        needed = set(wait.ranks) & deserted if wait.ranks else deserted if deserted == others else set()
        needed = {rank for rank in needed if not self._has_pending(rank)}
        still_deserted, mine.deserted = sorted(needed & mine.deserted), needed
        if not still_deserted or mine.event.is_set():
            return
        ranks = ranks_text(still_deserted)
        mine.deadlock = Deadlock(
            f"{ranks} will not come",
            cause=f"every thread that used {ranks} has ended without closing it; {wait}",
            next_step=_CLOSE_RANKS,
        )
        mine.event.set()

    def _is_deserted(self, rank: int) -> bool:
        """Whether all threads of a rank have ended; a new one may follow. The caller holds the lock."""
        users = self._users.get(rank)
        threads = [] if users is None else [user() for user in users]
        return users is not None and not any(thread is not None and thread.is_alive() for thread in threads)

    def _why_quiet(self, rank: int) -> str:
        if rank not in self._users:
            return f"no thread uses rank {rank}"
        if self._is_deserted(rank):
            return f"every thread that used rank {rank} has ended without closing it"
        return f"the threads that used rank {rank} are idle and have not closed it"

    def _are_all_parked(self, threads: set[threading.Thread]) -> bool:
        """Whether none of these threads can run before another one does.

        A thread from before this world that has done nothing here counts as parked if it is a daemon or waits
        with a limit: it is a watchdog. The main thread is none: after `join(1)` it may use the missing rank.
        """
        waits = parked_threads()
        for thread in threads:
            is_bystander = (
                thread is not threading.main_thread()
                and weakref.ref(thread) in self._bystanders
                and weakref.ref(thread) not in self._ranks_of
            )
            is_parked = thread in waits if is_bystander else waits.get(thread) is Parked.WITHOUT_LIMIT
            if thread.is_alive() and not is_parked and not (is_bystander and thread.daemon):
                return False
        return True

    def _could_help(self, thread: threading.Thread) -> bool:
        """Whether a thread may still do something for a rank; the caller holds the lock."""
        ranks = self._ranks_of.get(weakref.ref(thread))
        if ranks is None:
            return weakref.ref(thread) not in self._bystanders
        return bool(ranks & self._ranks_here)


# A wait of this length makes its first check. Most waits are shorter, and pay nothing.
_FIRST_CHECK_S: Final = 0.05

_CLOSE_RANKS: Final = "use `with comm:` in the thread of each rank, or unisono.testing.run_local(fn, n)"


class _Mine(threading.local):
    """The ranks that the calling thread has waited for, and those that it has sent or waited for."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.noted: set[int] = set()


DESCRIPTION = BackendInfo(
    name="local",
    summary="ranks as threads of one process",
    check=lambda: None,
    install="part of unisono",
    capabilities=_CAPABILITIES,
)
