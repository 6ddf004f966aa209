"""The contract between what moves bytes and everything above it.

Knows messages, requests and the duties of a backend. Does not know collectives, communicators or how any
backend works. A backend needs only `start_send`, `start_recv` and `probe`; every collective, group and call
above is built from these three.

The nouns. A *message* is an envelope and its bytes. A *context* separates communicators. A *tag* separates
messages within one: users have 0..2^31-1, collectives and control live above. A *request* is one send,
receive or probe under way.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

from unisono.errors import ClosedError, PeerLost, ProtocolError, UsageError, lost_text
from unisono.values import ANY, TAG_MAX, Any_, DType, ReduceOp

if TYPE_CHECKING:
    from unisono._native import HotMessages, Ledger
    from unisono.config import Config
    from unisono.runtime import Runtime

__all__ = [
    "CONTROL_BYTES_MAX",
    "ENDED_CONTEXTS_MAX",
    "ENVELOPE_BYTES",
    "GRACE_LOOK_S",
    "GRACE_S",
    "HEADER_BYTES_MAX",
    "OFFERS_MAX",
    "OWN_CREDIT_BYTES",
    "UNTYPED",
    "Backend",
    "Capabilities",
    "Envelope",
    "HeaderMismatch",
    "KnownCalls",
    "Lane",
    "LengthMismatch",
    "Mailbox",
    "OwnCredit",
    "PeerDown",
    "Request",
    "Stage",
    "Tags",
    "bytes_max",
    "eager_limits",
    "withdrawn",
]

# An envelope's header holds a fingerprint or a descriptor: a line of text and its call site.
HEADER_BYTES_MAX: Final = 1024

# What a queued message costs beyond its bytes: an endless stream of empty ones must meet a limit too.
ENVELOPE_BYTES: Final = 64

# So many contexts that were closed here are remembered: what comes for them is late, not early.
ENDED_CONTEXTS_MAX: Final = 1 << 16

# How the cause of a PeerDown begins if the bytes that came made no sense, or were damaged.
BROKEN: Final = "broke the protocol"

# Ranks do not begin at the same instant: for so long what is called already may still be to come, an agent or
# a function of it. A collective called there meanwhile says that nothing more will come; so often one looks.
GRACE_S: Final = 0.5
GRACE_LOOK_S: Final = 0.01

# The dtype code of plain bytes, which fit any receive buffer.
UNTYPED: Final = 255


class Tags:
    """How the 64 bits of a tag are shared out. An ANY receive meets only what users send.

    In the tag of a collective bits 40 to 60 are the engine's: which message of a plan it is.
    """

    COLLECTIVE = 1 << 62
    CONTROL = 1 << 61
    RPC = 1 << 60  # of frames; what follows a frame adds its number
    STAGES = 16  # a collective may exchange metadata before its plan: each stage has a tag of its own

    @staticmethod
    def collective(sequence: int, stage: int) -> int:
        """The tag of one stage of a numbered collective."""
        assert 0 <= stage < Tags.STAGES
        return Tags.COLLECTIVE | sequence * Tags.STAGES + stage

    @staticmethod
    def is_users(tag: int) -> bool:
        """Whether a user may have sent it."""
        return 0 <= tag <= TAG_MAX

    @staticmethod
    def is_control(tag: int) -> bool:
        """Whether it is news between ranks or the frame of a call: at most CONTROL_BYTES_MAX long."""
        return bool(tag & Tags.CONTROL) or tag == Tags.RPC


class Lane(IntEnum):
    """An independent queue on a link. A full lane never blocks another."""

    BULK = 0
    CONTROL = 1


# News between ranks and frames of calls are a few lines of text. No longer one is accepted, whoever sends it:
# more than this breaks the protocol, before any memory is taken for it.
CONTROL_BYTES_MAX: Final = 256 * 1024
# Most are much shorter than this, and travel at once; a hundred such may wait.
_CONTROL_EAGER_BYTES: Final = 16 * 1024
_CONTROL_CREDIT_BYTES: Final = 100 * _CONTROL_EAGER_BYTES

# A rank may send itself this much, and always one message of any length, before a receive is posted: a
# blocking send could never wait for its own receive. Beyond, it waits for its receive like any other.
OWN_CREDIT_BYTES: Final = 64 << 20

# Offers of one peer that may wait for their receives: the peer holds further ones back.
OFFERS_MAX: Final = 1 << 16


def eager_limits(config: Config, lane: Lane) -> tuple[int, int]:
    """The longest message that travels before it is asked for, and the bytes of them that may wait.

    Why a rank gives up must arrive although it leaves at once, however little data may travel.
    """
    if lane is Lane.CONTROL:
        return (
            max(config.eager_bytes, _CONTROL_EAGER_BYTES),
            max(config.eager_credit_bytes, _CONTROL_CREDIT_BYTES),
        )
    return config.eager_bytes, config.eager_credit_bytes


def bytes_max(config: Config, tag: int) -> int:
    """The longest message that may come under a tag; what users set for theirs does not bound control."""
    return CONTROL_BYTES_MAX if Tags.is_control(tag) else config.message_bytes_max


class OwnCredit:
    """What a rank has sent itself and not received, in bytes. Whoever uses it holds a lock."""

    def __init__(self, config: Config) -> None:
        self._limit = max(OWN_CREDIT_BYTES, config.eager_credit_bytes)
        self._used = 0

    def take(self, nbytes: int) -> bool:
        """Keep a message; False if it must wait for its receive instead. The first may have any length."""
        cost = nbytes + ENVELOPE_BYTES
        if self._used and self._used + cost > self._limit:
            return False
        self._used += cost
        return True

    def give_back(self, nbytes: int) -> None:
        """A message was received, or never will be."""
        self._used -= nbytes + ENVELOPE_BYTES


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known about a message before its bytes: `header` is opaque to the backend."""

    source: int
    context: int
    tag: int
    nbytes: int
    dtype: int = UNTYPED
    header: bytes = b""


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


class HeaderMismatch(Exception):
    """How a plan's request ends if a peer runs something else; whoever started it finds the words."""

    def __init__(self, peer: int, header: bytes) -> None:
        super().__init__(peer, header)
        self.peer = peer
        self.header = header


class LengthMismatch(Exception):
    """How a plan's request ends if a peer that runs the same sends a message of another length or type."""

    def __init__(self, peer: int, came: int, awaited: int) -> None:
        super().__init__(peer, came, awaited)
        self.peer = peer
        self.came = came
        self.awaited = awaited


class Request:
    """One send, receive or probe under way.

    Whoever completes it calls `complete` or `fail`, exactly once and without holding a lock: the callbacks
    run there and then. `data` holds the bytes of a receive that was started without a buffer.
    """

    __slots__ = (
        "_callbacks",
        "_envelope",
        "_error",
        "_lock",
        "_withdraw",
        "data",
        "done",
        "peer",
        "rank_here",
    )

    def __init__(self, peer: int | Any_, withdraw: Callable[[Request], bool] | None = None) -> None:
        self.peer = peer
        self.done = False
        # Turns the ranks of who ends it into those of the backend that was asked; None: they are equal.
        self.rank_here: Callable[[int], int] | None = None
        self.data: bytes | bytearray | None = None
        self._envelope: Envelope | None = None
        self._error: BaseException | None = None
        self._withdraw = withdraw
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []

    @property
    def envelope(self) -> Envelope | None:
        """What a receive or probe met or had to refuse, in the rank numbers of the backend that was asked."""
        if self._envelope is None or self.rank_here is None:
            return self._envelope
        return replace(self._envelope, source=self.rank_here(self._envelope.source))

    @property
    def error(self) -> BaseException | None:
        """What ended it, if not well; the ranks it names are those of the backend that was asked."""
        error, here = self._error, self.rank_here
        if here is None or error is None:
            return error
        match error:
            case PeerLost():
                return error.of_ranks(tuple(here(rank) for rank in error.ranks))
            case HeaderMismatch():
                return HeaderMismatch(here(error.peer), error.header)
            case LengthMismatch():
                return LengthMismatch(here(error.peer), error.came, error.awaited)
        return error

    def peers_awaited(self) -> tuple[int, ...]:
        """Whom it waits for now, as far as it is known."""
        return (self.peer,) if isinstance(self.peer, int) and not self.done else ()

    def withdraw_by(self, withdraw: Callable[[Request], bool]) -> None:
        """Say how it can be taken back."""
        self._withdraw = withdraw

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once it is done; at once if it is."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def complete(self, envelope: Envelope | None = None, data: bytes | bytearray | None = None) -> None:
        """End it well."""
        self._envelope = envelope
        self.data = data
        self._end()

    def fail(self, error: BaseException, envelope: Envelope | None = None) -> None:
        """End it with an error; the envelope is that of a message which met it and did not fit."""
        self._envelope = envelope
        self._error = error
        self._end()

    def cancel(self) -> bool:
        """Withdraw it. False if it is done or has met its counterpart: then it ends by itself, soon."""
        return not self.done and self._withdraw is not None and self._withdraw(self)

    def cancelled(self) -> None:
        """End it as withdrawn; for those who implement `cancel`."""
        self.fail(withdrawn())

    def _end(self) -> None:
        with self._lock:
            assert self._callbacks is not None, "a request ends once"
            callbacks, self._callbacks = self._callbacks, None
            self.done = True
        for callback in callbacks:
            callback()


def withdrawn() -> ClosedError:
    """The error of a request that was cancelled."""
    return ClosedError("withdrawn before it met its counterpart")


class Mailbox(Protocol):
    """Short messages of one context and tag in both directions, without a request for each.

    Who reads makes progress. A reader in front is one that waits for an answer; the others serve in the
    background, one at a time, and make way for any thread that waits for anything.
    """

    def post(self, dst: int, data: bytes, unsent_bytes_max: int) -> bool:
        """Send in the control lane, in order. What cannot arrive is dropped: a watch tells why.

        False, and nothing is sent, if more than `unsent_bytes_max` wait for a peer that does not take them.
        """

    def take(self, timeout: float, is_front: bool) -> list[tuple[int, Any]]:
        """Wait for messages and take them, with their sources; none after a poke, or if time is up.

        A message is bytes, or for one that was expected (its number, its outcome, how many bytes came). In
        the background it also returns with none when who read last has been away for long.
        """

    def drain(self) -> list[tuple[int, Any]]:
        """Take what is here."""

    def batches(self) -> int:
        """How often a thread was given messages so far: each time it has them in hand for a while."""

    def lend(self, dst: int, tag: int, data: Any, number: int) -> bool:
        """Send a long message from where it lies, which has to stay until it is no longer lent."""

    def is_lent(self, number: int) -> bool:
        """Whether the other side may still read it."""

    def expect(self, src: int, tag: int, into: Any, number: int) -> None:
        """Receive a long message where it is to stay; `take` tells its end, and whether it came."""

    def withdraw(self, number: int) -> None:
        """Take back what was lent or expected and has not begun."""

    def poke(self, is_front: bool) -> None:
        """Make the reader in front, or one in the background, return."""

    def close(self) -> None:
        """Let every reader return at once, now and later; what arrives is no longer taken."""


class KnownCalls(Protocol):
    """A short way for blocking collectives that were made before, from the same place with like arguments.

    What it begins and cannot end by itself, soon and well, it hands over.
    """

    @property
    def verbs(self) -> tuple[str, ...]:
        """The verbs that it has a short way for."""

    def verb(self, name: str, slow: Callable[..., Any], aid: Any) -> Callable[..., Any]:
        """Make what stands in front of `slow`, the verb itself.

        `aid.take_over` waits for what was begun, given (operation, sequence, header, start time, handle,
        memory, exception or None); `aid.heed` compares a message that was not met (rank, sequence, header).
        """

    def unmet(self, sequence: int) -> Sequence[tuple[int, int, bytes]]:
        """Messages that wait for calls before this one, if calls may end before theirs are met."""

    def behind(self) -> Sequence[int]:
        """Ranks that have not shown yet that they have made all calls that ended here."""

    def learn(
        self,
        sequence: int,
        operation: str,
        program: Any,
        dtype: int,
        op: int,
        memory_in: Any,
        memory_out: Any,
        header: bytes,
        divisor: int,
    ) -> bool:
        """Hear in the midst of a call by `slow` what was decided; False if there is nothing to learn."""


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

    def hot_path(
        self, context: int, size: int, ledger: Ledger, on_unmet: Callable[[int, int, bytes], bool]
    ) -> KnownCalls | None:
        """Make what runs known calls of a communicator of `size` ranks by a short way, if the backend can.

        Such a call may end before its messages are met. `on_unmet` hears of those that have come here and
        wait: the rank of the world, the number and the text of the call. False: it need not hear of any more.
        """
        return None

    def mailbox(self, context: int, tag: int) -> Mailbox | None:
        """Make what carries short messages below Python, if the backend can."""
        return None

    def hot_messages(
        self, context: int, members: tuple[int, ...], ledger: Ledger, *, is_introduced: bool
    ) -> HotMessages | None:
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
