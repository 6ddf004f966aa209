"""The backend of a simulated rank: the contract over a network that exists only in virtual time.

Knows how a message travels: whole if the credit allows, else its envelope first and the bytes
when a receive asks for them. Does not know how long anything takes (the fabric does), or why a rank is down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from unisono.config import Config
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Lane, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, UnisonoError, UsageError
from unisono.messaging.backend import Backend, Capabilities, PeerDown
from unisono.messaging.credit import OwnCredit
from unisono.messaging.inbox import InboundMessage, Inbox
from unisono.messaging.matching import Posted
from unisono.simulation.fabric import Fabric
from unisono.simulation.runtime import SimRuntime
from unisono.simulation.scheduler import SimThread

__all__ = ["Overseer", "SimBackend"]


class Overseer(Protocol):
    """Who has to know what a rank does."""

    def on_step(self, rank: int, step: int) -> None:
        """A rank is about to start its k-th operation: faults may strike."""

    def on_close(self, rank: int) -> None:
        """A rank leaves."""


class SimBackend(Backend):
    """One simulated rank. `peers` are the backends of all ranks, this one included."""

    def __init__(
        self, fabric: Fabric, thread: SimThread, peers: Sequence[SimBackend], overseer: Overseer
    ) -> None:
        self.fabric = fabric
        self.thread = thread
        self.inbox = Inbox(thread.rank, fabric.config.recv_bytes_max)
        self.own = OwnCredit(fabric.config)
        self.sending: dict[_Message, None] = {}
        self.offered: dict[_Message, None] = {}
        self.landing: dict[_Message, Posted] = {}
        self._peers = peers
        self._overseer = overseer
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
        """How many ranks are simulated."""
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
        """Whether it left or was killed: nothing reaches it any more."""
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
        """Send a message, or its envelope."""
        self.check_peer(dst, "dst")
        if isinstance(dst, Any_):
            raise UsageError("dst=ANY; allowed: one rank")
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
            bytes_of = data.cast("B") if data.nbytes else data
            _Message(self, self._peers[dst], envelope, bytes_of, lane, request).start(sync)
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
        """Drop what nobody will receive any more."""
        if not self.is_gone:
            self.inbox.end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Tell the listener of ranks that are or go down."""
        for down in list(self._down.values()):
            listener(down)
        if not self._is_closed:
            self._listeners.append(listener)

    def close(self) -> None:
        """Leave: what was sent arrives, what still waits for its receive is taken back."""
        if self.is_gone or self.fabric.scheduler.is_over:
            return
        self.fabric.scheduler.check_caller()
        self._is_closed = True
        self._listeners.clear()
        self._overseer.on_close(self.rank)
        self.inbox.close(_closed(self.rank), PeerDown(self.rank, "left", left=True).error())
        for posted in _emptied(self.landing).values():
            posted.request.fail(_closed(self.rank))
        for message in _emptied(self.sending):
            message.request.fail(_closed(self.rank))

    def has_lost(self, peer: int) -> bool:
        """Whether it knows that a rank is down."""
        return peer in self._down

    def peer_down(self, down: PeerDown) -> None:
        """A rank is down: whoever watches hears it first, then every request that needs it ends."""
        self._down[down.rank] = down
        for listener in list(self._listeners):
            listener(down)
        for message in [m for m in self.offered if m.sender.rank == down.rank]:
            # Its bytes will never come, so it is no message that could still be received.
            self.inbox.withdraw_parcel(message)
            del self.offered[message]
        self.inbox.peer_down(down)
        # Callbacks may do anything, this backend's end included: look again before each.
        for message in [m for m in self.landing if m.sender.rank == down.rank]:
            if (posted := self.landing.pop(message, None)) is not None:
                posted.request.fail(down.error())
        for message in [m for m in self.sending if m.receiver.rank == down.rank]:
            if message in self.sending:
                del self.sending[message]
                message.request.fail(down.error())

    def _begin(self, tag: int | Any_) -> bool:
        """Count an operation and let faults strike; False if the rank is dead but not the one to be told.

        What communicators tell each other by themselves is no step of a user's program.
        """
        scheduler = self.fabric.scheduler
        scheduler.check_caller()
        if self.thread.killed is None and (tag is ANY or not tag & Tags.CONTROL):
            self._steps += 1
            self._overseer.on_step(self.rank, self._steps)
        current = scheduler.current
        if current is not None and current.rank == self.rank:
            current.check_life()
            current.stand_still()
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
        self._is_met = False
        self._is_withdrawn = False

    # -- at the sender -------------------------------------------------------------------------------------

    def start(self, sync: bool) -> None:
        """Leave, with the bytes if they may go."""
        fabric, envelope = self.sender.fabric, self._envelope
        fabric.note("send", self.sender.rank, self.receiver.rank, envelope)
        self._is_eager = self._may_be_eager()
        if self._is_eager:
            self._data = bytes(self._data)
        is_waiting = sync or not self._is_eager
        if is_waiting:
            self.sender.sending[self] = None
            self.request.withdraw_by(lambda _: self._withdraw())
        self._to_receiver(envelope.nbytes if self._is_eager else 0, self._arrive)
        if not is_waiting:
            self.request.complete()

    def _may_be_eager(self) -> bool:
        if self.sender is self.receiver:
            return self.sender.own.take(self._envelope.nbytes)
        src, dst, fabric = self.sender.rank, self.receiver.rank, self.sender.fabric
        credit = fabric.way(src, dst).credit(self._lane)
        return credit.take(self._envelope.nbytes, fabric.scheduler.now, fabric.way(dst, src))

    def _answered(self) -> None:
        """The receiver asks for the bytes."""
        if self in self.sender.sending and not self.sender.is_gone:
            # The bytes are taken now: if the sender dies while they travel, they still arrive whole.
            self._data = bytes(self._data)
            self._to_receiver(self._envelope.nbytes, self._land)

    def _settled(self) -> None:
        """The sender's part is done."""
        if self in self.sender.sending and not self.sender.is_gone:
            del self.sender.sending[self]
            self.request.complete()

    def _withdraw(self) -> bool:
        if self._is_met or self not in self.sender.sending:
            return False
        self._is_withdrawn = True
        self.receiver.inbox.withdraw_parcel(self)
        self.receiver.offered.pop(self, None)
        del self.sender.sending[self]
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
            self.receiver.offered[self] = None
        self.receiver.inbox.arrive(self._envelope, self)

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Go into the receive that was met, or ask for the bytes."""
        self._is_met = True
        self.receiver.fabric.note("match", self.receiver.rank, self.sender.rank, envelope)
        if self._is_eager:
            self._return_credit()
            if self in self.sender.sending:
                self._to_sender(self._settled)
            self._fill(posted)
        else:
            del self.receiver.offered[self]
            self.receiver.landing[self] = posted
            self._to_sender(self._answered)

    def refuse(self, error: UnisonoError) -> None:
        """The receiver has left; the sender hears of that itself, as soon as the news has travelled."""

    def is_whole(self) -> bool:
        """Whether its bytes came with it, and its sender does not wait."""
        return self._is_eager and self not in self.sender.sending

    def drop(self) -> None:
        """Nobody will receive it: its sender may use the credit again."""
        self._return_credit()

    def _land(self) -> None:
        """The bytes have come."""
        self.sender.thread.when_awake(self._settled)
        posted = None if self.receiver.is_gone else self.receiver.landing.pop(self, None)
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
            self.sender.own.give_back(self._envelope.nbytes)
        else:
            fabric, src, dst = self.sender.fabric, self.sender.rank, self.receiver.rank
            when = fabric.scheduler.now + fabric.way(dst, src).latency_s
            fabric.way(src, dst).credit(self._lane).give_back(self._envelope.nbytes, when)


K = TypeVar("K")
V = TypeVar("V")


def _emptied(table: dict[K, V]) -> dict[K, V]:
    """Empty a table and return what was in it: callbacks may look at it meanwhile."""
    entries = dict(table)
    table.clear()
    return entries


def _closed(rank: int) -> ClosedError:
    return ClosedError(f"rank {rank} is closed")
