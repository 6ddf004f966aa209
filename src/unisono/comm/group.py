"""A group: the state of one communicator on one rank.

Knows its members, what is pending, what was called under which number, who is gone and whether it is still
sound. Does not know what the operations do, nor what the user holds.

Two nouns. A *fingerprint* is the text of a collective call, equal on all ranks if they call the same thing. A
group is *poisoned* by the first error that leaves its members in different places; from then on every
collective fails with that error, here and on the other members. It is *aborted* when a member gives up for
good: then messages between two members fail too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from unisono._native import CallLog
from unisono.comm.control import (
    RANKS_MAX,
    Answer,
    Control,
    Goodbye,
    GroupMessage,
    Query,
    Service,
    Verdict,
)
from unisono.comm.deadlock import ANY_RANK, Wait
from unisono.comm.inquiry import FORGOTTEN, Inquiry, call_of
from unisono.core.call_site import call_site
from unisono.core.clock import NEVER, Deadline, Timer
from unisono.core.envelope import ANY, HEADER_BYTES_MAX, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.core.task import Call, Steps, Task
from unisono.core.work import Started, Work, wait_or_cancel
from unisono.errors import (
    ClosedError,
    CollectiveMismatch,
    Location,
    PeerLost,
    ProtocolError,
    UnisonoError,
    UsageError,
    lost_text,
    said_of,
)
from unisono.messaging.backend import Backend, PeerDown

__all__ = ["Group", "await_request", "context_of", "descriptor_of", "fingerprint_of"]

T = TypeVar("T")

_log = logging.getLogger("unisono")

# Questions about collectives that were not called here yet, kept of each member.
_QUESTIONS_KEPT: Final = 64
# A farewell holds so many: an empty collective needs nobody, so its caller may leave while others wait in it.
_CALLS_TOLD: Final = 4
# Members that differ wait so long to hear what all others called. A mismatch is found within half a second
# (twice stall_query_s) and must end every rank within one.
_INQUIRY_S: Final = 0.4


@dataclass(slots=True)
class _Pending:
    """An operation under way. A collective has a sequence number; others concern single peers."""

    task: Task[object]
    sequence: int | None
    asked: set[int]
    is_send: bool = False


class Group:
    """The members of one communicator, seen from one of them."""

    def __init__(
        self,
        backend: Backend,
        control: Control,
        context: int,
        name: str,
        descriptor: bytes,
        world_ranks: tuple[int, ...],
        *,
        is_introduced: bool,
    ) -> None:
        self.backend = backend
        self.control = control
        self.context = context
        self.name = name
        self.epoch = 0
        self.parent: Group | None = None
        self.descriptor = descriptor
        self.world_ranks = world_ranks
        self.world_rank = world_ranks[backend.rank]
        self._lock = threading.RLock()
        self._pending: dict[int, _Pending] = {}
        self.call_log = CallLog()
        # The backend's ways around Python, for calls that were made before and for messages, if it has them.
        self.hot = backend.fast_path(context, backend.size, self.call_log, self.on_unclaimed)
        self.fast_messages = backend.fast_messages(
            context, tuple(range(backend.size)), self.call_log, is_introduced=is_introduced
        )
        self._poison: UnisonoError | None = None
        # Members called different things: until it is over, the poison is what is known so far.
        self._inquiry: Inquiry | None = None
        self._patience: Timer | None = None
        self._ending: UnisonoError | None = None  # a member gave up because of it
        self._is_heard = False  # a caller here has heard of the poison
        # Where works were started that nobody has waited for yet, and threads that a mismatch was raised in.
        self._unwaited: Counter[tuple[str, str]] = Counter()
        self._raised: dict[int, str] = {}
        # Who has not said yet, as this one leaves, that it made our last call.
        self._unsettled: set[int] = set()
        self._is_aborted = False
        self._closed: ClosedError | None = None
        self._services: dict[str, Service] = {}
        self._is_silent = False
        self._left: dict[int, str] = {}
        self._farewells: dict[int, Mapping[int, bytes]] = {}
        self._closed_lanes: dict[int, set[Lane]] = {}
        self._questions: dict[int, dict[int, bytes]] = {}
        self._dead: dict[int, str] = {}
        # A group that its members made without talking introduces itself with its first message to each.
        self._to_introduce = set() if is_introduced else set(self.world_ranks)

    # -- operations ---------------------------------------------------------------------------------------

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
        """Begin an operation and keep an eye on it until it ends."""
        runtime = self.backend.runtime
        runtime.used(self.world_rank)
        begun = 0.0 if is_collective or self.fast_messages is None else self.fast_messages.take_begun()
        call, task, entry = self._prepared(
            operation, deadline, begun or runtime.now(), steps, is_collective=is_collective, is_send=is_send
        )
        # Allowed, numbered and pending in one breath: no verdict can fall in between and miss it.
        with self._lock:
            self.check_usable(is_collective, operation)
            if is_collective:
                call.sequence = entry.sequence = self.call_log.take()
            self._pending[id(entry)] = entry
            if timers:
                started = (operation, call_site())
                self._unwaited[started] += 1
                call.on_result = lambda error: self._on_result(call, started, error)
        task.begin(timers)
        return Started(task, runtime) if timers else Work(task, runtime)

    def resume(
        self, operation: str, sequence: int, started_at: float, steps: Callable[[Call], Steps[T]]
    ) -> Work[T]:
        """Keep an eye on a collective that has its number and is under way below Python."""
        call, task, entry = self._prepared(operation, NEVER, started_at, steps, is_collective=True)
        with self._lock:
            call.sequence = entry.sequence = sequence
            self._pending[id(entry)] = entry
            # What happened before is not told again.
            reason = self._silence() if self._is_silent else None
            if self._closed is not None or self._poison is not None:
                reason = self._closed if self._closed is not None else self._current_poison()
        if reason is not None:
            task.interrupt(reason)
        task.begin(timers=False)
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
    ) -> tuple[Call, Task[T], _Pending]:
        runtime, config = self.backend.runtime, self.backend.config
        call = Call(operation, self.world_rank, self.name, self.epoch, None, deadline, started_at)
        carried = self._until_known(steps(call)) if is_collective else steps(call)
        task: Task[T] = Task(runtime, call, carried)
        entry = _Pending(task, None, set(), is_send)  # type: ignore[arg-type]
        call.unreachable_error = lambda: self._unreachable_error_of(call)
        call.translate_error = self._in_world_ranks
        call.on_end = lambda error: self._on_end(entry, error)
        call.on_result = lambda error: self._on_result(call, None, error)
        call.stall_log_s = None if runtime.is_virtual else config.stall_log_s
        if config.deadlock_after_s and not runtime.sees_deadlocks:
            call.long_wait_s, call.on_long_wait = config.deadlock_after_s, self.control.deadlocks.look
        if is_collective:
            budget = deadline.remaining(call.started_at)
            call.stall_query_s = (
                config.stall_query_s if budget is None else min(config.stall_query_s, budget / 2)
            )
            call.on_stall = lambda: self._ask(entry, call.waiting_on())
        return call, task, entry

    def check_usable(self, is_collective: bool, operation: str | None = None) -> None:
        """Refuse an operation on a closed or broken communicator.

        A collective that is called while members hear what the others called says so, too: see remember.
        """
        here = Location(operation, self.name, self.epoch)
        if self._closed is not None:
            raise self._closed.located(here)
        if self._poison is not None and (is_collective or self._is_aborted) and not self._is_inquiring():
            error = self._current_poison().located(here)
            self._note_raised(str(here), error)
            raise error

    def remember(self, sequence: int, fingerprint: bytes) -> None:
        """Keep what was called under a number, for those who ask later; compare it with who has left."""
        with self._lock:
            self.call_log.remember(sequence, fingerprint)
            known = list(self._farewells.items())
            askers = self._questions.pop(sequence, {})
            self._look()
            inquiry = self._inquiry
        if inquiry is not None:
            raise self._inquire(inquiry.sequence, {})
        known += [(rank, {sequence: theirs}) for rank, theirs in askers.items()]
        for rank, calls in known:
            if (mismatch := self._compare(rank, calls)) is not None:
                raise mismatch
        if (mismatch := self._find_unclaimed()) is not None:
            raise mismatch
        self.control.tell(askers, Answer(self.context, sequence, has_called=True))

    def check_fingerprint(self, call: Call, mine: bytes, peer: int, theirs: bytes) -> None:
        """Compare the call of the peer (by its rank here) with ours; a difference is the end of the group."""
        if call_of(mine) != call_of(theirs):
            assert call.sequence is not None
            raise self._inquire(call.sequence, {self.world_rank: mine, self.world_ranks[peer]: theirs})

    def refuse_length(self, call: Call, mine: bytes, peer: int, came: int, awaited: int) -> None:
        """The calls read alike and yet a message has another length: no correct peer sends it."""
        there = self.world_ranks[peer]
        lines = f"rank {there} sent {came} bytes where {awaited} were due"
        words = call_of(mine).decode(errors="replace")
        raise CollectiveMismatch(
            f"ranks {self.world_rank} and {there} disagree", report=f"{words}: {lines}", cause=lines
        )

    def introduction(self, peer: int) -> bytes:
        """The header of a message between users: who we are, in the first one to each peer."""
        with self._lock:
            there = self.world_ranks[peer]
            if there not in self._to_introduce:
                return b""
            self._to_introduce.discard(there)
            if self.fast_messages is not None:
                self.fast_messages.introduce(peer)
            return self.descriptor

    def check_introduction(self, header: bytes, source: int) -> None:
        """Refuse a message that another communicator with the same context id has sent."""
        if header and header != self.descriptor:
            raise ProtocolError(
                f"rank {self.world_ranks[source]} uses the context id of {self.name!r} for another group",
                next_step="close both groups and call sub again",
            )

    # -- services ------------------------------------------------------------------------------------------

    @property
    def next_sequence(self) -> int:
        """The number of the collective that is called next."""
        return self.call_log.next

    def progress(self) -> dict[int, int]:
        """How far this rank has come: the number of its next collective, here and on the groups above."""
        above = {} if self.parent is None else self.parent.progress()
        return {**above, self.context: self.next_sequence}

    def attach(self, service: Service, purpose: str) -> int:
        """Let something live here until the end of the group; returns its context. One for each purpose."""
        with self._lock:
            self.check_usable(is_collective=False)
            if purpose in self._services:
                raise UsageError(
                    f"{self.name!r} has or had an agent for {purpose}; allowed: one",
                    next_step="make another communicator by split or sub",
                )
            self._services[purpose] = service
        return context_of(self.context, self.descriptor.hex(), purpose)

    # -- endings ------------------------------------------------------------------------------------------

    def poison(self, error: UnisonoError) -> None:
        """The members are no longer in step: end every collective, refuse the next, tell the others once."""
        with self._lock:
            if self._closed is not None or self._poison is not None:
                return
            self._poison = error
            self._look()
            pending = [entry for entry in self._pending.values() if entry.sequence is not None]
        self.control.tell(self.world_ranks, Verdict.of(error, self.context))
        for entry in pending:
            entry.task.interrupt(self._current_poison)
        self._wake_all()

    def abort(self, error: UnisonoError) -> None:
        """A member gives up for good: end everything. If the group was poisoned before, that is the cause."""
        self._conclude()
        with self._lock:
            if self._closed is not None or self._is_aborted:
                return
            self._is_aborted = True
            self._poison = self._poison if self._poison is not None else error
            pending = list(self._pending.values())
            root_cause = self._poison
            self._look()
        self.control.tell(self.world_ranks, self._verdict(root_cause, is_abort=True))
        for entry in pending:
            entry.task.interrupt(self._current_poison)
        for service in list(self._services.values()):
            service.on_abort(root_cause)

    def close(self) -> None:
        """Flush, end what is pending, and say goodbye."""
        for service in list(self._services.values()):
            service.close()
        with self._lock:
            if self._closed is not None:
                return
            sends = [entry for entry in self._pending.values() if entry.is_send]
        self._flush(sends)
        is_ahead = self._confirm_before_close()
        is_unheard = (
            is_ahead
            and isinstance(self._poison, CollectiveMismatch)
            and not (self._is_heard or self._is_aborted)
        )
        if not is_unheard:
            self.warn_of_loose_ends(f" at {call_site()}")
        self._leave()
        if is_unheard:
            raise self._current_poison()

    def forget(self, cause: str | None = None) -> None:
        """Leave without waiting for anybody: who used it is gone, or will be."""
        self._leave(cause)

    def _leave(self, cause: str | None = None) -> None:
        with self._lock:
            if self._closed is not None:
                return
            next_step = None if cause is None else "close it, or join the threads that use it, before that"
            self._closed = ClosedError(
                f"communicator {self.name!r} is closed", cause=cause, next_step=next_step
            )
            self._look()
            pending = list(self._pending.values())
        for entry in pending:
            entry.task.interrupt(self._closed)
        if not self._is_aborted:
            if self._poison is not None:  # told before, but a farewell in its own lane must not overtake it
                self.control.tell(self.world_ranks, self._verdict(self._poison), Lane.BULK)
            for lane in (Lane.BULK, Lane.CONTROL):
                self.control.tell(self.world_ranks, Goodbye(self.context, lane, self._last_calls()), lane)
        self.control.leave(self)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed here."""
        return self._closed is not None

    def _flush(self, sends: list[_Pending]) -> None:
        runtime = self.backend.runtime
        deadline = runtime.deadline(self.backend.config.flush_s)
        for entry in sends:
            try:
                entry.task.wait(deadline.remaining(runtime.now()))
            except (UnisonoError, TimeoutError):
                continue

    def _confirm_before_close(self) -> bool:
        """Wait for those who have not shown yet that they made the calls that ended here; False if all have.

        Whoever runs ahead leaves only when the others are known to have made the same calls, when they are
        gone, or when the time to flush is over.
        """
        behind = [] if self.hot is None else self.hot.unconfirmed_ranks()
        self._find_unclaimed()
        self.wait_until_known()
        if not behind or self._poison is not None or self._is_silent:
            return bool(behind)

        def late() -> tuple[int, ...]:
            return tuple(sorted(self._unsettled - {*self._left, *self._dead}))

        def steps(call: Call) -> Steps[None]:
            call.waiting_on = late
            # After all that was sent: who answers has compared it.
            for sequence, fingerprint in self._last_calls(1).items():
                self.control.tell(behind, Query(self.context, sequence, fingerprint), Lane.BULK)
            while self._poison is None and late():
                yield

        self._unsettled.update(behind)
        deadline = self.backend.runtime.deadline(self.backend.config.flush_s)
        with contextlib.suppress(UnisonoError):
            wait_or_cancel(self.start("close", deadline, steps, is_collective=False, timers=False))
        return True

    def _on_end(self, entry: _Pending, error: UnisonoError | None) -> None:
        with self._lock:
            self._pending.pop(id(entry), None)
        if error is not None and entry.sequence is not None and not isinstance(error, ClosedError):
            self._is_heard = True
            self.poison(error)

    def _on_result(self, call: Call, started: tuple[str, str] | None, error: BaseException | None) -> None:
        """A thread of the user's has seen how an operation ended."""
        if started is not None:
            call.on_result = lambda error: self._on_result(call, None, error)
            with self._lock:
                self._unwaited[started] -= 1
                if not self._unwaited[started]:
                    del self._unwaited[started]
        if error is not None:
            self._note_raised(f"during {call}", error)

    def _note_raised(self, where: str, error: BaseException | None) -> None:
        if isinstance(error, CollectiveMismatch):
            thread = threading.current_thread()
            self._raised.setdefault(thread.ident or 0, f"{where} at {call_site()}, in thread {thread.name}")

    def warn_of_loose_ends(self, where: str) -> None:
        """Log what the user left undone: what nobody has seen is a mistake that hides."""
        with self._lock:
            works, poison = sorted(self._unwaited.items()), self._poison
        loose: list[str] = []
        if poison is None:
            started = [f"{verb} at {site}" + (f" ({n} times)" if n > 1 else "") for (verb, site), n in works]
            queued = [f"{n} bytes from rank {rank}, tag {tag}" for rank, tag, n in self._unreceived()]
            loose += [f"works never waited for: {', '.join(started)}"] if started else []
            loose += [f"messages never received: {'; '.join(queued)}"] if queued else []
        elif isinstance(poison, CollectiveMismatch) and threading.get_ident() not in self._raised:
            told = "; ".join(self._raised.values()) or "to nobody"
            loose.append(f"a mismatch that was raised {told}: {poison.what}")
        if loose and not self._is_aborted:
            _log.warning("rank %d closes %r%s with %s", self.world_rank, self.name, where, "; ".join(loose))

    def _unreceived(self) -> list[tuple[int, int, int]]:
        """The first message of each member that waits here: its world rank, tag and length."""
        found = []
        with contextlib.suppress(UnisonoError):
            if self._queued_from(ANY) is not None:
                for source, rank in enumerate(self.world_ranks):
                    if (envelope := self._queued_from(source)) is not None:
                        found.append((rank, envelope.tag, envelope.nbytes))
        return found

    def _queued_from(self, source: int | Any_) -> Envelope | None:
        probe = self.backend.probe(source, self.context, ANY)
        probe.cancel()
        return probe.envelope

    def _current_poison(self) -> UnisonoError:
        """The poison as it reads now: a PeerLost names all that are known to be lost."""
        error = self._poison
        assert error is not None
        self._is_heard = True
        if isinstance(error, PeerLost):
            ranks = tuple(sorted({*error.ranks, *self._dead}))
            if ranks != error.ranks:
                return error.of_ranks(ranks)
        return error.located(Location())

    # -- news ---------------------------------------------------------------------------------------------

    def on_news(self, sender: int, news: GroupMessage) -> None:
        """A member tells something about this communicator."""
        if sender not in self.world_ranks:
            return
        match news:
            case Verdict(kind="CollectiveMismatch", sequence=int(sequence), calls=calls) if calls:
                self._inquire(sequence, {rank: calls[rank] for rank in calls if rank in self.world_ranks})
                with self._lock:
                    is_inquiring = self._is_inquiring()
                    if news.is_abort and is_inquiring:
                        self._ending = news.error(sender)
                if news.is_abort and not is_inquiring:
                    self.abort(news.error(sender))
            case Verdict(is_abort=True):
                self.abort(news.error(sender))
            case Verdict():
                self.poison(news.error(sender))
            case Goodbye():
                with self._lock:
                    if news.calls or sender not in self._farewells:
                        self._farewells[sender] = news.calls
                    lanes = self._closed_lanes.setdefault(sender, set())
                    lanes.add(news.lane)
                    self._look()
                self._compare(sender, news.calls)
                if len(lanes) == len(Lane):
                    self._on_gone(sender, "left")
            case Query():
                self._on_query(sender, news)
            case Answer():
                self._on_answer(sender, news)

    def on_peer_down(self, down: PeerDown) -> None:
        """The backend gave a world rank up: left ends those who wait for it, dead ends every collective."""
        if down.rank not in self.world_ranks:
            return
        if down.left:
            self._on_gone(down.rank, down.cause)
            return
        with self._lock:
            self._dead[down.rank] = down.cause
            self._look()
        self._conclude(if_known=True)
        self.poison(self._lost([down.rank]))
        self._wake_all()

    def on_backend_closed(self) -> None:
        """The backend was closed under this communicator: who waits for news would wait for ever."""
        with self._lock:
            self._is_silent = True
            self._look()
            pending = list(self._pending.values())
        for entry in pending:
            entry.task.interrupt(self._silence())

    def _on_gone(self, rank: int, cause: str) -> None:
        with self._lock:
            self._left.setdefault(rank, cause)
            self._look()
        self._conclude(if_known=True)
        self._wake_all()

    def _silence(self) -> UnisonoError:
        return ClosedError(f"rank {self.world_rank} is closed")

    def _look(self) -> None:
        """See whether calls may go around Python: not if there is anything to compare, to refuse or to end.

        The caller holds the lock. What is under way below Python comes back, and finds what has changed.
        """
        odd = (self._closed, self._poison, self._left, self._dead, self._farewells, self._questions)
        self.call_log.fast_path_open = not any(odd) and not self._is_silent
        if not self.call_log.fast_path_open:
            self.call_log.interrupt_in_flight()

    def _wake_all(self) -> None:
        with self._lock:
            pending = list(self._pending.values())
        for entry in pending:
            entry.task.wake()

    def _unreachable_error_of(self, call: Call) -> UnisonoError | None:
        """Why an operation that waits now can never end, if so."""
        gone = {**self._left, **self._dead}
        if not gone or self._is_inquiring():
            return None
        if self._inquiry is not None and call.sequence is not None:
            return self._current_poison()  # who left called something else: that is why
        if not call.is_wildcard:
            hopeless = [
                rank for rank in call.waiting_on() if rank in gone and not self._has_joined(call, rank)
            ]
        elif self._dead:
            hopeless = list(self._dead)
        else:
            others = [rank for rank in self.world_ranks if rank != self.world_rank]
            hopeless = others if all(rank in gone for rank in others) else []
        if not hopeless:
            return None
        # Who leaves because the parent was aborted may never have made this group, to say so here.
        cause = None if any(rank in self._dead for rank in hopeless) else self._abort_above()
        return cause if cause is not None else self._lost(hopeless)

    def _has_joined(self, call: Call, rank: int) -> bool:
        """Whether a member that left had called a joint collective before, and so has done its part."""
        if not call.is_joint or call.sequence is None or rank in self._dead:
            return False
        return any(number >= call.sequence for number in self._farewells.get(rank, ()))

    def _abort_above(self) -> UnisonoError | None:
        """Why the nearest broken ancestor was given up, if one was."""
        above = self.parent
        while above is not None and not above._is_aborted:
            above = above.parent
        return None if above is None else above._current_poison()

    def _in_world_ranks(self, error: BaseException) -> BaseException:
        """The error of a request, which counts ranks as the backend of this group does, as users see it."""
        if isinstance(error, PeerLost):
            return error.of_ranks(tuple(self.world_ranks[rank] for rank in error.ranks))
        return error

    def _lost(self, ranks: list[int]) -> PeerLost:
        causes = {**self._left, **self._dead}
        everyone = tuple(sorted({*ranks, *self._dead}))
        cause = "; ".join(said_of(rank, causes[rank]) for rank in everyone)
        return PeerLost(lost_text(everyone, cause), ranks=everyone, cause=cause)

    # -- stalls and mismatches ----------------------------------------------------------------------------

    def _ask(self, entry: _Pending, ranks: tuple[int, ...]) -> None:
        """A collective does not end: show the others what was called here and ask what they are doing."""
        with self._lock:
            sequence = entry.sequence if id(entry) in self._pending else None
            fingerprint = None if sequence is None else self.call_log.find(sequence)
            fresh = [rank for rank in ranks if rank not in entry.asked and rank != self.world_rank]
            entry.asked.update(fresh)
        if sequence is not None and fingerprint is not None and fresh:
            self.control.tell(fresh, Query(self.context, sequence, fingerprint))

    def _on_query(self, sender: int, query: Query) -> None:
        if self._find_unclaimed() or self._compare(sender, {query.sequence: query.fingerprint}):
            return
        with self._lock:
            entry = self._pending_at(query.sequence)
            has_passed = query.sequence < self.call_log.next
            # Who asks too early is answered, and its call compared, once this rank makes its own.
            is_early = not has_passed or (entry is not None and self.call_log.find(query.sequence) is None)
            kept = sum(sender in askers for askers in self._questions.values())
            if is_early and kept < _QUESTIONS_KEPT:
                self._questions.setdefault(query.sequence, {})[sender] = query.fingerprint
                self._look()
            below = tuple(self.call_log.awaited(query.sequence))
        waiting_on = entry.task.call.waiting_on() if entry is not None else below
        self.control.answer(sender, Answer(self.context, query.sequence, has_passed, waiting_on[:RANKS_MAX]))

    def _compare(self, sender: int, calls: Mapping[int, bytes]) -> CollectiveMismatch | None:
        """Look for the first collective that a member called otherwise than this one."""
        for sequence, theirs in sorted(calls.items()):
            with self._lock:
                mine = self.call_log.find(sequence)
            if mine is not None and call_of(mine) != call_of(theirs):
                return self._inquire(sequence, {self.world_rank: mine, sender: theirs})
        return None

    def on_unclaimed(self, source: int, sequence: int, theirs: bytes) -> bool:
        """A message waits here although its sender went on: look whether it belongs to the call made here.

        False once there is nothing to compare any more. A call that is still to be made is compared then.
        """
        self._compare(source, {sequence: theirs})
        with self._lock:
            is_early = sequence >= self.call_log.next or self._pending_at(sequence) is not None
            is_forgotten = not is_early and self.call_log.find(sequence) is None
        if is_forgotten:
            self._inquire(sequence, {self.world_rank: FORGOTTEN, source: theirs})
        return self._poison is None and self._closed is None

    def _find_unclaimed(self) -> CollectiveMismatch | None:
        """Look for a message that a call made here should have received, and did not: it was another call."""
        if self.hot is not None:
            for source, sequence, theirs in self.hot.unclaimed(self.call_log.next):
                if (mismatch := self._compare(source, {sequence: theirs})) is not None:
                    return mismatch
        return None

    def _last_calls(self, count: int = _CALLS_TOLD) -> dict[int, bytes]:
        """What was called last: who lags behind by more than this has not met us for long."""
        with self._lock:
            return self.call_log.last(count)

    def _on_answer(self, sender: int, answer: Answer) -> None:
        if answer.has_called and sender in self._unsettled:
            self._unsettled.discard(sender)
            self._wake_all()
        with self._lock:
            entry = self._pending_at(answer.sequence)
        if entry is None:
            return
        call = entry.task.call
        if not answer.has_called:
            call.absent.add(sender)
            return
        if sender in call.absent:
            # It has just come. Whom it waits for is worth asking once it has had time to wait.
            call.absent.discard(sender)
            entry.asked.discard(sender)
            runtime, pause_s = self.backend.runtime, self.backend.config.stall_query_s
            runtime.call_at(runtime.now() + pause_s, lambda: self._ask(entry, call.waiting_on()))
        self._ask(entry, tuple(rank for rank in answer.waiting_on if rank in self.world_ranks))

    def _pending_at(self, sequence: int) -> _Pending | None:
        return next((entry for entry in self._pending.values() if entry.sequence == sequence), None)

    # -- deadlocks ----------------------------------------------------------------------------------------

    def calls_under_way(self) -> list[Call]:
        """The operations that have not ended."""
        with self._lock:
            return [entry.task.call for entry in self._pending.values()]

    def wait_of(self, call: Call, is_limited: bool) -> Wait | None:
        """What an operation of this group waits for; None if others cannot judge it."""
        words = str(call)
        if call.sequence is not None:
            # Of the absent only those it waits for itself: a rank that has called may still be sending to it.
            absent = tuple(sorted(call.absent.intersection(call.waiting_on())))
            return Wait(call.number, words, self.context, absent, False, call.sequence, is_limited=is_limited)
        open_ones = [message for message in call.messages if not message.request.done]
        if not open_ones:
            return None
        message = min(open_ones, key=lambda message: message.is_send)
        others = tuple(
            rank for rank in self.world_ranks if rank != self.world_rank and rank not in self._left
        )
        is_any = message.peer == ANY_RANK
        return Wait(
            call.number,
            words,
            self.context,
            others if is_any else (message.peer,),
            is_any,
            None,
            message.tag,
            message.is_send,
            is_limited,
        )

    # -- inquiries ----------------------------------------------------------------------------------------

    def _inquire(self, sequence: int, calls: Mapping[int, bytes]) -> CollectiveMismatch:
        """Members called different things: tell them, hear what the others called, then end all collectives.

        Returns what is known so far. The lowest number under which calls differ counts.
        """
        with self._lock:
            is_late = self._closed is not None or (self._poison is not None and not self._is_inquiring())
            inquiry = self._inquiry
            if is_late or inquiry is None or sequence < inquiry.sequence:
                inquiry = Inquiry(sequence)
            if sequence == inquiry.sequence:
                inquiry.add(calls)
            is_silent = self.world_rank not in inquiry.calls
            number = inquiry.sequence
            inquiry.add({rank: told[number] for rank, told in self._farewells.items() if number in told})
            if (mine := self.call_log.find(number)) is not None:
                inquiry.add({self.world_rank: mine})
            error = inquiry.error(self.world_ranks, self.world_rank, self.name, self.epoch)
            if is_late:
                return error
            is_first = self._inquiry is None
            is_news = inquiry is not self._inquiry or (is_silent and mine is not None)
            self._inquiry, self._poison = inquiry, error
            self._look()
        if is_news:
            self.control.tell(self.world_ranks, self._verdict(error))
        if is_first:
            runtime = self.backend.runtime
            self._patience = runtime.call_at(runtime.now() + _INQUIRY_S, self._conclude)
        self._conclude(if_known=True)
        return error

    def _verdict(self, error: UnisonoError, *, is_abort: bool = False) -> Verdict:
        """What the other members are told. Every one of them finds out by itself who differs."""
        is_found = self._inquiry is not None and isinstance(error, CollectiveMismatch)
        calls = self._inquiry.evidence(self.world_rank) if self._inquiry is not None and is_found else {}
        return Verdict.of(error, self.context, is_abort, calls)

    def _is_inquiring(self) -> bool:
        return self._inquiry is not None and not self._inquiry.is_over

    def _conclude(self, *, if_known: bool = False) -> None:
        """End an inquiry, and with it all collectives; with `if_known` only if every member was heard."""
        with self._lock:
            inquiry = self._inquiry
            if inquiry is None or inquiry.is_over:
                return
            if if_known and set(self.world_ranks) - {*inquiry.calls, *self._left, *self._dead}:
                return
            number = inquiry.sequence
            inquiry.add({rank: told[number] for rank, told in self._farewells.items() if number in told})
            inquiry.is_over = True
            self._poison = inquiry.error(self.world_ranks, self.world_rank, self.name, self.epoch)
            pending = [entry for entry in self._pending.values() if entry.sequence is not None]
            ending, self._ending = self._ending, None
        if self._patience is not None:
            self._patience.cancel()
        for entry in pending:
            entry.task.interrupt(self._current_poison)
        self._wake_all()
        if ending is not None:
            self.abort(ending)

    def _until_known(self, steps: Steps[T]) -> Steps[T]:
        """Carry a collective to its end; if members called different things, until all have told theirs."""
        try:
            return (yield from steps)
        except CollectiveMismatch:
            if self._inquiry is None:
                raise
            with contextlib.suppress(UnisonoError):  # whatever ends it meanwhile, this is the reason
                while self._is_inquiring():
                    yield
            raise self._current_poison() from None

    def wait_until_known(self) -> None:
        """Wait for an inquiry that is under way."""

        def steps(call: Call) -> Steps[None]:
            while self._is_inquiring():
                yield

        if self._is_inquiring():
            with contextlib.suppress(UnisonoError):
                wait_or_cancel(self.start("inquiry", NEVER, steps, is_collective=False, timers=False))


def fingerprint_of(words: str, descriptor: bytes) -> bytes:
    """The header of a collective's first messages: the call, then what does not count: where it stands."""
    call, room = f"{words} group={descriptor.hex()[:16]}".encode(), HEADER_BYTES_MAX // 2
    if len(call) > room:  # nothing that was said may go uncompared
        call = call[: room - 17] + b"~" + hashlib.blake2b(call, digest_size=8).hexdigest().encode()
    return call + b"\0" + call_site().encode()[: HEADER_BYTES_MAX // 2 - 1]


def context_of(*parts: object) -> int:
    """A 64-bit context id from what all members know; 0 and 1 are taken."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 2


def descriptor_of(*parts: object) -> bytes:
    """128 bits that tell a group from any other, whatever its context id."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()


def await_request(call: Call, request: Request, peers: Callable[[], tuple[int, ...]]) -> Steps[Request]:
    """Carry one request to its end. Interrupted, it is withdrawn; if it was met already, it ends well."""
    call.waiting_on = peers
    call.is_wildcard = request.peer is ANY
    request.notify(call.wake)
    try:
        if call.interruption is not None:
            raise call.interruption
        while not request.done:
            yield
    except BaseException as interruption:  # a KeyboardInterrupt too must not leave our memory to others
        request.cancel()
        while not request.done and not isinstance(interruption, GeneratorExit):
            yield
        if request.error is not None or not isinstance(interruption, UnisonoError):
            raise
    if request.error is not None:
        # That a peer is gone is a symptom. The news of it, and why, come by control, in the right order.
        while isinstance(request.error, PeerLost) and peers():
            yield
        raise call.translate_error(request.error)
    return request
