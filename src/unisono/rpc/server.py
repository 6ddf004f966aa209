"""The serving side of an agent: calls in, answers out.

Knows which calls are queued, running or being answered, and what becomes of each. Does not know how frames
travel, nor anything about calls that are made from here. Whatever a handler does, or a peer says, it goes on.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from unisono.core.clock import NEVER, Deadline, Killed, Waiting
from unisono.core.codec import place
from unisono.errors import ProtocolError, UnisonoError, UsageError
from unisono.messaging.backend import GRACE_LOOK_S, GRACE_S
from unisono.rpc.following import InboundParts, OutboundParts
from unisono.rpc.frames import (
    Ack,
    Answer,
    Ask,
    Failure,
    Item,
    PackedAnswer,
    PackedAsk,
    PackedItem,
    encode,
)
from unisono.rpc.incoming import Incoming, current
from unisono.rpc.objects import Objects
from unisono.rpc.payload import is_plain, pack, places, unpack
from unisono.rpc.peers import QUEUE_MAX
from unisono.rpc.pool import Pool
from unisono.rpc.registry import Handler, Kind, Registry
from unisono.rpc.streams import WINDOW, Credit

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent
    from unisono.rpc.loop import Loop

__all__ = ["Server"]

_log = logging.getLogger("unisono.rpc")

# Arrays that came for calls which do not run yet. What is beyond waits where it is.
_HELD_BYTES_MAX: Final = 256 << 20
# Notifications are confirmed so many at a time.
_NOTES_PER_ACK: Final = 32
# So many answers are looked at, whether they have arrived, whenever one is sent.
_LOOKS: Final = 8


class Server:
    """What an agent does for others."""

    def __init__(
        self, agent: Agent, registry: Registry, size: int, progress: Callable[[], dict[int, int]]
    ) -> None:
        self.agent = agent
        self.runtime = agent.runtime
        self.pool: Pool
        self._registry = registry
        self._settled_at = self.runtime.now() + GRACE_S
        self._progress = progress
        self._progress_first = progress()
        self._lock = threading.Lock()
        # By caller: who takes a call out of its table may answer it.
        self._tables: list[dict[int, Incoming]] = [{} for _ in range(size)]
        self._notes: list[int] = [0] * size
        self._notes_done: list[int] = [0] * size
        # Calls of names that are not exposed, while they may still be.
        self._early: list[Incoming] = []
        self._is_early_watched = False
        # By caller: what was sent and may not have arrived, by call, or by the negative number of an item.
        self._answers: list[OrderedDict[int, OutboundParts]] = [OrderedDict() for _ in range(size)]
        self._held_bytes = 0
        self._held_back: deque[tuple[Incoming, PackedAsk]] = deque()
        self._loop: Loop | None = None
        self.objects = Objects()

    # -- what comes in ------------------------------------------------------------------------------------

    def on_ask(self, source: int, ask: Ask | PackedAsk) -> None:
        """A call came."""
        timeout_s = ask.timeout_s
        deadline = NEVER
        if timeout_s is not None:
            deadline = Deadline(self.runtime.now() + timeout_s, timeout_s)
        incoming = Incoming(self, source, ask.call, ask.name, deadline)
        if ask.window:
            incoming.credit = Credit(max(1, min(ask.window, WINDOW)), self.agent.post.wake)
        table = self._tables[source]
        if ask.call:
            if ask.call in table:
                return  # no agent uses a number twice
            table[ask.call] = incoming
        else:
            self._notes[source] += 1
        is_crowded = len(table) + self._notes[source] > 2 * QUEUE_MAX or self._has_untaken(source)
        if is_crowded or self.pool.is_full:
            self._fail(incoming, "busy", "too many calls wait there")
        elif self.agent.is_closing and not self._is_nested(source):
            self._fail(incoming, "closed", "")
        elif isinstance(ask, Ask):
            incoming.args = ask.args
            self._look_up(incoming)
        else:
            self._take(incoming, ask)

    def on_cancel(self, source: int, call: int) -> None:
        """A caller no longer waits."""
        incoming = self._tables[source].pop(call, None)
        if incoming is not None:
            incoming.cancel()
        with self._lock:
            sending = self._answers[source].pop(call, None)
        if sending is not None:
            sending.cancel()

    def on_more(self, source: int, call: int, count: int) -> None:
        """The reader of a stream wants more."""
        incoming = self._tables[source].get(call)
        if incoming is not None and incoming.credit is not None:
            credit = incoming.credit
            credit.count = min(WINDOW, credit.count + max(0, count))
            credit.look()

    def on_gone(self, source: int) -> None:
        """A caller is gone: nobody waits for its calls, or holds its objects."""
        self.objects.on_gone(source)
        table = self._tables[source]
        for call in list(table):
            self.on_cancel(source, call)
        with self._lock:
            answers, self._answers[source] = self._answers[source], OrderedDict()
        for sending in answers.values():
            sending.cancel()

    def on_exposed(self) -> None:
        """A function can be called now: perhaps it was called too early."""
        with self._lock:
            early, self._early = self._early, []
        for incoming in early:
            self._look_up(incoming)

    # -- endings ------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether every call that came has been answered."""
        if any(self._tables) or not self.pool.is_idle():
            return False
        with self._lock:  # only now: a handler that ends leaves its answer here
            answers = [sending for kept in self._answers for sending in kept.values()]
        return all(sending.is_done() for sending in answers)

    def close(self, timeout: float, waiting: Waiting) -> None:
        """Answer nobody any more."""
        for source in range(len(self._tables)):
            self.on_gone(source)
        if self._loop is not None:
            self._loop.close(timeout, waiting)

    # -- on the way to a handler --------------------------------------------------------------------------

    def _is_nested(self, source: int) -> bool:
        """Whether a call may be part of what this agent finishes before it closes."""
        return self.agent.has_calls_to(source)

    def _look_up(self, incoming: Incoming) -> None:
        handler = self._registry.find(incoming.name)
        if handler is not None:
            incoming.handler = handler
            if handler.kind.is_async and not self.runtime.is_virtual:
                self._run_on_loop(incoming, handler)
            else:
                self.pool.put(incoming)
        elif not incoming.is_cancelled and not self._is_settled():
            with self._lock:
                self._early.append(incoming)
                must_watch, self._is_early_watched = not self._is_early_watched, True
            if must_watch:
                self._watch_early()
        else:
            self._fail(incoming, "unknown", self._registry.shown())

    def _is_settled(self) -> bool:
        """Whether all is exposed that will be: long ago, or its rank has gone on to a collective."""
        return (
            self.runtime.now() >= self._settled_at
            or self._progress() != self._progress_first
            or self.agent.is_closing
        )

    def _watch_early(self) -> None:
        """Look now and then whether those who called too early can be answered."""

        def look() -> None:
            self._is_early_watched = False
            self.on_exposed()

        self.runtime.call_at(min(self._settled_at, self.runtime.now() + GRACE_LOOK_S), look)

    def _take(self, incoming: Incoming, ask: PackedAsk) -> None:
        """Take what follows a call, as soon as there may be more of it here."""
        nbytes = ask.body.piece_bytes + sum(ask.body.sizes)
        incoming.held_bytes = max(0, nbytes)
        with self._lock:
            if self._held_bytes and self._held_bytes + nbytes > _HELD_BYTES_MAX:
                self._held_back.append((incoming, ask))
                return
            self._held_bytes += incoming.held_bytes
        self._begin_taking(incoming, ask)

    def _begin_taking(self, incoming: Incoming, ask: PackedAsk) -> None:
        agent = self.agent
        try:
            memory = places(ask.body)
        except (ProtocolError, MemoryError) as error:
            self._fail(incoming, "raised", str(error), type(error).__name__)
            self._let_in(incoming)
            return

        def then(error: BaseException | None) -> None:
            incoming.on_cancel.pop(InboundParts, None)
            if error is None:
                self._unpack(incoming, ask, memory)
                return
            if not incoming.is_cancelled:
                self._fail(incoming, "raised", str(error), type(error).__name__)
            self._let_in(incoming)

        if not memory:
            then(None)
            return
        taking = InboundParts(agent.post, incoming.source, ask.number, memory, then)
        incoming.on_cancel[InboundParts] = taking.cancel
        if taking.is_done:
            incoming.on_cancel.pop(InboundParts, None)
        if incoming.is_cancelled:
            taking.cancel()

    def _let_in(self, incoming: Incoming) -> None:
        """A call begins to run, or never will: others may come."""
        nbytes, incoming.held_bytes = incoming.held_bytes, 0
        if not nbytes:
            return
        ready: list[tuple[Incoming, PackedAsk]] = []
        with self._lock:
            self._held_bytes -= nbytes
            while self._held_back:
                more = self._held_back[0][0].held_bytes
                if self._held_bytes and self._held_bytes + more > _HELD_BYTES_MAX:
                    break
                self._held_bytes += more
                ready.append(self._held_back.popleft())
        for one, ask in ready:
            self._begin_taking(one, ask)

    def _unpack(self, incoming: Incoming, ask: PackedAsk, came: Any) -> None:
        try:
            args, kwargs = unpack(ask.body, came)
            if type(args) is not list or type(kwargs) is not dict or not all(type(k) is str for k in kwargs):
                raise ProtocolError("a malformed call")
        except (UnisonoError, ValueError, TypeError) as error:
            self._fail(incoming, "raised", str(error), "ProtocolError")
            self._let_in(incoming)
            return
        incoming.args, incoming.kwargs = args, kwargs
        self._look_up(incoming)

    # -- running ------------------------------------------------------------------------------------------

    def run(self, incoming: Incoming) -> None:
        """Run a handler on this thread and answer."""
        if incoming.held_bytes:
            self._let_in(incoming)
        if not self._may_run(incoming):
            return
        token = current.set(incoming)
        try:
            handler = incoming.handler
            if (checked := self._checked(incoming, handler)) is None:
                return
            value = handler.fn(*checked[0], **checked[1])
            if handler.kind is Kind.ASYNC:
                value = _driven(value)
            elif handler.kind.is_stream:
                items = value if handler.kind is Kind.STREAM else _driven_items(value)
                value = self._stream(incoming, items)
            self._answer(incoming, value)
        except Killed:
            raise
        except BaseException as error:  # a handler's SystemExit must not end the serving thread either
            self._raised(incoming, error)
        finally:
            current.reset(token)

    def _run_on_loop(self, incoming: Incoming, handler: Handler) -> None:
        with self._lock:
            if self._loop is None:
                from unisono.rpc.loop import Loop  # asyncio: only who has such handlers pays for it

                self._loop = Loop(self.runtime, f"unisono-rpc-loop-{self.agent.world_rank}")

        async def job() -> None:
            import asyncio

            self._let_in(incoming)
            if not self._may_run(incoming):
                return
            current.set(incoming)
            try:
                if (checked := self._checked(incoming, handler)) is not None:
                    made = handler.fn(*checked[0], **checked[1])
                    is_stream = handler.kind.is_stream
                    self._answer(incoming, await (self._stream_async(incoming, made) if is_stream else made))
            except asyncio.CancelledError:
                self._fail(incoming, "closed", "")
            except BaseException as error:
                self._raised(incoming, error)

        def on_task(cancel: Callable[[], object]) -> None:
            incoming.on_cancel[job] = cancel
            if incoming.is_cancelled:
                cancel()

        self._loop.run(job(), on_task)

    @property
    def loop(self) -> Loop | None:
        """Where async handlers run, once there were any."""
        return self._loop

    def slot_of_thread(self) -> Pool | None:
        """The pool whose slot the calling thread has, if it has one."""
        return self.pool if self.pool.is_mine else None

    def _may_run(self, incoming: Incoming) -> bool:
        if incoming.is_cancelled:
            self._note_done(incoming)
            return False
        if incoming.deadline.at is not None and incoming.deadline.has_passed(self.runtime.now()):
            self._fail(incoming, "deadline", "")
            return False
        return True

    def _stream(self, incoming: Incoming, items: Any) -> int:
        """Send what a generator gives, no faster than it is wanted; returns how many items there were."""
        credit, agent = incoming.credit, self.agent
        waiting = Waiting(agent.world_rank, (incoming.source,), f"the stream {incoming.name!r}")
        incoming.on_cancel[Credit] = credit.look
        index = 0
        try:
            for index, value in enumerate(items, 1):
                while credit.count <= 0 and not incoming.is_cancelled:
                    credit.is_done = False
                    if credit.count <= 0 and not incoming.is_cancelled:
                        agent.wait_for(credit, incoming.deadline, waiting)
                if incoming.is_cancelled:
                    break
                credit.count -= 1
                self._send_item(incoming, index - 1, value)
        finally:
            items.close()
        return index

    async def _stream_async(self, incoming: Incoming, items: Any) -> int:
        """The same on the loop; a reader that is gone cancels it."""
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

    def _send_item(self, incoming: Incoming, index: int, value: Any) -> None:
        call, source, agent = incoming.call, incoming.source, self.agent
        if is_plain((value,)):
            agent.tell(source, encode(Item(call, index, value)))
            return
        body, parts = pack(value)
        number = agent.next_number()
        agent.tell(source, encode(PackedItem(call, index, number, body)))
        if parts:
            sending = OutboundParts(agent.post, source, number, parts)
            self._keep(source, -number, sending)
            incoming.on_cancel[sending] = sending.cancel

    def _has_untaken(self, source: int) -> bool:
        """Whether a caller takes no answers, and so keeps more of them here than it may have calls."""
        if len(self._answers[source]) <= 2 * QUEUE_MAX:
            return False
        with self._lock:
            self._forget_some(source)
        return len(self._answers[source]) > 2 * QUEUE_MAX

    def _keep(self, source: int, key: int, sending: OutboundParts) -> None:
        """Remember what is on its way."""
        with self._lock:
            self._forget_some(source)
            self._answers[source][key] = sending

    def _forget_some(self, source: int) -> None:
        """Forget what has arrived of the oldest few: more than is added. The caller holds the lock."""
        answers = self._answers[source]
        for _ in range(min(_LOOKS, len(answers))):
            key, sending = answers.popitem(last=False)
            if not sending.is_done():
                answers[key] = sending

    def _checked(self, incoming: Incoming, handler: Handler) -> Any:
        if handler.kind.is_stream != (incoming.credit is not None):
            verb = "stream" if handler.kind.is_stream else "call"
            self._fail(incoming, "arguments", f"it has to be called by agent.{verb}", "TypeError")
            return None
        try:
            return handler.signature.checked(incoming.args, incoming.kwargs)
        except TypeError as error:
            self._fail(incoming, "arguments", str(error), "TypeError")
            return None

    # -- answers ------------------------------------------------------------------------------------------

    def _answer(self, incoming: Incoming, value: Any) -> None:
        call, source = incoming.call, incoming.source
        if not call:
            self._note_done(incoming)
        elif not is_plain((value,)):
            self._answer_packed(incoming, value)
        elif self._tables[source].pop(call, None) is not None:
            self.agent.tell(source, encode(Answer(call, value)))

    def _answer_packed(self, incoming: Incoming, value: Any) -> None:
        call, source = incoming.call, incoming.source
        agent = self.agent
        try:
            body, parts = pack(value, lambda steps: place(steps, "the result"))
        except UsageError as error:
            self._fail(incoming, "raised", f"its result cannot travel: {error}", "UsageError")
            return
        if self._tables[source].pop(call, None) is None:
            return
        number = agent.next_number()
        agent.tell(source, encode(PackedAnswer(call, number, body)))
        if parts:
            self._keep(source, call, OutboundParts(agent.post, source, number, parts))

    def _raised(self, incoming: Incoming, error: BaseException) -> None:
        kind = type(error)
        name = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        try:
            text, trace = str(error), "".join(traceback.format_exception(error))
        except Exception:  # its own __str__ may raise
            text, trace = "an exception whose text cannot be had", ""
        self._fail(incoming, "raised", text, name, trace)

    def _fail(
        self, incoming: Incoming, kind: str, what: str, type_name: str = "", traceback_text: str = ""
    ) -> None:
        call, source = incoming.call, incoming.source
        if not call:
            self._note_done(incoming)
            _log.warning("a notification of %r from rank %d failed: %s %s", incoming.name, source, kind, what)
        elif self._tables[source].pop(call, None) is not None:
            self.agent.tell(source, encode(Failure.of(call, kind, what, type_name, traceback_text)))

    def _note_done(self, incoming: Incoming) -> None:
        if incoming.call:
            return
        source = incoming.source
        with self._lock:
            self._notes[source] -= 1
            self._notes_done[source] += 1
            if self._notes_done[source] < _NOTES_PER_ACK:
                return
            count, self._notes_done[source] = self._notes_done[source], 0
        self.agent.tell(source, encode(Ack(count)))


def _driven_items(items: Any) -> Iterator[Any]:
    """The items of an async generator that only waits for works."""
    try:
        while True:
            try:
                item = _driven(items.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        _driven(items.aclose())


def _driven(coroutine: Any) -> Any:
    """Run a coroutine that only waits for works: in virtual time these wait by themselves."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise UsageError(
        "an async handler waits for something that is no Work; the simulator has no event loop",
        next_step="await only agent.start(...) there",
    )
