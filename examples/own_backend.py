"""Own backend: the smallest one that keeps the whole contract. Its transport is a method call.

python examples/own_backend.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import unisono as uni
from unisono.core.clock import RealRuntime
from unisono.core.envelope import UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request, withdrawn
from unisono.messaging.backend import Backend, Capabilities, PeerDown
from unisono.messaging.credit import ENVELOPE_BYTES, OWN_CREDIT_BYTES
from unisono.messaging.inbox import InboundMessage, Inbox
from unisono.messaging.matching import Posted
from unisono.testing import check_backend


class MinimalBackend(Backend):
    """One rank among several of this process."""

    @classmethod
    def create(cls, size: int) -> list[MinimalBackend]:
        """Make the ranks of a fresh world; each knows the others."""
        ranks: list[MinimalBackend] = []
        ranks.extend(cls(rank, ranks) for rank in range(size))
        return ranks

    def __init__(self, rank: int, ranks: list[MinimalBackend]) -> None:
        self._ranks = ranks
        self._config = uni.Config()
        self._runtime = RealRuntime()
        self._lock = threading.Lock()
        self.inbox = Inbox(rank, self._config.recv_bytes_max)
        self._credit_used: dict[int, int] = {}  # bytes that wait unreceived, by receiver
        self._down: dict[int, PeerDown] = {}
        self._listeners: list[Callable[[PeerDown], None]] = []
        self._is_closed = False

    # -- who it is ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self.inbox.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    @property
    def capabilities(self) -> Capabilities:
        """Messages only: collectives are executed from plans above it."""
        return Capabilities("minimal")

    @property
    def config(self) -> uni.Config:
        """The settings, the same on all ranks."""
        return self._config

    @property
    def runtime(self) -> RealRuntime:
        """How threads wait: here by the clock and events of the operating system."""
        return self._runtime

    # -- messages ----------------------------------------------------------------------------------------

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
        """Send eagerly if the credit allows it; otherwise the request ends when a receive matches."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, header)
        message = Message(self, self._ranks[dst], data, Request(dst))
        with self._lock:
            error = self._unreachable(dst)
            if error is None and not sync and self._take_credit(dst, message):
                # Eager: the sender may change its buffer as soon as the request is done.
                message.data = memoryview(bytes(data))
        if error is not None:
            message.request.fail(error)
            return message.request
        message.request.withdraw_by(lambda _: message.withdraw(withdrawn()))
        # The transport. Between processes, the bytes would travel, and a receive thread would call arrive().
        message.receiver.inbox.arrive(Envelope(self.rank, context, tag, data.nbytes, dtype, header), message)
        if message.is_eager:
            message.request.complete()  # not earlier: the next message must not overtake this one
        elif (error := self._unreachable(dst)) is not None:  # one of the two was closed meanwhile
            message.withdraw(error)
        return message.request

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive: the inbox matches it with what has arrived or will arrive."""
        self.check_peer(src, "src")
        return self.inbox.receive(src, context, tag, into, dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe, which ends when a message matches and leaves it queued."""
        self.check_peer(src, "src")
        return self.inbox.probe(src, context, tag)

    def end_group(self, context: int) -> None:
        """A communicator was closed here: drop its unreceived messages, and return their credit."""
        self.inbox.end_context(context)

    # -- endings -----------------------------------------------------------------------------------------

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        with self._lock:
            self._listeners.append(listener)
            known = list(self._down.values())
        for down in known:
            listener(down)

    def close(self) -> None:
        """Leave: end what is pending here, then notify the others. Eager messages stay receivable."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._listeners.clear()
        closed, down = self._closed_error(), PeerDown(self.rank, "left", left=True)
        for other in self._ranks:
            for message in other.inbox.inbound_from(self.rank):
                assert isinstance(message, Message)
                message.withdraw(closed)
        self.inbox.close(closed, down.error())
        for other in self._ranks:
            if other is not self:
                other._on_down(down)

    def _on_down(self, down: PeerDown) -> None:
        with self._lock:
            self._down[down.rank] = down
            listeners = list(self._listeners)
        self.inbox.peer_down(down)
        for listener in listeners:
            listener(down)

    def _closed_error(self) -> uni.ClosedError:
        return uni.ClosedError(f"rank {self.rank} is closed")

    def _unreachable(self, dst: int) -> uni.UnisonoError | None:
        if self._is_closed:
            return self._closed_error()
        return self._down[dst].error() if dst in self._down else None

    # -- credit ------------------------------------------------------------------------------------------

    def _take_credit(self, dst: int, message: Message) -> bool:
        """Whether a message may travel before its receive is posted; the caller holds the lock."""
        cost, used = len(message.data) + ENVELOPE_BYTES, self._credit_used.get(dst, 0)
        if dst == self.rank:
            # A blocking send to oneself cannot wait for its own receive: one message always fits.
            fits = used == 0 or used + cost <= OWN_CREDIT_BYTES
        else:
            config = self._config
            fits = len(message.data) <= config.eager_bytes and used + cost <= config.eager_credit_bytes
        if fits:
            self._credit_used[dst], message.credit = used + cost, cost
        return fits

    def return_credit(self, dst: int, cost: int) -> None:
        """An eager message was received, or never will be."""
        with self._lock:
            self._credit_used[dst] -= cost


class Message(InboundMessage):
    """A message that waits for its receive. `credit` is 0 if its sender waits, too (rendezvous)."""

    def __init__(
        self, sender: MinimalBackend, receiver: MinimalBackend, data: memoryview, request: Request
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.data = data.cast("B") if data.nbytes else memoryview(b"")
        self.request = request
        self.credit = 0

    @property
    def is_eager(self) -> bool:
        """Whether it was sent under credit: then its sender does not wait for it."""
        return self.credit > 0

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        """Copy the bytes into the receive that it matched, then end both requests."""
        taken = bytearray(self.data) if posted.into is None else None
        if posted.into is not None:
            posted.into[: envelope.nbytes] = self.data
        self._end(None)
        posted.request.complete(envelope, taken)

    def refuse(self, error: uni.UnisonoError) -> None:
        """The receiver was closed."""
        self._end(error)

    def is_whole(self) -> bool:
        """An eager message is: its bytes are here, and its sender has gone on."""
        return self.is_eager

    def drop(self) -> None:
        """The communicator was closed before anybody received it."""
        self._end(None)

    def withdraw(self, error: uni.UnisonoError) -> bool:
        """Take it back; False if it was eager or has matched a receive."""
        if self.is_eager or not self.receiver.inbox.withdraw_message(self):
            return False
        self._end(error)
        return True

    def _end(self, error: uni.UnisonoError | None) -> None:
        if self.is_eager:
            self.sender.return_credit(self.receiver.rank, self.credit)
        elif error is None:
            self.request.complete()
        else:
            self.request.fail(error)


def program(backend: MinimalBackend) -> int:
    """What one rank runs: every verb of a communicator works over the backend."""
    with uni.Communicator.world(backend) as world:
        return int(world.all_reduce(world.rank + 1))


if __name__ == "__main__":
    with ThreadPoolExecutor(3) as threads:
        print(f"all_reduce over our own backend: {list(threads.map(program, MinimalBackend.create(3)))}")
    passed = check_backend(MinimalBackend.create)
    print(f"it keeps the contract: {len(passed)} cases passed")
