"""The backend of a simulated rank: the contract over a network in virtual time.

A message is eager, with its bytes, if it is short and the credit allows. Otherwise its envelope goes first
(RTS), and the bytes follow when a receive has matched it (CTS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from unisono.config import Config
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Lane, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, UnisonoError
from unisono.messaging.backend import Backend, Capabilities, PeerDown
from unisono.messaging.credit import OwnCredit
from unisono.messaging.inbox import InboundMessage, Inbox
from unisono.messaging.matching import Posted
from unisono.simulation.fabric import Fabric
from unisono.simulation.runtime import SimRuntime
from unisono.simulation.scheduler import SimThread

__all__ = ["SimBackend", "StepObserver"]


class StepObserver(Protocol):
    """Is notified of what a rank does."""

    def on_step(self, rank: int, step: int) -> None:
        """A rank is about to start operation number `step`: faults may begin."""

    def on_close(self, rank: int) -> None:
        """A rank leaves."""


class SimBackend(Backend):
    """One simulated rank. `peers` are the backends of all ranks, this one included."""

    def __init__(
        self, fabric: Fabric, thread: SimThread, peers: Sequence[SimBackend], observer: StepObserver
    ) -> None:
        self.fabric = fabric
        self.thread = thread
        self.inbox = Inbox(thread.rank, fabric.config.recv_bytes_max)
        self.own_credit = OwnCredit(fabric.config)
        self.sends: dict[_Message, None] = {}
        self.unmatched: dict[_Message, None] = {}
        self.awaiting_data: dict[_Message, Posted] = {}
        self._peers = peers
        self._observer = observer
        self._runtime = SimRuntime(fabric.scheduler, thread)
        self._steps = 0
        self._down: dict[int, PeerDown] = {}
        self._listeners: list[Callable[[PeerDown], None]] = []
        self._is_closed = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self.thread.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.fabric.size

    @property
    def capabilities(self) -> Capabilities:
        """Everything but the fast paths."""
        return Capabilities("simulation")

    @property
    def runtime(self) -> SimRuntime:
        """Virtual time."""
        return self._runtime

    @property
    def config(self) -> Config:
        """The settings of all ranks."""
        return self.fabric.config

    @property
    def is_gone(self) -> bool:
        """Whether it has left or was killed: nothing reaches it any more."""
        return self._is_closed or self.thread.killed is not None

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
        """Send a message with its bytes, or its envelope alone."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, header)
        request = Request(dst)
        if not self._begin(tag):
            return request
        if self._is_closed:
            request.fail(_closed(self.rank))
        elif dst in self._down:
            request.fail(self._down[dst].error())
        else:
            envelope = Envelope(self.rank, context, tag, data.nbytes, dtype, header)
            payload = data.cast("B") if data.nbytes else data
            _Message(self, self._peers[dst], envelope, payload, lane, request).start(sync)
        return request

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive in this rank's inbox."""
        self.check_peer(src, "src")
        if not self._begin(tag):
            return Request(src)
        return self.inbox.receive(src, context, tag, into, dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe in this rank's inbox."""
        self.check_peer(src, "src")
        if not self._begin(tag):
            return Request(src)
        return self.inbox.probe(src, context, tag)

    def end_group(self, context: int) -> None:
        """Drop messages that no receive will match any more."""
        if not self.is_gone:
            self.inbox.end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        for down in list(self._down.values()):
            listener(down)
        if not self._is_closed:
            self._listeners.append(listener)

    def close(self) -> None:
        """Leave: what was sent arrives, sends that wait for their receive are withdrawn."""
        if self.is_gone or self.fabric.scheduler.is_over:
            return
        self.fabric.scheduler.check_caller()
        self._is_closed = True
        self._listeners.clear()
        self._observer.on_close(self.rank)
        self.inbox.close(_closed(self.rank), PeerDown(self.rank, "left", left=True).error())
        for posted in _emptied(self.awaiting_data).values():
            posted.request.fail(_closed(self.rank))
        for message in _emptied(self.sends):
            message.request.fail(_closed(self.rank))

    def has_lost(self, peer: int) -> bool:
        """Whether it knows that a rank is down."""
        return peer in self._down

    def peer_down(self, down: PeerDown) -> None:
        """A rank is down: notify the listeners, then end every request that needs it."""
        self._down[down.rank] = down
        for listener in list(self._listeners):
            listener(down)
        for message in [m for m in self.unmatched if m.sender.rank == down.rank]:
            # Its bytes will never come, so it can no longer be received.
            self.inbox.withdraw_message(message)
            del self.unmatched[message]
        self.inbox.peer_down(down)
        # Callbacks may do anything, even close this backend: check again before each.
        for message in [m for m in self.awaiting_data if m.sender.rank == down.rank]:
            if (posted := self.awaiting_data.pop(message, None)) is not None:
                posted.request.fail(down.error())
        for message in [m for m in self.sends if m.receiver.rank == down.rank]:
            if message in self.sends:
                del self.sends[message]
                message.request.fail(down.error())

    def _begin(self, tag: int | Any_) -> bool:
        """Count an operation and let faults begin; False if the rank is dead and another rank's thread calls.

        Control messages of communicators are no steps of a user's program.
        """
        scheduler = self.fabric.scheduler
        scheduler.check_caller()
        if self.thread.killed is None and (tag is ANY or not tag & Tags.CONTROL):
            self._steps += 1
            self._observer.on_step(self.rank, self._steps)
        current = scheduler.current
        if current is not None and current.rank == self.rank:
            current.check_alive()
            current.wait_while_paused()
        return self.thread.killed is None


class _Message(InboundMessage):
    """One message from a sender to a receiver, from its start to its end."""

    def __init__(
        self,
        sender: SimBackend,
        receiver: SimBackend,
        envelope: Envelope,
        data: memoryview,
        lane: Lane,
        request: Request,
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.request = request
        self._envelope = envelope
        self._data: memoryview | bytes = data
        self._lane = lane
        self._is_eager = False
        self._is_matched = False
        self._is_withdrawn = False

    # -- at the sender -------------------------------------------------------------------------------------

    def start(self, sync: bool) -> None:
        """Send the message, or its RTS."""
        fabric, envelope = self.sender.fabric, self._envelope
        fabric.note("send", self.sender.rank, self.receiver.rank, envelope)
        self._is_eager = self._may_be_eager()
        if self._is_eager:
            self._data = bytes(self._data)
        is_waiting = sync or not self._is_eager
        if is_waiting:
            self.sender.sends[self] = None
            self.request.withdraw_by(lambda _: self._withdraw())
        self._to_receiver(envelope.nbytes if self._is_eager else 0, self._arrive)
        if not is_waiting:
            self.request.complete()

    def _may_be_eager(self) -> bool:
        if self.sender is self.receiver:
            return self.sender.own_credit.take(self._envelope.nbytes)
        src, dst, fabric = self.sender.rank, self.receiver.rank, self.sender.fabric
        credit = fabric.channel(src, dst).credit(self._lane)
        return credit.take(self._envelope.nbytes, fabric.scheduler.now, fabric.channel(dst, src))

    def _on_cts(self) -> None:
        """A receive has matched: send the bytes."""
        if self in self.sender.sends and not self.sender.is_gone:
            # Copy the bytes now: if the sender dies while they travel, they still arrive whole.
            self._data = bytes(self._data)
            self._to_receiver(self._envelope.nbytes, self._on_data)

    def _on_fin(self) -> None:
        """The receiver has the message: end the send."""
        if self in self.sender.sends and not self.sender.is_gone:
            del self.sender.sends[self]
            self.request.complete()

    def _withdraw(self) -> bool:
        if self._is_matched or self not in self.sender.sends:
            return False
        self._is_withdrawn = True
        self.receiver.inbox.withdraw_message(self)
        self.receiver.unmatched.pop(self, None)
        del self.sender.sends[self]
        if self._is_eager:
            self._return_credit()
        self.request.cancelled()
        return True

    # -- at the receiver -----------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if self._is_withdrawn or self.receiver.is_gone:
            return
        self.receiver.fabric.note("arrive", self.receiver.rank, self.sender.rank, self._envelope)
        if not self._is_eager:
            self.receiver.unmatched[self] = None
        self.receiver.inbox.arrive(self._envelope, self)

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Copy the bytes into the matching receive, or ask for them."""
        self._is_matched = True
        self.receiver.fabric.note("match", self.receiver.rank, self.sender.rank, envelope)
        if self._is_eager:
            self._return_credit()
            if self in self.sender.sends:
                self._to_sender(self._on_fin)
            self._fill(posted)
        else:
            del self.receiver.unmatched[self]
            self.receiver.awaiting_data[self] = posted
            self._to_sender(self._on_cts)

    def refuse(self, error: UnisonoError) -> None:
        """Do nothing: the send ends when its rank learns that the receiver has left."""

    def is_whole(self) -> bool:
        """Whether its bytes came with it, and no send waits for it."""
        return self._is_eager and self not in self.sender.sends

    def drop(self) -> None:
        """It will never be received: return the credit."""
        self._return_credit()

    def _on_data(self) -> None:
        """The bytes have arrived."""
        self.sender.thread.when_running(self._on_fin)
        posted = None if self.receiver.is_gone else self.receiver.awaiting_data.pop(self, None)
        if posted is not None:
            self.receiver.fabric.note("data", self.receiver.rank, self.sender.rank, self._envelope)
            self._fill(posted)

    def _fill(self, posted: Posted) -> None:
        taken = None
        if posted.into is None:
            taken = bytearray(self._data)
        elif self._envelope.nbytes:
            posted.into[: self._envelope.nbytes] = self._data
        posted.request.complete(self._envelope, taken)

    # -- between the two -----------------------------------------------------------------------------------

    def _to_receiver(self, nbytes: int, delivery: Callable[[], None]) -> None:
        self.sender.fabric.carry(self.sender.rank, self.receiver.rank, self._lane, nbytes, delivery)

    def _to_sender(self, delivery: Callable[[], None]) -> None:
        # On the same lane, so that a goodbye of the receiver does not overtake it.
        self.receiver.fabric.carry(self.receiver.rank, self.sender.rank, self._lane, 0, delivery)

    def _return_credit(self) -> None:
        if self.sender is self.receiver:
            self.sender.own_credit.give_back(self._envelope.nbytes)
        else:
            fabric, src, dst = self.sender.fabric, self.sender.rank, self.receiver.rank
            when = fabric.scheduler.now + fabric.channel(dst, src).latency_s
            fabric.channel(src, dst).credit(self._lane).give_back(self._envelope.nbytes, when)


K = TypeVar("K")
V = TypeVar("V")


def _emptied(table: dict[K, V]) -> dict[K, V]:
    """Empty a table and return what was in it: callbacks may use the table meanwhile."""
    entries = dict(table)
    table.clear()
    return entries


def _closed(rank: int) -> ClosedError:
    return ClosedError(f"rank {rank} is closed")
