"""A group: the members of one communicator, seen from one rank: their calls, their failures and the end.

A *fingerprint* is a record of a collective call; it is equal on all ranks that call the same collective. A
group is *poisoned* by the first error after which its members are no longer in step: from then on every
collective fails with that error, here and on the other members. It is *aborted* when a member gives up for
good: then messages between two members fail as well.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Container

from unisono._native import DecisionTable, VerbGroup
from unisono.comm.control import Control, Service
from unisono.comm.control_messages import (
    CallReport,
    Goodbye,
    GroupFailure,
    GroupMessage,
    StallQuery,
    StallReply,
)
from unisono.comm.fingerprint import seed_of, words_of
from unisono.comm.group_state import GroupState, Pending
from unisono.comm.operations import Operations
from unisono.core.buffers import arguments
from unisono.core.call import Call, Steps
from unisono.core.call_site import call_site
from unisono.core.envelope import Lane
from unisono.core.runtime import NEVER, Deadline
from unisono.core.work import wait_or_cancel
from unisono.errors import (
    CollectiveMismatch,
    Location,
    ProtocolError,
    UnisonoError,
    UsageError,
)
from unisono.messaging.backend import Backend
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import FINGERPRINT_BYTES

__all__ = ["Group", "context_of", "descriptor_of"]


class Group(Operations):
    """The members of one communicator, seen from one of them."""

    def __init__(
        self,
        backend: Backend,
        control: Control,
        context: int,
        name: str,
        descriptor: bytes,
        *,
        is_introduced: bool,
        epoch: int = 0,
        parent: Group | None = None,
    ) -> None:
        state = GroupState(backend, control, context, name, epoch, descriptor)
        super().__init__(state, parent)
        self.context, self.descriptor = context, descriptor
        self.world_ranks = state.world_ranks
        # The group in the engine, if the backend has one; else, for some libraries, calls of their own.
        seed = seed_of(state.compared())
        self.native = state.native = backend.native_group(
            context, self.call_log, self, fingerprint_seed=seed, is_introduced=is_introduced
        )
        self.library_calls = backend.library_calls(context, self.call_log)
        self.verb_group: VerbGroup | None = self.native
        if self.library_calls is not None:
            self.verb_group = VerbGroup(
                self.call_log,
                arguments(),
                DecisionTable(),
                fingerprint_seed=seed,
                rank=backend.rank,
                size=backend.size,
                deadline_s=backend.config.deadline_s,
            )
        self._services: dict[str, Service] = {}
        self._is_abort_sent = False
        # The members of a group made by `sub` have not talked to each other: the first message to each of
        # these carries the group's descriptor.
        self._to_introduce = set() if is_introduced else set(self.world_ranks)

    def check_usable(self, is_collective: bool, operation: str | None = None) -> None:
        """Refuse an operation on a closed or broken communicator.

        While the calls of a mismatch are collected, a new collective is not refused here: its call belongs
        into the report, and `remember` raises the mismatch.
        """
        here = Location(operation, self.name, self.epoch)
        if self.state.closed is not None:
            raise self.state.closed.located(here)
        is_refused = self.state.poisoned_by is not None and (is_collective or self.state.is_aborted)
        if is_refused and not self._mismatches.is_collecting:
            error = self.state.poison_error().located(here)
            self.loose_ends.note_raised(str(here), error)
            raise error

    def remember(self, sequence: int, fingerprint: bytes) -> None:
        """Log the call made under a number, and compare it with calls that other members reported before.

        Raises:
            CollectiveMismatch: a member called something else under this number.
        """
        with self.state.lock:
            self.state.remember(sequence, fingerprint)
            known = list(self.state.last_calls.items())
            early = self._stalls.take_early(sequence)
            self.state.update_fast_path(interrupts=False)
        if (mismatch := self._mismatches.add_to_current()) is not None:
            raise mismatch
        known += [(rank, {sequence: CallReport(theirs)}) for rank, theirs in early.items()]
        for rank, calls in known:
            if (mismatch := self._mismatches.compare(rank, calls)) is not None:
                raise mismatch
        if (mismatch := self._run_ahead.find_unclaimed()) is not None:
            raise mismatch
        self.control.send(early, StallReply(self.context, sequence, has_called=True))

    def check_fingerprint(self, call: Call, mine: bytes, peer: int, theirs: bytes) -> None:
        """Compare the call of a peer (by its rank in the group) with ours.

        Raises:
            CollectiveMismatch: they differ.
            ProtocolError: it is no fingerprint.
        """
        there = self.world_ranks[peer]
        if len(theirs) != FINGERPRINT_BYTES:
            raise ProtocolError(f"rank {there} sent a fingerprint of {len(theirs)} bytes")
        if mine != theirs:
            assert call.sequence is not None
            own = self.state.report(call.sequence, mine)
            raise self._mismatches.add(call.sequence, {self.world_rank: own, there: CallReport(theirs)})

    def refuse_length(self, call: Call, mine: bytes, peer: int, came: int, awaited: int) -> None:
        """The calls are equal and yet a message has another length: no correct peer sends it."""
        there = self.world_ranks[peer]
        lines = f"rank {there} sent {came} bytes where {awaited} were due"
        raise CollectiveMismatch(
            f"ranks {self.world_rank} and {there} disagree", report=f"{words_of(mine)}: {lines}", cause=lines
        )

    def introduction(self, peer: int) -> bytes:
        """The header of a user's message: our descriptor in the first one to each peer, else nothing."""
        with self.state.lock:
            there = self.world_ranks[peer]
            if there not in self._to_introduce:
                return b""
            self._to_introduce.discard(there)
            if self.native is not None:
                self.native.introduce(peer)
            return self.descriptor

    def check_introduction(self, header: bytes, source: int) -> None:
        """Refuse a message from another communicator with the same context id.

        Raises:
            ProtocolError: the header is not our descriptor.
        """
        if header and header != self.descriptor:
            raise ProtocolError(
                f"rank {self.world_ranks[source]} uses the context id of {self.name!r} for another group",
                next_step="close both groups and call sub again",
            )

    # -- services ------------------------------------------------------------------------------------------

    def attach(self, service: Service, purpose: str) -> int:
        """Attach a service that lives until the group ends; returns the context for its messages.

        Raises:
            UsageError: the group has or had a service for this purpose.
        """
        with self.state.lock:
            self.check_usable(is_collective=False)
            if purpose in self._services:
                raise UsageError(
                    f"{self.name!r} has or had an agent for {purpose}; allowed: one",
                    next_step="make another communicator by split or sub",
                )
            self._services[purpose] = service
        return context_of(self.context, self.descriptor.hex(), purpose)

    # -- the end of a group -------------------------------------------------------------------------------

    def poison(self, error: UnisonoError) -> None:
        """The members are not in step any more: end every collective, refuse the next, inform the others."""
        with self.state.lock:
            if self.state.closed is not None or self.state.poisoned_by is not None:
                return
            self.state.poisoned_by = error
            self.state.update_fast_path()
        failure = GroupFailure.of(error, self.context)
        for lane in Lane:  # ahead of all that this rank sends from now on
            self.control.send(self.world_ranks, failure, lane)
        self.state.interrupt(self.state.poison_error, only_collectives=True)
        self.state.wake_all()

    def abort(self, error: UnisonoError) -> None:
        """A member gives up for good: end everything. If the group was poisoned before, that is the cause.

        Inform the other members first: a local caller that gets the error may exit at once.
        """
        self._mismatches.conclude()
        with self.state.lock:
            if self.state.closed is not None or self._is_abort_sent:
                return
            self._is_abort_sent = True
            root_cause = self.state.poisoned_by or error
        self.control.send(self.world_ranks, self._mismatches.failure_message(root_cause, is_abort=True))
        with self.state.lock:
            self.state.is_aborted = True
            self.state.poisoned_by = self.state.poisoned_by or root_cause
            self.state.update_fast_path()
        self.state.interrupt(self.state.poison_error, only_collectives=False)
        for service in list(self._services.values()):
            service.on_abort(root_cause)

    def close(self) -> None:
        """Flush, end what is pending, and say goodbye.

        Raises:
            CollectiveMismatch: a call that ran ahead turned out to be a mismatch, and no caller here got the
                error yet. The group is closed all the same.
        """
        for service in list(self._services.values()):
            service.close()
        if self._is_idle():
            self.leave(is_soon=self.parent is not None)
            return
        self.state.adopt_started(all_messages=True)
        with self.state.lock:
            if self.state.closed is not None:
                return
            sends = [entry for entry in self.state.pending.values() if entry.is_send]
        if sends:
            self._flush(sends)
        ran_ahead = self._confirm_before_close()
        is_mismatch_unseen = (
            ran_ahead
            and isinstance(self.state.poisoned_by, CollectiveMismatch)
            and not (self.state.is_poison_seen or self.state.is_aborted)
        )
        if not is_mismatch_unseen:
            self.loose_ends.warn(lambda: f" at {call_site()}")
        self.leave()
        if is_mismatch_unseen:
            raise self.state.poison_error()

    def _is_idle(self) -> bool:
        """Whether nothing is under way, left undone or to be confirmed."""
        state, native = self.state, self.native
        if native is None or state.pending or state.poisoned_by is not None or state.closed is not None:
            return False
        if "loose_ends" in self.__dict__ or ("_mismatches" in self.__dict__ and self._mismatches.is_found):
            return False
        return native.is_idle()

    def leave(self, cause: str | None = None, *, is_soon: bool = False) -> None:
        """Say goodbye without waiting for anything. `cause` says why, if the user did not close the group.

        `is_soon`: nothing was left to do, so the goodbye may wait to be batched.
        """
        with self.state.lock:
            if self.state.closed is not None:
                return
            closed = self.state.close(cause)
        self.state.interrupt(closed, only_collectives=False)
        if is_soon:
            # If all ranks are known to have made the same calls, no rank waits in a different one.
            calls = None if self.call_log.is_agreed else self.state.last_calls_here
            self.control.leave_soon(self.world_ranks, self.context, calls)
            return
        if not self.state.is_aborted:
            if self.state.poisoned_by is not None:
                # A mismatch that was collected here went out in one lane; it must precede the goodbye.
                failure = self._mismatches.failure_message(self.state.poisoned_by)
                self.control.send(self.world_ranks, failure, Lane.BULK)
            self.control.leave(self.world_ranks, self.context, self.state.last_calls_here())
        self.control.remove_group(self)

    @property
    def is_closed(self) -> bool:
        """Whether this rank has closed it."""
        return self.state.closed is not None

    def _flush(self, sends: list[Pending]) -> None:
        runtime = self.backend.runtime
        deadline = runtime.deadline(self.backend.config.flush_s)
        for entry in sends:
            try:
                entry.task.wait(deadline.remaining(runtime.now()))
            except (UnisonoError, TimeoutError):
                continue

    def _confirm_before_close(self) -> bool:
        """If calls ran ahead, wait until the others confirm them, are gone, or flush_s is over.

        Returns whether calls ran ahead.
        """
        ranks = self._run_ahead.unconfirmed_ranks()
        self._run_ahead.find_unclaimed()
        self.wait_for_mismatch()
        if ranks and self.state.poisoned_by is None and not self.state.is_backend_closed:
            deadline = self.backend.runtime.deadline(self.backend.config.flush_s)
            self._wait("close", deadline, lambda call: self._run_ahead.confirm(call, ranks))
        return bool(ranks)

    def on_unclaimed(self, source: int, sequence: int, theirs: bytes) -> bool:
        """See RunAhead.on_unclaimed."""
        return self._run_ahead.on_unclaimed(source, sequence, theirs)

    def adopt_overdue(self) -> None:
        """See GroupState.adopt_started."""
        self.state.adopt_started(only_overdue=True)

    def wait_for_mismatch(self) -> None:
        """If members called different collectives, wait until the calls of all are known."""
        if self._mismatches.is_collecting:
            self._wait("mismatch", NEVER, lambda call: self._mismatches.until_collected())

    def _wait(self, operation: str, deadline: Deadline, steps: Callable[[Call], Steps[None]]) -> None:
        with contextlib.suppress(UnisonoError):
            wait_or_cancel(self.start(operation, deadline, steps, is_collective=False, timers=False))

    # -- events from control ------------------------------------------------------------------------------

    def on_control_message(self, sender: int, message: GroupMessage) -> None:
        """A member sent a message about this group."""
        if sender not in self.world_ranks:
            return
        match message:
            case GroupFailure(kind="CollectiveMismatch", sequence=int(sequence), calls=calls) if calls:
                members = {rank: calls[rank] for rank in calls if rank in self.world_ranks}
                self._mismatches.add(sequence, members)
                if message.is_abort and not self._mismatches.defer_abort(message.error(sender)):
                    self.abort(message.error(sender))
            case GroupFailure(is_abort=True):
                self.abort(message.error(sender))
            case GroupFailure():
                self.poison(message.error(sender))
            case Goodbye():
                is_complete = self.state.add_goodbye(sender, message)
                self._mismatches.compare(sender, message.calls)
                if is_complete:
                    self._on_left(sender, "left")
            case StallQuery():
                # A mismatch ends the query: its sender gets the failure instead of a reply.
                calls = {message.sequence: CallReport(message.fingerprint)}
                if not (self._run_ahead.find_unclaimed() or self._mismatches.compare(sender, calls)):
                    self._stalls.on_query(sender, message)
            case StallReply():
                self._run_ahead.on_reply(sender, message)
                self._stalls.on_reply(sender, message)

    def on_peer_down(self, down: PeerDown) -> None:
        """A world rank is gone. If it left, waits for it end; if it died, every collective ends."""
        if down.rank not in self.world_ranks:
            return
        if down.left:
            self._on_left(down.rank, down.cause)
            return
        self.state.add_gone(down.rank, down.cause, is_dead=True)
        self._mismatches.conclude(if_complete=True)
        self.poison(self.state.lost_error([down.rank]))
        self.state.wake_all()

    def on_backend_closed(self) -> None:
        """The backend was closed under this group: operations that wait for messages would never end."""
        with self.state.lock:
            self.state.is_backend_closed = True
            self.state.update_fast_path()
        self.state.interrupt(self._backend_closed_error(), only_collectives=False)

    def ranks_left(self) -> Container[int]:
        """The world ranks of the members that have closed the group."""
        return self.state.left

    def _on_left(self, rank: int, cause: str) -> None:
        self.state.add_gone(rank, cause, is_dead=False)
        self._mismatches.conclude(if_complete=True)
        self.state.wake_all()


def context_of(*parts: object) -> int:
    """A 64-bit context id from values that all members know; never 0 (control) or 1 (the world)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 2


def descriptor_of(*parts: object) -> bytes:
    """128 bits that identify a group even if its context id collides with that of another."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
