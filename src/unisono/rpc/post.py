"""The post: how frames, and what follows them, get to another agent; how a thread waits for what they bring.

Knows backends. Does not know what is in a frame. There are two: over any backend, frames come by callback, on
whatever thread brings them. A backend with a mailbox brings them to a thread that reads: one of the agent's
own, or one that waits for an answer and so needs nobody to wake it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from unisono.core.clock import Deadline, Runtime, Waiting
from unisono.core.envelope import ANY, Lane, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, PeerLost, ProtocolError, UnisonoError, lost_text
from unisono.messaging.backend import Backend
from unisono.messaging.credit import ENVELOPE_BYTES
from unisono.messaging.fast_path import Mailbox

__all__ = [
    "UNBOUNDED",
    "UNSENT_ASKS_MAX",
    "UNSENT_BYTES_MAX",
    "CallbackTransport",
    "Lent",
    "MailboxTransport",
    "RpcTransport",
    "Waitable",
]

_log = logging.getLogger("unisono.rpc")

# (rank, frame)
Deliver: TypeAlias = Callable[[int, bytes], None]
# What went wrong, if anything.
Then: TypeAlias = Callable[[BaseException | None], None]

# How long a thread reads before Python looks for signals.
_SLICE_S: Final = 0.05
# How long a thread sleeps that others wake: a signal wakes it, too.
_SLEEP_S: Final = 1.0
# How often to look whether other threads have delivered what they have in hand, and for how long at most.
_QUIET_LOOK_S: Final = 0.001
_QUIET_MAX_S: Final = 0.05
# Bytes of frames that wait for a rank which does not take them. Beyond the first bound, calls to it fail as
# busy. Honest use does not reach the second: these calls, 73 MiB of stream items (peers.QUEUE_MAX streams of
# streams.WINDOW items of up to 4.5 KiB) and 16 MiB of answers. A rank beyond it is given up.
UNSENT_ASKS_MAX: Final = 32 << 20
UNSENT_BYTES_MAX: Final = 128 << 20
# What is sent whatever waits: the last word to a rank.
UNBOUNDED: Final = (1 << 63) - 1
# How long to wait after a frame could not be received, for want of memory for example.
_REST_S: Final = 0.05
# Outcomes of a message that was expected: native/messaging/message.hpp.
_DONE, _PEER_DOWN, _CLOSED = 0, 2, 4


class Waitable:
    """Something that threads wait for: an answer, or room for another call."""

    def __init__(self) -> None:
        self.is_done = False
        # How to wake who waits; the post's own.
        self.waiter: Any = None


class Lent(Protocol):
    """Memory on its way to another rank; it has to stay as it is until that has it."""

    @property
    def done(self) -> bool:
        """Whether the other side has it, or never will."""

    def cancel(self) -> bool:
        """Take it back, if the other side has not begun to take it."""


class RpcTransport(ABC):
    """The frames of one agent."""

    @abstractmethod
    def send(self, dst: int, frame: bytes, unsent_bytes_max: int) -> bool:
        """Send a frame. Whether it arrives is told by what comes back, or by the end of the rank.

        False, and nothing is sent, if more than `unsent_bytes_max` wait for the rank to take them.
        """

    @abstractmethod
    def lend(self, dst: int, number: int, part: memoryview) -> Lent:
        """Send what follows a frame from where it lies."""

    @abstractmethod
    def receive(self, src: int, number: int, place: np.ndarray[Any, Any], then: Then) -> Callable[[], object]:
        """Receive what follows a frame where it is to stay, and say when it is there; returns how to stop."""

    @abstractmethod
    def when_quiet(self, call: Callable[[], None]) -> None:
        """Call as soon as every frame that is here has been delivered."""

    @abstractmethod
    def wait(self, awaited: Waitable, deadline: Deadline, waiting: Callable[[], Waiting]) -> None:
        """Wait until it is done, or until the deadline."""

    @abstractmethod
    def wake(self, awaited: Waitable) -> None:
        """It is done: wake who waits for it."""

    @abstractmethod
    def close(self) -> None:
        """Hear no more."""


class CallbackTransport(RpcTransport):
    """Over any backend: a receive that every frame meets."""

    def __init__(self, backend: Backend, context: int, deliver: Deliver) -> None:
        self._backend = backend
        self._runtime: Runtime = backend.runtime
        self._context = context
        self._deliver = deliver
        self._lock = threading.Lock()
        self._unsent = [0] * backend.size
        self._posted: Request | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to hear."""
        self._listen()

    def send(self, dst: int, frame: bytes, unsent_bytes_max: int) -> bool:
        """Send a frame."""
        if self._unsent[dst] > unsent_bytes_max:
            return False
        request = self._backend.start_send(dst, self._context, Tags.RPC, memoryview(frame), lane=Lane.CONTROL)
        if not request.done:
            with self._lock:
                self._unsent[dst] += len(frame) + ENVELOPE_BYTES
            request.notify(partial(self._on_sent, dst, len(frame) + ENVELOPE_BYTES))
        return True

    def _on_sent(self, dst: int, cost: int) -> None:
        with self._lock:
            self._unsent[dst] -= cost

    def lend(self, dst: int, number: int, part: memoryview) -> Lent:
        """Send it in the lane of the data."""
        return self._backend.start_send(dst, self._context, Tags.RPC | number, part)

    def receive(self, src: int, number: int, place: np.ndarray[Any, Any], then: Then) -> Callable[[], object]:
        """Receive it."""
        request = self._backend.start_recv(src, self._context, Tags.RPC | number, place.data)

        def tell() -> None:
            envelope = request.envelope
            came = envelope.nbytes if envelope is not None else -1
            then(request.error if request.error is not None else _fault(came, place.nbytes))

        request.notify(tell)
        return request.cancel

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Frames come in order here."""
        call()

    def wait(self, awaited: Waitable, deadline: Deadline, waiting: Callable[[], Waiting]) -> None:
        """Wait by the clock of the backend."""
        runtime = self._runtime
        while not awaited.is_done:
            left = deadline.remaining(runtime.now())
            if left is not None and left <= 0:
                return
            with self._lock:
                # What changes more than once raises its flag more than once.
                if awaited.waiter is None or awaited.waiter.is_set():
                    awaited.waiter = runtime.event()
                event = awaited.waiter
            if not awaited.is_done:
                runtime.block(event, left, waiting, is_limited=left is not None)

    def wake(self, awaited: Waitable) -> None:
        """Raise its flag, if somebody waits for it."""
        if awaited.waiter is not None:
            awaited.waiter.set()

    def close(self) -> None:
        """Withdraw the receive."""
        with self._lock:
            self._is_closed = True
            posted = self._posted
        if posted is not None:
            posted.cancel()

    def _listen(self) -> None:
        while not self._is_closed:
            request = self._backend.start_recv(ANY, self._context, Tags.RPC, None)
            self._posted = request
            if not request.done:
                request.notify(partial(self._on_message, request))
                return
            if not self._hear(request):
                return

    def _on_message(self, request: Request) -> None:
        if self._hear(request):
            self._listen()

    def _hear(self, request: Request) -> bool:
        """Take what came; False if nothing will come any more."""
        if isinstance(request.error, PeerLost):
            return True  # a message whose sender went while it was on its way: the others still speak
        if request.error is not None:
            if not isinstance(request.error, ClosedError):
                # It is still there: at once it would fail again.
                _log.error("a frame could not be received: %s", request.error)
                self._runtime.call_at(self._runtime.now() + _REST_S, self._listen)
            return False
        envelope = request.envelope
        assert envelope is not None
        self._deliver(envelope.source, bytes(request.data or b""))
        return True


class MailboxTransport(RpcTransport):
    """Over a mailbox: whoever waits reads it; while nobody does, a thread of the pool."""

    def __init__(self, mailbox: Mailbox, runtime: Runtime, deliver: Deliver) -> None:
        self._mailbox = mailbox
        self._runtime = runtime
        self._deliver = deliver
        self._lead = threading.Lock()
        self._leader = 0
        self._followers: dict[Waitable, None] = {}
        self._numbers = itertools.count(1)
        # What is expected: where, and whom to tell.
        self._expected: dict[int, tuple[np.ndarray[Any, Any], Then]] = {}
        self._lock = threading.Lock()
        self._batches_delivered = 0
        # Every frame passes here: a method less in between.
        self.send = mailbox.post  # type: ignore[method-assign,assignment]

    def send(self, dst: int, frame: bytes, unsent_bytes_max: int) -> bool:
        """Send a frame."""
        return self._mailbox.post(dst, frame, unsent_bytes_max)

    def lend(self, dst: int, number: int, part: memoryview) -> Lent:
        """Lend it to the mailbox."""
        lent = _MailboxLent(self._mailbox, next(self._numbers))
        self._mailbox.lend(dst, Tags.RPC | number, part, lent.number)
        return lent

    def receive(self, src: int, number: int, place: np.ndarray[Any, Any], then: Then) -> Callable[[], object]:
        """Expect it in the mailbox: whoever reads that brings the news."""
        mine = next(self._numbers)
        self._expected[mine] = (place, then)
        self._mailbox.expect(src, Tags.RPC | number, place, mine)
        return partial(self._mailbox.withdraw, mine)

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Deliver what nobody has taken, and wait for those threads that have."""
        runtime, until = self._runtime, self._runtime.now() + _QUIET_MAX_S

        def look() -> None:
            self._deliver_all(self._mailbox.drain())
            # In this order: what is delivered by now was counted by then.
            delivered = self._batches_delivered
            if delivered == self._mailbox.batches() or runtime.now() >= until:
                call()
            else:
                runtime.call_at(runtime.now() + _QUIET_LOOK_S, look)

        runtime.call_soon(look)

    def read(self) -> None:
        """Deliver what comes next, or return because there is something to run."""
        self._take(1.0, is_front=False)

    def rouse(self) -> None:
        """Make a reader of the pool return."""
        self._mailbox.interrupt_wait(False)

    def wait(self, awaited: Waitable, deadline: Deadline, waiting: Callable[[], Waiting]) -> None:
        """Read until it is done; while another thread reads, sleep."""
        now = self._runtime.now
        while not awaited.is_done:
            left = deadline.remaining(now())
            if left is not None and left <= 0:
                return
            left = _SLEEP_S if left is None else left
            if self._lead.acquire(blocking=False):
                self._leader = threading.get_ident()
                awaited.waiter = self
                try:
                    self._read_for(awaited, min(left, _SLICE_S))
                finally:
                    self._leader = 0
                    self._lead.release()
                    awaited.waiter = None
                    self._pass_on()
            else:
                self._follow(awaited, min(left, _SLEEP_S))

    def wake(self, awaited: Waitable) -> None:
        """Wake the thread that waits for it, if there is one and it is not this one."""
        waiter = awaited.waiter
        if waiter is None:
            return
        if waiter is not self:
            _release(waiter)
        elif self._leader != threading.get_ident():
            self._mailbox.interrupt_wait(True)

    def close(self) -> None:
        """Let every reader go."""
        self._mailbox.close()

    def _read_for(self, awaited: Waitable, timeout: float) -> None:
        """Read, unless it was done before this thread could be woken."""
        if not awaited.is_done:
            self._take(timeout, is_front=True)

    def _take(self, timeout: float, *, is_front: bool) -> None:
        self._deliver_all(self._mailbox.take(timeout, is_front))

    def _deliver_all(self, letters: list[tuple[int, Any]]) -> None:
        if not letters:
            return
        deliver = self._deliver
        for source, letter in letters:
            if type(letter) is bytes:
                deliver(source, letter)
            else:
                self._on_expected(source, *letter)
        with self._lock:
            self._batches_delivered += 1

    def _on_expected(self, source: int, number: int, outcome: int, nbytes: int) -> None:
        place, then = self._expected.pop(number)
        error: UnisonoError | None
        if outcome == _DONE:
            error = _fault(nbytes, place.nbytes)
        elif outcome == _PEER_DOWN:
            error = PeerLost(lost_text((source,)), ranks=(source,), cause="it died while it sent")
        elif outcome == _CLOSED:
            error = ClosedError("the backend is closed")
        else:
            error = ProtocolError("a part of a message was given up, or is longer than was said")
        try:
            then(error)
        except Exception:
            _log.exception("what followed a frame could not be heeded")

    def _follow(self, awaited: Waitable, limit: float) -> None:
        turn = threading.Lock()
        turn.acquire()
        awaited.waiter = turn
        self._followers[awaited] = None
        try:
            # Whoever led may have gone before it could see us: so look again.
            if not awaited.is_done and self._lead.locked():
                turn.acquire(timeout=limit)
        finally:
            self._followers.pop(awaited, None)
            awaited.waiter = None

    def _pass_on(self) -> None:
        """Let one of those who sleep read on."""
        while self._followers:
            try:
                awaited, _ = self._followers.popitem()
            except KeyError:
                return
            waiter = awaited.waiter
            if waiter is not None and waiter is not self:
                _release(waiter)
                return


class _MailboxLent:
    """Memory that was lent to a mailbox, which keeps it until nobody reads it."""

    __slots__ = ("_mailbox", "number")

    def __init__(self, mailbox: Mailbox, number: int) -> None:
        self._mailbox = mailbox
        self.number = number

    @property
    def done(self) -> bool:
        return not self._mailbox.is_lent(self.number)

    def cancel(self) -> bool:
        self._mailbox.withdraw(self.number)
        return self.done


def _fault(came: int, awaited: int) -> ProtocolError | None:
    return None if came == awaited else ProtocolError("a part of a message is shorter than was said")


def _release(turn: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it may be woken twice
        turn.release()
