"""The contract between a backend, which moves bytes between ranks, and everything above it.

Collectives, groups and RPC are built from `start_send`, `start_recv` and `probe` alone: a backend with these
three has all of them. The other methods are fast paths or bookkeeping, and optional unless abstract.

A *message* is an envelope and its bytes. A *context* separates communicators. A *tag* separates messages
within a context: users have 0 to 2^31-1, collectives and control messages use tags above. A *request* is one
send, receive or probe under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

from unisono._native import RankMap
from unisono.core.envelope import ANY, HEADER_BYTES_MAX, UNTYPED, Any_, Lane
from unisono.core.request import Request
from unisono.errors import UnisonoError, UsageError
from unisono.messaging.credit import bytes_max
from unisono.messaging.fast_path import LibraryCalls, Mailbox
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import Stage

if TYPE_CHECKING:
    from unisono._native import CallLog, NativeGroup
    from unisono.config import Config
    from unisono.core.runtime import Runtime

__all__ = [
    "GRACE_LOOK_S",
    "GRACE_S",
    "Backend",
    "Capabilities",
    "GroupListener",
    "numbered_hosts",
]

# Start-up grace: how long an RPC call waits for a peer that has not created its agent, or not exposed the
# function, yet; and the poll interval meanwhile. A collective that the peer called later ends the grace.
GRACE_S: Final = 0.5
GRACE_LOOK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. A call that needs more is refused before anything is sent.

    `run_plan` and `run_collective`: the backend has these optional methods. `sync_send`: a send can be asked
    to end only when it has been matched. `wildcards`: ANY as a source or tag. `device_memory`: buffers may be
    in GPU memory.
    """

    name: str
    run_plan: bool = False
    run_collective: bool = False
    sync_send: bool = True
    wildcards: bool = True
    device_memory: bool = False


def numbered_hosts(names: Sequence[object]) -> tuple[int, ...]:
    """The hosts of ranks as `Backend.hosts` gives them: by number, in the order of appearance.

    So groups whose ranks lie on hosts in the same way have the same hosts, whichever hosts they are.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names) if len(numbers) > 1 else ()


class GroupListener(Protocol):
    """A group, as the engine sees it: what it must look at."""

    def on_unclaimed(self, source: int, sequence: int, theirs: bytes) -> bool:
        """A message waits here of a collective that ended elsewhere before it was received ("run-ahead").

        Given are the world rank of the sender, the number of its call and its fingerprint. False: no more
        such events are needed.
        """

    def adopt_overdue(self) -> None:
        """Started operations stall, or their deadline is over."""


class Backend(ABC):
    """Moves bytes between `size` ranks, seen from one of them.

    Every backend promises:

    - *Order.* Messages of one sender with one (context, tag) match receives in the order they were sent.
    - *Ownership.* A buffer belongs to the request until the request is done. Until then no other code may
      write to it, or read a receive buffer.
    - *All or nothing.* If a send fails, the receiver has all of the message or nothing, never a part that
      looks whole.
    - *Type and length.* A message that is longer than the receive buffer, or of another type, fails that
      receive with UsageError and stays queued.
    - *Bounded memory.* A small message is eager: it travels at once, under a credit per peer. A longer one,
      or one beyond the credit, sends only its envelope and waits. So any send may last until its receive.
    - *Lost peers.* A request that needs a peer that is gone fails with PeerLost. Messages that arrived before
      stay receivable. `watch` reports a rank only after everything it sent has arrived.
    - *Links.* After any error a link is intact at a message boundary, or closed.
    - *Threads.* All methods may be called from any thread, and none blocks but `close`.

    `unisono.testing.check_backend` tests all of these.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's position, 0 to size - 1."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend can do."""

    @property
    @abstractmethod
    def runtime(self) -> Runtime:
        """The clock, timers and threads on which its requests end."""

    @property
    @abstractmethod
    def config(self) -> Config:
        """The settings, equal on all ranks."""

    @cached_property
    def rank_map(self) -> RankMap:
        """Translates the ranks of this backend to peers, the ranks of the world, and back.

        Of all backends only views (SubBackend) have ranks that are no peers.
        """
        return RankMap(range(self.size))

    @abstractmethod
    def start_send(
        self,
        dst: int,
        context: int,
        tag: int,
        data: memoryview,
        *,
        dtype: int = UNTYPED,
        header: bytes = b"",
        lane: Lane = Lane.BULK,
        sync: bool = False,
    ) -> Request:
        """Start to send a message.

        The request ends when `data` may be reused. That says nothing about the receiver, unless `sync`. The
        caller must not change `data` before. Cancelling the request withdraws a message that was not matched;
        a matched one is sent to its end. If the request fails, see "all or nothing" above.

        Args:
            dst: the receiver; this rank itself is allowed.
            context: the number of the communicator: messages of different contexts never match.
            tag: 0 to 2^31 - 1 for users; collectives and control messages use tags above.
            data: contiguous bytes, possibly none.
            dtype: the code of the element type, which must equal the receive's; UNTYPED fits any.
            header: at most HEADER_BYTES_MAX bytes that arrive with the envelope.
            lane: a full lane never blocks another. Order holds only within a lane.
            sync: end only when the message has been matched with a receive.

        Raises:
            UsageError: there is no such rank, or the message is too long. Nothing was sent.

        The request may end with PeerLost (the receiver is gone) or ClosedError (this backend was closed, or
        the request was cancelled).
        """

    def post(self, dst: int, context: int, tag: int, data: memoryview, lane: Lane) -> None:
        """Send a message whose end nothing waits for; `data` is kept until then.

        Args:
            dst: the receiver.
            context: the communicator's number.
            tag: the tag.
            data: contiguous bytes, which must not change.
            lane: as in `start_send`.

        Raises:
            UsageError: as in `start_send`. What happens to the message later is not reported.
        """
        self.start_send(dst, context, tag, data, lane=lane)

    @abstractmethod
    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Start to receive a message.

        The request ends with the envelope, once all bytes are in `into`. A shorter message leaves the rest of
        `into` unchanged. Cancelling withdraws a receive that was not matched; a matched one is received to
        its end. If the request fails, `into` may hold a part of the message.

        Args:
            src: the sender, or ANY.
            context: the number of the communicator.
            tag: the tag, or ANY, which matches the tags of users only.
            into: a writable contiguous buffer; None receives into new memory, `request.data`, of up to
                `recv_bytes_max` bytes.
            dtype: the code of the element type; UNTYPED fits any.

        Raises:
            UsageError: there is no such rank.

        The request may end with UsageError (the message does not fit and stays queued), PeerLost (the sender
        is gone; never for ANY, because another rank may still send) or ClosedError.
        """

    def listen(
        self,
        context: int,
        tag: int,
        on_message: Callable[[int, bytes], None],
        on_end: Callable[[UnisonoError], None],
    ) -> bool:
        """Receive every message of a context and tag; False if the caller must post receives for them.

        A peer's end is reported (`watch`) after all that it sent.

        Args:
            context: the number of the communicator.
            tag: the tag.
            on_message: called with (source, data) for one message at a time, in the order of arrival, on
                whatever thread dispatches. It must not raise.
            on_end: called once no further message will be received: with ClosedError, or with the error of a
                message that could not be received. That one stays queued, and `listen` may be called again.
                A backend that is closed already calls it, too.
        """
        return False

    @abstractmethod
    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Start to wait for a message without receiving it.

        The request ends with the envelope of the first message that a receive with these arguments would
        match, at once if one is queued. The message stays queued, and another receive may take it.

        Args:
            src: the sender, or ANY.
            context: the number of the communicator.
            tag: the tag, or ANY, which matches the tags of users only.

        Raises:
            UsageError: there is no such rank.

        The request may end with PeerLost (the sender is gone; never for ANY) or ClosedError.
        """

    @abstractmethod
    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Call the listener once for every rank that is gone, now or later, until the backend is closed.

        Args:
            listener: may be called on any thread, also within this call, and without a lock held. By then
                everything that the rank sent has arrived here. It must not raise.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave, in an orderly way.

        Blocks up to `config.flush_s` for sends under way. Then pending requests end with ClosedError, and the
        other ranks' `watch` reports this rank with `left`. Messages that arrived there stay receivable. What
        was not sent by then is lost as a whole. A second call does nothing.

        It raises nothing: a peer that is gone or does not answer is not waited for any longer.
        """

    def hosts(self) -> tuple[int, ...]:
        """A number per rank, equal for ranks on one host; empty if all are on one. The same on every rank."""
        return ()

    def link_kind(self) -> str:
        """What connects ranks of one host, as the measurements name it (shm, tcp). The same on every rank.

        Empty if it was not measured: then algorithms are chosen by their predicted cost.
        """
        return ""

    def run_plan(self, plan: Any, counts: tuple[int, ...], stage: Stage) -> Request:
        """Run a plan (plans.Plan), bound to these counts, below Python.

        Called only if the capability says so, and never with a user-defined operation.

        Args:
            plan: the steps of this rank, for all counts.
            counts: the elements of each part, as many as the collective has.
            stage: context, tag, type, operation and memory. The arrays of `stage.memory` belong to the
                request until it is done.

        Raises:
            NotImplementedError: the backend does not have the capability.

        The request may end with HeaderMismatch (a peer runs another collective), LengthMismatch (a peer sent
        a message of another length) or ClosedError. It does not end if a peer is gone: `watch` informs
        the caller, which cancels. A cancelled request ends once no peer uses its memory any more.
        """
        raise NotImplementedError(f"{self.capabilities.name} does not run plans")

    def run_collective(self, problem: Any, stage: Stage) -> Request | None:
        """Run a collective (plans.Problem) by the library's own algorithm; None leaves it to plans.

        Called only if the capability says so, and on all ranks or, if the stage has a map, on all of its
        members. All of them must decide alike. The result must be ours: the same layout, and the same bits on
        all ranks.

        Args:
            problem: the collective, its counts and its root.
            stage: as in `run_plan`.

        It raises nothing: what the library cannot do is None, and its errors end the request, as in
        `run_plan`.
        """
        return None

    def native_group(
        self,
        context: int,
        call_log: CallLog,
        listener: GroupListener,
        *,
        fingerprint_seed: int,
        is_introduced: bool,
        rank_map: RankMap | None = None,
        leaves_tensors: bool = False,
    ) -> NativeGroup | None:
        """The communicator of these ranks in the engine, which runs its calls; None if there is no engine.

        Args:
            context: the number of the communicator.
            call_log: of the communicator: numbers its collectives, and keeps the last ones.
            listener: what Python must look at. It is not kept alive; `end_group` ends it.
            fingerprint_seed: of the hash in the fingerprints of its calls.
            is_introduced: False if the first message to each member must go through Python.
            rank_map: leads from the communicator's ranks to those here; by default `self.rank_map`.
            leaves_tensors: calls with tensors of a device are left to `device_verb`.
        """
        return None

    def compile_plan(self, plan: Any, itemsize: int) -> tuple[Any, int]:
        """A plan (plans.Plan) as the program of the engine, and the length of its longest pieces.

        Args:
            plan: the steps of this rank.
            itemsize: bytes of an element; the length is in elements.

        Raises:
            NotImplementedError: there is no engine.
        """
        raise NotImplementedError(f"{self.capabilities.name} has no engine")

    def adopt(
        self,
        handle: int,
        peer: int | Any_ | None,
        buffer: memoryview | None,
        dtype: int,
        memory: tuple[Any, ...],
    ) -> Request:
        """A request for an operation of the engine's calls, as if it had been started here.

        Args:
            handle: the operation's.
            peer: the other rank of a message; None for a collective.
            buffer: the message's bytes.
            dtype: the code of the element type.
            memory: objects to keep until the operation has ended.

        Raises:
            NotImplementedError: there is no engine.
        """
        raise NotImplementedError(f"{self.capabilities.name} has no engine")

    def library_calls(
        self, context: int, call_log: CallLog, rank_map: RankMap | None = None
    ) -> LibraryCalls | None:
        """The blocking collectives of a communicator that a library makes on the caller's thread; or None.

        Args:
            context: the number of the communicator.
            call_log: numbers its collectives.
            rank_map: leads from its ranks to those here; by default `self.rank_map`.
        """
        return None

    def device_verb(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """A blocking verb of the communicator of all ranks, for tensors of a device, too.

        Args:
            reference: the verb for everything else, with its name and signature; returned by default.
        """
        return reference

    def mailbox(self, context: int, tag: int, rank_map: RankMap | None = None) -> Mailbox | None:
        """A mailbox for short messages below Python; None if there is none.

        Args:
            context: the number of the agent.
            tag: of the messages.
            rank_map: leads from the agent's ranks to those here; by default `self.rank_map`.
        """
        return None

    def end_group(self, context: int) -> None:  # noqa: B027 - optional: for state per context
        """A communicator of some of the ranks, or an agent, was closed here.

        Eager messages that were not received, and those that come later, are dropped and their credit
        returned. A message whose sender still waits stays queued: the sender withdraws it when it is informed
        of the end.

        Args:
            context: its number, which is not used again. An unknown one is ignored.
        """

    def end_unused(self, context: int) -> bool:
        """End a communicator of which nothing here has sent or received; False if messages wait for it.

        False, too, if the backend cannot tell: then it is ended as one that was used.

        Args:
            context: the number of the communicator, which is not used again if the result is True.
        """
        return False

    def check_length(self, tag: int, nbytes: int, header: bytes = b"") -> None:
        """Refuse a message that is longer than its kind may be, before anything is sent.

        Args:
            tag: tells control messages, which have a limit of their own, from those of users.
            nbytes: of the message.
            header: of the message.

        Raises:
            UsageError: the message or its header is too long.
        """
        longest = bytes_max(self.config, tag)
        if nbytes > longest or len(header) > HEADER_BYTES_MAX:
            raise UsageError(
                f"a message of {nbytes} bytes with a header of {len(header)}; allowed: "
                f"{longest} and {HEADER_BYTES_MAX}"
            )

    def check_peer(self, rank: int | Any_, what: str) -> None:
        """Refuse a rank that does not exist, before anything is sent.

        Args:
            rank: what the caller passed.
            what: the argument's name, for the error. Only `src` may be ANY.

        Raises:
            UsageError: there is no such rank.
        """
        if rank is ANY and what == "src":
            return
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(f"{what}={rank!r}; allowed: ranks 0 to {self.size - 1}")
