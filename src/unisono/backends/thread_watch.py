"""Deadlock detection among ranks that share a process: which threads use a rank, and whether any can go on.

Knows threads and waits. Does not know how messages travel: `WatchedRanks` answers for the backend.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from unisono.core.parked_threads import Parked, parked_threads
from unisono.core.runtime import Event, Waiting
from unisono.errors import Deadlock, UsageError, ranks_text

__all__ = ["ThreadUsers", "ThreadWatch", "WatchedRanks"]

_ThreadRef: TypeAlias = weakref.ref[threading.Thread]


@dataclass(frozen=True, slots=True)
class ThreadUsers:
    """The threads that use a rank below Python: by ident, whether the thread belongs to the rank.

    It belongs to the rank once it has made a call or waited. `has_lost_users`: one that did has ended.
    """

    living: Mapping[int, bool] = field(default_factory=dict)
    has_lost_users: bool = False


class WatchedRanks(Protocol):
    """The questions of the watch about the ranks of a process."""

    def moves(self) -> int:
        """A number that changes whenever a message moves."""

    def is_quiet(self) -> bool:
        """Whether no message is under way, and every completion was dispatched."""

    def has_pending(self, rank: int) -> bool:
        """Whether a rank has a receive without a message, or a send that waits for its receive."""

    def users(self, rank: int) -> ThreadUsers:
        """The threads that use a rank and have not said so by `used` or `note_user`."""


@dataclass(eq=False, slots=True)
class _Blocked:
    """A thread that waits without a time limit."""

    thread: threading.Thread
    event: Event
    waiting: Callable[[], Waiting]
    deadlock: Deadlock | None = None
    deserted: set[int] = field(default_factory=set)  # ranks that were deserted at the last check


class ThreadWatch:
    """Sees threads that can never go on, among the ranks of one process.

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

    Raises:
        UsageError: `size` is not an integer of at least 1.
    """

    def __init__(self, size: int, grace_s: float, ranks: WatchedRanks) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"n={size!r}; allowed: an integer >= 1")
        self._ranks = ranks
        self._grace_s = grace_s
        self._events = 0  # limited waits and ranks that have left
        self._lock = threading.Lock()
        self._blocked: list[_Blocked] = []
        self._ranks_here = set(range(size))
        # Threads by references without callbacks: a callback would swallow a Ctrl-C that strikes in it.
        self._ranks_of: dict[_ThreadRef, set[int]] = {}
        self._users: dict[int, set[_ThreadRef]] = {}
        # Ranks that a thread uses which Python does not know, or which ends just now.
        self._unknown_users: set[int] = set()
        self._mine = _Mine()
        self._bystanders = frozenset(map(weakref.ref, threading.enumerate()))

    def used(self, rank: int) -> None:
        """The calling thread starts an operation of a rank, or waits for one: it belongs to the rank."""
        if rank in self._mine.ranks:
            return
        self._mine.ranks.add(rank)
        with self._lock:
            users = self._users.get(rank, ())
            here = {weakref.ref(threading.current_thread())}
            self._users[rank] = here.union(user for user in users if user() is not None)

    def note_user(self, rank: int) -> None:
        """The calling thread sends or waits for a rank."""
        if rank in self._mine.noted:
            return
        self._mine.noted.add(rank)
        thread = weakref.ref(threading.current_thread())
        with self._lock:
            if thread not in self._ranks_of:
                self._ranks_of = {user: ranks for user, ranks in self._ranks_of.items() if user() is not None}
            self._ranks_of.setdefault(thread, set()).add(rank)

    def note_left(self, rank: int) -> None:
        """A rank has left."""
        self._events += 1
        with self._lock:
            self._ranks_here.discard(rank)

    def block(
        self,
        wait: Callable[[Event, float | None, Callable[[], Waiting]], bool],
        now: Callable[[], float],
        event: Event,
        timeout: float | None,
        waiting: Callable[[], Waiting],
        *,
        is_limited: bool,
    ) -> bool:
        """Wait by `wait`; without a time limit, raise Deadlock once no thread can end the wait."""
        rank = waiting().rank
        self.used(rank)
        self.note_user(rank)
        if is_limited or not self._grace_s:
            self._events += 1
            return wait(event, timeout, waiting)
        mine = _Blocked(threading.current_thread(), event, waiting)
        with self._lock:
            self._blocked.append(mine)
        end = None if timeout is None else now() + timeout
        check_s = min(_FIRST_CHECK_S, self._grace_s / 2)
        try:
            while True:
                # Most waits are shorter than the first check, and pay nothing for it.
                before = self._activity() if check_s == self._grace_s else -1
                left = check_s if end is None else min(check_s, end - now())
                woken = left > 0 and wait(event, left, waiting)
                if woken or left < check_s:
                    break
                self._check_deserted(mine)
                if check_s == self._grace_s and self._activity() == before:
                    self._check_all()
                check_s = self._grace_s
        finally:
            with self._lock:
                self._blocked.remove(mine)
        if mine.deadlock is not None:
            raise mine.deadlock
        return woken

    def _activity(self) -> int:
        return self._events + self._ranks.moves()

    def _add_users_below(self) -> None:
        """Learn of threads that use a rank without coming through Python; the caller holds the lock."""
        by_ident = {thread.ident: thread for thread in threading.enumerate()}
        self._unknown_users.clear()
        for rank in self._ranks_here:
            users = self._ranks.users(rank)
            mine = {user for user in self._users.get(rank, ()) if user() is not None}
            for ident, belongs in users.living.items():
                thread = by_ident.get(ident)
                if thread is None:
                    if belongs:
                        self._unknown_users.add(rank)
                elif not thread.name.startswith(_OWN_THREADS):
                    self._ranks_of.setdefault(weakref.ref(thread), set()).add(rank)
                    if belongs:
                        mine.add(weakref.ref(thread))
            if mine or users.has_lost_users or rank in self._users:
                self._users[rank] = mine

    def _check_all(self) -> None:
        with self._lock:
            self._add_users_below()
            blocked = [b for b in self._blocked if not b.event.is_set()]
            waits = [b.waiting() for b in blocked]
            quiet = self._ranks_here - {w.rank for w in waits}
            # List parked threads before all threads: a parked thread cannot have started another in between.
            parked = parked_threads()
            others = set(threading.enumerate()) - {b.thread for b in blocked} - _idle_own_threads(parked)
            if not self._are_all_parked(others, parked) and (
                any(self._could_help(thread) for thread in others)
                or any(not self._is_deserted(rank) for rank in quiet)
            ):
                return
            if not self._ranks.is_quiet() or any(b.event.is_set() for b in blocked):
                return
            lines = [str(w) for w in sorted(waits, key=lambda w: w.rank)]
            lines += [self._why_quiet(rank) for rank in sorted(quiet)]
            for entry in blocked:
                entry.deadlock = Deadlock(
                    "no rank can go on",
                    cause="; ".join(lines),
                    next_step=_CLOSE_RANKS if quiet else None,
                )
        for entry in blocked:
            entry.event.set()

    def _check_deserted(self, mine: _Blocked) -> None:
        """End a wait that needs a rank which was deserted at the last check already."""
        wait = mine.waiting()
        with self._lock:
            self._add_users_below()
            others = self._ranks_here - {wait.rank}
            deserted = {rank for rank in others if self._is_deserted(rank)}
        # Any other rank may end a wait that names none.
        needed = set(wait.ranks) & deserted if wait.ranks else deserted if deserted == others else set()
        needed = {rank for rank in needed if not self._ranks.has_pending(rank)}
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
        users = None if rank in self._unknown_users else self._users.get(rank)
        threads = [] if users is None else [user() for user in users]
        return users is not None and not any(thread is not None and thread.is_alive() for thread in threads)

    def _why_quiet(self, rank: int) -> str:
        if rank not in self._users:
            return f"no thread uses rank {rank}"
        if self._is_deserted(rank):
            return f"every thread that used rank {rank} has ended without closing it"
        return f"the threads that used rank {rank} are idle and have not closed it"

    def _are_all_parked(
        self, threads: set[threading.Thread], parked: Mapping[threading.Thread, Parked]
    ) -> bool:
        """Whether none of these threads can run before another one does.

        A thread from before this world that has done nothing here counts as parked if it is a daemon or waits
        with a limit: it is a watchdog. The main thread is none: after `join(1)` it may use the missing rank.
        """
        for thread in threads:
            is_bystander = (
                thread is not threading.main_thread()
                and weakref.ref(thread) in self._bystanders
                and weakref.ref(thread) not in self._ranks_of
            )
            is_parked = thread in parked if is_bystander else parked.get(thread) is Parked.WITHOUT_LIMIT
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


# Threads that serve a rank and have no program of their own.
_OWN_THREADS: Final = "unisono-"


def _idle_own_threads(parked: Mapping[threading.Thread, Parked]) -> set[threading.Thread]:
    return {
        thread
        for thread, how in parked.items()
        if how is Parked.WITHOUT_LIMIT and thread.name.startswith(_OWN_THREADS)
    }


class _Mine(threading.local):
    """The ranks that the calling thread has used, and those that it has sent or waited for."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.noted: set[int] = set()
