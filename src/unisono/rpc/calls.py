"""Calls that were made from here: who waits for which answer.

Knows a call under way, when it expires and how it ends. Does not know how it is made (outgoing.py), how a
frame travels (post.py) nor how a call is served (server.py).
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import warnings
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from unisono.core.clock import NEVER, Deadline, Runtime, Timer, Waiting
from unisono.core.work import Work
from unisono.errors import (
    BadArguments,
    ClosedError,
    DeadlineExceeded,
    Location,
    NotExposed,
    PeerAborted,
    PeerLost,
    RemoteError,
    UnisonoError,
    lost_text,
)
from unisono.rpc.following import InboundParts, OutboundParts
from unisono.rpc.frames import Failure
from unisono.rpc.incoming import Incoming, current
from unisono.rpc.peers import QUEUE_MAX, Peer
from unisono.rpc.post import Waitable
from unisono.rpc.streams import Arrivals

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["Deadlines", "PendingCall"]


class PendingCall(Work[Any], Waitable):
    """A call under way: what `start` returns."""

    def __init__(
        self, agent: Agent, peer: Peer, number: int, name: str, deadline: Deadline, started_at: float
    ) -> None:
        self._agent = agent
        self._runtime: Runtime = agent.runtime
        self._deadline = deadline
        self._started_at = started_at
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] | None = None
        self.peer = peer
        self.number = number
        self.name = name
        self.is_done = False
        self.waiter: Any = None
        self.sending: OutboundParts | None = None
        self.taking: InboundParts | None = None
        self.above: Incoming | None = None
        self.stream: Arrivals | None = None
        self.items: list[InboundParts] = []  # of a stream, on their way

    # -- what a user does with it -------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the answer and return it.

        Raises:
            DeadlineExceeded: `timeout` seconds passed and the call goes on, or its own deadline has passed.
            RemoteError: the function raised; its traceback is in `traceback_text`.
            PeerLost: the other rank, or its agent, is gone.
        """
        if not self.is_done:
            limit = self._runtime.deadline(timeout) if timeout is not None else NEVER
            self._await_answer(limit)
            if not self.is_done:
                raise DeadlineExceeded(
                    f"waited {timeout:.3g} s, the call goes on",
                    waiting_on=(self.peer.world_rank,),
                    where=self.location(),
                )
        if self._error is not None:
            raise self._copied(self._error)
        return self._value

    @property
    def has_failed(self) -> bool:
        """Whether it ended, and not well."""
        return self._error is not None

    def done(self) -> bool:
        """Whether it ended, well or not."""
        if not self.is_done:
            self._runtime.polled()
        return self.is_done

    def cancel(self) -> bool:
        """Give up; the other side is told. False if it had ended already."""
        rank = self._agent.world_rank
        return self.give_up(lambda: PeerAborted(f"rank {rank} cancelled the call", rank=rank))

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait on an event loop."""
        if not self.is_done and not self._runtime.is_virtual:
            import asyncio  # only needed here

            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def tell() -> None:
                with contextlib.suppress(RuntimeError):  # nobody waits on a loop that is closed
                    loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

            self.on_done(tell)
            try:
                yield from future.__await__()
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.wait()

    def __repr__(self) -> str:
        state = "done" if self.is_done else "under way"
        return f"<Work call {self.name!r} on rank {self.peer.rank}: {state}>"

    def __del__(self) -> None:
        if not getattr(self, "is_done", True) and not self._runtime.is_dead and not self._agent.is_closed:
            warnings.warn(
                f"{self!r} was dropped before it ended; keep the Work and wait for it",
                ResourceWarning,
                stacklevel=2,
            )

    # -- how it ends --------------------------------------------------------------------------------------

    def complete(self, value: Any) -> None:
        """It was answered. For whoever took it out of its peer's table, as is `fail`."""
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        """It ended badly."""
        self._error = error
        self._end()

    def give_up(self, error: Callable[[], UnisonoError]) -> bool:
        """End it from this side; False if it has ended."""
        if self.peer.calls.pop(self.number, None) is None:
            return False
        for taking in (self.taking, *self.items):
            if taking is not None:
                taking.cancel()
        self._agent.tell_cancelled(self)
        self.fail(error().located(self.location()))
        return True

    def expire(self) -> None:
        """Its deadline has passed."""
        given, rank = self._deadline.given_s, self.peer.world_rank
        self.give_up(
            lambda: DeadlineExceeded(
                f"rank {rank} did not answer within {given:.3g} s"
                if given is not None
                else f"rank {rank} did not answer in time",
                waiting_on=(rank,),
            )
        )

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call back once it ended; at once if it has."""
        with self.peer.lock:
            if not self.is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def location(self) -> Location:
        """Where it stands."""
        agent = self._agent
        elapsed = self._runtime.now() - self._started_at
        return Location(f"call of {self.name!r}", agent.communicator, agent.epoch, None, elapsed)

    def waiting(self) -> Waiting:
        """Who waits for whom."""
        return Waiting(self._agent.world_rank, (self.peer.world_rank,), f"call of {self.name!r}")

    def _await_answer(self, limit: Deadline) -> None:
        """Wait until it is done or the limit has passed; a handler gives up its slot meanwhile."""
        own = self._deadline
        sooner = own if limit.at is None or (own.at is not None and own.at <= limit.at) else limit
        incoming = current.get()
        pool = None if incoming is None else incoming.server.slot_of_thread()
        if pool is not None:
            pool.give_up_slot()
        try:
            self._agent.post.wait(self, sooner, self.waiting)
            if not self.is_done and own.has_passed(self._runtime.now()):
                self.expire()
                self._agent.post.wait(self, limit, self.waiting)
        except UnisonoError as deadlock:
            cause = deadlock
            self.give_up(lambda: cause)
        except BaseException:
            self.cancel()
            raise
        finally:
            if pool is not None:
                pool.take_slot(self.waiting)

    def _end(self) -> None:
        with self.peer.lock:
            self.is_done = True
            callbacks, self._callbacks = self._callbacks, None
        if self.sending is not None and not self.sending.is_done():
            self.sending.cancel()  # it was refused before all of it was taken
        self.sending = self.taking = None
        if self.above is not None:
            self.above.on_cancel.pop(self, None)
        agent = self._agent
        if self.waiter is not None:
            agent.post.wake(self)
        if self.peer.room:
            agent.make_room(self.peer)
        for callback in callbacks or ():
            callback()

    def _copied(self, error: BaseException) -> BaseException:
        """Each thread that asks raises its own copy, so that tracebacks do not grow into each other."""
        return error.located(Location()) if isinstance(error, UnisonoError) else error


class Deadlines:
    """When calls expire that nobody may be waiting for: one timer for all of them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, PendingCall]] = []
        self._timer: Timer | None = None
        self._timer_at = 0.0

    def add(self, at: float, calling: PendingCall) -> None:
        """Let a call expire at a time, if it has not ended by then."""
        with self._lock:
            heapq.heappush(self._heap, (at, calling.number, calling))
            if len(self._heap) > 2 * QUEUE_MAX and len(self._heap) % QUEUE_MAX == 0:
                self._heap = [entry for entry in self._heap if not entry[2].is_done]
                heapq.heapify(self._heap)
            if self._timer is None or at < self._timer_at:
                self._arm()

    def close(self) -> None:
        """Forget all of them."""
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
            self._timer = self._runtime.call_at(self._timer_at, self._look)

    def _look(self) -> None:
        now = self._runtime.now()
        late: list[PendingCall] = []
        with self._lock:
            self._timer = None
            while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_done):
                late.append(heapq.heappop(self._heap)[2])
            self._arm()
        for calling in late:
            if not calling.is_done:
                calling.expire()


def error_of(failure: Failure, calling: PendingCall) -> UnisonoError:
    """The error that a caller gets for what the other side said."""
    rank, name = calling.peer.world_rank, calling.name
    what = "".join(c if c.isprintable() or c == "\n" else "?" for c in failure.what)
    match failure.kind:
        case "arguments":
            return BadArguments(
                f"rank {rank} cannot call {name!r}", rank=rank, type_name="TypeError", cause=what
            )
        case "unknown":
            return NotExposed(
                f"rank {rank} exposes no function {name!r}",
                rank=rank,
                type_name="LookupError",
                cause=what or None,
                next_step=f"agent.register({name!r}, fn) on rank {rank}, or call what it exposes",
            )
        case "deadline":
            return DeadlineExceeded(f"rank {rank} could not run {name!r} in time", waiting_on=(rank,))
        case "closed":
            return closed_there(calling.peer)
        case "busy":
            return RemoteError(
                f"rank {rank} refused the call",
                rank=rank,
                type_name="Busy",
                cause=what,
                next_step="call it again when some of these have ended",
            )
        case _:
            what, _, step = what.partition(". Next: ")  # an error of ours knows it better
            return RemoteError(
                f"rank {rank} raised {failure.type_name or 'an exception'} in {name!r}",
                rank=rank,
                type_name=failure.type_name,
                traceback_text=failure.traceback_text,
                cause=what or None,
                next_step=step or None,
            )


def closed_there(peer: Peer) -> PeerLost:
    """The error of a call to a rank whose agent is closed."""
    rank = peer.world_rank
    return PeerLost(lost_text((rank,)), ranks=(rank,), cause="it has closed its agent")


def closed_here() -> ClosedError:
    """The error of a call by an agent that is closed."""
    return ClosedError("the agent is closed")
