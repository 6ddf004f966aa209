"""Native ranks without communicators, in this process, and the frames that a test sends to them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.credentials import Issuer
from tests.support.member import HEAD

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card
from unisono.config import Config
from unisono.core.envelope import Tags
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.messaging.credit import CONTROL_BYTES_MAX

CONTEXT = 0xC0FFEE
SECRET = b"the job's secret"
PATIENCE_S = 120

EAGER, RTS, CTS, DATA, FIN, CREDIT, QUEUED, WITHDRAW, HEARTBEAT, GOODBYE, DOWN = range(2, 13)

Make = Callable[..., list[NativeBackend]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(size, ranks, **settings)`: engines of these ranks of a world, not connected yet."""
    tmp_path.chmod(0o700)
    made: list[NativeBackend] = []

    def start(
        size: int, ranks: Sequence[int] | None = None, *, hosts: bool = False, **settings: Any
    ) -> list[NativeBackend]:
        # No rank may be declared dead because this machine is busy.
        common = {"shm": False, "neighbours": False, "config": Config(silence_s=20.0)}
        for rank in range(size) if ranks is None else ranks:
            given = {**common, "host": f"host {rank}" if hosts else "", **settings}
            made.append(NativeBackend(rank, size, str(tmp_path), SECRET, **given))
        return made

    yield start
    for backend in made:
        backend.close()


def connect(
    backends: list[NativeBackend], issuer: Issuer | None = None, cards: list[Card] | None = None
) -> None:
    known = cards or [backend.card() for backend in backends]
    for backend in backends:
        backend.connect(known, issuer.credentials(backend.rank) if issuer is not None else None)


def ended(backend: NativeBackend, request: Request) -> Request:
    event = backend.runtime.event()
    request.notify(event.set)
    assert backend.runtime.block(event, PATIENCE_S, lambda: Waiting(backend.rank, (), "a test")), (
        "the request does not end"
    )
    return request


def exchange(one: NativeBackend, other: NativeBackend, nbytes: int = 100_003) -> None:
    """Each of two ranks receives the message of the other."""
    rows = {b.rank: (np.arange(nbytes) * 7 + b.rank).astype(np.uint8) for b in (one, other)}
    into = {b.rank: np.zeros(nbytes, np.uint8) for b in (one, other)}
    pairs = ((one, other), (other, one))
    works = [(b, b.start_recv(p.rank, CONTEXT, 1, memoryview(into[b.rank]))) for b, p in pairs]
    works += [(b, b.start_send(p.rank, CONTEXT, 1, memoryview(rows[b.rank]))) for b, p in pairs]
    for backend, request in works:
        if (error := ended(backend, request).error) is not None:
            raise error
    for b, p in pairs:
        assert np.array_equal(into[b.rank], rows[p.rank])


def call(one: NativeBackend, other: NativeBackend) -> None:
    """Send a message; the first rank opens the link."""
    assert ended(one, one.start_send(other.rank, CONTEXT, 0, memoryview(b"x"))).error is None
    assert ended(other, other.start_recv(one.rank, CONTEXT, 0, None)).data == b"x"


def memory_kib() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def head(
    kind: int,
    *,
    flags: int = 0,
    dtype: int = 255,
    header: int = 0,
    context: int = 0,
    tag: int = 0,
    nbytes: int = 0,
) -> bytes:
    return HEAD.pack(kind | flags << 8, dtype, 0, header, context, tag, nbytes)


def random_frame(rng: random.Random, size: int) -> bytes:
    """A frame that a member of a world of this size may have invented, and bytes that follow it."""
    kind = rng.choice((EAGER, RTS, CTS, DATA, FIN, CREDIT, QUEUED, WITHDRAW, HEARTBEAT, DOWN, GOODBYE))
    number = rng.choice((0, 1, 2, 5, 63, 1 << 20, (1 << 32) - 1, 1 << 63))
    # A peer may report other ranks, so a report is about a rank that does not exist.
    is_report = kind == DOWN
    frame = head(
        kind,
        flags=rng.choice((0, 0, 1, 255)),
        header=rng.choice((0, 0, 3, 1024, 1025)),
        context=size + rng.randrange(9) if is_report else rng.choice((0, 1, 5, CONTEXT, number)),
        tag=0 if is_report else rng.choice((0, number)),
        nbytes=0 if is_report else number,
    )
    return frame + rng.randbytes(rng.choice((0, 8, 16, 300)))


# Lengths beyond the receiver's request, or beyond any allowed message.
BOMBS = {
    "a message of 2^63 bytes": head(EAGER, nbytes=1 << 63),
    "a message of 2^64 - 1 bytes": head(EAGER, nbytes=(1 << 64) - 1),
    "a message of 2^32 - 1 bytes at once": head(EAGER, nbytes=(1 << 32) - 1),
    "a message beyond the credit": head(EAGER, nbytes=60_000) + bytes(60_000),
    "an RTS of 2^63 bytes": head(RTS, nbytes=1 << 63) + bytes(16),
    "an RTS with rendezvous id 2^32 - 1": head(RTS, nbytes=100_000) + struct.pack("<QQ", (1 << 32) - 1, 0),
    "a rendezvous id used twice": (head(RTS, nbytes=100_000) + bytes(16)) * 2,
    "a control message of 3 GiB": head(RTS, tag=Tags.CONTROL, nbytes=3 << 30) + bytes(16),
    "a control message of one byte too many": head(RTS, tag=Tags.CONTROL, nbytes=CONTROL_BYTES_MAX + 1)
    + bytes(16),
    "a frame of a call of 3 GiB": head(RTS, context=7, tag=Tags.RPC, nbytes=3 << 30) + bytes(16),
    "a header of 64 KiB": head(EAGER, header=65535),
    "data without a CTS": head(DATA, nbytes=1 << 20) + bytes(1 << 16),
    "data for rendezvous id 2^63": head(DATA, context=1 << 63, nbytes=8) + bytes(8),
    "an answer to nothing": head(FIN, context=5),
    "a CTS for nothing": head(CTS, context=5),
    "a withdrawal of nothing": head(WITHDRAW, context=5),
    "credit that was never given": head(CREDIT, nbytes=1 << 40),
    "a kind that there is not": head(200),
    "no kind": bytes(32),
}
