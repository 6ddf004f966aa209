"""A me: one rank's place in a conformance case.

Knows how to wait for a request, what data to send and how to say what was expected. Does not know the cases.
Ranks of a case talk only through the backend, so the same case runs on threads, in processes and in virtual
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.core.clock import Waiting
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.errors import UnisonoError
from unisono.messaging.backend import Backend, PeerDown
from unisono.messaging.credit import ENVELOPE_BYTES

__all__ = ["CONTEXT", "PATIENCE_S", "CaseRank", "Downs", "payload"]

E = TypeVar("E", bound=UnisonoError)

# A whole case ends by then, so that a hang is a failure. Set by run_case; long enough for a loaded machine.
PATIENCE_S: ContextVar[float] = ContextVar("PATIENCE_S", default=30.0)

# What a case uses unless it says otherwise, and where `meet` talks. Both use all 64 bits.
CONTEXT: Final = 0xFEDC_BA98_7654_3212
_MEETING: Final = 0x8000_0000_0000_0102

# Bytes of a receive buffer that no message has touched.
UNTOUCHED: Final = 0xEE


def payload(rank: int, index: int, nbytes: int) -> memoryview:
    """Bytes that show who sent them, as which message, and where each of them belongs."""
    seed = np.uint32((rank * 2246822519 + index * 3266489917 + 374761393) % 2**32)
    words = np.arange((nbytes + 3) // 4, dtype=np.uint32) * np.uint32(2654435761) ^ seed
    words = (words ^ words >> np.uint32(15)) * np.uint32(2246822519)
    data: Any = (words ^ words >> np.uint32(13)).view(np.uint8)[:nbytes]
    return memoryview(data)


class Downs:
    """What a watch has told, by rank, and a request per rank that ends when it is told."""

    def __init__(self, backend: Backend) -> None:
        self.told: dict[int, list[PeerDown]] = {}
        self._awaited = {rank: Request(rank) for rank in range(backend.size)}
        backend.watch(self._hear)

    def of(self, rank: int) -> Request:
        """Ends when the rank is down."""
        return self._awaited[rank]

    def _hear(self, down: PeerDown) -> None:
        news = self.told.setdefault(down.rank, [])
        news.append(down)
        if len(news) == 1:
            self._awaited[down.rank].complete()


class CaseRank:
    """One rank of a case: its backend, and how to wait and check there."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rank = backend.rank
        self.size = backend.size
        self.eager_bytes = backend.config.eager_bytes
        self.credit_bytes = backend.config.eager_credit_bytes
        self._deadline = backend.runtime.now() + PATIENCE_S.get()
        self._meetings = 0

    def eager_lengths(self, *wanted: int) -> list[int]:
        """Those of the lengths that may travel at once, all of them together: they need no receive to end."""
        chosen, credit = [], self.credit_bytes
        for nbytes in wanted:
            if nbytes <= self.eager_bytes and nbytes + ENVELOPE_BYTES <= credit:
                credit -= nbytes + ENVELOPE_BYTES
                chosen.append(nbytes)
        return chosen

    # -- to begin -----------------------------------------------------------------------------------------

    def send(
        self,
        dst: int,
        data: memoryview | bytes = b"",
        *,
        tag: int = 0,
        context: int = CONTEXT,
        dtype: int = UNTYPED,
        header: bytes = b"",
        lane: Lane = Lane.BULK,
        sync: bool = False,
    ) -> Request:
        """Start a send."""
        return self.backend.start_send(
            dst, context, tag, memoryview(data), dtype=dtype, header=header, lane=lane, sync=sync
        )

    def recv(
        self,
        src: int | Any_ = ANY,
        into: memoryview | None = None,
        *,
        tag: int | Any_ = 0,
        context: int = CONTEXT,
        dtype: int = UNTYPED,
    ) -> Request:
        """Start a receive; without a buffer, of any length."""
        return self.backend.start_recv(src, context, tag, into, dtype=dtype)

    def probe(self, src: int | Any_ = ANY, *, tag: int | Any_ = 0, context: int = CONTEXT) -> Request:
        """Start a probe."""
        return self.backend.probe(src, context, tag)

    def world(self) -> Communicator:
        """The communicator of all ranks; it closes the backend."""
        return Communicator.world(self.backend)

    @property
    def time_left_s(self) -> float:
        """What remains of the patience with this case."""
        return max(0.0, self._deadline - self.backend.runtime.now())

    # -- to wait ------------------------------------------------------------------------------------------

    def ended(self, request: Request, what: str) -> Request:
        """Wait until it ends, however it does."""
        runtime = self.backend.runtime
        event = runtime.event()
        request.notify(event.set)
        peers = () if isinstance(request.peer, Any_) else (request.peer,)
        while not request.done:
            left = self.time_left_s
            if not left or not runtime.block(event, left, lambda: Waiting(self.rank, peers, what)):
                self.check(request.done, f"{what} ends", "it hangs")
        return request

    def done(self, request: Request, what: str) -> Request:
        """Wait until it ends, and well."""
        self.ended(request, what)
        if request.error is not None:
            self.fail(f"{what} ends well", f"{type(request.error).__name__}: {request.error}")
        return request

    def failed(self, request: Request, kind: type[E], what: str) -> E:
        """Wait until it ends with the error that is due."""
        self.ended(request, what)
        if not isinstance(request.error, kind):
            got = "it ended well" if request.error is None else repr(request.error)
            self.fail(f"{what} fails with {kind.__name__}", got)
        return request.error

    def told(self, news: Downs, rank: int) -> PeerDown:
        """Wait until a watch has told that a rank is down."""
        self.ended(news.of(rank), f"being told by watch that rank {rank} is down")
        return news.told[rank][0]

    def all_done(self, requests: Iterable[Request], what: str) -> None:
        """Wait until all end, and well."""
        for i, request in enumerate(requests):
            self.done(request, f"{what} #{i}")

    def got(self, request: Request, what: str) -> Envelope:
        """Wait for a receive or probe and return what it met."""
        envelope = self.done(request, what).envelope
        if envelope is None:
            self.fail(f"{what} tells its envelope", "None")
        return envelope

    def take(
        self,
        src: int | Any_,
        expected: memoryview | bytes,
        what: str,
        *,
        tag: int | Any_ = 0,
        context: int = CONTEXT,
        room: int = 3,
    ) -> Envelope:
        """Receive into a buffer that is `room` bytes too long, and check everything about it."""
        buffer = self.buffer(len(expected) + room)
        envelope = self.got(self.recv(src, buffer, tag=tag, context=context), what)
        self.check_filled(envelope, buffer, expected, what)
        return envelope

    def meet(self) -> None:
        """Wait until every rank has come here: whatever was sent before has then arrived."""
        number, self._meetings = self._meetings, self._meetings + 1

        def come(peer: int) -> None:
            self.done(self.send(peer, tag=number, context=_MEETING), f"coming to rank {peer}")

        def await_(peer: int) -> None:
            self.done(self.recv(peer, tag=number, context=_MEETING), f"waiting for rank {peer} to come")

        others = range(1, self.size) if self.rank == 0 else range(1)
        first, then = (await_, come) if self.rank == 0 else (come, await_)
        for step in (first, then):
            for peer in others:
                step(peer)

    # -- to judge -----------------------------------------------------------------------------------------

    @staticmethod
    def buffer(nbytes: int) -> memoryview:
        """Memory to receive into, marked as untouched."""
        return memoryview(bytearray([UNTOUCHED]) * nbytes)

    def check_filled(
        self, envelope: Envelope, buffer: memoryview, expected: memoryview | bytes, what: str
    ) -> None:
        """Check that a message lies whole in the buffer, and nothing beyond it."""
        length = len(expected)
        self.equal(envelope.nbytes, length, f"the length of {what}")
        if buffer[:length] != memoryview(expected):
            wrong = next(i for i in range(length) if buffer[i] != expected[i])
            self.fail(f"{what} arrives as it was sent", f"byte {wrong} of {length} differs")
        self.check(
            all(byte == UNTOUCHED for byte in buffer[length:]), f"{what} leaves the rest of the buffer alone"
        )

    def equal(self, got: Any, expected: Any, what: str) -> None:
        """Check a plain value."""
        if got != expected:
            self.fail(f"{what} is {expected!r}", repr(got))

    def same(self, got: Any, expected: Any, what: str) -> None:
        """Check an array, shape and type included."""
        got, expected = np.asarray(got), np.asarray(expected)
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            self.fail(f"{what} is {expected.dtype} of shape {expected.shape}", f"{got.dtype} of {got.shape}")
        if got.tobytes() != expected.tobytes():
            self.fail(f"{what} is what NumPy computes", f"{got!r}, not {expected!r}")

    def check(self, is_right: bool, expected: str, got: str = "it does not") -> None:
        """Check anything else; `expected` is a sentence."""
        if not is_right:
            self.fail(expected, got)

    def fail(self, expected: str, got: str) -> NoReturn:
        """This is not how it should be."""
        raise AssertionError(f"expected that {expected}; {got}")

    def raised(self, kind: type[E], what: str, call: Callable[..., object], *args: Any, **options: Any) -> E:
        """Check that a call raises what is due."""
        got: object
        try:
            got = call(*args, **options)
        except kind as error:
            return error
        except UnisonoError as error:
            got = error
        raise AssertionError(f"expected that {what} raises {kind.__name__}; it gave {got!r}")
