"""Control: what ranks tell each other about their operations, beside the data.

Knows the control messages, whom to send them to, and which group each concerns. Does not know what a group
does with the news. One control serves all communicators of a world: a posted receive that every control
message of every context meets.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeAlias

import msgspec

from unisono.contract import GRACE_LOOK_S, GRACE_S, Backend, Lane, PeerDown, Tags
from unisono.errors import (
    ClosedError,
    CollectiveMismatch,
    DeadlineExceeded,
    Deadlock,
    Location,
    PeerAborted,
    PeerLost,
    ProtocolError,
    UnisonoError,
)
from unisono.values import ANY
from unisono.work import Call, Steps, Task

__all__ = [
    "Absent",
    "Answer",
    "Control",
    "Knock",
    "Left",
    "Member",
    "Present",
    "Query",
    "Tenant",
    "Verdict",
    "decode",
]

_log = logging.getLogger("unisono")

CONTROL_CONTEXT: Final = 0
WORLD_CONTEXT: Final = 1

# A rank may hear of a communicator before it has made it; the news waits, this much of it.
_EARLY_NEWS_MAX: Final = 1024
# Text that comes from a peer is shown to people and logged: one line of it, not a book.
_TEXT_MAX: Final = 4096


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """A communicator is broken, and why: the root cause, passed on as itself."""

    context: int
    kind: str
    what: str
    cause: str = ""
    report: str = ""
    ranks: tuple[int, ...] = ()
    operation: str | None = None
    communicator: str | None = None
    sequence: int | None = None
    is_abort: bool = False

    @staticmethod
    def of(error: UnisonoError, context: int, is_abort: bool = False) -> Verdict:
        """Put an error into words that travel; an abort ends more than collectives, for its sender leaves."""
        ranks: tuple[int, ...] = ()
        if isinstance(error, PeerLost):
            ranks = error.ranks
        elif isinstance(error, DeadlineExceeded):
            ranks = error.waiting_on
        elif isinstance(error, PeerAborted):
            ranks = (error.rank,)
        report = error.report if isinstance(error, CollectiveMismatch) else ""
        where = error.where
        return Verdict(
            context,
            type(error).__name__,
            error.what,
            error.cause or "",
            report,
            ranks,
            where.operation,
            where.communicator,
            where.sequence,
            is_abort,
        )

    def error(self, sender: int) -> UnisonoError:
        """Make the error that it speaks of; what is not passed on as itself becomes the sender's abort."""
        what, cause, report = _shown(self.what), _shown(self.cause), _shown(self.report)
        where = Location(self.operation, self.communicator, None, self.sequence)
        match self.kind:
            case "PeerLost":
                return PeerLost(what, ranks=self.ranks, where=where, cause=cause)
            case "DeadlineExceeded":
                return DeadlineExceeded(what, waiting_on=self.ranks, where=where, cause=cause)
            case "CollectiveMismatch":
                return CollectiveMismatch(what, report=report, where=where, cause=cause)
            case "Deadlock":
                return Deadlock(what, where=where, cause=cause)
            case "PeerAborted":
                rank = self.ranks[0] if self.ranks and self.ranks[0] >= 0 else sender
                return PeerAborted(what, rank=rank, where=where, cause=cause)
            case _:
                text = f"{self.kind}: {what}" + (f": {cause}" if cause else "")
                return PeerAborted(f"rank {sender} gave up", rank=sender, where=where, cause=text)


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The sender has closed this communicator; all it sent on it in this lane came before.

    It has left when both lanes say so: data, and the word that ours were taken, travel in different ones.
    `calls` holds its last collectives by number: who waits for one that was called otherwise learns why.
    """

    context: int
    lane: Lane
    calls: dict[int, bytes] = {}


class Query(msgspec.Struct, frozen=True, tag="query"):
    """The sender's collective does not end: what is the receiver doing at that number?"""

    context: int
    sequence: int
    fingerprint: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What the sender is doing: whether it has called the collective, and whom it waits for itself."""

    context: int
    sequence: int
    has_called: bool
    waiting_on: tuple[int, ...] = ()


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """Does the receiver have a tenant of this context, an agent for calls? The sender has, called `name`.

    `progress` is how far the sender had come when it made its own: the number of its next collective, by
    context. Who is beyond that and has none is not about to make one.
    """

    context: int
    name: str
    progress: dict[int, int] = {}


class Present(msgspec.Struct, frozen=True, tag="present"):
    """The sender has one, and what it is called."""

    context: int
    name: str


class Absent(msgspec.Struct, frozen=True, tag="absent"):
    """The sender has none."""

    context: int


News: TypeAlias = Verdict | Left | Query | Answer
Word: TypeAlias = News | Knock | Present | Absent
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Word).decode


def decode(data: bytes) -> Word:
    """Read a control message.

    Raises:
        ProtocolError: it is none.
    """
    try:
        news: Word = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("a malformed control message", cause=str(error)) from None
    return news


class Member(Protocol):
    """A communicator as control sees it."""

    context: int

    @property
    def next_sequence(self) -> int:
        """The number of the collective that is called next."""

    def on_news(self, sender: int, news: News) -> None:
        """A member, by its world rank, tells something about this communicator."""

    def on_peer_down(self, down: PeerDown) -> None:
        """The backend gave a world rank up."""

    def on_silence(self) -> None:
        """The backend was closed: no more news will come."""


class Tenant(Protocol):
    """What lives on a communicator and ends with it, such as an agent for calls. Ranks are world ranks."""

    context: int
    name: str | None
    progress: dict[int, int]  # see Knock

    def on_present(self, sender: int, name: str) -> None:
        """A rank has one, too, and what it is called."""

    def on_absent(self, sender: int) -> None:
        """A rank has none."""

    def on_peer_down(self, down: PeerDown) -> None:
        """The backend gave a rank up."""

    def on_silence(self) -> None:
        """The backend was closed: no more news will come."""

    def on_abort(self, error: UnisonoError) -> None:
        """The communicator was given up."""

    def close(self) -> None:
        """The communicator is being closed: finish, and leave."""


class Control:
    """One rank's ear and voice for everything that is not data."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._members: dict[int, Member] = {}
        self._tenants: dict[int, Tenant] = {}
        self._knocks: dict[int, dict[int, str]] = {}
        # Contexts whose tenant was waited for once, and did not come.
        self._missed: OrderedDict[int, None] = OrderedDict()
        self._down: dict[int, PeerDown] = {}
        self._early: OrderedDict[int, list[tuple[int, News]]] = OrderedDict()
        self._early_count = 0
        self._ends: deque[PeerDown] = deque()
        self._call = Call("control", backend.rank)
        Task(backend.runtime, self._call, self._listen(self._call)).begin(timers=False)
        backend.watch(self._on_peer_down)

    def join(self, member: Member) -> None:
        """Let a communicator hear the news of its context, the early ones first."""
        with self._lock:
            self._members[member.context] = member
            early = self._early.pop(member.context, [])
            self._early_count -= len(early)
            down = list(self._down.values())
        for verdict in down:
            member.on_peer_down(verdict)
        for sender, news in early:
            member.on_news(sender, news)

    def leave(self, member: Member) -> None:
        """Stop telling a communicator anything."""
        with self._lock:
            self._members.pop(member.context, None)

    def settle(self, tenant: Tenant) -> None:
        """Let a tenant hear who asks for it, those first who asked too early, and who is gone."""
        with self._lock:
            self._tenants[tenant.context] = tenant
            early = self._knocks.pop(tenant.context, {})
            self._missed.pop(tenant.context, None)
            down = list(self._down.values())
        for verdict in down:
            tenant.on_peer_down(verdict)
        for sender, name in sorted(early.items()):
            self._on_knock(sender, name, tenant)

    def unsettle(self, tenant: Tenant) -> None:
        """Tell a tenant no more."""
        with self._lock:
            self._tenants.pop(tenant.context, None)

    def ask_for(self, tenant: Tenant, rank: int) -> None:
        """Ask a rank whether it has such a tenant."""
        self.tell([rank], Knock(tenant.context, tenant.name or "", tenant.progress))

    def has_context(self, context: int) -> bool:
        """Whether a living communicator of this rank uses the context."""
        return context in self._members

    def tell(self, ranks: Iterable[int], news: Word, lane: Lane = Lane.CONTROL) -> None:
        """Send news to world ranks. Whoever cannot be reached has other sources of bad news."""
        data = memoryview(_encode(news))
        for rank in ranks:
            if rank != self.backend.rank and rank not in self._down:
                self.backend.start_send(rank, CONTROL_CONTEXT, Tags.CONTROL, data, lane=lane)

    def _listen(self, call: Call) -> Steps[None]:
        while True:
            request = self.backend.start_recv(ANY, CONTROL_CONTEXT, Tags.CONTROL, None)
            request.notify(call.wake)
            while not request.done:
                # A peer that gives up says why and goes: what it said comes first.
                while self._ends and not request.done and self._is_quiet():
                    self._heed(self._tell_end, self._ends.popleft())
                if not request.done:
                    yield
            if request.error is not None and not isinstance(request.error, ClosedError):
                continue  # a message whose sender went while it was on its way: the others still speak
            if request.error is not None:
                with self._lock:
                    members, tenants = list(self._members.values()), list(self._tenants.values())
                for member in members:
                    member.on_silence()
                for tenant in tenants:
                    tenant.on_silence()
                return
            envelope = request.envelope
            assert envelope is not None
            self._heed(self._on_message, envelope.source, bytes(request.data or b""))

    def _heed(self, hear: Callable[..., None], *news: object) -> None:
        """Hear the news. A failure in that must not make this rank deaf: others would wait for ever."""
        try:
            hear(*news)
        except Exception as error:
            _log.exception("rank %d: control failed", self.backend.rank)
            self._blame(
                self.backend.rank,
                ProtocolError(
                    f"rank {self.backend.rank} could not heed a control message", cause=repr(error)
                ),
            )

    def _on_message(self, sender: int, data: bytes) -> None:
        try:
            news = decode(data)
        except ProtocolError as error:
            self._blame(
                sender, ProtocolError(f"rank {sender} sent a malformed control message", cause=error.cause)
            )
            return
        if isinstance(news, Knock | Present | Absent):
            self._on_tenants_word(sender, news)
            return
        with self._lock:
            member = self._members.get(news.context)
            if member is None and not isinstance(news, Query | Answer):
                self._keep(sender, news)
        if member is not None:
            member.on_news(sender, news)
        elif isinstance(news, Query):
            self.tell([sender], Answer(news.context, news.sequence, has_called=False))

    def _on_tenants_word(self, sender: int, word: Knock | Present | Absent) -> None:
        with self._lock:
            tenant = self._tenants.get(word.context)
            if tenant is None and isinstance(word, Knock) and len(self._knocks) < _EARLY_NEWS_MAX:
                self._knocks.setdefault(word.context, {})[sender] = word.name
        match word:
            case Knock() if tenant is not None:
                self._on_knock(sender, word.name, tenant)
            case Knock():
                until = self.backend.runtime.now() + (0 if word.context in self._missed else GRACE_S)
                self._await_tenant(sender, word, until)
            case Present() if tenant is not None:
                tenant.on_present(sender, _shown(word.name))
            case Absent() if tenant is not None:
                tenant.on_absent(sender)

    def _on_knock(self, sender: int, name: str, tenant: Tenant) -> None:
        self.tell([sender], Present(tenant.context, tenant.name or ""))
        tenant.on_present(sender, _shown(name))

    def _await_tenant(self, sender: int, knock: Knock, until: float) -> None:
        """Give a tenant the time to come that it may still need, and no more."""
        runtime = self.backend.runtime
        now = runtime.now()
        with self._lock:
            is_asked = sender in self._knocks.get(knock.context, {})
            is_beyond = any(
                context in self._members and self._members[context].next_sequence > sequence
                for context, sequence in knock.progress.items()
            )
            if is_asked and now >= until:
                self._missed[knock.context] = None
                if len(self._missed) > _EARLY_NEWS_MAX:
                    self._missed.popitem(last=False)
        if not is_asked or is_beyond or now >= until:
            self._say_absent(sender, knock.context)
        else:
            look_at = min(until, now + GRACE_LOOK_S)
            runtime.call_at(look_at, lambda: self._await_tenant(sender, knock, until))

    def _say_absent(self, sender: int, context: int) -> None:
        with self._lock:
            waiting = self._knocks.get(context, {})
            waiting.pop(sender, None)
            if not waiting:
                self._knocks.pop(context, None)
            is_here = context in self._tenants
        if not is_here:
            self.tell([sender], Absent(context))

    def _keep(self, sender: int, news: News) -> None:
        self._early.setdefault(news.context, []).append((sender, news))
        self._early_count += 1
        while self._early_count > _EARLY_NEWS_MAX:
            _, oldest = self._early.popitem(last=False)
            self._early_count -= len(oldest)

    def _blame(self, sender: int, error: ProtocolError) -> None:
        with self._lock:
            members = list(self._members.values())
        for member in members:
            member.on_news(sender, Verdict.of(error, member.context))

    def _is_quiet(self) -> bool:
        """Whether no message waits behind the one that is being received."""
        queued = self.backend.probe(ANY, CONTROL_CONTEXT, Tags.CONTROL)
        return not queued.done and queued.cancel()

    def _on_peer_down(self, down: PeerDown) -> None:
        self._ends.append(down)
        self._call.wake()

    def _tell_end(self, down: PeerDown) -> None:
        with self._lock:
            if down.rank in self._down:
                return
            self._down[down.rank] = down
            members, tenants = list(self._members.values()), list(self._tenants.values())
        for member in members:
            member.on_peer_down(down)
        for tenant in tenants:
            tenant.on_peer_down(down)


def _shown(text: str) -> str:
    """A peer's text, fit to be shown: printable, one line each, of bounded length."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:_TEXT_MAX])
