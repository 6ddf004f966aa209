"""A call under way, as its caller holds it: how a thread waits for it, and how it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from unisono.core.runtime import NEVER, Deadline, Runtime, Waiting, refuse_blocking
from unisono.core.work import Work
from unisono.errors import DeadlineExceeded, Location, PeerAborted, UnisonoError
from unisono.rpc.blobs import InboundValue, OutboundBlobs
from unisono.rpc.frame import CANCEL, MORE, short
from unisono.rpc.peers import Peer
from unisono.rpc.pool import held_slot
from unisono.rpc.server import Incoming
from unisono.rpc.streams import ItemBuffer, wake_loop
from unisono.rpc.transport import RpcTransport, Waitable

if TYPE_CHECKING:
    from unisono.rpc.client import CallStarter

__all__ = ["PendingCall", "StartedCall"]


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
    _is_awaited = False  # by a thread
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
            self._check_open()
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
        if not self.is_done:
            self._check_open()
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

    def _check_open(self) -> None:
        """Refuse to wait in a forked child, where no answer comes. Else `close` ends every call by itself."""
        if self._client.is_closed:
            raise self._client.closed().located(self.location())

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
        with self.peer.lock:
            is_first, self._is_awaited = not self._is_awaited, True
        observer = None
        if not is_first:
            observer = _Observer(transport)
            self.on_done(observer.end)
        awaited = observer or self
        pool = held_slot()
        if pool is not None:
            pool.give_up_slot()
        try:
            transport.wait(awaited, sooner, self.waiting)
            if not self.is_done and own.has_passed(self._runtime.now()):
                self.expire()
                transport.wait(awaited, limit, self.waiting)
        except UnisonoError as deadlock:
            cause = deadlock
            self._give_up(lambda: cause)
        except BaseException:
            self.cancel()
            raise
        finally:
            if observer is None:
                self._is_awaited = False
            else:
                self._off_end(observer.end)
            if pool is not None:
                pool.take_slot(self.waiting)

    def _end(self) -> None:
        peer, client = self.peer, self._client
        with peer.lock:
            self.is_done = True
            callbacks, self._callbacks = self._callbacks, None
        if self.outbound is not None:
            self.outbound.cancel()  # nothing is left of it, unless the call was refused before all was read
            self.outbound = None
        self.inbound = None
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


class _Observer(Waitable):
    """What a second thread waits for: the transport knows one waiting thread of each waitable."""

    def __init__(self, transport: RpcTransport) -> None:
        super().__init__()
        self._transport = transport

    def end(self) -> None:
        """The call has ended."""
        self.is_done = True
        self._transport.wake(self)
