"""The state of a group that its parts share: identity, pending operations, members that are gone, its end.

The fast path below Python may run only while none of this needs attention. Every change is therefore followed
by `update_fast_path`, under the same hold of the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from unisono._native import CallLog, NativeGroup
from unisono.comm.control import Control
from unisono.comm.control_messages import CALLS_MAX, CallReport, Goodbye
from unisono.comm.fingerprint import fused, words_of
from unisono.core.call_site import caller, is_users, line_text
from unisono.core.dtypes import DTYPES
from unisono.core.envelope import Lane
from unisono.core.task import Task
from unisono.errors import ClosedError, Location, PeerLost, UnisonoError, lost_text, said_of
from unisono.messaging.backend import Backend

__all__ = ["GroupState", "Pending"]

# Calls whose words are kept: of the others a report shows what their fingerprints say.
_WORDS_KEPT: Final = 1024


@dataclass(slots=True)
class Pending:
    """An operation under way. A collective has a sequence number; others concern single peers.

    `queried` are the ranks that were sent a stall query.
    """

    task: Task[object]
    sequence: int | None = None
    queried: set[int] = field(default_factory=set)
    is_send: bool = False


class GroupState:
    """What one rank knows about one group. Ranks are world ranks unless a name says otherwise."""

    def __init__(
        self,
        backend: Backend,
        control: Control,
        context: int,
        name: str,
        epoch: int,
        descriptor: bytes,
    ) -> None:
        self.backend = backend
        self._descriptor = descriptor
        self.control = control
        self.context = context
        self.name = name
        self.epoch = epoch
        self.rank_map = backend.rank_map.within(control.backend.rank_map)
        self.world_ranks = self.rank_map.peers
        self.world_rank = self.world_ranks[backend.rank]
        self.lock = threading.RLock()
        self.call_log = CallLog()
        self.native: NativeGroup | None = None
        self._words: dict[bytes, str] = {}
        self.pending: dict[int, Pending] = {}
        self.poisoned_by: UnisonoError | None = None
        self.is_poison_seen = False  # a caller here got the error
        self.is_aborted = False
        self.closed: ClosedError | None = None
        self.is_backend_closed = False
        # Members that said goodbye and members that died, with the cause; the last calls of the former.
        self.left: dict[int, str] = {}
        self.dead: dict[int, str] = {}
        self.last_calls: dict[int, dict[int, CallReport]] = {}
        self._closed_lanes: dict[int, set[Lane]] = {}
        # Stall queries about collectives that were not called here yet: fingerprint by sequence and rank.
        self.early_queries: dict[int, dict[int, bytes]] = {}

    def update_fast_path(self, *, interrupts: bool = True) -> None:
        """Close the fast path if there is anything to compare, refuse or end; the caller holds the lock.

        Messages between members that are not gone go on. If it `interrupts`, calls under way below Python
        return to it, and find what has changed.
        """
        attention = (
            self.closed,
            self.poisoned_by,
            self.left,
            self.dead,
            self.last_calls,
            self.early_queries,
            self.is_backend_closed,
        )
        self.call_log.fast_path_open = not any(attention)
        self.call_log.messages_open = not (self.closed or self.is_aborted or self.is_backend_closed)
        if interrupts and not self.call_log.fast_path_open:
            self.call_log.interrupt_in_flight()

    def close(self, cause: str | None = None) -> ClosedError:
        """Refuse every operation; the caller holds the lock. `cause`: why, if the user did not."""
        next_step = cause and "close it, or join the threads that use it, before the main thread ends"
        self.closed = ClosedError(f"communicator {self.name!r} is closed", cause=cause, next_step=next_step)
        self.update_fast_path()
        return self.closed

    # -- calls --------------------------------------------------------------------------------------------

    def remember(self, sequence: int, fingerprint: bytes) -> None:
        """Log a call, and the line of the user's program that makes it; the caller holds the lock."""
        frame = caller()
        self.call_log.remember(sequence, fingerprint, frame.f_code, frame.f_lasti)

    def keep_words(self, fingerprint: bytes, words: Callable[[], str]) -> None:
        """Keep what a fingerprint does not say of a call that Python makes."""
        if fingerprint in self._words:
            return
        text = words()
        with self.lock:
            if len(self._words) >= _WORDS_KEPT:
                del self._words[next(iter(self._words))]
            self._words[fingerprint] = text

    def compared(self, op_words: str = "") -> tuple[object, ...]:
        """What members compare by a hash, beside the arrays; `op_words` are those of a user's op."""
        return self._descriptor, self.backend.config.segment_bytes, op_words

    @property
    def tail_words(self) -> str:
        """What the words of every call end with: what else ranks compare."""
        return f" segment={self.backend.config.segment_bytes} group={self._descriptor.hex()[:16]}"

    def report(self, sequence: int, fingerprint: bytes) -> CallReport:
        """A call of this rank as other members are told of it."""
        filename, line = self.call_log.site(sequence) or ("", 0)
        is_known = bool(filename) and is_users(filename)
        words = self._words.get(fingerprint)
        if words is None:  # the engine made the call
            lengths, types = self.call_log.lengths(sequence), self.call_log.types(sequence)
            arrays = None
            if lengths is not None and types is not None:
                dtypes = list(DTYPES.values())
                arrays = fused([(dtypes[code], n) for code, n in zip(types, lengths, strict=True)]).text
            words = words_of(fingerprint, arrays, lengths=lengths) + self.tail_words
        return CallReport.of(fingerprint, words, line_text(filename, line) if is_known else "")

    def last_calls_here(self) -> dict[int, CallReport]:
        """The last calls of this rank, for its goodbye.

        An empty collective needs no other rank, so its caller may leave while others wait in the same one or
        in a different one: from its last calls they can detect a mismatch.
        """
        last = self.call_log.last(CALLS_MAX).items()
        return {sequence: self.report(sequence, fingerprint) for sequence, fingerprint in last}

    # -- pending operations -------------------------------------------------------------------------------

    def adopt_started(self, *, only_overdue: bool = False, all_messages: bool = False) -> None:
        """Let started operations of the engine become pending here, so that they can be asked and ended.

        Messages that can go on stay there, unless `all_messages` says otherwise. What a thread waits for is
        adopted by that thread: it has been interrupted.
        """
        if self.native is not None:
            for work in self.native.works_to_adopt(only_overdue=only_overdue, all_messages=all_messages):
                work._adopt(False)

    def pending_at(self, sequence: int) -> Pending | None:
        """The collective under way with this number."""
        return next((entry for entry in self.pending.values() if entry.sequence == sequence), None)

    def wake_all(self) -> None:
        """Let every pending operation look again at what it waits for."""
        self.adopt_started()
        with self.lock:
            pending = list(self.pending.values())
        for entry in pending:
            entry.task.wake()

    def interrupt(self, reason: UnisonoError | Callable[[], UnisonoError], *, only_collectives: bool) -> None:
        """End pending operations with an error."""
        self.adopt_started()
        with self.lock:
            pending = [e for e in self.pending.values() if e.sequence is not None or not only_collectives]
        for entry in pending:
            entry.task.interrupt(reason)

    # -- members that are gone ----------------------------------------------------------------------------

    def add_goodbye(self, sender: int, goodbye: Goodbye) -> bool:
        """Note a goodbye; True once the sender has said it in every lane."""
        with self.lock:
            if goodbye.calls or sender not in self.last_calls:
                self.last_calls[sender] = goodbye.calls
            lanes = self._closed_lanes.setdefault(sender, set())
            lanes.add(goodbye.lane)
            self.update_fast_path()
            return len(lanes) == len(Lane)

    def add_gone(self, rank: int, cause: str, *, is_dead: bool) -> None:
        """A member has left or died: messages with it end here, and so does every collective."""
        with self.lock:
            if is_dead:
                self.dead[rank] = cause
            else:
                self.left.setdefault(rank, cause)
            if self.native is not None:
                self.native.note_gone(self.world_ranks.index(rank), is_dead)
            self.update_fast_path()

    def gone(self) -> dict[int, str]:
        """Members that left or died, with the cause."""
        return {**self.left, **self.dead}

    def last_calls_at(self, sequence: int) -> dict[int, CallReport]:
        """What members that left called under this number, as far as their goodbyes say."""
        return {rank: calls[sequence] for rank, calls in self.last_calls.items() if sequence in calls}

    def lost_error(self, ranks: list[int]) -> PeerLost:
        """The error of an operation that needs these ranks; it names all dead ranks, too."""
        causes = self.gone()
        everyone = tuple(sorted({*ranks, *self.dead}))
        cause = "; ".join(said_of(rank, causes[rank]) for rank in everyone)
        return PeerLost(lost_text(everyone, cause), ranks=everyone, cause=cause)

    # -- the error of a poisoned group --------------------------------------------------------------------

    def poison_error(self) -> UnisonoError:
        """A copy of the error that poisoned the group, to be raised; a PeerLost names all dead ranks."""
        error = self.poisoned_by
        assert error is not None
        self.is_poison_seen = True
        if isinstance(error, PeerLost):
            ranks = tuple(sorted({*error.ranks, *self.dead}))
            if ranks != error.ranks:
                return error.of_ranks(ranks)
        return error.located(Location())
