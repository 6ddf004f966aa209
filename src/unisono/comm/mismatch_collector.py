"""Collects what every member called once two members are known to have called different collectives.

Each member that sees the mismatch sends its own call to all others, with its line, and waits until all have
sent theirs, so that every rank raises the same report. The wait is bounded: a fingerprint that came with a
message is enough for a report, and a member that holds the interpreter or died leaves out its line only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

from unisono.comm.control_messages import CallReport, GroupFailure
from unisono.comm.fingerprint import may_be_one_call
from unisono.comm.group_state import GroupState
from unisono.comm.mismatch import Mismatch
from unisono.core.call import Steps
from unisono.core.runtime import Timer
from unisono.errors import CollectiveMismatch, UnisonoError

__all__ = ["MismatchCollector"]

T = TypeVar("T")

# How long to wait for the calls of all members, and, where every fingerprint is known, for their lines. A
# mismatch is found within half a second (twice stall_query_s), and must end every rank's collective within
# one second.
_COLLECT_S: Final = 0.4
_LINES_S: Final = 0.25


class Aborted(Protocol):
    """The group, as the collector ends it."""

    def abort(self, error: UnisonoError) -> None:
        """A member gives up for good."""


class MismatchCollector:
    """The mismatch of one group, if there is one. While it collects calls, the group's error may change."""

    def __init__(self, state: GroupState, group: Callable[[], Aborted | None]) -> None:
        self._state = state
        self._group = group  # weak: it holds the collector
        self._mismatch: Mismatch | None = None
        self._is_over = False
        self._timer: Timer | None = None
        self._deferred_abort: UnisonoError | None = None

    @property
    def is_found(self) -> bool:
        """Whether members called different collectives."""
        return self._mismatch is not None

    @property
    def is_collecting(self) -> bool:
        """Whether calls of members are still awaited."""
        return self._mismatch is not None and not self._is_over

    def compare(self, sender: int, calls: Mapping[int, CallReport]) -> CollectiveMismatch | None:
        """Find the first collective, of those given by number, that a member called and this rank did not."""
        for sequence, theirs in sorted(calls.items()):
            with self._state.lock:
                mine = self._state.call_log.find(sequence)
            if mine is not None and not may_be_one_call(mine, theirs.fingerprint):
                own = self._state.report(sequence, mine)
                return self.add(sequence, {self._state.world_rank: own, sender: theirs})
        return None

    def add_to_current(self) -> CollectiveMismatch | None:
        """Add this rank's call to a mismatch that is known, if it has made that call by now."""
        return None if self._mismatch is None else self.add(self._mismatch.sequence, {})

    def add(self, sequence: int, calls: Mapping[int, CallReport]) -> CollectiveMismatch:
        """Members called different collectives under a number: send ours to all, and collect theirs.

        Returns the error as far as it is known. Of several numbers the lowest counts.
        """
        state = self._state
        with state.lock:
            is_late = state.closed is not None or (state.poisoned_by is not None and not self.is_collecting)
            mismatch = self._mismatch
            if is_late or mismatch is None or sequence < mismatch.sequence:
                mismatch = Mismatch(sequence)
            if sequence == mismatch.sequence:
                mismatch.add(calls)
            had_mine = state.world_rank in mismatch.ranks_reported()
            mismatch.add(state.last_calls_at(mismatch.sequence))
            if (mine := state.call_log.find(mismatch.sequence)) is not None:
                mismatch.add({state.world_rank: state.report(mismatch.sequence, mine)})
            error = self._error(mismatch)
            if is_late:
                return error
            is_first = self._mismatch is None
            is_new_to_others = mismatch is not self._mismatch or (not had_mine and mine is not None)
            self._mismatch, state.poisoned_by = mismatch, error
            state.update_fast_path()
        if is_new_to_others:
            state.control.send(state.world_ranks, self.failure_message(error))
        if is_first:
            runtime = state.backend.runtime
            self._timer = runtime.call_at(runtime.now() + _LINES_S, self._on_lines_late)
        self.conclude(if_complete=True)
        return error

    def conclude(self, *, if_complete: bool = False) -> None:
        """Stop collecting and end all collectives; with `if_complete` only if all calls are known."""
        state = self._state
        with state.lock:
            mismatch = self._mismatch
            if mismatch is None or self._is_over:
                return
            if if_complete and set(state.world_ranks) - {
                *mismatch.ranks_reported(),
                *state.left,
                *state.dead,
            }:
                return
            mismatch.add(state.last_calls_at(mismatch.sequence))
            self._is_over = True
            state.poisoned_by = self._error(mismatch)
            deferred, self._deferred_abort = self._deferred_abort, None
        if self._timer is not None:
            self._timer.cancel()
        state.interrupt(state.poison_error, only_collectives=True)
        state.wake_all()
        if deferred is not None and (group := self._group()) is not None:
            group.abort(deferred)

    def _on_lines_late(self) -> None:
        """Stop waiting for lines. A member of which not even the fingerprint is known has a little longer."""
        state = self._state
        with state.lock:
            known = set() if self._mismatch is None else set(self._mismatch.calls)
            is_known = not set(state.world_ranks) - {*known, *state.left, *state.dead}
            if not is_known:
                runtime = state.backend.runtime
                self._timer = runtime.call_at(runtime.now() + _COLLECT_S - _LINES_S, self.conclude)
        if is_known:
            self.conclude()

    def defer_abort(self, error: UnisonoError) -> bool:
        """Abort the group once all calls are collected; False if none are awaited."""
        with self._state.lock:
            if self.is_collecting:
                self._deferred_abort = error
            return self.is_collecting

    def failure_message(self, error: UnisonoError, *, is_abort: bool = False) -> GroupFailure:
        """An error for the other members. From the calls of a mismatch, each finds the ranks that differ."""
        calls = {}
        if self._mismatch is not None and isinstance(error, CollectiveMismatch):
            calls = self._mismatch.evidence(self._state.world_rank)
        return GroupFailure.of(error, self._state.context, is_abort, calls)

    def finish(self, steps: Steps[T]) -> Steps[T]:
        """Run the steps of a collective; if they end in a mismatch, raise it once all calls are collected."""
        try:
            return (yield from steps)
        except CollectiveMismatch:
            if self._mismatch is None:
                raise
            with contextlib.suppress(UnisonoError):  # whatever else ends it meanwhile, this is the reason
                yield from self.until_collected()
            raise self._state.poison_error() from None

    def until_collected(self) -> Steps[None]:
        """Wait while calls are collected."""
        while self.is_collecting:
            yield

    def _error(self, mismatch: Mismatch) -> CollectiveMismatch:
        state = self._state
        return mismatch.error(state.world_ranks, state.world_rank, state.name, state.epoch)
