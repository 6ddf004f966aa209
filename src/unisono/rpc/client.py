"""The calling side of an agent: calls out, their deadlines and their ends.

A call is admitted, packed, and sent once it is known that the other rank has an agent. The dispatcher
completes it.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from unisono.core.codec import path_of_argument
from unisono.core.runtime import NEVER, Deadline, Runtime, Timer, Waiting
from unisono.errors import ClosedError, DeadlineExceeded, Location, UsageError
from unisono.rpc.blobs import OutboundBlobs, UnreadBlobs
from unisono.rpc.frame import ASK, NAME_CHARS_MAX, Packed, pack
from unisono.rpc.peers import QUEUE_MAX, AdmissionWait, Peer, Peers, busy
from unisono.rpc.pending_call import PendingCall, StartedCall
from unisono.rpc.server import current
from unisono.rpc.streams import WINDOW, ItemBuffer, Stream
from unisono.rpc.transport import UNSENT_ASKS_MAX, RpcTransport

__all__ = ["TIMEOUT_S", "CallStarter"]

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
        _starters.add(self)

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
            self.peers.end(peer, self.closed)
        self._deadlines.close()

    def is_all_sent(self) -> bool:
        """Whether no notification is held back, and the blobs of all have been read."""
        return self._notified.are_all_read() and not any(
            peer.notifications and peer.state is Peer.State.ASKED and peer.error is None
            for peer in self.peers
        )

    def closed(self) -> ClosedError:
        """The error of those that use the closed agent."""
        if not self.runtime.is_forked:
            return ClosedError("the agent is closed")
        return ClosedError(
            "the agent belongs to the parent process",
            next_step="make a communicator and an agent after the fork",
        )

    def location(self, name: str, elapsed: float | None = None) -> Location:
        """Where a call stands, for its errors."""
        return Location(f"call of {name!r}", self._communicator, self._epoch, None, elapsed)

    def waiting(self, peer: Peer, name: str) -> Waiting:
        """Which rank waits for which."""
        return Waiting(self.peers.own.world_rank, (peer.world_rank,), f"call of {name!r}")

    def _admitted(self, dst: int | str, name: str, deadline: Deadline, *, may_wait: bool = True) -> Peer:
        """The rank to call, once it has few enough unanswered calls if `may_wait`."""
        if self.is_closed or (self._is_closing and current.get() is None):
            raise self.closed().located(self.location(name))
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


_starters: WeakSet[CallStarter] = WeakSet()


def _after_fork() -> None:
    """A child has no threads that would receive answers."""
    for starter in _starters:
        starter.is_closed = True


os.register_at_fork(after_in_child=_after_fork)
