"""Ranks inside one process, in Python: the reference for backends, and for the executor of plans.

`uni.local` lets the engine host its ranks instead: native/local_ranks.py. Sends are bounded as on a real
link: short messages are eager under a credit per pair of ranks, others wait for their receive. So a program
that needs unbounded buffers fails here too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.backends.thread_watch import ThreadUsers, ThreadWatch
from unisono.config import Config
from unisono.core.clock import Event, RealRuntime, Runtime, Waiting
from unisono.core.envelope import UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request, withdrawn
from unisono.errors import ClosedError, UnisonoError, UsageError
from unisono.messaging.backend import Backend, Capabilities, PeerDown
from unisono.messaging.credit import ENVELOPE_BYTES, OwnCredit, eager_limits
from unisono.messaging.inbox import InboundMessage, Inbox
from unisono.messaging.matching import Posted

__all__ = ["LocalBackend"]

_CAPABILITIES = Capabilities("local")


class LocalBackend(Backend):
    """One of n ranks that share this process."""

    @classmethod
    def create(cls, size: int, config: Config | None = None) -> list[LocalBackend]:
        """Make `size` connected ranks.

        Raises:
            UsageError: `size` is not an integer of at least 1.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"n={size!r}; allowed: an integer >= 1")
        hub = _Hub(size, config if config is not None else Config())
        return [cls(hub, rank) for rank in range(size)]

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        # A rank that is garbage-collected without `close` must not leave the others waiting for it.
        gone = PeerDown(rank, "left without closing", left=True)
        self._finalizer = weakref.finalize(self, hub.leave_later, gone)
        self._finalizer.atexit = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks in this process."""
        return self._hub.size

    @property
    def capabilities(self) -> Capabilities:
        """Everything but the fast paths."""
        return _CAPABILITIES

    @property
    def runtime(self) -> Runtime:
        """The clock, with a watch for deadlocks."""
        return self._hub.runtime

    @property
    def config(self) -> Config:
        """The settings of all ranks."""
        return self._hub.config

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
        """Put a message into the inbox of `dst`: a copy if the credit allows, otherwise a reference."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, header)
        self._hub.watch_threads.note_user(self._rank)
        request = Request(dst)
        down = self._hub.down_of(self._rank, dst)
        if down is not None:
            request.fail(down)
            return request
        envelope = Envelope(self._rank, context, tag, data.nbytes, dtype, header)
        credit = self._hub.credit(self._rank, dst, lane)
        message = _Message(data.cast("B") if data.nbytes else data, request, credit, self._hub)
        if credit.take(data.nbytes):
            message.data, message.cost = memoryview(bytes(data)), data.nbytes + ENVELOPE_BYTES
        inbox = self._hub.inboxes[dst]
        request.withdraw_by(lambda _: message.withdraw(inbox, withdrawn()))
        # No send waits for an eager message, which its receiver may answer on this very thread.
        if message.cost and not sync:
            message.request = None
            inbox.arrive(envelope, message)
            request.complete()
        else:
            inbox.arrive(envelope, message)
            if (closed := self._hub.down_of(self._rank, self._rank)) is not None:
                message.withdraw(inbox, closed)  # `close` on another thread has not seen this message
        return request

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive in this rank's inbox."""
        self.check_peer(src, "src")
        return self._hub.inboxes[self._rank].receive(src, context, tag, into, dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe in this rank's inbox."""
        self.check_peer(src, "src")
        return self._hub.inboxes[self._rank].probe(src, context, tag)

    def end_group(self, context: int) -> None:
        """Drop messages that no receive will match any more."""
        self._hub.inboxes[self._rank].end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        self._hub.watch(self._rank, listener)

    def close(self) -> None:
        """Leave. Messages that were sent before can still be received."""
        if self._finalizer.detach() is not None:
            self._hub.leave(PeerDown(self._rank, "left", left=True))

    def kill(self, cause: str = "killed") -> None:
        """End this rank as a crash would."""
        if self._finalizer.detach() is not None:
            self._hub.leave(PeerDown(self._rank, cause))


@dataclass(slots=True)
class _Credit:
    """The credit of one rank at another, on one lane."""

    limit: int
    eager_bytes: int
    used: int = 0
    own: OwnCredit | None = None  # of a rank at itself
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> bool:
        """Use credit for a message; False if it must wait for its receive."""
        cost = nbytes + ENVELOPE_BYTES
        with self.lock:
            if self.own is not None:
                return self.own.take(nbytes)
            if nbytes > self.eager_bytes or self.used + cost > self.limit:
                return False
            self.used += cost
            return True

    def give_back(self, cost: int) -> None:
        with self.lock:
            if self.own is not None:
                self.own.give_back(cost - ENVELOPE_BYTES)
            else:
                self.used -= cost


class _Message(InboundMessage):
    """A message in this process; `request` is the sender's, if it still waits. `cost` is the credit used."""

    def __init__(self, data: memoryview, request: Request, credit: _Credit, hub: _Hub) -> None:
        self.data = data
        self.request: Request | None = request
        self.cost = 0
        self._credit = credit
        self._hub = hub

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        self._hub.note_activity()
        taken = None
        if posted.into is None:
            taken = bytearray(self.data)
        elif envelope.nbytes:
            posted.into[: envelope.nbytes] = self.data
        self._return_credit()
        if self.request is not None:
            self.request.complete()
        posted.request.complete(envelope, taken)

    def refuse(self, error: UnisonoError) -> None:
        self._return_credit()
        if self.request is not None:
            self.request.fail(error)

    def is_whole(self) -> bool:
        return self.request is None

    def drop(self) -> None:
        self._return_credit()

    def withdraw(self, inbox: Inbox, error: UnisonoError) -> bool:
        """Remove the message and end the sender's request; False if it was matched or has ended."""
        if self.request is None or not inbox.withdraw_message(self):
            return False
        self.refuse(error)
        return True

    def _return_credit(self) -> None:
        cost, self.cost = self.cost, 0
        if cost:
            self._credit.give_back(cost)


class _Hub:
    """What the ranks of one process share."""

    def __init__(self, size: int, config: Config) -> None:
        self.size = size
        self.config = config
        self.inboxes = [Inbox(rank, config.recv_bytes_max) for rank in range(size)]
        self.activity = 0
        self.watch_threads = ThreadWatch(size, config.deadlock_after_s, self)
        self.runtime = _WatchfulRuntime(self.watch_threads)
        self._lock = threading.Lock()
        self._credits: dict[tuple[int, int, Lane], _Credit] = {}
        self._down: dict[int, PeerDown] = {}
        self._listeners: dict[int, list[Callable[[PeerDown], None]]] = {rank: [] for rank in range(size)}

    def credit(self, src: int, dst: int, lane: Lane) -> _Credit:
        """The credit of `src` at `dst`, on one lane."""
        credit = self._credits.get((src, dst, lane))
        if credit is None:
            eager_bytes, limit = eager_limits(self.config, lane)
            own = OwnCredit(self.config) if src == dst else None
            credit = self._credits.setdefault((src, dst, lane), _Credit(limit, eager_bytes, own=own))
        return credit

    def down_of(self, rank: int, peer: int) -> UnisonoError | None:
        """The error of a send from `rank` to `peer`, if one of them is down."""
        down = self._down
        if rank in down:
            return ClosedError(f"rank {rank} is closed")
        return down[peer].error() if peer in down else None

    def watch(self, rank: int, listener: Callable[[PeerDown], None]) -> None:
        with self._lock:
            self._listeners[rank].append(listener)
            known = list(self._down.values())
        for down in known:
            listener(down)

    def leave(self, down: PeerDown) -> None:
        with self._lock:
            if down.rank in self._down:
                return
            self._down[down.rank] = down
            self._listeners[down.rank] = []
            listeners = [fn for fns in self._listeners.values() for fn in fns]
        self.watch_threads.note_left(down.rank)
        closed = ClosedError(f"rank {down.rank} is closed")
        for inbox in self.inboxes:
            for message in inbox.inbound_from(down.rank):
                assert isinstance(message, _Message)
                message.withdraw(inbox, closed)
        self.inboxes[down.rank].close(closed, down.error())
        for inbox in self.inboxes:
            if inbox.rank != down.rank:
                inbox.peer_down(down)
        for listener in listeners:
            listener(down)

    def leave_later(self, down: PeerDown) -> None:
        """Leave soon: the garbage collector may run while a lock of ours is held."""
        self.runtime.call_soon(lambda: self.leave(down))

    def note_activity(self) -> None:
        self.activity += 1

    def moves(self) -> int:
        """How many messages were delivered."""
        return self.activity

    def is_quiet(self) -> bool:
        """Whether no message is under way: each is delivered by the thread that sends or receives it."""
        return True

    def users(self, rank: int) -> ThreadUsers:
        """None but those that have said so."""
        return ThreadUsers()

    def has_pending(self, rank: int) -> bool:
        """Whether a rank has a receive without a message, or a send that waits for its receive."""
        if self.inboxes[rank].is_awaited():
            return True
        messages = (message for inbox in self.inboxes for message in inbox.inbound_from(rank))
        return any(isinstance(message, _Message) and message.request is not None for message in messages)


class _WatchfulRuntime(RealRuntime):
    """The real runtime, with the watch for threads that can never go on."""

    sees_deadlocks = True

    def __init__(self, watch: ThreadWatch) -> None:
        super().__init__()
        self._watch = watch

    def used(self, rank: int) -> None:
        """The calling thread waits for an operation of a rank: it belongs to the rank."""
        self._watch.used(rank)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait; without a time limit, raise Deadlock once no thread can end the wait."""
        return self._watch.block(super().block, self.now, event, timeout, waiting, is_limited=is_limited)
