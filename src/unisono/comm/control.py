"""Control: what ranks tell each other about their operations, beside the data.

Knows the control messages, whom to send them to, and which group each concerns. Does not know what a group
does with the news. One control serves all communicators of a world: a posted receive that every control
message of every context meets.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Final, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from unisono.comm.deadlock import Wait
from unisono.comm.deadlock_watch import Ask, DeadlockWatch, Doomed, Mark, Told
from unisono.core.envelope import ANY, HEADER_BYTES_MAX, Lane, Tags
from unisono.core.task import Call, Steps, Task
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
from unisono.messaging.backend import GRACE_LOOK_S, GRACE_S, Backend, PeerDown
from unisono.messaging.credit import CONTROL_BYTES_MAX, ENDED_CONTEXTS_MAX, ENVELOPE_BYTES

__all__ = [
    "Answer",
    "Control",
    "Goodbye",
    "Member",
    "Query",
    "Service",
    "ServiceFound",
    "ServiceMissing",
    "ServiceQuery",
    "Verdict",
    "decode",
]

_log = logging.getLogger("unisono")

CONTROL_CONTEXT: Final = 0
WORLD_CONTEXT: Final = 1

# A rank may hear of a communicator before it has made it; the news waits, so many bytes of each sender.
EARLY_BYTES_MAX: Final = 1 << 20
# Who asks for an agent too early is remembered, in so many contexts of each rank.
_KNOCKS_MAX: Final = 64
_MISSED_MAX: Final = 1024
# Answers to a rank that it has not taken yet: who asks and does not listen gets no more.
_ANSWERS_MAX: Final = 1024
# Text that comes from a peer is shown to people and logged: one line of it, not a book.
_TEXT_MAX: Final = 4096
RANKS_MAX: Final = 1 << 13
_CALLS_MAX: Final = 64
# How long to wait after a control message could not be received, for want of memory for example.
_REST_S: Final = 0.05

# What stands in a message is bounded where it is read, and cut to the same length where it is written. All
# of the longest together are shorter than CONTROL_BYTES_MAX.
Text: TypeAlias = Annotated[str, Meta(max_length=_TEXT_MAX)]
Fingerprint: TypeAlias = Annotated[bytes, Meta(max_length=HEADER_BYTES_MAX)]
Ranks: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=RANKS_MAX)]
Calls: TypeAlias = Annotated[dict[int, Fingerprint], Meta(max_length=_CALLS_MAX)]
Progress: TypeAlias = Annotated[dict[int, int], Meta(max_length=_CALLS_MAX)]


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """A communicator is broken, and why: the root cause, passed on as itself.

    If members called different things, `calls` holds the sender's call and two that differ, by world rank.
    """

    context: int
    kind: Text
    what: Text
    cause: Text = ""
    report: Text = ""
    ranks: Ranks = ()
    operation: Text | None = None
    communicator: Text | None = None
    sequence: int | None = None
    is_abort: bool = False
    calls: Calls = {}

    @staticmethod
    def of(
        error: UnisonoError, context: int, is_abort: bool = False, calls: Mapping[int, bytes] | None = None
    ) -> Verdict:
        """Put an error into words that travel; an abort ends more than collectives, for its sender leaves."""
        ranks: tuple[int, ...] = ()
        if isinstance(error, PeerLost):
            ranks = error.ranks
        elif isinstance(error, DeadlineExceeded):
            ranks = error.waiting_on
        elif isinstance(error, PeerAborted):
            ranks = (error.rank,)
        elif isinstance(error, CollectiveMismatch):
            ranks = error.culprits
        report = error.report if isinstance(error, CollectiveMismatch) else ""
        where = error.where
        return Verdict(
            context,
            _cut(type(error).__name__),
            _cut(error.what),
            _cut(error.cause or ""),
            _cut(report),
            ranks[:RANKS_MAX],
            where.operation and _cut(where.operation),
            where.communicator and _cut(where.communicator),
            where.sequence,
            is_abort,
            dict(itertools.islice((calls or {}).items(), _CALLS_MAX)),
        )

    def error(self, sender: int) -> UnisonoError:
        """Make the error that it speaks of; what is not passed on as itself becomes the sender's abort."""
        what, cause, report = _shown(self.what), _shown(self.cause), _shown(self.report)
        where = Location(self.operation, self.communicator, None, self.sequence)
        match self.kind:
            case "PeerLost":  # what the sender was doing is not what its receiver does
                return PeerLost(what, ranks=self.ranks, cause=cause)
            case "DeadlineExceeded":
                return DeadlineExceeded(what, waiting_on=self.ranks, where=where, cause=cause)
            case "CollectiveMismatch":
                # Under this number the members called different verbs: the sender's is but one of them.
                where = replace(where, operation="collective")
                return CollectiveMismatch(what, report=report, culprits=self.ranks, where=where, cause=cause)
            case "Deadlock":
                return Deadlock(what, where=where, cause=cause)
            case "PeerAborted":
                rank = self.ranks[0] if self.ranks and self.ranks[0] >= 0 else sender
                return PeerAborted(what, rank=rank, where=where, cause=cause)
            case _:
                text = f"{self.kind}: {what}" + (f": {cause}" if cause else "")
                return PeerAborted(f"rank {sender} gave up", rank=sender, where=where, cause=text)


class Goodbye(msgspec.Struct, frozen=True, tag="left"):
    """The sender has closed this communicator; all it sent on it in this lane came before.

    It has left when both lanes say so: data, and the word that ours were taken, travel in different ones.
    `calls` holds its last collectives by number: who waits for one that was called otherwise learns why.
    """

    context: int
    lane: Lane
    calls: Calls = {}


class Query(msgspec.Struct, frozen=True, tag="query"):
    """The sender's collective does not end: what is the receiver doing at that number?"""

    context: int
    sequence: int
    fingerprint: Fingerprint


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What the sender is doing: whether it has called the collective, and whom it waits for itself."""

    context: int
    sequence: int
    has_called: bool
    waiting_on: Ranks = ()


class ServiceQuery(msgspec.Struct, frozen=True, tag="knock"):
    """Does the receiver have a service of this context, an agent for calls? The sender has, called `name`.

    `progress` is how far the sender had come when it made its own: the number of its next collective, by
    context. Who is beyond that and has none is not about to make one.
    """

    context: int
    name: Text
    progress: Progress = {}


class ServiceFound(msgspec.Struct, frozen=True, tag="present"):
    """The sender has one, and what it is called."""

    context: int
    name: Text


class ServiceMissing(msgspec.Struct, frozen=True, tag="absent"):
    """The sender has none."""

    context: int


GroupMessage: TypeAlias = Verdict | Goodbye | Query | Answer
ControlMessage: TypeAlias = (
    GroupMessage | ServiceQuery | ServiceFound | ServiceMissing | Ask | Told | Mark | Doomed
)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ControlMessage).decode


def decode(data: bytes) -> ControlMessage:
    """Read a control message.

    Raises:
        ProtocolError: it is none.
    """
    try:
        news: ControlMessage = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("a malformed control message", cause=str(error)) from None
    return news


class Member(Protocol):
    """A communicator as control sees it."""

    context: int

    @property
    def next_sequence(self) -> int:
        """The number of the collective that is called next."""

    def calls_under_way(self) -> list[Call]:
        """The operations that have not ended."""

    def wait_of(self, call: Call, is_limited: bool) -> Wait | None:
        """What an operation of it waits for."""

    def on_news(self, sender: int, news: GroupMessage) -> None:
        """A member, by its world rank, tells something about this communicator."""

    def on_peer_down(self, down: PeerDown) -> None:
        """The backend gave a world rank up."""

    def on_backend_closed(self) -> None:
        """The backend was closed: no more news will come."""


class Service(Protocol):
    """What lives on a communicator and ends with it, such as an agent for calls. Ranks are world ranks."""

    context: int
    name: str | None
    progress: dict[int, int]  # see ServiceQuery

    def on_present(self, sender: int, name: str) -> None:
        """A rank has one, too, and what it is called."""

    def on_absent(self, sender: int) -> None:
        """A rank has none."""

    def on_peer_down(self, down: PeerDown) -> None:
        """The backend gave a rank up."""

    def on_backend_closed(self) -> None:
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
        self._services: dict[int, Service] = {}
        self._knocks: dict[int, dict[int, str]] = {}
        # Contexts whose service was waited for once, and did not come.
        self._missed: OrderedDict[int, None] = OrderedDict()
        self._down: dict[int, PeerDown] = {}
        # Contexts that were closed here last: what is still said about them is late, not early.
        self._over: OrderedDict[int, None] = OrderedDict()
        self._early = _EarlyNews()
        self._answers: Counter[int] = Counter()
        self._ends: deque[PeerDown] = deque()
        self.deadlocks = DeadlockWatch(self)
        self._call = Call("control", backend.rank)
        Task(backend.runtime, self._call, self._listen(self._call)).begin(timers=False)
        backend.watch(self._on_peer_down)

    def join(self, member: Member) -> None:
        """Let a communicator hear the news of its context, the early ones first."""
        with self._lock:
            self._members[member.context] = member
            early = self._early.taken(member.context)
            down = list(self._down.values())
        for verdict in down:
            member.on_peer_down(verdict)
        for sender, data in early:
            news = decode(data)
            assert isinstance(news, Verdict | Goodbye), "nothing else is kept"
            member.on_news(sender, news)

    def leave(self, member: Member) -> None:
        """Stop telling a communicator anything."""
        with self._lock:
            self._members.pop(member.context, None)
            self._over[member.context] = None
            if len(self._over) > ENDED_CONTEXTS_MAX:
                self._over.popitem(last=False)

    def settle(self, service: Service) -> None:
        """Let a service hear who asks for it, those first who asked too early, and who is gone."""
        with self._lock:
            self._services[service.context] = service
            early = self._knocks.pop(service.context, {})
            self._missed.pop(service.context, None)
            down = list(self._down.values())
        for verdict in down:
            service.on_peer_down(verdict)
        for sender, name in sorted(early.items()):
            self._on_knock(sender, name, service)

    def unsettle(self, service: Service) -> None:
        """Tell a service no more."""
        with self._lock:
            self._services.pop(service.context, None)

    def ask_for(self, service: Service, rank: int) -> None:
        """Ask a rank whether it has such a service."""
        nearest = dict(list(service.progress.items())[-_CALLS_MAX:])
        self.tell([rank], ServiceQuery(service.context, service.name or "", nearest))

    def has_context(self, context: int) -> bool:
        """Whether a living communicator of this rank uses the context."""
        return context in self._members

    def groups(self) -> list[Member]:
        """The living communicators of this rank."""
        with self._lock:
            return list(self._members.values())

    def has_services(self) -> bool:
        """Whether anything lives on them that others may call."""
        return bool(self._services)

    def tell(self, ranks: Iterable[int], news: ControlMessage, lane: Lane = Lane.CONTROL) -> None:
        """Send news to world ranks. Whoever cannot be reached has other sources of bad news."""
        data = self._encoded(news)
        for rank in ranks:
            if data is not None and rank != self.backend.rank and rank not in self._down:
                self.backend.start_send(rank, CONTROL_CONTEXT, Tags.CONTROL, data, lane=lane)

    def answer(self, rank: int, word: ControlMessage, lane: Lane = Lane.CONTROL) -> None:
        """Send what others asked for to a world rank, unless it asks and asks and takes no answer."""
        if rank == self.backend.rank or rank in self._down or (data := self._encoded(word)) is None:
            return
        with self._lock:
            if self._answers[rank] >= _ANSWERS_MAX:
                return
            self._answers[rank] += 1

        def taken() -> None:
            with self._lock:
                self._answers[rank] -= 1

        self.backend.start_send(rank, CONTROL_CONTEXT, Tags.CONTROL, data, lane=lane).notify(taken)

    def _encoded(self, word: ControlMessage) -> memoryview | None:
        """What travels; None if nobody would take it. Verdicts and answers are cut so that this never is."""
        data = memoryview(_encode(word))
        if data.nbytes <= CONTROL_BYTES_MAX:
            return data
        _log.error("rank %d: news of %d bytes is too long to be told", self.backend.rank, data.nbytes)
        return None

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
            if isinstance(request.error, PeerLost):
                continue  # a message whose sender went while it was on its way: the others still speak
            if request.error is not None and not isinstance(request.error, ClosedError):
                yield from self._rest(call, request.error)
                continue
            if request.error is not None:
                with self._lock:
                    members, services = list(self._members.values()), list(self._services.values())
                for member in members:
                    member.on_backend_closed()
                for service in services:
                    service.on_backend_closed()
                self.deadlocks.close()
                return
            envelope = request.envelope
            assert envelope is not None
            self._heed(self._on_message, envelope.source, bytes(request.data or b""))

    def _rest(self, call: Call, error: BaseException) -> Steps[None]:
        """A message could not be received and is still there: say so, and try again after a while."""
        rank, runtime = self.backend.rank, self.backend.runtime
        self._blame(rank, ProtocolError(f"rank {rank} could not receive a control message", cause=str(error)))
        until = runtime.now() + _REST_S
        runtime.call_at(until, call.wake)
        while runtime.now() < until:
            yield

    def _heed(self, hear: Callable[..., None], *news: object) -> None:
        """Hear the news. A failure in that must not make this rank deaf: others would wait for ever."""
        try:
            hear(*news)
        except Exception as error:
            _log.exception("rank %d: control failed", self.backend.rank)
            self._blame(
                self.backend.rank,
                ProtocolError(
                    f"rank {self.backend.rank} could not check_unclaimed a control message", cause=repr(error)
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
        if isinstance(news, ServiceQuery | ServiceFound | ServiceMissing):
            self._on_service_message(sender, news)
            return
        if isinstance(news, Ask | Told | Mark | Doomed):
            self.deadlocks.on_word(sender, news)
            return
        with self._lock:
            member = self._members.get(news.context)
            is_late = news.context in self._over
            if member is None and not is_late and not isinstance(news, Query | Answer):
                self._early.keep(sender, news.context, data)
        if member is not None:
            member.on_news(sender, news)
        elif isinstance(news, Query) and is_late:
            # Who asks has not heard that this rank left it: the news came too early to be kept there.
            self.answer(sender, Answer(news.context, news.sequence, has_called=False))
            for lane in Lane:
                self.answer(sender, Goodbye(news.context, lane), lane)
        elif isinstance(news, Query):
            self.answer(sender, Answer(news.context, news.sequence, has_called=False))

    def _on_service_message(self, sender: int, word: ServiceQuery | ServiceFound | ServiceMissing) -> None:
        with self._lock:
            service = self._services.get(word.context)
            is_waiting = sender in self._knocks.get(word.context, {})
            if service is None and isinstance(word, ServiceQuery) and self._knocks_of(sender) < _KNOCKS_MAX:
                self._knocks.setdefault(word.context, {})[sender] = word.name
        match word:
            case ServiceQuery() if service is not None:
                self._on_knock(sender, word.name, service)
            case ServiceQuery() if not is_waiting:  # else it will be answered
                until = self.backend.runtime.now() + (0 if word.context in self._missed else GRACE_S)
                self._await_tenant(sender, word, until)
            case ServiceFound() if service is not None:
                service.on_present(sender, _shown(word.name))
            case ServiceMissing() if service is not None:
                service.on_absent(sender)

    def _on_knock(self, sender: int, name: str, service: Service) -> None:
        self.answer(sender, ServiceFound(service.context, service.name or ""))
        service.on_present(sender, _shown(name))

    def _await_tenant(self, sender: int, knock: ServiceQuery, until: float) -> None:
        """Give a service the time to come that it may still need, and no more."""
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
                if len(self._missed) > _MISSED_MAX:
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
            is_here = context in self._services
        if not is_here:
            self.answer(sender, ServiceMissing(context))

    def _knocks_of(self, sender: int) -> int:
        """In how many contexts a rank waits for an agent; the caller holds the lock."""
        return sum(sender in waiting for waiting in self._knocks.values())

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
            members, services = list(self._members.values()), list(self._services.values())
        for member in members:
            member.on_peer_down(down)
        for service in services:
            service.on_peer_down(down)


class _EarlyNews:
    """What ranks said about communicators that were not made here yet, as it came.

    Of each rank a bounded number of bytes is kept. Beyond, its oldest news loses all calls but the last, and
    only if that does not help it goes.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._by_context: dict[int, dict[int, tuple[int, bytes]]] = {}
        # By sender: the context of its news by number, and those that have not been made shorter.
        self._by_sender: dict[int, OrderedDict[int, int]] = {}
        self._full: dict[int, OrderedDict[int, int]] = {}
        self._bytes: Counter[int] = Counter()

    def keep(self, sender: int, context: int, data: bytes) -> None:
        number = next(self._numbers)
        self._by_context.setdefault(context, {})[number] = (sender, data)
        kept = self._by_sender.setdefault(sender, OrderedDict())
        full = self._full.setdefault(sender, OrderedDict())
        kept[number] = full[number] = context
        self._bytes[sender] += _cost(data)
        while self._bytes[sender] > EARLY_BYTES_MAX and full:
            self._shorten(*full.popitem(last=False))
        while self._bytes[sender] > EARLY_BYTES_MAX:
            oldest, its_context = kept.popitem(last=False)
            news = self._by_context[its_context]
            self._bytes[sender] -= _cost(news.pop(oldest)[1])
            if not news:
                del self._by_context[its_context]

    def taken(self, context: int) -> list[tuple[int, bytes]]:
        """The news of a context, with its senders, in the order in which it came."""
        found = self._by_context.pop(context, {})
        for number, (sender, data) in found.items():
            del self._by_sender[sender][number]
            self._full[sender].pop(number, None)
            self._bytes[sender] -= _cost(data)
        return list(found.values())

    def _shorten(self, number: int, context: int) -> None:
        """Keep the last call only: that its sender had come so far decides who still waits for it."""
        sender, data = self._by_context[context][number]
        news = decode(data)
        assert isinstance(news, Verdict | Goodbye), "nothing else is kept"
        if len(news.calls) > 1 and isinstance(news, Goodbye):
            last = max(news.calls)
            shorter = _encode(msgspec.structs.replace(news, calls={last: news.calls[last]}))
            self._by_context[context][number] = (sender, shorter)
            self._bytes[sender] -= len(data) - len(shorter)


def _cost(data: bytes) -> int:
    return len(data) + ENVELOPE_BYTES


def _cut(text: str) -> str:
    return text[:_TEXT_MAX]


def _shown(text: str) -> str:
    """A peer's text, fit to be shown: printable, one line each, of bounded length."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:_TEXT_MAX])
