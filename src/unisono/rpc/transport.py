"""The transport: how frames and blobs reach another agent, and how a thread waits for what they bring.

There are two. `CallbackTransport` works over any backend: frames arrive by callback, on any thread.
`MailboxTransport` uses the mailbox of a backend that has one: frames arrive on a thread that reads, which is
a thread of the pool, or one that waits for an answer and so needs no other thread to wake it.

A *blob* is a long part of a value that travels beside its frame as a message of its own (frame.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from unisono._native import CERTAIN_BLOB_BYTES, SIGNAL_CHECK_S
from unisono.core.envelope import ANY, Lane, Tags
from unisono.core.request import Request
from unisono.core.runtime import Deadline, Runtime, Waiting, refuse_blocking
from unisono.errors import ClosedError, PeerLost, ProtocolError, UnisonoError, lost_text
from unisono.messaging.backend import Backend
from unisono.messaging.credit import ENVELOPE_BYTES
from unisono.messaging.fast_path import Mailbox
from unisono.rpc.pool import held_slot

__all__ = [
    "UNBOUNDED",
    "UNSENT_ASKS_MAX",
    "UNSENT_BYTES_MAX",
    "CallbackTransport",
    "LentBuffer",
    "MailboxTransport",
    "Outbound",
    "RpcTransport",
    "Waitable",
]

_log = logging.getLogger("unisono.rpc")

# (source rank, frame)
Deliver: TypeAlias = Callable[[int, bytes], None]
# Called with the error, or with None.
OnDone: TypeAlias = Callable[[BaseException | None], None]

# How long a thread of the pool reads at a time.
_READ_S: Final = 1.0
# How long a waiting thread sleeps while another one reads; that one, or a signal, wakes it earlier.
_SLEEP_S: Final = 1.0
# When a peer is lost: how often to check whether other threads have dispatched the frames they took, and for
# how long at most.
_DELIVERED_LOOK_S: Final = 0.001
_DELIVERED_MAX_S: Final = 0.05
# Bytes of frames that wait for a rank which does not read. Beyond the first bound, calls to it fail as busy.
# Honest use does not reach the second: these calls, 256 MiB of stream items (peers.QUEUE_MAX streams of
# streams.WINDOW items in frames of up to 16 KiB) and 32 MiB of answers. A rank beyond it is given up.
UNSENT_ASKS_MAX: Final = 32 << 20
UNSENT_BYTES_MAX: Final = 320 << 20
# For a goodbye, which is sent whatever waits.
UNBOUNDED: Final = (1 << 63) - 1
# Pause after a frame could not be received, for want of memory for example.
_RETRY_S: Final = 0.05
# Outcomes of an expected message: native/messaging/message.hpp.
_DONE, _PEER_DOWN, _CLOSED = 0, 2, 4


class Waitable:
    """Something that a thread waits for: an answer, an item of a stream, or admission of another call."""

    def __init__(self) -> None:
        self.is_done = False
        # How the transport wakes the waiting thread; None while no thread waits.
        self.waiter: Any = None


class Outbound(Protocol):
    """The blobs that travel beside a frame."""

    parts: Sequence[tuple[int, memoryview]]
    """The tag and the memory of each."""

    def on_lent(self, lent: Sequence[LentBuffer]) -> None:
        """They are sent, with their frame."""


class LentBuffer(Protocol):
    """Memory that is being sent. It must not change until `done`."""

    @property
    def done(self) -> bool:
        """Whether the receiver has it, or never will."""

    def cancel(self) -> bool:
        """Withdraw it unless the receiver has begun to read it; returns `done`."""


class RpcTransport(ABC):
    """Frames and blobs of one agent. Every method may be called from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Numbers of calls and of blobs, unique for this sender.
        self.next_number: Callable[[], int] = itertools.count(1).__next__

    @abstractmethod
    def start(self, deliver: Deliver) -> None:
        """Call `deliver` with every frame that arrives from now on."""

    @abstractmethod
    def send(
        self,
        dst: int,
        frame: bytes,
        unsent_bytes_max: int,
        is_more: bool = False,
        outbound: Outbound | None = None,
    ) -> bool:
        """Send a frame and its blobs; with `is_more` others follow, and it may wait a moment for them.

        Blobs are not copied. One that its receiver receives in any case is sent before the frame, so that it
        is usually there when the frame is read; a longer one after it.

        That it arrived shows only in an answer, and that it did not in the loss of the rank.

        Returns:
            False, and nothing is sent, if more than `unsent_bytes_max` bytes wait for the rank to read them.
        """

    @abstractmethod
    def receive(self, src: int, number: int, memory: Any, on_done: OnDone) -> Callable[[], object]:
        """Receive a blob into memory, then call `on_done`; returns a function that cancels it.

        `on_done` is called before this returns if the blob is here already. The error is a PeerLost,
        ClosedError, or a ProtocolError if the blob has another length.
        """

    @abstractmethod
    def when_delivered(self, call: Callable[[], None]) -> None:
        """Call back once every frame that has arrived is dispatched, on whatever thread."""

    @abstractmethod
    def wait(self, waitable: Waitable, deadline: Deadline, waiting: Callable[[], Waiting]) -> None:
        """Return when the waitable is done or the deadline has passed."""

    def wait_outside_slot(self, waitable: Waitable, deadline: Deadline, waiting: Waiting) -> None:
        """As `wait`; a handler gives its slot up meanwhile.

        Raises:
            UsageError: an inline handler must not wait.
        """
        refuse_blocking()
        pool = held_slot()
        if pool is not None:
            pool.give_up_slot()
        try:
            self.wait(waitable, deadline, lambda: waiting)
        finally:
            if pool is not None:
                pool.take_slot(lambda: waiting)

    @property
    def is_read_by_caller(self) -> bool:
        """Whether the calling thread waits for something of its own and reads frames meanwhile."""
        return False

    @abstractmethod
    def wake(self, waitable: Waitable) -> None:
        """Wake the thread that waits for it, if there is one."""

    @abstractmethod
    def close(self) -> None:
        """Deliver no more frames."""


class CallbackTransport(RpcTransport):
    """Over any backend: one posted receive that every frame matches."""

    def __init__(self, backend: Backend, context: int) -> None:
        super().__init__(backend.runtime)
        self._backend = backend
        self._context = context
        self._deliver: Deliver
        self._lock = threading.Lock()
        self._unsent = [0] * backend.size
        self._posted: Request | None = None
        self._is_closed = False

    def start(self, deliver: Deliver) -> None:
        """Post the receive."""
        self._deliver = deliver
        self._post_receive()

    def send(
        self,
        dst: int,
        frame: bytes,
        unsent_bytes_max: int,
        is_more: bool = False,
        outbound: Outbound | None = None,
    ) -> bool:
        """Send a frame in the control lane, and its blobs in the data lane."""
        if self._unsent[dst] > unsent_bytes_max:
            return False
        parts = () if outbound is None else outbound.parts
        lent = {
            number: self._lend(dst, number, part)
            for number, part in parts
            if part.nbytes <= CERTAIN_BLOB_BYTES
        }
        request = self._backend.start_send(dst, self._context, Tags.RPC, memoryview(frame), lane=Lane.CONTROL)
        if not request.done:
            with self._lock:
                self._unsent[dst] += len(frame) + ENVELOPE_BYTES
            request.notify(partial(self._on_sent, dst, len(frame) + ENVELOPE_BYTES))
        if outbound is not None:
            outbound.on_lent(
                [lent[number] if number in lent else self._lend(dst, number, part) for number, part in parts]
            )
        return True

    def _on_sent(self, dst: int, cost: int) -> None:
        with self._lock:
            self._unsent[dst] -= cost

    def _lend(self, dst: int, number: int, part: memoryview) -> LentBuffer:
        """Send a blob; as the mailbox does, a long one only when the receiver takes it."""
        is_long = part.nbytes > CERTAIN_BLOB_BYTES
        return self._backend.start_send(dst, self._context, Tags.RPC | number, part, sync=is_long)

    def receive(self, src: int, number: int, memory: Any, on_done: OnDone) -> Callable[[], object]:
        """Post a receive for a blob."""
        buffer = memoryview(memory)
        request = self._backend.start_recv(src, self._context, Tags.RPC | number, buffer)

        def on_request_done() -> None:
            envelope = request.envelope
            came = envelope.nbytes if envelope is not None else -1
            on_done(request.error if request.error is not None else _length_error(came, buffer.nbytes))

        request.notify(on_request_done)
        return request.cancel

    def when_delivered(self, call: Callable[[], None]) -> None:
        """At once: frames are dispatched in order here."""
        call()

    def wait(self, waitable: Waitable, deadline: Deadline, waiting: Callable[[], Waiting]) -> None:
        """Block on an event of the backend's clock."""
        runtime = self._runtime
        while not waitable.is_done:
            left = deadline.remaining(runtime.now())
            if left is not None and left <= 0:
                return
            with self._lock:
                # A stream's waitable is set many times: each wait needs an event that is not set yet.
                if waitable.waiter is None or waitable.waiter.is_set():
                    waitable.waiter = runtime.event()
                event = waitable.waiter
            if not waitable.is_done:
                runtime.block(event, left, waiting, is_limited=left is not None)

    def wake(self, waitable: Waitable) -> None:
        """Set its event."""
        if waitable.waiter is not None:
            waitable.waiter.set()

    def close(self) -> None:
        """Withdraw the posted receive."""
        with self._lock:
            self._is_closed = True
            posted = self._posted
        if posted is not None:
            posted.cancel()

    def _post_receive(self) -> None:
        while not self._is_closed:
            request = self._backend.start_recv(ANY, self._context, Tags.RPC, None)
            self._posted = request
            if not request.done:
                request.notify(partial(self._on_message, request))
                return
            if not self._take(request):
                return

    def _on_message(self, request: Request) -> None:
        if self._take(request):
            self._post_receive()

    def _take(self, request: Request) -> bool:
        """Deliver a received frame; False if no other receive is to be posted now."""
        if isinstance(request.error, PeerLost):
            return True  # its sender was lost while it sent; others still send
        if request.error is not None:
            if not isinstance(request.error, ClosedError):
                # The frame is still there, so a receive posted at once would fail again.
                _log.error("a frame could not be received: %s", request.error)
                self._runtime.call_at(self._runtime.now() + _RETRY_S, self._post_receive)
            return False
        envelope = request.envelope
        assert envelope is not None
        self._deliver(envelope.source, bytes(request.data or b""))
        return True


class MailboxTransport(RpcTransport):
    """Over a mailbox. One waiting thread, the *leader*, reads it for all; the others, its *followers*, sleep.

    While no thread waits, a thread of the pool reads.
    """

    def __init__(self, mailbox: Mailbox, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._mailbox = mailbox
        self._deliver: Deliver
        self._lead = threading.Lock()
        self._leader = 0
        self._followers: dict[Waitable, None] = {}
        self._handles = itertools.count(1)
        # Blobs under way, by their handle in the mailbox: the length, and what to call at the end.
        self._expected: dict[int, tuple[int, OnDone]] = {}
        self._lock = threading.Lock()
        self._batches_delivered = 0

    def start(self, deliver: Deliver) -> None:
        """Frames arrive on the threads that call `read` and `wait`."""
        self._deliver = deliver

    def send(
        self,
        dst: int,
        frame: bytes,
        unsent_bytes_max: int,
        is_more: bool = False,
        outbound: Outbound | None = None,
    ) -> bool:
        """Post a frame, and lend its blobs to the mailbox."""
        if outbound is None:
            return self._mailbox.post(dst, frame, unsent_bytes_max, is_more)
        parts = [(Tags.RPC | number, part, next(self._handles)) for number, part in outbound.parts]
        if not self._mailbox.post(dst, frame, unsent_bytes_max, is_more, parts):
            return False
        outbound.on_lent([_MailboxLent(self._mailbox, handle) for _, _, handle in parts])
        return True

    def receive(self, src: int, number: int, memory: Any, on_done: OnDone) -> Callable[[], object]:
        """Expect a blob in the mailbox: unless it is here, a thread that reads learns of its end."""
        handle = next(self._handles)
        self._expected[handle] = (memoryview(memory).nbytes, on_done)
        ended = self._mailbox.expect(src, Tags.RPC | number, memory, handle)
        if ended is not None:
            self._on_blob(src, handle, *ended)
        return partial(self._mailbox.withdraw, handle)

    def when_delivered(self, call: Callable[[], None]) -> None:
        """Deliver what no thread has taken, and wait for the threads that have taken something."""
        runtime, until = self._runtime, self._runtime.now() + _DELIVERED_MAX_S

        def look() -> None:
            self._deliver_all(self._mailbox.drain())
            # In this order: a batch that is delivered by now had been counted by the mailbox.
            delivered = self._batches_delivered
            if delivered == self._mailbox.batches() or runtime.now() >= until:
                call()
            else:
                runtime.call_at(runtime.now() + _DELIVERED_LOOK_S, look)

        runtime.call_soon(look)

    def read(self) -> None:
        """Deliver what arrives next, on a thread of the pool; `wake_reader` ends it."""
        self._deliver_all(self._mailbox.take(_READ_S, False))

    def wake_reader(self) -> None:
        """Make one thread return from `read`."""
        self._mailbox.interrupt_wait(False)

    def wait(self, waitable: Waitable, deadline: Deadline, waiting: Callable[[], Waiting]) -> None:
        """Read until it is done; while another thread reads, sleep."""
        now = self._runtime.now
        while not waitable.is_done:
            left = deadline.remaining(now())
            if left is not None and left <= 0:
                return
            left = _SLEEP_S if left is None else left
            # A signal handler that raised in between would lose the frames of others, or the lead.
            with self._runtime.defer_signals():
                is_leader = self._lead.acquire(blocking=False)
                if is_leader:
                    self._read_as_leader(waitable, min(left, SIGNAL_CHECK_S))
            if not is_leader:
                self._follow(waitable, min(left, _SLEEP_S))

    def _read_as_leader(self, waitable: Waitable, limit: float) -> None:
        self._leader = threading.get_ident()
        waitable.waiter = self
        try:
            if not waitable.is_done:  # it may have ended before this thread could be woken
                self._deliver_all(self._mailbox.take(limit, True))
        finally:
            self._leader = 0
            self._lead.release()
            waitable.waiter = None
            self._pass_lead_on()

    @property
    def is_read_by_caller(self) -> bool:
        """Whether the calling thread is the leader."""
        return self._leader == threading.get_ident()

    def wake(self, waitable: Waitable) -> None:
        """Wake the thread that waits for it, unless that is the calling thread."""
        waiter = waitable.waiter
        if waiter is None:
            return
        if waiter is not self:
            _release(waiter)
        elif not self.is_read_by_caller:
            self._mailbox.interrupt_wait(True)

    def close(self) -> None:
        """Make every reader return, now and later."""
        self._mailbox.close()

    def _deliver_all(self, messages: list[tuple[int, Any]]) -> None:
        if not messages:
            return
        deliver = self._deliver
        for source, message in messages:
            if type(message) is bytes:
                deliver(source, message)
            else:
                self._on_blob(source, *message)
        with self._lock:
            self._batches_delivered += 1

    def _on_blob(self, source: int, handle: int, outcome: int, nbytes: int) -> None:
        announced, on_done = self._expected.pop(handle)
        error: UnisonoError | None
        if outcome == _DONE:
            error = _length_error(nbytes, announced)
        elif outcome == _PEER_DOWN:
            error = PeerLost(lost_text((source,)), ranks=(source,), cause="it died while it sent")
        elif outcome == _CLOSED:
            error = ClosedError("the backend is closed")
        else:
            error = ProtocolError("a blob was withdrawn, or is longer than its frame announced")
        try:
            on_done(error)
        except Exception:
            _log.exception("a blob from rank %d could not be processed", source)

    def _follow(self, waitable: Waitable, limit: float) -> None:
        turn = threading.Lock()
        turn.acquire()
        waitable.waiter = turn
        self._followers[waitable] = None
        try:
            # The leader may have left before it could see this follower: so look again.
            if not waitable.is_done and self._lead.locked():
                turn.acquire(timeout=limit)
        finally:
            self._followers.pop(waitable, None)
            waitable.waiter = None

    def _pass_lead_on(self) -> None:
        """Wake one follower, which reads on."""
        while self._followers:
            try:
                waitable, _ = self._followers.popitem()
            except KeyError:
                return
            waiter = waitable.waiter
            # One whose answer is here was woken for that, and does not read.
            if waiter is not None and waiter is not self and not waitable.is_done:
                _release(waiter)
                return


class _MailboxLent:
    """Memory that was lent to a mailbox, which keeps it alive until the receiver has read it."""

    __slots__ = ("_mailbox", "handle")

    def __init__(self, mailbox: Mailbox, handle: int) -> None:
        self._mailbox = mailbox
        self.handle = handle

    @property
    def done(self) -> bool:
        return not self._mailbox.is_lent(self.handle)

    def cancel(self) -> bool:
        self._mailbox.withdraw(self.handle)
        return self.done


def _length_error(came: int, announced: int) -> ProtocolError | None:
    return None if came == announced else ProtocolError("a blob is shorter than its frame announced")


def _release(turn: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it may be woken twice
        turn.release()
