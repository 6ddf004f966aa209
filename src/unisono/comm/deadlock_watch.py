"""Deadlock detection between processes: collects the states of ranks, and ends waits that can never end.

deadlock.py decides what a deadlock is; this module asks the ranks.

A *check* has two rounds. In the first, a rank one of whose threads has waited for `deadlock_after_s` asks the
ranks that it waits for, and the ranks that those wait for, and so on. If their states show a deadlock, its
lowest rank starts the second round: each deadlocked rank sends the others a *marker* behind everything it has
sent them, and reports again once it has all markers. If every report equals the first one, the ranks were in
these waits at one moment with no message between them under way, so the deadlock is certain, and each of them
gets Deadlock. For all other ranks the check ends with the first round.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from unisono.comm.control_messages import (
    ControlMessage,
    DeadlockFound,
    DeadlockMessage,
    Marker,
    WaitQuery,
    WaitReport,
)
from unisono.comm.deadlock import ANY_RANK, RankState, Wait, cycle_of, deadlocked, wait_text
from unisono.core.call import Call
from unisono.core.envelope import Lane
from unisono.core.parked_threads import Parked, current_frames, parked_threads
from unisono.core.task import blocked_threads
from unisono.errors import Deadlock
from unisono.messaging.backend import Backend

if TYPE_CHECKING:
    from unisono.core.runtime import Timer

__all__ = ["DeadlockWatch", "WatchedGroup"]

_log = logging.getLogger("unisono")

# Bounds of one report, which keep it shorter than a control message may be. A rank with more than this under
# way is never counted as blocked.
_MESSAGES_MAX: Final = 128
_WAITS_MAX: Final = 32
_GROUPS_MAX: Final = 256
# Bound on checks of other ranks whose markers are awaited here, and on cycles that were logged.
_CHECKS_MAX: Final = 64


class WatchedGroup(Protocol):
    """A group as deadlock detection sees it."""

    context: int
    world_rank: int
    world_ranks: tuple[int, ...]

    @property
    def next_sequence(self) -> int:
        """The number of the collective that is called next."""

    def calls_under_way(self) -> list[Call]:
        """The operations that Python carries on."""

    def messages_under_way(self) -> list[tuple[bool, int, int]]:
        """(is a send, world rank, tag) of all messages that have not ended; -1 is any."""

    def ranks_left(self) -> Container[int]:
        """The world ranks of the members that have closed the group."""


class _Control(Protocol):
    """What sends for the watch: control.Control."""

    backend: Backend

    def groups(self) -> Sequence[WatchedGroup]: ...
    def has_services(self) -> bool: ...
    def send(self, ranks: Iterable[int], message: ControlMessage, lane: Lane = Lane.CONTROL) -> None: ...
    def reply(self, rank: int, message: ControlMessage, lane: Lane = Lane.CONTROL) -> None: ...


@dataclass(slots=True)
class _Markers:
    """The markers of one check: the ranks that sent theirs, the ranks needed, and what follows."""

    received: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    then: Callable[[], None] | None = None


class DeadlockWatch:
    """One rank's part in deadlock detection."""

    def __init__(self, control: _Control) -> None:
        self._control = control
        self._rank = control.backend.rank
        self._lock = threading.Lock()
        # The check that this rank runs: its number, the reports of the first round, the ranks asked for one.
        self._check = 0
        self._timer: Timer | None = None
        self._due = 0.0
        self._states: dict[int, RankState] = {}
        self._asked: set[int] = set()
        # Its second round: the deadlocked ranks, and their second reports.
        self._suspects: tuple[int, ...] = ()
        self._confirmed: dict[int, RankState] = {}
        # By initiator and its check.
        self._markers: OrderedDict[tuple[int, int], _Markers] = OrderedDict()
        # The cycle that the last check found, which was not certain; and the cycles that were logged.
        self._last_cycle: tuple[int, ...] = ()
        self._logged: set[str] = set()

    def check_soon(self) -> None:
        """A thread has waited for long: check on a timer thread, now and every `deadlock_after_s`.

        Not on this thread: while it ran the check it would not count as waiting.
        """
        self._schedule(self._control.backend.runtime.now())

    def close(self) -> None:
        """Check no more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()

    def _schedule(self, when: float) -> None:
        watch = weakref.ref(self)

        def check_now() -> None:
            if (living := watch()) is not None:
                living._start_check()

        with self._lock:
            if self._timer is not None and when >= self._due:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._due = when
            self._timer = self._control.backend.runtime.call_at(when, check_now)

    def _start_check(self) -> None:
        after_s, now = self._control.backend.config.deadlock_after_s, self._control.backend.runtime.now()
        with self._lock:
            self._timer = None
        # A thread that has waited for less will ask for a check itself.
        if not any(now - call.started_at >= after_s for call in self._waiting()):
            return
        self._schedule(now + after_s)
        mine = self._state()
        with self._lock:
            self._check += 1
            self._states, self._asked = {self._rank: mine}, {self._rank}
            self._suspects, self._confirmed = (), {}
        self._continue()

    def on_message(self, sender: int, message: DeadlockMessage) -> None:
        """Another rank asks or reports."""
        match message:
            case WaitQuery(ranks=()):
                self._control.reply(sender, WaitReport(message.check, False, self._state()))
            case WaitQuery():
                self._exchange_markers(
                    (sender, message.check),
                    message.ranks,
                    lambda: self._control.reply(sender, WaitReport(message.check, True, self._state())),
                )
            case WaitReport():
                self._on_report(sender, message)
            case Marker():
                self._on_marker(sender, (message.initiator, message.check))
            case DeadlockFound():
                self._end(message.numbers, message.cause)

    # -- the state of this rank ---------------------------------------------------------------------------

    def _waiting(self) -> list[Call]:
        """The operations of this world that threads wait for."""
        calls = {id(call) for group in self._control.groups() for call in group.calls_under_way()}
        return [blocked.call for blocked in blocked_threads().values() if id(blocked.call) in calls]

    def _state(self) -> RankState:
        blocked, waits = blocked_threads(), []
        helpers = [] if not self._control.has_services() else ["an agent that serves calls"]
        next_sequences, groups = {}, {}
        sends: list[tuple[int, int, int]] = []
        receives: list[tuple[int, int, int]] = []
        for group in self._control.groups():
            next_sequences[group.context] = group.next_sequence
            for call in group.calls_under_way():
                groups[id(call)] = group
            for is_send, peer, tag in group.messages_under_way():
                (sends if is_send else receives).append((group.context, peer, tag))
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        # A thread that waits for another one without a timeout does nothing before that one does. A wait for
        # ranks of another world may look the same.
        parked = {thread.ident for thread, how in parked_threads().items() if how is Parked.WITHOUT_LIMIT}
        parked -= blocked.keys()
        for ident in current_frames():
            name = names.get(ident, "a thread")
            one = blocked.get(ident)
            group_of_call = None if one is None else groups.get(id(one.call))
            wait = (
                None
                if group_of_call is None or one is None
                else _wait_of(group_of_call, one.call, one.is_limited)
            )
            if wait is not None:
                waits.append(wait)
            elif ident not in parked and not name.startswith("unisono-"):
                helpers.append(f"thread {name}")
        messages = len(sends) + len(receives)
        if messages > _MESSAGES_MAX or len(waits) > _WAITS_MAX or len(next_sequences) > _GROUPS_MAX:
            helpers.append("more operations under way than a report holds")
        return RankState(
            self._rank,
            tuple(sorted(waits, key=lambda wait: wait.number)[:_WAITS_MAX]),
            tuple(sorted(sends)[:_MESSAGES_MAX]),
            tuple(sorted(receives)[:_MESSAGES_MAX]),
            dict(list(next_sequences.items())[:_GROUPS_MAX]),
            tuple(sorted(helpers)[:_WAITS_MAX]),
        )

    # -- a check of this rank -----------------------------------------------------------------------------

    def _continue(self) -> None:
        """Ask the ranks that are waited for and were not asked yet; once all have reported, decide."""
        with self._lock:
            check, states = self._check, dict(self._states)
            size = self._control.backend.size
            blockers = {peer for state in states.values() for peer in state.blockers() if 0 <= peer < size}
            unasked = blockers - self._asked
            self._asked |= unasked
            is_complete = self._asked <= states.keys()
        if unasked:
            self._control.send(sorted(unasked), WaitQuery(check))
        elif is_complete:
            self._decide(check, states)

    def _decide(self, check: int, states: dict[int, RankState]) -> None:
        suspects = tuple(sorted(deadlocked(states)))
        if self._rank in suspects:
            if self._rank == suspects[0]:
                with self._lock:
                    self._suspects, self._confirmed = suspects, {}
                self._control.send(suspects, WaitQuery(check, suspects))
                self._exchange_markers(
                    (self._rank, check),
                    suspects,
                    lambda: self._on_report(self._rank, WaitReport(check, True, self._state())),
                )
            return
        cycle = cycle_of(states, self._rank)
        numbers = tuple(wait.number for _, wait in cycle)
        is_same, self._last_cycle = bool(cycle) and numbers == self._last_cycle, numbers
        if is_same and cycle[0][0] == self._rank:
            self._log_cycle(states, cycle)

    def _on_report(self, sender: int, message: WaitReport) -> None:
        with self._lock:
            if message.check != self._check or message.state.rank != sender:
                return
            if not message.after_markers:
                self._states[sender] = message.state
            elif sender in self._suspects:
                self._confirmed[sender] = message.state
            suspects, confirmed = self._suspects, dict(self._confirmed)
            is_certain = suspects and confirmed == {rank: self._states.get(rank) for rank in suspects}
        if not message.after_markers:
            self._continue()
        elif is_certain and deadlocked(confirmed) == set(suspects):
            cause = "; ".join(wait_text(rank, wait) for rank, wait in cycle_of(confirmed, self._rank))
            for rank in suspects:
                numbers = tuple(wait.number for wait in confirmed[rank].waits)
                self._control.send([rank], DeadlockFound(numbers, cause))
            self._end(tuple(wait.number for wait in confirmed[self._rank].waits), cause)

    def _log_cycle(self, states: dict[int, RankState], cycle: list[tuple[int, Wait]]) -> None:
        """Warn once of a cycle of waits that something could still break."""
        text = "; ".join(wait_text(rank, wait) for rank, wait in cycle)
        if text in self._logged or len(self._logged) > _CHECKS_MAX:
            return
        self._logged.add(text)
        ways_out = [
            f"rank {rank} has {', '.join(states[rank].helpers)}" for rank, _ in cycle if states[rank].helpers
        ]
        ways_out += [f"rank {rank} waits with a timeout" for rank, wait in cycle if wait.is_limited]
        _log.warning(
            "a cycle of waits: %s. It may still end: %s. Next: pair every send with a receive",
            text,
            "; ".join(ways_out) or "other waits of these ranks may end",
        )

    # -- markers ------------------------------------------------------------------------------------------

    def _exchange_markers(
        self, key: tuple[int, int], ranks: tuple[int, ...], then: Callable[[], None]
    ) -> None:
        """Send all others a marker behind what they were sent before; call `then` once all of theirs came."""
        others = {rank for rank in ranks if rank != self._rank and 0 <= rank < self._control.backend.size}
        with self._lock:
            markers = self._markers_of(key)
            markers.needed, markers.then = others, then
        for rank in sorted(others):
            self._control.reply(rank, Marker(*key), Lane.BULK)
        self._on_marker(self._rank, key)

    def _on_marker(self, sender: int, key: tuple[int, int]) -> None:
        with self._lock:
            markers = self._markers_of(key)
            markers.received.add(sender)
            then = markers.then if markers.needed <= markers.received else None
            if then is not None:
                del self._markers[key]
        if then is not None:
            then()

    def _markers_of(self, key: tuple[int, int]) -> _Markers:
        """The caller holds the lock."""
        if key not in self._markers and len(self._markers) >= _CHECKS_MAX:
            self._markers.popitem(last=False)
        return self._markers.setdefault(key, _Markers())

    # -- the end of the waits -----------------------------------------------------------------------------

    def _end(self, numbers: tuple[int, ...], cause: str) -> None:
        ours = {id(call) for call in self._waiting()}
        for blocked in blocked_threads().values():
            if blocked.call.number in numbers and id(blocked.call) in ours and not blocked.is_limited:
                blocked.task.interrupt(Deadlock("no rank can go on", cause=cause))


def _wait_of(group: WatchedGroup, call: Call, is_limited: bool) -> Wait | None:
    """What an operation of a group waits for; None if other ranks cannot tell whether it can end."""
    words = str(call)
    if call.sequence is not None:
        # Only absent ranks that this rank waits for itself: one that has called may still be sending to it.
        absent = tuple(sorted(call.absent.intersection(call.waiting_on())))
        return Wait(call.number, words, group.context, absent, False, call.sequence, is_limited=is_limited)
    open_ones = [message for message in call.messages if not message.request.done]
    if not open_ones:
        return None
    message = min(open_ones, key=lambda message: message.is_send)
    left = group.ranks_left()
    others = tuple(rank for rank in group.world_ranks if rank != group.world_rank and rank not in left)
    is_any = message.peer == ANY_RANK
    return Wait(
        call.number,
        words,
        group.context,
        others if is_any else (message.peer,),
        is_any,
        None,
        message.tag,
        message.is_send,
        is_limited,
    )
