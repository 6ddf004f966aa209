"""The serving side of an agent: calls in, answers out.

Serving goes on whatever a handler raises and whatever a peer sends. The thread that removes a call from its
caller's table is the one that answers it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from unisono._native import forbid_blocking, frame_value
from unisono.core.codec import path_of
from unisono.core.runtime import NEVER, Deadline, Killed, Runtime, Waiting
from unisono.errors import ProtocolError, UsageError
from unisono.messaging.backend import GRACE_LOOK_S, GRACE_S
from unisono.rpc.blobs import InboundBudget, InboundValue, UnreadBlobs, discard
from unisono.rpc.frame import ACK, ANSWER, ITEM, UNWANTED, Frame, arguments_of, failure, pack, short
from unisono.rpc.peers import QUEUE_MAX, Peer, Peers
from unisono.rpc.pool import Loop, Pool, Reader, run_virtual
from unisono.rpc.registry import Handler, Registry
from unisono.rpc.streams import WINDOW, Credit
from unisono.rpc.transport import RpcTransport

__all__ = ["INLINE_S", "Incoming", "Server", "current", "here"]

_log = logging.getLogger("unisono.rpc")

# Notifications are acknowledged in batches of this many.
_NOTIFICATIONS_PER_ACK: Final = 32
# Bound per caller on queued calls and on unread answers: twice QUEUE_MAX, so a correct caller never
# reaches it.
_QUEUE_MAX: Final = 2 * QUEUE_MAX
# An inline handler that takes longer is logged: to wake a thread of the pool takes a fraction of it.
INLINE_S: Final = 0.005
# While the agent closes: the first and the longest pause between two checks whether all is answered.
_DRAIN_LOOK_MIN_S: Final = 0.0002
_DRAIN_LOOK_MAX_S: Final = 0.01

_NONE: Final = object()

current: ContextVar[Incoming | None] = ContextVar("unisono-rpc-incoming", default=None)


def here() -> Incoming | None:
    """The call that the calling code serves; None outside of handlers."""
    return current.get()


class Incoming:
    """A call that came in, as its handler sees it. `source` is the caller's rank in the communicator."""

    __slots__ = (
        "args",
        "call",
        "credit",
        "deadline",
        "handler",
        "held_bytes",
        "is_cancelled",
        "kwargs",
        "name",
        "on_cancel",
        "runtime",
        "source",
    )

    def __init__(self, runtime: Runtime, source: int, call: int, name: str, deadline: Deadline) -> None:
        self.runtime = runtime
        self.source = source
        self.call = call
        self.name = name
        self.deadline = deadline
        self.handler: Any = None
        self.args: Any = ()
        self.kwargs: Any = {}
        self.credit: Any = None  # of a stream
        self.is_cancelled = False
        self.held_bytes = 0  # of its blobs, until it runs
        # Called if the caller gives up: cancels the calls that the handler waits for, for example.
        self.on_cancel: dict[Any, Callable[[], object]] = {}

    def remaining(self) -> float | None:
        """Seconds until the caller gives up; None if it never does."""
        return self.deadline.remaining(self.runtime.now())

    def cancel(self) -> None:
        """The caller no longer waits."""
        self.is_cancelled = True
        for call in list(self.on_cancel.values()):
            call()

    def __repr__(self) -> str:
        return f"<Incoming {self.name!r} from rank {self.source}>"


class Server:
    """Serves the calls of all peers with the handlers of a registry, at most `handlers` at a time.

    `progress` is the number of the next collective by context: see `_is_settled`. `reader` is for the pool.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: RpcTransport,
        peers: Peers,
        registry: Registry,
        progress: Callable[[], dict[int, int]],
        handlers: int,
        reader: Reader | None,
    ) -> None:
        self._runtime = runtime
        self._transport = transport
        self._peers = peers
        self._registry = registry
        self._is_closing = False
        self._settled_at = runtime.now() + GRACE_S
        self._progress = progress
        self._progress_first = progress()
        self._lock = threading.Lock()
        # By caller.
        self._tables: list[dict[int, Incoming]] = [{} for _ in peers]
        # Cancelled calls that may come later: another thread has taken them and not dispatched yet.
        self._cancelled_early: list[dict[int, None]] = [{} for _ in peers]
        self._on_cancelled: list[Callable[[int, int], None]] = []
        self._notifications: list[int] = [0] * len(peers)
        self._notifications_done: list[int] = [0] * len(peers)
        # Calls of names that are not exposed, while they may still be.
        self._early: list[Incoming] = []
        self._is_early_watched = False
        self._unread = UnreadBlobs(len(peers))
        self._budget = InboundBudget()
        self.pool = Pool(runtime, self.run, handlers, f"unisono-rpc-{peers.own.world_rank}", reader)
        self.loop: Loop | None = None  # runs the async handlers, once there is one
        self._slow_inline: set[str] = set()  # inline handlers that were logged as slow
        peers.watch_lost(self._on_lost)

    # -- frames -------------------------------------------------------------------------------------------

    def on_ask(self, peer: Peer, frame: Frame) -> None:
        """A call came."""
        source, call, timeout_s = peer.rank, frame.call, frame.timeout_s
        deadline = NEVER
        if timeout_s is not None:
            deadline = Deadline(self._runtime.now() + timeout_s, timeout_s)
        incoming = Incoming(self._runtime, source, call, frame.name, deadline)
        if frame.count:
            incoming.credit = Credit(min(frame.count, WINDOW), self._transport.wake)
        table = self._tables[source]
        if call:
            if call in table:
                return  # no agent uses a number twice
            table[call] = incoming
            if self._cancelled_early[source].pop(call, _NONE) is not _NONE:
                table.pop(call, None)
                discard(self._transport, source, frame)
                return
        else:
            self._notifications[source] += 1
        is_crowded = len(table) + self._notifications[source] > _QUEUE_MAX
        if is_crowded or self._unread.has_more_than(source, _QUEUE_MAX) or self.pool.is_full:
            self._refuse(incoming, frame, "busy", "too many calls wait there")
        elif self._is_closing and not peer.calls:
            # A peer that this agent calls may have to call back, so that this agent can finish.
            self._refuse(incoming, frame, "closed", "")
        elif frame.blob_bytes:
            incoming.held_bytes = frame.blob_bytes
            self._budget.admit(frame.blob_bytes, partial(self._receive_arguments, incoming, frame))
        else:
            try:
                value = frame_value(frame.data)
            except Exception as error:
                self._reject_arguments(incoming, error)
            else:
                self._on_arguments(incoming, value)

    def watch_cancelled(self, on_cancelled: Callable[[int, int], None]) -> None:
        """Tell of every call, by rank and number, that its caller has given up; it may have been answered."""
        self._on_cancelled.append(on_cancelled)

    def on_cancel(self, source: int, call: int) -> None:
        """A caller no longer waits."""
        # Before the table, into which `on_ask` looks first: one of the two sees the other.
        early = self._cancelled_early[source]
        early[call] = None
        incoming = self._tables[source].pop(call, None)
        if incoming is not None:
            early.pop(call, None)
            incoming.cancel()
        elif len(early) > QUEUE_MAX:  # most of them had been answered
            with contextlib.suppress(KeyError, RuntimeError):
                del early[next(iter(early))]
        self._unread.cancel(source, call)
        for tell in self._on_cancelled:
            tell(source, call)

    def on_more(self, peer: Peer, frame: Frame) -> None:
        """The reader of a stream wants more items."""
        incoming = self._tables[peer.rank].get(frame.call)
        if incoming is not None and incoming.credit is not None:
            credit = incoming.credit
            credit.count = min(WINDOW, credit.count + frame.count)
            credit.notify()

    def on_exposed(self) -> None:
        """Another function is exposed: it may have been called too early."""
        with self._lock:
            early, self._early = self._early, []
        for incoming in early:
            self._look_up(incoming)

    def _on_lost(self, source: int) -> None:
        """A caller is gone: its calls need no answers."""
        for call in list(self._tables[source]):
            self.on_cancel(source, call)
        self._unread.cancel_all(source)

    # -- endings ------------------------------------------------------------------------------------------

    def refuse_calls(self) -> None:
        """The agent begins to close: only calls are served that it may depend on itself."""
        self._is_closing = True

    def drain(self, deadline: Deadline, is_all_sent: Callable[[], bool]) -> None:
        """Wait until all that came is served and all is sent; a handler that closes does not wait."""
        if self.pool.is_mine or (self.loop is not None and self.loop.is_mine):
            return
        pause_s = _DRAIN_LOOK_MIN_S
        while not ((self._is_idle() and is_all_sent()) or deadline.has_passed(self._runtime.now())):
            self._runtime.sleep(pause_s)
            pause_s = min(2 * pause_s, _DRAIN_LOOK_MAX_S)

    def _is_idle(self) -> bool:
        # In this order: a handler that ends leaves its answer among the unread ones.
        are_served = not (any(self._tables) or any(self._notifications))
        return are_served and self.pool.is_idle() and self._unread.are_all_read()

    def close(self, timeout: float, waiting: Waiting) -> None:
        """Answer no more calls. The pool is closed separately, after the transport that its threads read."""
        for source in range(len(self._tables)):
            self._on_lost(source)
        if self.loop is not None:
            self.loop.close(timeout, waiting)

    # -- before a handler runs ----------------------------------------------------------------------------

    def _look_up(self, incoming: Incoming) -> None:
        handler = self._registry.find(incoming.name)
        if handler is not None:
            incoming.handler = handler
            if handler.is_async and not self._runtime.is_virtual:
                self._run_on_loop(incoming, handler)
            elif handler.is_inline and self._transport.is_read_by_caller:
                self.run(incoming)
            else:
                self.pool.put(incoming)
        elif not incoming.is_cancelled and not self._is_settled():
            with self._lock:
                self._early.append(incoming)
                must_watch, self._is_early_watched = not self._is_early_watched, True
            if must_watch:
                self._watch_early()
        else:
            self._fail(incoming, "unknown", self._registry.describe())

    def _is_settled(self) -> bool:
        """Whether this rank has exposed all it will: the grace period is over, or it called a collective."""
        return (
            self._runtime.now() >= self._settled_at
            or self._progress() != self._progress_first
            or self._is_closing
        )

    def _watch_early(self) -> None:
        """Check soon whether early calls can be answered."""

        def look() -> None:
            self._is_early_watched = False
            self.on_exposed()

        self._runtime.call_at(min(self._settled_at, self._runtime.now() + GRACE_LOOK_S), look)

    def _refuse(self, incoming: Incoming, frame: Frame, kind: str, what: str) -> None:
        """Fail a call before its blobs are received. The failure, if there is one, informs their sender."""
        self._fail(incoming, kind, what)
        if frame.blob_bytes:
            discard(self._transport, incoming.source, frame)
            if not incoming.call:
                self._peers.send(incoming.source, short(UNWANTED, count=frame.number))

    def _receive_arguments(self, incoming: Incoming, frame: Frame) -> None:
        def on_end(value: Any, error: BaseException | None) -> None:
            incoming.on_cancel.pop(InboundValue, None)
            if error is None:
                self._on_arguments(incoming, value)
            else:
                self._reject_arguments(incoming, error)

        inbound = InboundValue(self._transport, incoming.source, frame, on_end)
        incoming.on_cancel[InboundValue] = inbound.cancel
        if inbound.is_done:
            incoming.on_cancel.pop(InboundValue, None)
        if incoming.is_cancelled:
            inbound.cancel()

    def _on_arguments(self, incoming: Incoming, value: Any) -> None:
        try:
            incoming.args, incoming.kwargs = arguments_of(value)
        except ProtocolError as error:
            self._reject_arguments(incoming, error)
            return
        self._look_up(incoming)

    def _reject_arguments(self, incoming: Incoming, error: BaseException) -> None:
        if not incoming.is_cancelled:
            self._fail(incoming, "raised", str(error), type(error).__name__)
        self._release_budget(incoming)

    def _release_budget(self, incoming: Incoming) -> None:
        nbytes, incoming.held_bytes = incoming.held_bytes, 0
        if nbytes:
            self._budget.release(nbytes)

    # -- running ------------------------------------------------------------------------------------------

    def run(self, incoming: Incoming) -> None:
        """Run a handler on this thread, and answer."""
        if incoming.held_bytes:
            self._release_budget(incoming)
        if not self._may_run(incoming):
            return
        token = current.set(incoming)
        try:
            handler = incoming.handler
            if (bound := self._bound(incoming, handler)) is None:
                return
            if handler.is_inline:
                value = self._run_inline(incoming, handler, bound)
            else:
                value = handler.fn(*bound[0], **bound[1])
            if handler.is_async:  # in virtual time only: see _look_up
                value = run_virtual(value)
            if handler.is_stream:
                value = self._stream(incoming, value)
            self._answer(incoming, value)
        except Killed:
            raise
        except BaseException as error:  # a handler's SystemExit must not end the serving thread either
            self._raised(incoming, error)
        finally:
            current.reset(token)

    def _run_inline(self, incoming: Incoming, handler: Handler, bound: Any) -> Any:
        """Run a handler that must not wait, and log it once if it took long."""
        began = self._runtime.now()
        was_forbidden = forbid_blocking(True)
        try:
            return handler.fn(*bound[0], **bound[1])
        finally:
            forbid_blocking(was_forbidden)
            took = self._runtime.now() - began
            if took > INLINE_S and incoming.name not in self._slow_inline:
                self._slow_inline.add(incoming.name)
                _log.warning(
                    "the inline handler %r took %.3g s, and others wait: expose it without inline=True",
                    incoming.name,
                    took,
                )

    def _run_on_loop(self, incoming: Incoming, handler: Handler) -> None:
        with self._lock:
            if self.loop is None:
                self.loop = Loop(self._runtime, f"unisono-rpc-loop-{self._peers.own.world_rank}")

        async def job() -> None:
            self._release_budget(incoming)
            if not self._may_run(incoming):
                return
            current.set(incoming)
            try:
                if (bound := self._bound(incoming, handler)) is not None:
                    made = handler.fn(*bound[0], **bound[1])
                    is_stream = handler.is_stream
                    self._answer(incoming, await (self._stream_async(incoming, made) if is_stream else made))
            except BaseException as error:  # of a call that was cancelled it is not sent
                self._raised(incoming, error)

        def on_task(cancel: Callable[[], object]) -> None:
            incoming.on_cancel[job] = cancel
            if incoming.is_cancelled:
                cancel()

        self.loop.run(job(), on_task)

    def _may_run(self, incoming: Incoming) -> bool:
        if incoming.is_cancelled:
            self._acknowledge(incoming)
            return False
        if incoming.deadline.at is not None and incoming.deadline.has_passed(self._runtime.now()):
            self._fail(incoming, "deadline", "")
            return False
        return True

    def _bound(self, incoming: Incoming, handler: Handler) -> Any:
        """The checked arguments; None if the call was refused."""
        if handler.is_stream != (incoming.credit is not None):
            words = "a generator. Next: read it by agent.stream or, of an object, by proxy.stream"
            if not handler.is_stream:
                words = "no generator. Next: call it by agent.call or, of an object, by the proxy"
            self._fail(incoming, "arguments", f"it is {words}", "TypeError")
            return None
        try:
            return handler.parameters.bind(incoming.args, incoming.kwargs)
        except TypeError as error:
            self._fail(incoming, "arguments", str(error), "TypeError")
            return None

    def _stream(self, incoming: Incoming, items: Any) -> int:
        """Send the items of a generator, as far as its reader gives credit; returns how many there were."""
        credit, rank = incoming.credit, self._peers.own.world_rank
        waiting = Waiting(rank, (incoming.source,), f"the stream {incoming.name!r}")
        incoming.on_cancel[Credit] = credit.notify
        index = 0
        try:
            for index, value in enumerate(items, 1):
                while credit.count <= 0 and not incoming.is_cancelled:
                    credit.is_done = False
                    if credit.count <= 0 and not incoming.is_cancelled:
                        self._transport.wait_outside_slot(credit, incoming.deadline, waiting)
                if incoming.is_cancelled:
                    break
                credit.count -= 1
                self._send_item(incoming, index - 1, value)
        finally:
            items.close()
        return index

    async def _stream_async(self, incoming: Incoming, items: Any) -> int:
        """As `_stream`, on the event loop; it is cancelled with the call."""
        credit, index = incoming.credit, 0
        try:
            async for value in items:
                while credit.count <= 0:
                    changed = credit.next_change()
                    if credit.count <= 0:
                        await changed
                credit.count -= 1
                self._send_item(incoming, index, value)
                index += 1
        finally:
            await items.aclose()
        return index

    # -- answers ------------------------------------------------------------------------------------------

    def _send_item(self, incoming: Incoming, index: int, value: Any) -> None:
        source, number = incoming.source, self._transport.next_number()
        frame, _, blobs = pack(ITEM, incoming.call, number, value, None, count=index)
        outbound = self._unread.add(source, incoming.call, number, blobs) if blobs else None
        if incoming.is_cancelled:  # by now: the cancellation may not have found these blobs
            self._unread.cancel(source, incoming.call)
            return
        incoming.credit.sent = index + 1
        self._peers.send(source, frame, outbound=outbound)

    def _answer(self, incoming: Incoming, value: Any) -> None:
        call, source = incoming.call, incoming.source
        if not call:
            self._acknowledge(incoming)
            return
        try:
            frame, number, blobs = pack(ANSWER, call, self._transport.next_number(), value, _place)
        except UsageError as error:
            self._fail(incoming, "raised", f"its result cannot travel: {error}", "UsageError")
            return
        outbound = self._unread.add(source, call, number, blobs) if blobs else None
        if self._tables[source].pop(call, None) is None:  # cancelled: these blobs were not found then
            self._unread.cancel(source, call)
            return
        self._peers.send(source, frame, is_more=self.pool.has_jobs, outbound=outbound)

    def _raised(self, incoming: Incoming, error: BaseException) -> None:
        kind = type(error)
        is_builtin = kind.__module__ == "builtins"
        name = kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
        try:
            # Joined to a plain text: a subclass may have odd methods.
            text, trace = "".join([str(error)]), "".join(traceback.format_exception(error))
        except BaseException:  # its own __str__ may raise anything
            text, trace = "an exception whose text cannot be read", ""
        self._fail(incoming, "raised", text, name, trace)

    def _fail(
        self, incoming: Incoming, kind: str, what: str, type_name: str = "", traceback_text: str = ""
    ) -> None:
        call, source = incoming.call, incoming.source
        if not call:
            self._acknowledge(incoming)
            _log.warning("a notification of %r from rank %d failed: %s %s", incoming.name, source, kind, what)
        elif self._tables[source].pop(call, None) is not None:
            items = 0 if incoming.credit is None else incoming.credit.sent
            self._peers.send(source, failure(call, kind, what, type_name, traceback_text, items))

    def _acknowledge(self, incoming: Incoming) -> None:
        """A notification has ended: its sender may send another. Calls need no acknowledgement."""
        if incoming.call:
            return
        source = incoming.source
        with self._lock:
            self._notifications[source] -= 1
            self._notifications_done[source] += 1
            if self._notifications_done[source] < _NOTIFICATIONS_PER_ACK:
                return
            count, self._notifications_done[source] = self._notifications_done[source], 0
        self._peers.send(source, short(ACK, count=count))


def _place(steps: Sequence[str]) -> str:
    """Where a part of a result stands."""
    return path_of(steps, "the result")
