"""Run-ahead: collectives on the fast path that end here before their messages are received elsewhere.

A root may go on without waiting for its receivers. The receiver keeps such messages as *unclaimed*; if it has
already made the call with that number, and the call did not take the message, the two ranks called different
collectives. Before a group is closed, the ranks that have sent nothing since must *confirm* that they made
the last call.
"""

from __future__ import annotations

from unisono.comm.control_messages import CallReport, StallQuery, StallReply
from unisono.comm.fingerprint import FORGOTTEN
from unisono.comm.group_state import GroupState
from unisono.comm.mismatch_collector import MismatchCollector
from unisono.core.call import Call, Steps
from unisono.core.envelope import Lane
from unisono.errors import CollectiveMismatch
from unisono.messaging.stage import FINGERPRINT_BYTES

__all__ = ["RunAhead"]


class RunAhead:
    """What one rank knows of calls that ran ahead on one group."""

    def __init__(self, state: GroupState, mismatches: MismatchCollector) -> None:
        self._state = state
        self._mismatches = mismatches
        self._unconfirmed: set[int] = set()

    def on_unclaimed(self, source: int, sequence: int, theirs: bytes) -> bool:
        """A message of a call that ran ahead waits here: compare that call with ours.

        False if nothing needs to be compared any more. A call still to be made here is compared when it is.
        """
        state = self._state
        state.adopt_started()
        if len(theirs) != FINGERPRINT_BYTES:  # no rank sends it; the receive that meets it refuses it
            return True
        call = CallReport(theirs)
        self._mismatches.compare(source, {sequence: call})
        with state.lock:
            is_early = sequence >= state.call_log.next or state.pending_at(sequence) is not None
            is_forgotten = not is_early and state.call_log.find(sequence) is None
        # A report may come late: its call may have claimed the message meanwhile, and be forgotten by now.
        if is_forgotten and self._is_waiting(source, sequence):
            forgotten = CallReport(FORGOTTEN, line="")
            self._mismatches.add(sequence, {state.world_rank: forgotten, source: call})
        return state.poisoned_by is None and state.closed is None

    def _is_waiting(self, source: int, sequence: int) -> bool:
        assert self._state.native is not None
        waiting = self._state.native.unclaimed(self._state.call_log.next)
        return any((rank, number) == (source, sequence) for rank, number, _ in waiting)

    def find_unclaimed(self) -> CollectiveMismatch | None:
        """Look for a message that a call made here should have received and did not."""
        if self._state.native is not None:
            for source, sequence, theirs in self._state.native.unclaimed(self._state.call_log.next):
                if len(theirs) != FINGERPRINT_BYTES:
                    continue
                if (mismatch := self._mismatches.compare(source, {sequence: CallReport(theirs)})) is not None:
                    return mismatch
        return None

    def unconfirmed_ranks(self) -> list[int]:
        """The ranks that have not shown yet that they made the calls that ended here."""
        return [] if self._state.native is None else self._state.native.unconfirmed_ranks()

    def confirm(self, call: Call, ranks: list[int]) -> Steps[None]:
        """Ask ranks whether they made our last call; wait until all have replied, are gone, or differ."""
        state = self._state

        def awaited() -> tuple[int, ...]:
            return tuple(sorted(self._unconfirmed - {*state.left, *state.dead}))

        self._unconfirmed.update(ranks)
        call.waiting_on = awaited
        with state.lock:
            last = state.call_log.last(1)
        # In the bulk lane, behind everything that was sent: a rank that replies has compared all of it.
        for sequence, fingerprint in last.items():
            state.control.send(ranks, StallQuery(state.context, sequence, fingerprint), Lane.BULK)
        while state.poisoned_by is None and awaited():
            yield

    def on_reply(self, sender: int, reply: StallReply) -> None:
        """A rank that has made the call is confirmed."""
        if reply.has_called and sender in self._unconfirmed:
            self._unconfirmed.discard(sender)
            self._state.wake_all()
