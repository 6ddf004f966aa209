"""One rank of a conformance case: it starts requests, waits for them and checks the results.

Ranks of a case communicate only through the backend, so the same case runs on threads, in processes and in
virtual time. In the cases this object is called `me`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.errors import UnisonoError
from unisono.messaging.backend import Backend
from unisono.messaging.credit import ENVELOPE_BYTES
from unisono.messaging.peer_down import PeerDown

__all__ = ["CONTEXT", "PATIENCE_S", "CaseRank", "PeerDownLog", "payload"]

E = TypeVar("E", bound=UnisonoError)

# Seconds for a whole case, so that a hang is a failure. Set by run_case; enough for a loaded machine.
PATIENCE_S: ContextVar[float] = ContextVar("PATIENCE_S", default=30.0)

# The context of a case's messages, and that of `barrier`. Both use the highest of the 64 bits.
CONTEXT: Final = 0xFEDC_BA98_7654_3212
_BARRIER: Final = 0x8000_0000_0000_0102

# The value of bytes in a receive buffer that no message has written.
UNTOUCHED: Final = 0xEE


def payload(rank: int, index: int, nbytes: int) -> memoryview:
    """Bytes that differ by sending rank, by message and by position."""
    seed = np.uint32((rank * 2246822519 + index * 3266489917 + 374761393) % 2**32)
    words = np.arange((nbytes + 3) // 4, dtype=np.uint32) * np.uint32(2654435761) ^ seed
    words = (words ^ words >> np.uint32(15)) * np.uint32(2246822519)
    data: Any = (words ^ words >> np.uint32(13)).view(np.uint8)[:nbytes]
    return memoryview(data)


class PeerDownLog:
    """What `Backend.watch` has reported, by rank, and a request per rank that ends with the first report."""

    def __init__(self, backend: Backend) -> None:
        self.reports: dict[int, list[PeerDown]] = {}
        self._awaited = {rank: Request(rank) for rank in range(backend.size)}
        backend.watch(self._on_down)

    def of(self, rank: int) -> Request:
        """A request that ends when the rank is down."""
        return self._awaited[rank]

    def _on_down(self, down: PeerDown) -> None:
        reports = self.reports.setdefault(down.rank, [])
        reports.append(down)
        if len(reports) == 1:
            self._awaited[down.rank].complete()


class CaseRank:
    """One rank of a case, with its backend. A failed check raises AssertionError with what was expected."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rank = backend.rank
        self.size = backend.size
        self.eager_bytes = backend.config.eager_bytes
        self.credit_bytes = backend.config.eager_credit_bytes
        self._deadline = backend.runtime.now() + PATIENCE_S.get()
        self._barriers = 0

    def eager_lengths(self, *wanted: int) -> list[int]:
        """The lengths whose sends are all eager and fit the credit together: they end without a receive."""
        chosen, credit = [], self.credit_bytes
        for nbytes in wanted:
            if nbytes <= self.eager_bytes and nbytes + ENVELOPE_BYTES <= credit:
                credit -= nbytes + ENVELOPE_BYTES
                chosen.append(nbytes)
        return chosen

    # -- start --------------------------------------------------------------------------------------------

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
        """The communicator of all ranks; closing it closes the backend."""
        return Communicator.world(self.backend)

    @property
    def time_left_s(self) -> float:
        """Seconds that remain for this case."""
        return max(0.0, self._deadline - self.backend.runtime.now())

    # -- wait ---------------------------------------------------------------------------------------------

    def wait_ended(self, request: Request, what: str) -> Request:
        """Wait until a request ends, with or without an error."""
        runtime = self.backend.runtime
        event = runtime.event()
        request.notify(event.set)
        peers = () if isinstance(request.peer, Any_) else (request.peer,)
        while not request.done:
            left = self.time_left_s
            if not left or not runtime.block(event, left, lambda: Waiting(self.rank, peers, what)):
                self.check(request.done, f"{what} ends", "it hangs")
        return request

    def wait_done(self, request: Request, what: str) -> Request:
        """Wait until a request ends without an error."""
        self.wait_ended(request, what)
        if request.error is not None:
            self.fail(f"{what} succeeds", f"{type(request.error).__name__}: {request.error}")
        return request

    def wait_failed(self, request: Request, kind: type[E], what: str) -> E:
        """Wait until a request ends with an error of this kind; returns the error."""
        self.wait_ended(request, what)
        if not isinstance(request.error, kind):
            got = "it succeeded" if request.error is None else repr(request.error)
            self.fail(f"{what} fails with {kind.__name__}", got)
        return request.error

    def wait_down(self, log: PeerDownLog, rank: int) -> PeerDown:
        """Wait until a watch has reported that a rank is down."""
        self.wait_ended(log.of(rank), f"the report of watch that rank {rank} is down")
        return log.reports[rank][0]

    def wait_all_done(self, requests: Iterable[Request], what: str) -> None:
        """Wait until all requests end without an error."""
        for i, request in enumerate(requests):
            self.wait_done(request, f"{what} #{i}")

    def wait_envelope(self, request: Request, what: str) -> Envelope:
        """Wait for a receive or probe; the envelope of the message that it matched."""
        envelope = self.wait_done(request, what).envelope
        if envelope is None:
            self.fail(f"{what} has an envelope", "it is None")
        return envelope

    def expect(
        self,
        src: int | Any_,
        expected: memoryview | bytes,
        what: str,
        *,
        tag: int | Any_ = 0,
        context: int = CONTEXT,
        spare: int = 3,
    ) -> Envelope:
        """Receive into a buffer that is `spare` bytes too long, and check bytes, length and the rest."""
        buffer = self.buffer(len(expected) + spare)
        envelope = self.wait_envelope(self.recv(src, buffer, tag=tag, context=context), what)
        self.check_filled(envelope, buffer, expected, what)
        return envelope

    def barrier(self) -> None:
        """Wait until every rank has called this; messages that were sent before have then arrived."""
        number, self._barriers = self._barriers, self._barriers + 1

        def arrive(peer: int) -> None:
            self.wait_done(self.send(peer, tag=number, context=_BARRIER), f"barrier: a send to rank {peer}")

        def await_(peer: int) -> None:
            self.wait_done(self.recv(peer, tag=number, context=_BARRIER), f"barrier: a receive from {peer}")

        others = range(1, self.size) if self.rank == 0 else range(1)
        first, then = (await_, arrive) if self.rank == 0 else (arrive, await_)
        for step in (first, then):
            for peer in others:
                step(peer)

    # -- check --------------------------------------------------------------------------------------------

    @staticmethod
    def buffer(nbytes: int) -> memoryview:
        """Memory to receive into; every byte is UNTOUCHED."""
        return memoryview(bytearray([UNTOUCHED]) * nbytes)

    def check_filled(
        self, envelope: Envelope, buffer: memoryview, expected: memoryview | bytes, what: str
    ) -> None:
        """Check that the buffer holds the whole message, and that the bytes after it are unchanged."""
        length = len(expected)
        self.check_equal(envelope.nbytes, length, f"the length of {what}")
        if buffer[:length] != memoryview(expected):
            wrong = next(i for i in range(length) if buffer[i] != expected[i])
            self.fail(f"{what} arrives as it was sent", f"byte {wrong} of {length} differs")
        self.check(
            all(byte == UNTOUCHED for byte in buffer[length:]), f"{what} leaves the rest of the buffer alone"
        )

    def check_equal(self, got: Any, expected: Any, what: str) -> None:
        """Check that a value is the expected one."""
        if got != expected:
            self.fail(f"{what} is {expected!r}", repr(got))

    def check_array(self, got: Any, expected: Any, what: str) -> None:
        """Check that an array has the expected shape, type and bits."""
        got, expected = np.asarray(got), np.asarray(expected)
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            self.fail(f"{what} is {expected.dtype} of shape {expected.shape}", f"{got.dtype} of {got.shape}")
        if got.tobytes() != expected.tobytes():
            self.fail(f"{what} is what NumPy computes", f"{got!r}, not {expected!r}")

    def check(self, is_right: bool, expected: str, got: str = "it does not") -> None:
        """Check a condition; `expected` is a sentence for the error, `got` what was found instead."""
        if not is_right:
            self.fail(expected, got)

    def fail(self, expected: str, got: str) -> NoReturn:
        """Fail the case."""
        raise AssertionError(f"expected that {expected}; {got}")

    def check_raises(
        self, kind: type[E], what: str, call: Callable[..., object], *args: Any, **options: Any
    ) -> E:
        """Check that a call raises an error of this kind; returns the error."""
        got: object
        try:
            got = call(*args, **options)
        except kind as error:
            return error
        except UnisonoError as error:
            got = error
        raise AssertionError(f"expected that {what} raises {kind.__name__}; it returned or raised {got!r}")
