"""Stall queries: a collective that does not end asks the ranks it waits for whether they have called it.

The query carries the caller's fingerprint, so a mismatch is found even if the two calls exchange no message.
"""

from __future__ import annotations

from typing import Final

from unisono.comm.control_messages import RANKS_MAX, StallQuery, StallReply
from unisono.comm.group_state import GroupState, Pending

__all__ = ["StallQueries"]

# Bound on queries of each member about collectives that were not called here yet.
_EARLY_MAX: Final = 64


class StallQueries:
    """The stall queries that one rank sends and receives on one group."""

    def __init__(self, state: GroupState) -> None:
        self._state = state

    def send(self, entry: Pending, ranks: tuple[int, ...]) -> None:
        """Query ranks that were not queried yet about a collective that has not ended."""
        state = self._state
        with state.lock:
            sequence = entry.sequence if id(entry) in state.pending else None
            fingerprint = None if sequence is None else state.call_log.find(sequence)
            unqueried = [rank for rank in ranks if rank not in entry.queried and rank != state.world_rank]
            entry.queried.update(unqueried)
        if sequence is not None and fingerprint is not None and unqueried:
            state.control.send(unqueried, StallQuery(state.context, sequence, fingerprint))

    def take_early(self, sequence: int) -> dict[int, bytes]:
        """Remove and return the queries that came before this rank made the call: fingerprints by rank."""
        return self._state.early_queries.pop(sequence, {})

    def on_query(self, sender: int, query: StallQuery) -> None:
        """Reply. A query about a call that is still to be made here is replied to again once it is made."""
        state = self._state
        state.adopt_started()
        with state.lock:
            entry = state.pending_at(query.sequence)
            has_called = query.sequence < state.call_log.next
            is_early = not has_called or (entry is not None and state.call_log.find(query.sequence) is None)
            kept = sum(sender in ranks for ranks in state.early_queries.values())
            if is_early and kept < _EARLY_MAX:
                state.early_queries.setdefault(query.sequence, {})[sender] = query.fingerprint
                state.update_fast_path()
            awaited_below = tuple(state.call_log.awaited(query.sequence))
        waiting_on = entry.task.call.waiting_on() if entry is not None else awaited_below
        reply = StallReply(state.context, query.sequence, has_called, waiting_on[:RANKS_MAX])
        state.control.reply(sender, reply)

    def on_reply(self, sender: int, reply: StallReply) -> None:
        """Note a rank that has not called the collective; query the ranks that the others wait for."""
        state = self._state
        with state.lock:
            entry = state.pending_at(reply.sequence)
        if entry is None:
            return
        call = entry.task.call
        if not reply.has_called:
            call.absent.add(sender)
            return
        if sender in call.absent:
            # It has just made the call. It can say which ranks it waits for once it has waited for a while.
            call.absent.discard(sender)
            entry.queried.discard(sender)
            runtime, pause_s = state.backend.runtime, state.backend.config.stall_query_s
            runtime.call_at(runtime.now() + pause_s, lambda: self.send(entry, call.waiting_on()))
        self.send(entry, tuple(rank for rank in reply.waiting_on if rank in state.world_ranks))
