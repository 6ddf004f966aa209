"""Control: sends, receives and dispatches the control messages of one rank.

One control serves all communicators of a world. It keeps one wildcard receive posted, which control messages
of every context match, and hands each message to the group, service or deadlock watch that it concerns.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from unisono.comm.control_messages import (
    CALLED_MAX,
    CONTEXTS_MAX,
    GOODBYES_MAX,
    CallReport,
    ControlMessage,
    Goodbye,
    Goodbyes,
    GroupFailure,
    GroupMessage,
    ServiceFound,
    ServiceMessage,
    ServiceMissing,
    ServiceQuery,
    StallQuery,
    StallReply,
    decode,
    encode,
    printable,
)
from unisono.comm.deadlock_watch import DeadlockWatch, WatchedGroup
from unisono.comm.early_messages import EarlyMessages
from unisono.comm.goodbyes import DELAY_S, UnsentGoodbyes
from unisono.core.call import Call, Steps
from unisono.core.clock import Dropped, when_dropped
from unisono.core.envelope import ANY, Lane, Tags
from unisono.core.task import Task
from unisono.errors import ClosedError, PeerLost, ProtocolError, UnisonoError
from unisono.messaging.backend import GRACE_LOOK_S, GRACE_S, Backend
from unisono.messaging.credit import CONTROL_BYTES_MAX, ENDED_CONTEXTS_MAX
from unisono.messaging.peer_down import PeerDown

__all__ = ["CONTROL_CONTEXT", "WORLD_CONTEXT", "AttachedGroup", "Control", "Service"]

_log = logging.getLogger("unisono")

CONTROL_CONTEXT: Final = 0
WORLD_CONTEXT: Final = 1

# Bound on the contexts, per asking rank, in which a query for a service waits here for that service.
_QUERIES_MAX: Final = 64
# Contexts whose service did not appear within GRACE_S: later queries for it do not wait again.
_ABSENT_MAX: Final = 1024
# Replies to one rank that it has not received yet. A rank that queries without receiving gets no more.
_REPLIES_MAX: Final = 1024
# The pause after a control message could not be received, for lack of memory for example.
_RETRY_S: Final = 0.05


class AttachedGroup(WatchedGroup, Protocol):
    """A group as control sees it."""

    def on_control_message(self, sender: int, message: GroupMessage) -> None:
        """A member, given by its world rank, sent a message about this group."""

    def on_peer_down(self, down: PeerDown) -> None:
        """The backend declared a world rank dead or gone."""

    def on_backend_closed(self) -> None:
        """The backend was closed: no more messages will come."""


class Service(Protocol):
    """What lives on a communicator and ends with it, such as an RPC agent. Ranks are world ranks."""

    context: int
    name: str | None
    progress: dict[int, int]  # see ServiceQuery

    def on_present(self, sender: int, name: str) -> None:
        """Another rank has the same service, with this name."""

    def on_absent(self, sender: int) -> None:
        """Another rank does not have this service."""

    def on_peer_down(self, down: PeerDown) -> None:
        """The backend declared a rank dead or gone."""

    def on_backend_closed(self) -> None:
        """The backend was closed: no more messages will come."""

    def on_abort(self, error: UnisonoError) -> None:
        """The communicator was aborted."""

    def close(self) -> None:
        """The communicator is being closed: finish, and leave."""


class Control:
    """One rank's end of the control lane."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._groups: dict[int, AttachedGroup] = {}
        # Contexts of communicators that were not used yet, and so have no group.
        self._reserved: set[int] = set()
        self._services: dict[int, Service] = {}
        # By context and asking rank: the name of its service. They wait for a service that is not here yet.
        self._waiting_queries: dict[int, dict[int, str]] = {}
        self._absent: OrderedDict[int, None] = OrderedDict()
        self._down: dict[int, PeerDown] = {}
        # Contexts that were closed here last: a message about one of them is late, not early.
        self._closed_contexts: OrderedDict[int, None] = OrderedDict()
        self._early = EarlyMessages()
        self._goodbyes: UnsentGoodbyes[dict[int, CallReport]] = UnsentGoodbyes()
        self._replies_unsent: Counter[int] = Counter()
        # Peers that are down, not dispatched yet: what they sent before goes first.
        self._down_pending: deque[PeerDown] = deque()
        # What leaves the groups that were dropped; one thread at a time does it.
        self._dropped: deque[Dropped] = deque()
        self._leaving = threading.RLock()
        self.deadlocks = DeadlockWatch(self)
        self._call = Call("control", backend.rank)
        if self._listen():
            backend.watch(lambda down: self._dispatch(self._dispatch_down, down))
        else:
            Task(backend.runtime, self._call, self._receive_all(self._call)).begin(timers=False)
            backend.watch(self._on_peer_down)

    def reserve(self, context: int) -> None:
        """A communicator was made whose group follows when it is used; its messages are kept until then."""
        self._reserved.add(context)

    def add_group(self, group: AttachedGroup) -> None:
        """Dispatch the messages of its context to a group, those that came early first."""
        with self._lock:
            self._reserved.discard(group.context)
            self._groups[group.context] = group
            early = self._early.take(group.context)
            down = list(self._down.values())
        for each in down:
            group.on_peer_down(each)
        for sender, message in early:
            group.on_control_message(sender, message)

    def remove_group(self, group: AttachedGroup) -> None:
        """Dispatch nothing to this group any more."""
        with self._lock:
            self._close_context(group.context)

    def leave_soon(
        self, ranks: tuple[int, ...], context: int, calls: Callable[[], dict[int, CallReport]] | None = None
    ) -> None:
        """A communicator of these world ranks was closed, and nothing was left to do on it.

        `calls` returns its last calls; None if no rank can need them. Goodbyes are sent together.
        """
        with self._lock:
            self._close_context(context)
            self._goodbyes.add(context, ranks, calls)
            self._goodbyes.remove(context, self.backend.rank)
            for sender, message in self._early.take(context):
                if isinstance(message, Goodbye):
                    self._goodbyes.remove(context, sender)
            count = len(self._goodbyes)
        if count == 1:
            runtime = self.backend.runtime
            runtime.call_at(runtime.now() + DELAY_S, self.send_goodbyes)
        elif count >= GOODBYES_MAX:
            self.send_goodbyes()

    def _close_context(self, context: int) -> None:
        self._groups.pop(context, None)
        self._reserved.discard(context)
        self._closed_contexts[context] = None
        if len(self._closed_contexts) > ENDED_CONTEXTS_MAX:
            self._closed_contexts.popitem(last=False)

    def add_service(self, service: Service) -> None:
        """Register a service: reply to the queries that waited for it, and dispatch those that come."""
        with self._lock:
            self._services[service.context] = service
            waiting = self._waiting_queries.pop(service.context, {})
            self._absent.pop(service.context, None)
            down = list(self._down.values())
        for each in down:
            service.on_peer_down(each)
        for sender, name in sorted(waiting.items()):
            self._on_service_query(sender, name, service)

    def remove_service(self, service: Service) -> None:
        """Unregister a service."""
        with self._lock:
            self._services.pop(service.context, None)

    def query_service(self, service: Service, rank: int) -> None:
        """Ask a rank whether it has this service; `on_present` or `on_absent` follows."""
        nearest = dict(list(service.progress.items())[-CONTEXTS_MAX:])
        self.send([rank], ServiceQuery(service.context, service.name or "", nearest))

    def has_context(self, context: int) -> bool:
        """Whether an open communicator of this rank uses the context."""
        return context in self._groups or context in self._reserved

    def groups(self) -> list[AttachedGroup]:
        """The open communicators of this rank."""
        with self._lock:
            return list(self._groups.values())

    def has_services(self) -> bool:
        """Whether this rank serves calls of others."""
        return bool(self._services)

    def leave(self, ranks: Iterable[int], context: int, calls: dict[int, CallReport]) -> None:
        """Say goodbye to world ranks, in every lane."""
        ranks = tuple(ranks)
        for lane in (Lane.BULK, Lane.CONTROL):
            self.send(ranks, Goodbye(context, lane, calls), lane)

    def send_goodbyes(self) -> None:
        """Send the goodbyes that wait to be batched."""
        with self._lock:
            by_rank, makers = self._goodbyes.take()
        named = {context for contexts in by_rank.values() for context in contexts}
        calls = {context: make() for context, make in makers.items() if context in named}
        for rank, contexts in by_rank.items():
            called = [context for context in contexts if context in calls]
            batches = [called[start : start + CALLED_MAX] for start in range(0, len(called), CALLED_MAX)]
            batches.append([context for context in contexts if context not in calls])
            for batch in filter(None, batches):
                known = {context: calls[context] for context in batch if context in calls}
                for lane in (Lane.BULK, Lane.CONTROL):
                    self.send((rank,), Goodbyes(tuple(batch), lane, known), lane)

    def watch(self, communicator: object, leave: Callable[[], None]) -> Dropped:
        """Call `leave` on another thread, or before the world leaves, when a communicator was dropped."""
        watched = Dropped.watch(communicator, leave, self._dropped.append)
        watched.also = when_dropped(communicator, self.leave_dropped)
        return watched

    def leave_dropped(self) -> None:
        """Leave the dropped groups, and send all goodbyes. A world does so first: nothing follows its own."""
        with self._leaving:
            while self._dropped:
                self._dropped.popleft().act()
            self.send_goodbyes()

    def send(self, ranks: Iterable[int], message: ControlMessage, lane: Lane = Lane.CONTROL) -> None:
        """Send a message to world ranks, without waiting. Ranks that are down are left out."""
        if self._goodbyes:
            self.send_goodbyes()
        data = self._encoded(message)
        for rank in ranks:
            if data is not None and rank != self.backend.rank and rank not in self._down:
                self.backend.post(rank, CONTROL_CONTEXT, Tags.CONTROL, data, lane)

    def reply(self, rank: int, message: ControlMessage, lane: Lane = Lane.CONTROL) -> None:
        """Send what a world rank asked for, unless _REPLIES_MAX replies to it are still on their way."""
        if self._goodbyes:
            self.send_goodbyes()
        if rank == self.backend.rank or rank in self._down or (data := self._encoded(message)) is None:
            return
        with self._lock:
            if self._replies_unsent[rank] >= _REPLIES_MAX:
                return
            self._replies_unsent[rank] += 1

        def on_sent() -> None:
            with self._lock:
                self._replies_unsent[rank] -= 1

        self.backend.start_send(rank, CONTROL_CONTEXT, Tags.CONTROL, data, lane=lane).notify(on_sent)

    def _encoded(self, message: ControlMessage) -> memoryview | None:
        """The bytes; None if peers would refuse them, which the bounds of the fields should exclude."""
        data = memoryview(encode(message))
        if data.nbytes <= CONTROL_BYTES_MAX:
            return data
        _log.error(
            "rank %d: dropped a control message of %d bytes; the limit is %d",
            self.backend.rank,
            data.nbytes,
            CONTROL_BYTES_MAX,
        )
        return None

    # -- receiving ----------------------------------------------------------------------------------------

    def _listen(self) -> bool:
        return self.backend.listen(CONTROL_CONTEXT, Tags.CONTROL, self._on_heard, self._on_end)

    def _on_heard(self, sender: int, data: bytes) -> None:
        self._dispatch(self._on_message, sender, data)

    def _on_end(self, error: UnisonoError) -> None:
        if isinstance(error, ClosedError):
            self._on_backend_closed()
            return
        runtime = self.backend.runtime
        self._report_unreceived(error)

        def again() -> None:
            self._listen()

        runtime.call_at(runtime.now() + _RETRY_S, again)

    def _on_backend_closed(self) -> None:
        with self._lock:
            groups, services = list(self._groups.values()), list(self._services.values())
        for group in groups:
            group.on_backend_closed()
        for service in services:
            service.on_backend_closed()
        self.deadlocks.close()

    def _report_unreceived(self, error: BaseException) -> None:
        rank = self.backend.rank
        self._fail_groups(
            rank, ProtocolError(f"rank {rank} could not receive a control message", cause=str(error))
        )

    def _receive_all(self, call: Call) -> Steps[None]:
        while True:
            request = self.backend.start_recv(ANY, CONTROL_CONTEXT, Tags.CONTROL, None)
            request.notify(call.wake)
            while not request.done:
                # A peer that gives up says why before it goes: that message must be dispatched first.
                while self._down_pending and not request.done and self._is_queue_empty():
                    self._dispatch(self._dispatch_down, self._down_pending.popleft())
                if not request.done:
                    yield
            if isinstance(request.error, PeerLost):
                continue  # the sender of a message died while the message was on its way
            if request.error is not None and not isinstance(request.error, ClosedError):
                yield from self._pause(call, request.error)
                continue
            if request.error is not None:
                self._on_backend_closed()
                return
            envelope = request.envelope
            assert envelope is not None
            self._dispatch(self._on_message, envelope.source, bytes(request.data or b""))

    def _pause(self, call: Call, error: BaseException) -> Steps[None]:
        """A message could not be received and is still queued: report it, and wait before the next try."""
        runtime = self.backend.runtime
        self._report_unreceived(error)
        until = runtime.now() + _RETRY_S
        runtime.call_at(until, call.wake)
        while runtime.now() < until:
            yield

    def _dispatch(self, handler: Callable[..., None], *event: object) -> None:
        """Call a handler. Its failure must not stop the receiving: other ranks would wait for ever."""
        try:
            handler(*event)
        except Exception as error:
            _log.exception("rank %d: control failed", self.backend.rank)
            self._fail_groups(
                self.backend.rank,
                ProtocolError(
                    f"rank {self.backend.rank} could not process a control message", cause=repr(error)
                ),
            )

    def _on_message(self, sender: int, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError as error:
            self._fail_groups(
                sender, ProtocolError(f"rank {sender} sent a malformed control message", cause=error.cause)
            )
            return
        if isinstance(message, GroupMessage):
            self._on_group_message(sender, message)
        elif isinstance(message, Goodbyes):
            self._on_goodbyes(sender, message)
        elif isinstance(message, ServiceMessage):
            self._on_service_message(sender, message)
        else:
            self.deadlocks.on_message(sender, message)

    def _on_goodbyes(self, sender: int, message: Goodbyes) -> None:
        with self._lock:  # once for all: most of these groups were closed here, too
            late = [context for context in message.contexts if context in self._closed_contexts]
            for context in late:
                self._goodbyes.remove(context, sender)
        if len(late) < len(message.contexts):
            for context in sorted(set(message.contexts).difference(late)):
                calls = message.calls.get(context, {})
                self._on_group_message(sender, Goodbye(context, message.lane, calls))

    def _on_group_message(self, sender: int, message: GroupMessage) -> None:
        with self._lock:
            group = self._groups.get(message.context)
            is_late = message.context in self._closed_contexts
            if is_late and isinstance(message, Goodbye):
                self._goodbyes.remove(message.context, sender)
            if group is None and not is_late and not isinstance(message, StallQuery | StallReply):
                self._early.keep(sender, message.context, encode(message))
        if group is not None:
            group.on_control_message(sender, message)
        elif isinstance(message, StallQuery):
            self.reply(sender, StallReply(message.context, message.sequence, has_called=False))
            if is_late:
                # The sender did not keep our goodbye: it came before the sender had made the group.
                for lane in Lane:
                    self.reply(sender, Goodbye(message.context, lane), lane)

    def _fail_groups(self, sender: int, error: ProtocolError) -> None:
        for group in self.groups():
            group.on_control_message(sender, GroupFailure.of(error, group.context))

    def _is_queue_empty(self) -> bool:
        """Whether no message waits behind the one that is being received."""
        queued = self.backend.probe(ANY, CONTROL_CONTEXT, Tags.CONTROL)
        return not queued.done and queued.cancel()

    def _on_peer_down(self, down: PeerDown) -> None:
        self._down_pending.append(down)
        self._call.wake()

    def _dispatch_down(self, down: PeerDown) -> None:
        with self._lock:
            if down.rank in self._down:
                return
            self._down[down.rank] = down
            groups, services = list(self._groups.values()), list(self._services.values())
        for group in groups:
            group.on_peer_down(down)
        for service in services:
            service.on_peer_down(down)

    # -- services -----------------------------------------------------------------------------------------

    def _on_service_message(self, sender: int, message: ServiceMessage) -> None:
        with self._lock:
            service = self._services.get(message.context)
            is_waiting = sender in self._waiting_queries.get(message.context, {})
            has_space = self._queries_of(sender) < _QUERIES_MAX
            if service is None and isinstance(message, ServiceQuery) and has_space:
                self._waiting_queries.setdefault(message.context, {})[sender] = message.name
        match message:
            case ServiceQuery() if service is not None:
                self._on_service_query(sender, message.name, service)
            case ServiceQuery() if not is_waiting:  # else an earlier query of this rank will be replied to
                until = self.backend.runtime.now() + (0 if message.context in self._absent else GRACE_S)
                self._await_service(sender, message, until)
            case ServiceFound() if service is not None:
                service.on_present(sender, printable(message.name))
            case ServiceMissing() if service is not None:
                service.on_absent(sender)

    def _on_service_query(self, sender: int, name: str, service: Service) -> None:
        self.reply(sender, ServiceFound(service.context, service.name or ""))
        service.on_present(sender, printable(name))

    def _await_service(self, sender: int, query: ServiceQuery, until: float) -> None:
        """Reply "missing" once the service cannot come any more, or did not come by `until`."""
        runtime = self.backend.runtime
        now = runtime.now()
        with self._lock:
            is_waiting = sender in self._waiting_queries.get(query.context, {})
            is_beyond = any(
                context in self._groups and self._groups[context].next_sequence > sequence
                for context, sequence in query.progress.items()
            )
            if is_waiting and now >= until:
                self._absent[query.context] = None
                if len(self._absent) > _ABSENT_MAX:
                    self._absent.popitem(last=False)
        if not is_waiting or is_beyond or now >= until:
            self._reply_missing(sender, query.context)
        else:
            runtime.call_at(min(until, now + GRACE_LOOK_S), lambda: self._await_service(sender, query, until))

    def _reply_missing(self, sender: int, context: int) -> None:
        with self._lock:
            waiting = self._waiting_queries.get(context, {})
            waiting.pop(sender, None)
            if not waiting:
                self._waiting_queries.pop(context, None)
            is_here = context in self._services
        if not is_here:
            self.reply(sender, ServiceMissing(context))

    def _queries_of(self, sender: int) -> int:
        """In how many contexts a rank waits for a service here; the caller holds the lock."""
        return sum(sender in waiting for waiting in self._waiting_queries.values())
