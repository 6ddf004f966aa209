"""The operations of a group, from their start or adoption to their end.

It numbers collectives, keeps what is under way in the group's state, and finds out why an operation can never
end. How members fail and leave, and how the group ends, is in group.py.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from unisono.comm.control import Control
from unisono.comm.group_state import GroupState, Pending
from unisono.comm.loose_ends import LooseEnds
from unisono.comm.mismatch_collector import MismatchCollector
from unisono.comm.run_ahead import RunAhead
from unisono.comm.stall_queries import StallQueries
from unisono.core.call import Begun, Call, Steps
from unisono.core.runtime import Deadline
from unisono.core.task import Task
from unisono.core.work import Started, Work
from unisono.errors import ClosedError, PeerLost, UnisonoError
from unisono.messaging.backend import Backend

__all__ = ["Operations"]

T = TypeVar("T")


class _Part(Generic[T]):
    """A part of a group, made when it is needed first: many groups never need it."""

    def __init__(self, make: Callable[[Operations], T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, group: Operations, owner: type) -> T:
        # Once for all threads; from then on the attribute of the group is found first.
        with group.state.lock:
            if self._name not in group.__dict__:
                group.__dict__[self._name] = self._make(group)
            part: T = group.__dict__[self._name]
            return part


class Operations(ABC):
    """The part of a group that starts operations and follows them to their end."""

    def __init__(self, state: GroupState, parent: Operations | None) -> None:
        self.state = state
        self.backend: Backend = state.backend
        self.control: Control = state.control
        self.call_log = state.call_log
        self.world_rank = state.world_rank
        self.parent = parent

    # The parts know the state, not the group: without a cycle, a group that is dropped is freed at once.
    loose_ends = _Part(lambda group: LooseEnds(group.state))
    _mismatches = _Part(lambda group: MismatchCollector(group.state, weakref.ref(group)))
    _run_ahead = _Part(lambda group: RunAhead(group.state, group._mismatches))
    _stalls = _Part(lambda group: StallQueries(group.state))

    @property
    def name(self) -> str:
        """What errors call the communicator."""
        return self.state.name

    @property
    def epoch(self) -> int:
        """The number of the membership view."""
        return self.state.epoch

    @abstractmethod
    def check_usable(self, is_collective: bool, operation: str | None = None) -> None:
        """Refuse an operation on a closed or broken communicator."""

    @abstractmethod
    def poison(self, error: UnisonoError) -> None:
        """End every collective: the members are not in step any more."""

    @abstractmethod
    def abort(self, error: UnisonoError) -> None:
        """End everything: a member gives up for good."""

    @property
    def next_sequence(self) -> int:
        """The number of the collective that is called next."""
        return self.call_log.next

    def progress(self) -> dict[int, int]:
        """The number of this rank's next collective by context, of this group and its ancestors."""
        above = {} if self.parent is None else self.parent.progress()
        return {**above, self.state.context: self.next_sequence}

    def start(
        self,
        operation: str,
        deadline: Deadline,
        steps: Callable[[Call], Steps[T]],
        *,
        is_collective: bool,
        timers: bool,
        is_send: bool = False,
    ) -> Work[T]:
        """Start an operation, which stays pending until it ends."""
        runtime = self.backend.runtime
        runtime.used(self.world_rank)
        call, task, entry = self._prepared(
            operation, deadline, runtime.now(), steps, is_collective=is_collective, is_send=is_send
        )
        # Checked, numbered and pending under one hold of the lock: no error of the group can miss it.
        with self.state.lock:
            self.check_usable(is_collective, operation)
            if is_collective:
                call.sequence = entry.sequence = self.call_log.take()
            self.state.pending[id(entry)] = entry
            if timers:
                started = self.loose_ends.add_started(operation)
                call.on_result = lambda error: self._on_result(call, started, error)
        task.begin(timers)
        is_warned_of = timers and not self.loose_ends.is_lenient
        return Started(task, runtime) if is_warned_of else Work(task, runtime)

    def resume(
        self,
        operation: str,
        sequence: int | None,
        started_at: float,
        deadline: Deadline,
        steps: Callable[[Call], Steps[T]],
        *,
        timers: bool,
        is_send: bool,
    ) -> Work[T]:
        """Adopt an operation that is under way in the engine; a collective has its number."""
        call, task, entry = self._prepared(
            operation, deadline, started_at, steps, is_collective=sequence is not None, is_send=is_send
        )
        task.steps = Begun(task.steps)
        with self.state.lock:
            call.sequence = entry.sequence = sequence
            self.state.pending[id(entry)] = entry
            # The group may have failed before the operation was pending here, and may be closed since.
            reason = self._backend_closed_error() if self.state.is_backend_closed else None
            if self.state.closed is not None:
                reason = self.state.closed
            if self.state.poisoned_by is not None and (sequence is not None or self.state.is_aborted):
                if not self._mismatches.is_collecting:
                    reason = self.state.poison_error()
                elif self.state.closed is None:
                    reason = None  # the report of the mismatch is not complete: its end follows
        if reason is not None:
            task.interrupt(reason)
        task.begin(timers)
        return Work(task, self.backend.runtime)

    def _prepared(
        self,
        operation: str,
        deadline: Deadline,
        started_at: float,
        steps: Callable[[Call], Steps[T]],
        *,
        is_collective: bool,
        is_send: bool = False,
    ) -> tuple[Call, Task[T], Pending]:
        runtime, config = self.backend.runtime, self.backend.config
        call = Call(operation, self.world_rank, self.name, self.epoch, None, deadline, started_at)
        carried = self._mismatches.finish(steps(call)) if is_collective else steps(call)
        task: Task[T] = Task(runtime, call, carried)
        entry = Pending(task, is_send=is_send)  # type: ignore[arg-type]
        call.unreachable_error = lambda: self._unreachable_error_of(call)
        call.translate_error = self._in_world_ranks
        call.on_end = lambda error: self._on_end(entry, error)
        call.on_result = lambda error: self._on_result(call, None, error)
        call.stall_log_s = None if runtime.is_virtual else config.stall_log_s
        if config.deadlock_after_s and not runtime.sees_deadlocks:
            call.long_wait_s, call.on_long_wait = config.deadlock_after_s, self.control.deadlocks.check_soon
        if is_collective:
            budget = deadline.remaining(call.started_at)
            call.stall_query_s = (
                config.stall_query_s if budget is None else min(config.stall_query_s, budget / 2)
            )
            call.on_stall = lambda: self._stalls.send(entry, call.waiting_on())
        return call, task, entry

    def calls_under_way(self) -> list[Call]:
        """The operations that Python carries on. The engine's have no thread that waits in Python."""
        with self.state.lock:
            return [entry.task.call for entry in self.state.pending.values()]

    def messages_under_way(self) -> list[tuple[bool, int, int]]:
        """(is a send, world rank, tag) of all messages that have not ended; -1 is any."""
        native = self.state.native
        found = [] if native is None else native.messages_under_way()
        messages = (message for call in self.calls_under_way() for message in call.messages)
        return found + [(m.is_send, m.peer, m.tag) for m in messages if not m.request.done]

    def _on_end(self, entry: Pending, error: UnisonoError | None) -> None:
        with self.state.lock:
            self.state.pending.pop(id(entry), None)
        if error is not None and entry.sequence is not None and not isinstance(error, ClosedError):
            self.state.is_poison_seen = True
            self.poison(error)

    def _on_result(self, call: Call, started: tuple[str, str] | None, error: BaseException | None) -> None:
        """A thread of the user has seen how an operation ended."""
        if started is not None:
            call.on_result = lambda error: self._on_result(call, None, error)
            self.loose_ends.remove_started(started)
        if error is not None:
            self.loose_ends.note_raised(f"during {call}", error)

    # -- errors of operations -----------------------------------------------------------------------------

    def _unreachable_error_of(self, call: Call) -> UnisonoError | None:
        """Why an operation that waits now can never end, if so."""
        gone = self.state.gone()
        if not gone or self._mismatches.is_collecting:
            return None
        if self._mismatches.is_found and call.sequence is not None:
            return (
                self.state.poison_error()
            )  # the rank that left had called something else: that is the cause
        if not call.is_wildcard:
            needed = [rank for rank in call.waiting_on() if rank in gone and not self._has_joined(call, rank)]
        elif self.state.dead:
            needed = list(self.state.dead)
        else:
            others = [rank for rank in self.state.world_ranks if rank != self.world_rank]
            needed = others if all(rank in gone for rank in others) else []
        if not needed:
            return None
        # A rank that left because the parent was aborted may never have made this group.
        cause = None if any(rank in self.state.dead for rank in needed) else self._ancestor_abort()
        return cause if cause is not None else self.state.lost_error(needed)

    def _has_joined(self, call: Call, rank: int) -> bool:
        """Whether a member that left had called a joint collective before, and so has done its part."""
        if not call.is_joint or call.sequence is None or rank in self.state.dead:
            return False
        return any(number >= call.sequence for number in self.state.last_calls.get(rank, ()))

    def _ancestor_abort(self) -> UnisonoError | None:
        """The error of the nearest ancestor that was aborted."""
        above = self.parent
        while above is not None and not above.state.is_aborted:
            above = above.parent
        return None if above is None else above.state.poison_error()

    def _in_world_ranks(self, error: BaseException) -> BaseException:
        """The error of a request, whose ranks are those of the group, as users see it."""
        if isinstance(error, PeerLost):
            return error.of_ranks(self.state.rank_map.peers_of(error.ranks))
        return error

    def _backend_closed_error(self) -> UnisonoError:
        return ClosedError(f"rank {self.world_rank} is closed")
