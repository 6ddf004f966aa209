"""The contract between a backend, which moves bytes, and everything above it.

Knows messages, requests and the duties of a backend. Does not know collectives, communicators or how any
backend works. Collectives, groups and RPC are built from `start_send`, `start_recv` and `probe`.

The nouns. A *message* is an envelope and its bytes. A *context* separates communicators. A *tag* separates
messages within one: users have 0..2^31-1, collectives and control live above. A *request* is one send,
receive or probe under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from unisono.core.dtypes import DType
from unisono.core.envelope import ANY, Any_
from unisono.core.ops import ReduceOp
from unisono.errors import PeerLost, ProtocolError, UsageError, lost_text

if TYPE_CHECKING:
    from unisono._native import CallLog, FastMessages
    from unisono.config import Config
    from unisono.core.clock import Runtime
from unisono.core.envelope import HEADER_BYTES_MAX, UNTYPED, Lane
from unisono.core.request import Request
from unisono.messaging.credit import bytes_max
from unisono.messaging.fast_path import FastPath, Mailbox

__all__ = ["BROKEN", "GRACE_LOOK_S", "GRACE_S", "Backend", "Capabilities", "PeerDown", "Stage"]

# How the cause of a PeerDown begins if the bytes that came made no sense, or were damaged.
BROKEN: Final = "broke the protocol"

# Ranks do not begin at the same instant: for so long what is called already may still be to come, an agent or
# a function of it. A collective called there meanwhile says that nothing more will come; so often one looks.
GRACE_S: Final = 0.5
GRACE_LOOK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A backend's verdict: this rank will not be heard of again. `left` if it said goodbye."""

    rank: int
    cause: str
    left: bool = False

    def error(self) -> PeerLost:
        """The error of a request that can no longer end; a ProtocolError may be behind it."""
        lost = PeerLost(lost_text((self.rank,), self.cause), ranks=(self.rank,), cause=self.cause)
        if self.cause.startswith(BROKEN):
            lost.__cause__ = ProtocolError(f"rank {self.rank} {self.cause}")
        return lost


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; what it cannot is refused before anything is sent.

    `run_plan` and `run_collective` name the two optional fast paths. `sync_send`: a send can be made to
    end only when it has met its receive.
    """

    name: str
    run_plan: bool = False
    run_collective: bool = False
    sync_send: bool = True
    wildcards: bool = True
    device_memory: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a collective, as whoever runs it sees it.

    `memory` holds the flat arrays of the plan's buffers (plans.Buf). `header` is the fingerprint that goes
    with the first message to each peer; what stands before its first NUL byte is compared. `members` are the
    plan's ranks by their numbers in the backend, if those differ. `on_compiled` is shown what the plan
    became, if the backend runs it in a form that can be run again without asking.
    """

    context: int
    tag: int
    dtype: DType
    op: ReduceOp | None
    memory: Mapping[Any, Any]
    header: bytes
    members: tuple[int, ...] | None = None
    on_compiled: Callable[[Any], object] | None = None


class Backend(ABC):
    """What moves bytes between `size` ranks, seen from one of them.

    Promises, on good days and bad:

    - Messages of one sender with one (context, tag) meet receives in the order they were sent.
    - A buffer belongs to the request until the request is done. If a send fails, the receiver may have
      got all of the message or none, never a part that looks whole.
    - A message longer than the buffer, or of another type, fails that receive with UsageError and stays
      queued.
    - Unmatched payload is bounded: small messages travel at once under a credit per peer, others send an
      envelope and wait. So a send may take until its receive.
    - A request whose peer is gone fails with PeerLost; messages that arrived before stay receivable. A
      watch tells of a rank only after all that it sent has arrived.
    - After any error a link is intact at a message boundary, or closed.
    - All methods may be called from any thread; none blocks.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's position, 0 to size - 1."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend can do."""

    @property
    @abstractmethod
    def runtime(self) -> Runtime:
        """The clock and threads that its requests live by."""

    @property
    @abstractmethod
    def config(self) -> Config:
        """The settings that all ranks share."""

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
        """Start sending. With `sync` the request ends only when the message has met its receive."""

    @abstractmethod
    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Start receiving into a buffer; with None into bytes of the message's own length."""

    @abstractmethod
    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Start waiting for a message without taking it; done at once if one is queued."""

    @abstractmethod
    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Tell the listener of every rank that is or goes down, until the backend is closed."""

    @abstractmethod
    def close(self) -> None:
        """Leave: flush what was sent, end pending requests, tell the others."""

    def hosts(self) -> tuple[int, ...]:
        """A number per rank, equal for ranks on one host; empty if all share one."""
        return ()

    def link_kind(self) -> str:
        """What joins ranks of one host, as measurements call it (shm, tcp); the same answer on every rank.

        Empty if nobody has measured it: then algorithms are chosen by prediction.
        """
        return ""

    def run_plan(self, plan: Any, stage: Stage) -> Request:
        """Execute a plan (plans.Plan) below Python.

        Asked only with the capability, and never for a user's own operation. The request may end with
        ClosedError, HeaderMismatch or LengthMismatch. If a peer is gone it waits on: whoever hears of it by
        `watch` cancels. Cancelled, it ends once nobody uses its memory.
        """
        raise NotImplementedError(f"{self.capabilities.name} does not run plans")

    def fast_path(
        self, context: int, size: int, call_log: CallLog, on_unclaimed: Callable[[int, int, bytes], bool]
    ) -> FastPath | None:
        """Make what runs known calls of a communicator of `size` ranks by a short way, if the backend can.

        Such a call may end before its messages are met. `on_unclaimed` hears of those that have come here and
        wait: the rank of the world, the number and the text of the call. False: it need not hear of any more.
        """
        return None

    def mailbox(self, context: int, tag: int) -> Mailbox | None:
        """Make what carries short messages below Python, if the backend can."""
        return None

    def fast_messages(
        self, context: int, members: tuple[int, ...], call_log: CallLog, *, is_introduced: bool
    ) -> FastMessages | None:
        """Make what sends and receives a communicator's plain messages without Python, if the backend can.

        `members` are its ranks here. Unless `is_introduced`, the first message to each goes through Python.
        """
        return None

    def adopt_run(self, handle: int, memory: tuple[Any, ...]) -> Request:
        """Follow a run that the hot path began, as if it came from `run_plan`."""
        raise NotImplementedError(f"{self.capabilities.name} has no hot path")

    def run_collective(self, problem: Any, stage: Stage) -> Request | None:
        """Solve a problem (plans.Problem) by the library's own algorithm, or leave it to plans: None.

        Asked only with the capability, and by all ranks or, if the stage names members, by all of these. It
        must give our results: the same layout, the same bits on all ranks.
        """
        return None

    def end_group(self, context: int) -> None:  # noqa: B027 - only who keeps something for groups cares
        """A communicator of some of the ranks, or an agent, was closed here: its context is not used again.

        Messages that came whole and that nobody received, or that come later, are dropped: their credit goes
        back. A message whose sender still waits stays: the sender takes it back when it hears of the end.
        """

    def check_length(self, tag: int, nbytes: int, header: bytes = b"") -> None:
        """Refuse a message that is longer than any of its kind may be, before anything is sent."""
        longest = bytes_max(self.config, tag)
        if nbytes > longest or len(header) > HEADER_BYTES_MAX:
            raise UsageError(
                f"a message of {nbytes} bytes with a header of {len(header)}; allowed: "
                f"{longest} and {HEADER_BYTES_MAX}"
            )

    def check_peer(self, rank: int | Any_, what: str) -> None:
        """Refuse a rank that does not exist, before anything is sent. Only a source (`src`) may be ANY."""
        if rank is ANY and what == "src":
            return
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(f"{what}={rank!r}; allowed: ranks 0 to {self.size - 1}")
