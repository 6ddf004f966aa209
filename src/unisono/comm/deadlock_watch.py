"""The watch for deadlocks between processes: collects what ranks report, and ends waits that nobody can end.

Knows which threads of this process wait, whom to ask and when an answer can be relied on. Does not know what
a deadlock is (deadlock.py), nor what operations do.

A rank one of whose threads has waited for long asks those it waits for, and whom these wait for in turn. If
their reports show ranks that are lost, each of these sends the others a *mark* behind everything it has sent
them, and reports again once it has theirs. If all report the same as before, they were in these waits at one
moment, with no message between them under way: then they get Deadlock. The lowest rank of those that are lost
sees to it; for the others a look ends with the first reports.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from unisono.comm.deadlock import Report, Wait, cycle_of, lost_of, told
from unisono.core.clock import Parked, parked_threads
from unisono.core.envelope import Lane
from unisono.core.task import Call, blocked_threads
from unisono.errors import Deadlock
from unisono.messaging.backend import Backend

if TYPE_CHECKING:
    from unisono.core.clock import Timer

__all__ = ["Ask", "DeadlockWatch", "Doomed", "Mark", "Told"]

_log = logging.getLogger("unisono")

# More under way than this is too much to tell, and a rank with so much to do is not called stuck.
_MESSAGES_MAX: Final = 128
_WAITS_MAX: Final = 32
_GROUPS_MAX: Final = 256
# Of looks by others so many are remembered at a time.
_LOOKS_KEPT: Final = 64


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """What do the threads of the receiver wait for? With `ranks`: marks first, between all of these."""

    look: int
    ranks: tuple[int, ...] = ()


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer."""

    look: int
    is_marked: bool
    report: Report


class Mark(msgspec.Struct, frozen=True, tag="mark"):
    """All that the sender sent before has arrived; it belongs to a look of the rank `asker`."""

    asker: int
    look: int


class Doomed(msgspec.Struct, frozen=True, tag="doomed"):
    """These operations of the receiver can never end, and why."""

    numbers: tuple[int, ...]
    cause: str


class _World(Protocol):
    """Who speaks for this rank."""

    backend: Backend

    def groups(self) -> Iterable[Any]: ...
    def has_services(self) -> bool: ...
    def tell(self, ranks: Iterable[int], news: Any, lane: Lane = Lane.CONTROL) -> None: ...
    def answer(self, rank: int, word: Any, lane: Lane = Lane.CONTROL) -> None: ...


@dataclass(slots=True)
class _Marks:
    """Who has sent a mark of one look, whose are needed, and what is done once all have come."""

    come: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    then: Callable[[], None] | None = None


class DeadlockWatch:
    """One rank's part in it."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._rank = world.backend.rank
        self._lock = threading.Lock()
        self._look = 0
        self._timer: Timer | None = None
        self._due = 0.0
        self._reports: dict[int, Report] = {}
        self._asked: set[int] = set()
        # The second time: who takes part, and who has reported again.
        self._lost: tuple[int, ...] = ()
        self._again: dict[int, Report] = {}
        # By asker and its look: who has sent a mark, and what to do when all have.
        self._marks: OrderedDict[tuple[int, int], _Marks] = OrderedDict()
        # Waits that closed to a chain at the last look, though not for certain; and what was logged of such.
        self._seen: tuple[int, ...] = ()
        self._logged: set[str] = set()

    def look(self) -> None:
        """A thread of this process has waited for long: look whether anybody can end that, and again later.

        On a thread of our own: one that looks does not wait.
        """
        self._look_at(self._world.backend.runtime.now())

    def close(self) -> None:
        """Look no more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()

    def _look_at(self, when: float) -> None:
        watch = weakref.ref(self)

        def look_now() -> None:
            if (living := watch()) is not None:
                living._look_now()

        with self._lock:
            if self._timer is not None and when >= self._due:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._due = when
            self._timer = self._world.backend.runtime.call_at(when, look_now)

    def _look_now(self) -> None:
        after_s, now = self._world.backend.config.deadlock_after_s, self._world.backend.runtime.now()
        with self._lock:
            self._timer = None
        # Who has waited for less will look by itself.
        if not any(now - call.started_at >= after_s for call in self._waiting()):
            return
        self._look_at(now + after_s)
        mine = self._report()
        with self._lock:
            self._look += 1
            self._reports, self._asked = {self._rank: mine}, {self._rank}
            self._lost, self._again = (), {}
        self._go_on()

    def on_word(self, sender: int, word: Ask | Told | Mark | Doomed) -> None:
        """Another rank asks or answers."""
        match word:
            case Ask(ranks=()):
                self._world.answer(sender, Told(word.look, False, self._report()))
            case Ask():
                self._exchange_marks(
                    (sender, word.look),
                    word.ranks,
                    lambda: self._world.answer(sender, Told(word.look, True, self._report())),
                )
            case Told():
                self._on_told(sender, word)
            case Mark():
                self._on_mark(sender, (word.asker, word.look))
            case Doomed():
                self._end(word.numbers, word.cause)

    # -- what goes on here --------------------------------------------------------------------------------

    def _waiting(self) -> list[Call]:
        """The operations of this world that threads wait for."""
        calls = {id(call) for group in self._world.groups() for call in group.calls_under_way()}
        return [one.call for one in blocked_threads().values() if id(one.call) in calls]

    def _report(self) -> Report:
        blocked, waits = blocked_threads(), []
        helpers = [] if not self._world.has_services() else ["an agent that serves calls"]
        messages, following, groups = [], {}, {}
        for group in self._world.groups():
            following[group.context] = group.next_sequence
            for call in group.calls_under_way():
                groups[id(call)] = group
                messages += [(group.context, m) for m in call.messages if not m.request.done]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        # Who waits for another thread, without a limit, does nothing before that one does. A wait for ranks
        # of another world may look like it.
        parked = {thread.ident for thread, how in parked_threads().items() if how is Parked.WITHOUT_LIMIT}
        parked -= blocked.keys()
        for ident in sys._current_frames():
            name = names.get(ident, "a thread")
            one = blocked.get(ident)
            group = None if one is None else groups.get(id(one.call))
            wait = None if group is None or one is None else group.wait_of(one.call, one.is_limited)
            if wait is not None:
                waits.append(wait)
            elif ident not in parked and not name.startswith("unisono-"):
                helpers.append(f"thread {name}")
        if len(messages) > _MESSAGES_MAX or len(waits) > _WAITS_MAX or len(following) > _GROUPS_MAX:
            helpers.append("more operations than can be told")
        under_way = [(is_send, context, peer, tag) for context, (is_send, peer, tag, _) in messages]
        return Report(
            self._rank,
            tuple(sorted(waits, key=lambda wait: wait.number)[:_WAITS_MAX]),
            tuple(sorted(each[1:] for each in under_way if each[0])[:_MESSAGES_MAX]),
            tuple(sorted(each[1:] for each in under_way if not each[0])[:_MESSAGES_MAX]),
            dict(list(following.items())[:_GROUPS_MAX]),
            tuple(sorted(helpers)[:_WAITS_MAX]),
        )

    # -- looking ------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Ask those who are waited for; once all have told, judge."""
        with self._lock:
            look, reports = self._look, dict(self._reports)
            size = self._world.backend.size
            named = {peer for report in reports.values() for peer in report.blockers() if 0 <= peer < size}
            fresh = named - self._asked
            self._asked |= fresh
            is_whole = self._asked <= reports.keys()
        if fresh:
            self._world.tell(sorted(fresh), Ask(look))
        elif is_whole:
            self._judge(look, reports)

    def _judge(self, look: int, reports: dict[int, Report]) -> None:
        lost = tuple(sorted(lost_of(reports)))
        if self._rank in lost:
            if self._rank == lost[0]:
                with self._lock:
                    self._lost, self._again = lost, {}
                self._world.tell(lost, Ask(look, lost))
                mine = (self._rank, look)
                self._exchange_marks(
                    mine, lost, lambda: self._on_told(self._rank, Told(look, True, self._report()))
                )
            return
        cycle = cycle_of(reports, self._rank)
        numbers = tuple(wait.number for _, wait in cycle)
        is_old, self._seen = bool(cycle) and numbers == self._seen, numbers
        if is_old and cycle[0][0] == self._rank:
            self._log(reports, cycle)

    def _on_told(self, sender: int, word: Told) -> None:
        with self._lock:
            if word.look != self._look or word.report.rank != sender:
                return
            if not word.is_marked:
                self._reports[sender] = word.report
            elif sender in self._lost:
                self._again[sender] = word.report
            lost, again = self._lost, dict(self._again)
            is_sure = lost and again == {rank: self._reports.get(rank) for rank in lost}
        if not word.is_marked:
            self._go_on()
        elif is_sure and lost_of(again) == set(lost):
            cause = "; ".join(told(rank, wait) for rank, wait in cycle_of(again, self._rank))
            for rank in lost:
                self._world.tell([rank], Doomed(tuple(wait.number for wait in again[rank].waits), cause))
            self._end(tuple(wait.number for wait in again[self._rank].waits), cause)

    def _log(self, reports: dict[int, Report], cycle: list[tuple[int, Wait]]) -> None:
        """Say once that waits close to a chain which somebody could still open."""
        text = "; ".join(told(rank, wait) for rank, wait in cycle)
        if text in self._logged or len(self._logged) > _LOOKS_KEPT:
            return
        self._logged.add(text)
        hopes = [
            f"rank {rank} has {', '.join(reports[rank].helpers)}"
            for rank, _ in cycle
            if reports[rank].helpers
        ]
        hopes += [f"rank {rank} waits with a timeout" for rank, wait in cycle if wait.is_limited]
        _log.warning(
            "a cycle of waits: %s. It is no Deadlock for certain: %s. Next: pair every send with a receive",
            text,
            "; ".join(hopes) or "other waits of these ranks may end",
        )

    # -- marks --------------------------------------------------------------------------------------------

    def _exchange_marks(self, key: tuple[int, int], ranks: tuple[int, ...], then: Callable[[], None]) -> None:
        """Send all others a mark behind what they were sent before; go on once all of theirs have come."""
        others = {rank for rank in ranks if rank != self._rank and 0 <= rank < self._world.backend.size}
        with self._lock:
            marks = self._marks_of(key)
            marks.needed, marks.then = others, then
        for rank in sorted(others):
            self._world.answer(rank, Mark(*key), Lane.BULK)
        self._on_mark(self._rank, key)

    def _on_mark(self, sender: int, key: tuple[int, int]) -> None:
        with self._lock:
            marks = self._marks_of(key)
            marks.come.add(sender)
            then = marks.then if marks.needed <= marks.come else None
            if then is not None:
                del self._marks[key]
        if then is not None:
            then()

    def _marks_of(self, key: tuple[int, int]) -> _Marks:
        """The caller holds the lock."""
        if key not in self._marks and len(self._marks) >= _LOOKS_KEPT:
            self._marks.popitem(last=False)
        return self._marks.setdefault(key, _Marks())

    # -- endings ------------------------------------------------------------------------------------------

    def _end(self, numbers: tuple[int, ...], cause: str) -> None:
        ours = {id(call) for call in self._waiting()}
        for one in blocked_threads().values():
            if one.call.number in numbers and id(one.call) in ours and not one.is_limited:
                one.task.interrupt(
                    Deadlock(
                        "no rank can go on",
                        cause=cause,
                        next_step="break the cycle: pair every send with a receive",
                    )
                )
