"""Ranks inside one process, for threads and tests.

Sends are bounded as on a real link: short messages are eager under a credit per pair of ranks, others wait
for their receive. So a program that needs unbounded buffers fails here too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from unisono.backends.registry import BackendInfo
from unisono.config import Config
from unisono.core.clock import (
    Event,
    Parked,
    RealRuntime,
    Runtime,
    Waiting,
    parked_threads,
)
from unisono.core.envelope import UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request, withdrawn
from unisono.errors import ClosedError, Deadlock, UnisonoError, UsageError, ranks_text
from unisono.messaging.backend import Backend, Capabilities, PeerDown
from unisono.messaging.credit import ENVELOPE_BYTES, OwnCredit, eager_limits
from unisono.messaging.inbox import InboundMessage, Inbox
from unisono.messaging.matching import Posted

__all__ = ["DESCRIPTION", "LocalBackend"]

_CAPABILITIES = Capabilities("local")
_ThreadRef: TypeAlias = weakref.ref[threading.Thread]


class LocalBackend(Backend):
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
        self._hub = hub
        self._rank = rank
        # A rank that is garbage-collected without `close` must not leave the others waiting for it.
        gone = PeerDown(rank, "left without closing", left=True)
        self._finalizer = weakref.finalize(self, hub.leave_later, gone)
        self._finalizer.atexit = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks in this process."""
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
        """Put a message into the inbox of `dst`: a copy if the credit allows, otherwise a reference."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, header)
        self._hub.runtime.note_user(self._rank)
        request = Request(dst)
        down = self._hub.down_of(self._rank, dst)
        if down is not None:
            request.fail(down)
            return request
        envelope = Envelope(self._rank, context, tag, data.nbytes, dtype, header)
        credit = self._hub.credit(self._rank, dst, lane)
        message = _Message(data.cast("B") if data.nbytes else data, request, credit, self._hub)
        if credit.take(data.nbytes):
            message.data, message.cost = memoryview(bytes(data)), data.nbytes + ENVELOPE_BYTES
        inbox = self._hub.inboxes[dst]
        request.withdraw_by(lambda _: message.withdraw(inbox, withdrawn()))
        # No send waits for an eager message, which its receiver may answer on this very thread.
        if message.cost and not sync:
            message.request = None
            inbox.arrive(envelope, message)
            request.complete()
        else:
            inbox.arrive(envelope, message)
            if (closed := self._hub.down_of(self._rank, self._rank)) is not None:
                message.withdraw(inbox, closed)  # `close` on another thread has not seen this message
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

    def end_group(self, context: int) -> None:
        """Drop messages that no receive will match any more."""
        self._hub.inboxes[self._rank].end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        self._hub.watch(self._rank, listener)

    def close(self) -> None:
        """Leave. Messages that were sent before can still be received."""
        if self._finalizer.detach() is not None:
            self._hub.leave(PeerDown(self._rank, "left", left=True))

    def kill(self, cause: str = "killed") -> None:
        """End this rank as a crash would."""
        if self._finalizer.detach() is not None:
            self._hub.leave(PeerDown(self._rank, cause))


@dataclass(slots=True)
class _Credit:
    """The credit of one rank at another, on one lane."""

    limit: int
    eager_bytes: int
    used: int = 0
    own: OwnCredit | None = None  # of a rank at itself
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> bool:
        """Use credit for a message; False if it must wait for its receive."""
        cost = nbytes + ENVELOPE_BYTES
        with self.lock:
            if self.own is not None:
                return self.own.take(nbytes)
            if nbytes > self.eager_bytes or self.used + cost > self.limit:
                return False
            self.used += cost
            return True

    def give_back(self, cost: int) -> None:
        with self.lock:
            if self.own is not None:
                self.own.give_back(cost - ENVELOPE_BYTES)
            else:
                self.used -= cost


class _Message(InboundMessage):
    """A message in this process; `request` is the sender's, if it still waits. `cost` is the credit used."""

    def __init__(self, data: memoryview, request: Request, credit: _Credit, hub: _Hub) -> None:
        self.data = data
        self.request: Request | None = request
        self.cost = 0
        self._credit = credit
        self._hub = hub

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        self._hub.note_activity()
        taken = None
        if posted.into is None:
            taken = bytearray(self.data)
        elif envelope.nbytes:
            posted.into[: envelope.nbytes] = self.data
        self._return_credit()
        if self.request is not None:
            self.request.complete()
        posted.request.complete(envelope, taken)

    def refuse(self, error: UnisonoError) -> None:
        self._return_credit()
        if self.request is not None:
            self.request.fail(error)

    def is_whole(self) -> bool:
        return self.request is None

    def drop(self) -> None:
        self._return_credit()

    def withdraw(self, inbox: Inbox, error: UnisonoError) -> bool:
        """Remove the message and end the sender's request; False if it was matched or has ended."""
        if self.request is None or not inbox.withdraw_message(self):
            return False
        self.refuse(error)
        return True

    def _return_credit(self) -> None:
        cost, self.cost = self.cost, 0
        if cost:
            self._credit.give_back(cost)


class _Hub:
    """What the ranks of one process share."""

    def __init__(self, size: int, config: Config) -> None:
        self.size = size
        self.config = config
        self.inboxes = [Inbox(rank, config.recv_bytes_max) for rank in range(size)]
        self.runtime = _WatchfulRuntime(size, config.deadlock_after_s, self.has_pending)
        self._lock = threading.Lock()
        self._credits: dict[tuple[int, int, Lane], _Credit] = {}
        self._down: dict[int, PeerDown] = {}
        self._listeners: dict[int, list[Callable[[PeerDown], None]]] = {rank: [] for rank in range(size)}

    def credit(self, src: int, dst: int, lane: Lane) -> _Credit:
        """The credit of `src` at `dst`, on one lane."""
        credit = self._credits.get((src, dst, lane))
        if credit is None:
            eager_bytes, limit = eager_limits(self.config, lane)
            own = OwnCredit(self.config) if src == dst else None
            credit = self._credits.setdefault((src, dst, lane), _Credit(limit, eager_bytes, own=own))
        return credit

    def down_of(self, rank: int, peer: int) -> UnisonoError | None:
        """The error of a send from `rank` to `peer`, if one of them is down."""
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
            for message in inbox.inbound_from(down.rank):
                assert isinstance(message, _Message)
                message.withdraw(inbox, closed)
        self.inboxes[down.rank].close(closed, down.error())
        for inbox in self.inboxes:
            if inbox.rank != down.rank:
                inbox.peer_down(down)
        for listener in listeners:
            listener(down)

    def leave_later(self, down: PeerDown) -> None:
        """Leave soon: the garbage collector may run while a lock of ours is held."""
        self.runtime.call_soon(lambda: self.leave(down))

    def note_activity(self) -> None:
        self.runtime.activity += 1

    def has_pending(self, rank: int) -> bool:
        """Whether a rank has a receive without a message, or a send that waits for its receive."""
        if self.inboxes[rank].is_awaited():
            return True
        messages = (message for inbox in self.inboxes for message in inbox.inbound_from(rank))
        return any(isinstance(message, _Message) and message.request is not None for message in messages)


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
    """The ranks that the calling thread has used."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()


DESCRIPTION = BackendInfo(
    name="local",
    summary="ranks as threads of one process",
    check=lambda: None,
    install="part of unisono",
    capabilities=_CAPABILITIES,
)
