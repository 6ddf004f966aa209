"""The calling side of an agent: calls out, their deadlines and their ends.

A call is admitted, packed, and sent once it is known that the other rank has an agent. The dispatcher
completes it.
"""

from __future__ import annotations

import heapq
import logging
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final

from unisono.core.codec import path_of_argument
from unisono.core.runtime import NEVER, Deadline, Runtime, Timer, Waiting, refuse_blocking
from unisono.core.work import Work
from unisono.errors import ClosedError, DeadlineExceeded, Location, PeerAborted, UnisonoError, UsageError
from unisono.rpc.blobs import InboundValue, OutboundBlobs, UnreadBlobs
from unisono.rpc.frame import ASK, CANCEL, MORE, NAME_CHARS_MAX, Packed, pack, short
from unisono.rpc.peers import QUEUE_MAX, AdmissionWait, Peer, Peers, busy
from unisono.rpc.pool import held_slot
from unisono.rpc.server import Incoming, current
from unisono.rpc.streams import WINDOW, ItemBuffer, Stream, wake_loop
from unisono.rpc.transport import UNSENT_ASKS_MAX, RpcTransport, Waitable

__all__ = ["TIMEOUT_S", "CallStarter", "PendingCall"]

_log = logging.getLogger("unisono.rpc")

# Of a call for which the user gives none.
TIMEOUT_S: Final = 30.0
# With more calls to a rank under way, a frame may wait a moment for the next ones.
_PIPELINED_MIN: Final = 8


class CallStarter:
    """Starts the calls of one agent."""

    def __init__(
        self, runtime: Runtime, transport: RpcTransport, peers: Peers, communicator: str, epoch: int
    ) -> None:
        self.runtime = runtime
        self.transport = transport
        self.peers = peers
        self.is_closed = False
        self._is_closing = False
        self._communicator = communicator
        self._epoch = epoch
        self._deadlines = _Deadlines(runtime)
        self._notified = UnreadBlobs(len(peers))  # blobs of notifications
        peers.watch_lost(self._notified.cancel_all)

    def begin(
        self,
        dst: int | str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        *,
        timers: bool,
        buffer: ItemBuffer | None = None,
    ) -> PendingCall:
        """Begin a call. With `timers` it expires by itself, else only while a thread waits for it.

        Raises:
            UsageError: no such rank or name, or an argument cannot be sent. Nothing was sent.
            DeadlineExceeded: too many calls to that rank stayed unanswered.
            ClosedError: the agent is closed.
        """
        runtime = self.runtime
        now = runtime.now()
        deadline = NEVER if timeout is None else runtime.deadline(timeout)
        parent = current.get()
        until = None if parent is None else parent.deadline.at
        # The caller of this handler does not wait longer than that.
        if until is not None and (deadline.at is None or until < deadline.at):
            deadline = Deadline(until, max(0.0, until - now))
        # A handler that waits is one of a bounded number, and admission might depend on its own caller.
        is_waiting_handler = parent is not None and not timers and buffer is None
        peer = self._admitted(dst, name, deadline, may_wait=not is_waiting_handler)
        number = self.transport.next_number()
        window = WINDOW if buffer is not None else 0
        message = self._packed(number, number, name, args, kwargs, deadline.given_s, window)
        kind = StartedCall if timers else PendingCall
        pending = kind(self, peer, number, name, deadline, now)
        if buffer is not None:
            pending.buffer = buffer
        if parent is not None:
            pending.parent = parent
            parent.on_cancel[pending] = pending.cancel
        peer.calls[number] = pending
        self._send_or_hold(peer, message, pending)
        if parent is not None and parent.is_cancelled:
            pending.cancel()
        if timers and deadline.at is not None and not pending.is_done:
            self._deadlines.add(deadline.at, number, peer)
        return pending

    def notify(self, dst: int | str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a function without an answer; raises as `begin` does, and a RemoteError if it was not sent."""
        peer = self._admitted(dst, name, self.runtime.deadline(TIMEOUT_S))
        message = self._packed(0, self.transport.next_number(), name, args, kwargs)
        with peer.lock:
            peer.notifications += 1
        self._send_or_hold(peer, message, None)

    def on_unwanted(self, rank: int, number: int) -> None:
        """A rank has refused a notification and will not receive its blobs."""
        self._notified.cancel(rank, number)

    def stream(
        self, dst: int | str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Stream:
        """Call a generator; raises as `begin` does. `timeout` is for each item."""
        buffer = ItemBuffer(self.transport.wake)
        pending = self.begin(dst, name, args, kwargs, None, timers=False, buffer=buffer)
        pending.on_done(buffer.notify)
        return Stream(self.runtime, pending, buffer, timeout)

    def can_call(self, rank: int) -> bool:
        """Whether a call to a rank may arrive."""
        return not self._is_closing and self.peers[rank].error is None

    def refuse_calls(self) -> None:
        """The agent begins to close: only the handlers that it finishes may still call."""
        self._is_closing = True

    def close(self) -> None:
        """End every call that was made."""
        self._is_closing = self.is_closed = True
        for peer in self.peers:
            self.peers.end(peer, _closed_here)
        self._deadlines.close()

    def location(self, name: str, elapsed: float | None = None) -> Location:
        """Where a call stands, for its errors."""
        return Location(f"call of {name!r}", self._communicator, self._epoch, None, elapsed)

    def waiting(self, peer: Peer, name: str) -> Waiting:
        """Which rank waits for which."""
        return Waiting(self.peers.own.world_rank, (peer.world_rank,), f"call of {name!r}")

    def _admitted(self, dst: int | str, name: str, deadline: Deadline, *, may_wait: bool = True) -> Peer:
        """The rank to call, once it has few enough unanswered calls if `may_wait`."""
        if self.is_closed or (self._is_closing and current.get() is None):
            raise _closed_here().located(self.location(name))
        if not isinstance(name, str) or len(name) > NAME_CHARS_MAX:
            raise UsageError(f"name={str(name)[:80]!r}; allowed: a text of up to {NAME_CHARS_MAX} characters")
        peer = self.peers.find(dst, deadline)
        if may_wait and peer.is_full:
            self._await_admission(peer, name, deadline)
        return peer

    def _await_admission(self, peer: Peer, name: str, deadline: Deadline) -> None:
        admission = AdmissionWait()
        with peer.lock:
            peer.admissions.append(admission)
        self.peers.admit(peer)
        self.transport.wait_outside_slot(admission, deadline, self.waiting(peer, name))
        if not admission.is_done:
            raise DeadlineExceeded(
                f"rank {peer.world_rank} has too many unanswered calls",
                waiting_on=(peer.world_rank,),
                where=self.location(name),
            )

    def _packed(
        self,
        call: int,
        number: int,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None = None,
        window: int = 0,
    ) -> Packed:
        try:
            return pack(ASK, call, number, (args, kwargs), _place, name, timeout_s, window)
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the name {name!r} cannot be encoded: {error}", next_step="call a name that is exposed"
            ) from None

    def _send_or_hold(self, peer: Peer, message: Packed, pending: PendingCall | None) -> None:
        """Send a call, or hold it until it is known that there is an agent to take it."""
        if peer.state is Peer.State.PRESENT:
            if not self._send(peer, message, pending) and pending is None:
                raise busy(peer)
        else:
            self.peers.hold(peer, partial(self._send, peer, message, pending))
        if peer.error is not None and pending is not None:
            pending.fail_unless_done(peer.error)

    def _send(self, peer: Peer, message: Packed, pending: PendingCall | None) -> bool:
        frame, number, blobs = message
        if pending is not None and pending.is_done:
            return True
        outbound: OutboundBlobs | None = None
        if blobs:
            outbound = (
                OutboundBlobs(number, blobs)
                if pending is not None
                else self._notified.add(peer.rank, number, number, blobs)
            )
        # With more than _PIPELINED_MIN calls in flight, another call or a wait follows soon, and either
        # flushes corked frames.
        is_more = len(peer.calls) > _PIPELINED_MIN
        if not self.transport.send(peer.rank, frame, UNSENT_ASKS_MAX, is_more, outbound):
            self._notified.cancel(peer.rank, number)
            self._on_unsent(peer, pending)
            return False
        if outbound is not None and pending is not None:
            pending.outbound = outbound
            if pending.is_done:
                outbound.cancel()
        return True

    def _on_unsent(self, peer: Peer, pending: PendingCall | None) -> None:
        """The rank leaves too much unread for another call."""
        if pending is None:
            with peer.lock:
                peer.notifications -= 1
            _log.warning("a notification was not sent: %s", busy(peer))
        else:
            pending.fail_unless_done(partial(busy, peer))


class PendingCall(Work[Any], Waitable):
    """A call under way: what `start` returns.

    The thread that removes it from its peer's table of calls is the one that calls `complete` or `fail`.
    """

    # Most calls need only the first two of these.
    is_done = False
    waiter: Any = None
    outbound: OutboundBlobs | None = None
    inbound: InboundValue | None = None
    inbound_items: Sequence[InboundValue] = ()
    parent: Incoming | None = None  # the handler that made it
    buffer: ItemBuffer | None = None  # of a stream
    _value: Any = None
    _error: BaseException | None = None
    _callbacks: list[Callable[[], object]] | None = None

    def __init__(
        self, client: CallStarter, peer: Peer, number: int, name: str, deadline: Deadline, started_at: float
    ) -> None:
        self._client = client
        self._deadline = deadline
        self._started_at = started_at
        self._runtime = client.runtime
        self.peer = peer
        self.number = number
        self.name = name

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the answer and return it.

        Raises:
            DeadlineExceeded: `timeout` seconds passed and the call goes on, or its own deadline has passed.
            RemoteError: the function raised; its traceback is in `traceback_text`.
            PeerLost: the other rank, or its agent, is gone.
        """
        if not self.is_done:
            refuse_blocking()
            limit = self._runtime.deadline(timeout) if timeout is not None else NEVER
            self._await_answer(limit)
            if not self.is_done:
                raise DeadlineExceeded(
                    f"waited {timeout:.3g} s, the call goes on",
                    waiting_on=(self.peer.world_rank,),
                    where=self.location(),
                )
        error = self._error
        if error is not None:
            # Each waiting thread raises its own copy, so that their tracebacks do not mix.
            raise error.located(Location()) if isinstance(error, UnisonoError) else error
        return self._value

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def done(self) -> bool:
        """Whether it ended, well or not."""
        if not self.is_done:
            self._runtime.polled()
        return self.is_done

    def cancel(self) -> bool:
        """Give up, here and on the other side. False if it had ended already."""
        rank = self._client.peers.own.world_rank
        return self._give_up(lambda: PeerAborted(f"rank {rank} cancelled the call", rank=rank))

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait on an event loop."""
        if not self.is_done and not self._runtime.is_virtual:
            import asyncio  # loaded only by programs with an event loop

            future, resolve = wake_loop()
            self.on_done(resolve)
            try:
                yield from future.__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.wait()

    def __repr__(self) -> str:
        state = "done" if self.is_done else "under way"
        return f"<Work call {self.name!r} on rank {self.peer.rank}: {state}>"

    # -- for the reader of a stream -----------------------------------------------------------------------

    def wait_outside_slot(self, waitable: Waitable, deadline: Deadline) -> None:
        """Wait for something that the other rank sends before the answer; a handler gives its slot up."""
        self._client.transport.wait_outside_slot(waitable, deadline, self.waiting())

    def request_items(self, count: int) -> None:
        """Let the generator go on by this many items."""
        self._client.peers.send(self.peer.rank, short(MORE, self.number, count=count))

    # -- how it ends --------------------------------------------------------------------------------------

    def complete(self, value: Any) -> None:
        """It was answered."""
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        """It ended with an error."""
        self._error = error
        self._end()

    def fail_unless_done(self, error: Callable[[], UnisonoError]) -> None:
        """Take it out of its peer's table and end it with an error, unless another thread did."""
        if self.peer.calls.pop(self.number, None) is not None:
            self.fail(error().located(self.location()))

    def expire(self) -> None:
        """Its deadline has passed."""
        given, rank = self._deadline.given_s, self.peer.world_rank
        limit = f"within {given:.3g} s" if given is not None else "in time"
        self._give_up(lambda: DeadlineExceeded(f"rank {rank} did not answer {limit}", waiting_on=(rank,)))

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call back once it ended; at once if it has."""
        with self.peer.lock:
            if not self.is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def _on_end(self, notify: Callable[[], object]) -> None:
        self.on_done(notify)

    def _off_end(self, notify: Callable[[], object]) -> None:
        with self.peer.lock:
            if self._callbacks is not None and notify in self._callbacks:
                self._callbacks.remove(notify)

    def _has_ended(self) -> bool:
        return self.is_done

    def _runtime_and_rank(self) -> tuple[Runtime, int]:
        return self._runtime, self._client.peers.own.world_rank

    def location(self) -> Location:
        """Where it stands, for its errors."""
        return self._client.location(self.name, self._runtime.now() - self._started_at)

    def waiting(self) -> Waiting:
        """Which rank waits for which."""
        return self._client.waiting(self.peer, self.name)

    def _give_up(self, error: Callable[[], UnisonoError]) -> bool:
        """End it from this side, and tell the other; False if it has ended."""
        peer = self.peer
        if peer.calls.pop(self.number, None) is None:
            return False
        for inbound in (self.inbound, *self.inbound_items):
            if inbound is not None:
                inbound.cancel()
        if peer.state is Peer.State.PRESENT and peer.error is None and not self._client.is_closed:
            self._client.peers.send(peer.rank, short(CANCEL, self.number))
        self.fail(error().located(self.location()))
        return True

    def _await_answer(self, limit: Deadline) -> None:
        """Wait until it is done or the limit has passed; a handler gives its slot up meanwhile."""
        own, transport = self._deadline, self._client.transport
        sooner = own if limit.at is None or (own.at is not None and own.at <= limit.at) else limit
        pool = held_slot()
        if pool is not None:
            pool.give_up_slot()
        try:
            transport.wait(self, sooner, self.waiting)
            if not self.is_done and own.has_passed(self._runtime.now()):
                self.expire()
                transport.wait(self, limit, self.waiting)
        except UnisonoError as deadlock:
            cause = deadlock
            self._give_up(lambda: cause)
        except BaseException:
            self.cancel()
            raise
        finally:
            if pool is not None:
                pool.take_slot(self.waiting)

    def _end(self) -> None:
        peer, client = self.peer, self._client
        with peer.lock:
            self.is_done = True
            callbacks, self._callbacks = self._callbacks, None
        if self.outbound is not None and not self.outbound.is_done():
            self.outbound.cancel()  # the call was refused before all of it was read
        self.outbound = self.inbound = None
        if self.parent is not None:
            self.parent.on_cancel.pop(self, None)
        if self.waiter is not None:
            client.transport.wake(self)
        if peer.admissions:
            client.peers.admit(peer)
        for callback in callbacks or ():
            callback()


class StartedCall(PendingCall):
    """A call that the user holds; it warns if it is dropped before it has ended.

    Others have no `__del__`: see core.work.Started.
    """

    def __del__(self) -> None:
        if not getattr(self, "is_done", True) and not self._runtime.is_dead and not self._client.is_closed:
            warnings.warn(
                f"{self!r} was dropped before it ended; keep the Work and wait for it",
                ResourceWarning,
                stacklevel=2,
            )


class _Deadlines:
    """When calls expire that no thread may be waiting for: one timer for all of them.

    Holds the numbers of calls and not the calls, which hold their results.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Peer]] = []  # no two have the same number
        self._timer: Timer | None = None
        self._timer_at = 0.0

    def add(self, at: float, number: int, peer: Peer) -> None:
        """Let a call expire at a time, if it has not ended by then."""
        with self._lock:
            heapq.heappush(self._heap, (at, number, peer))
            if len(self._heap) > 2 * QUEUE_MAX and len(self._heap) % QUEUE_MAX == 0:
                self._heap = [entry for entry in self._heap if entry[1] in entry[2].calls]
                heapq.heapify(self._heap)
            if self._timer is None or at < self._timer_at:
                self._arm()

    def close(self) -> None:
        """Let none of them expire."""
        with self._lock:
            self._heap.clear()
            if self._timer is not None:
                self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer_at = self._heap[0][0]
            self._timer = self._runtime.call_at(self._timer_at, self._on_timer)

    def _on_timer(self) -> None:
        now = self._runtime.now()
        late: list[PendingCall] = []
        with self._lock:
            self._timer = None
            while self._heap:
                at, number, peer = self._heap[0]
                pending = peer.calls.get(number)
                if pending is not None and at > now:
                    break
                heapq.heappop(self._heap)
                if pending is not None:
                    late.append(pending)
            self._arm()
        for pending in late:
            pending.expire()


def _place(steps: Sequence[str]) -> str:
    """Where a part of (args, kwargs) stands."""
    return path_of_argument(steps[1:])


def _closed_here() -> ClosedError:
    return ClosedError("the agent is closed")
