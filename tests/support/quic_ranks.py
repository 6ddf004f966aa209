"""QUIC ranks in the test's own process, linked directly or through a relay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.credentials import Issuer
from tests.support.relay import Relay

from unisono.backends.native.backend import NativeBackend
from unisono.core.request import Request

__all__ = ["PATIENCE_S", "Make", "exchange", "make", "ranks_through", "wait_for_all"]

PATIENCE_S = 30.0

Make = Callable[..., list[NativeBackend]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(size, issuer, ranks)`: ranks with QUIC links, connected if there is an issuer."""
    tmp_path.chmod(0o700)
    made: list[NativeBackend] = []

    def start(
        size: int, issuer: Issuer | None = None, only: range | tuple[int, ...] | None = None, **how: Any
    ) -> list[NativeBackend]:
        ranks = [
            NativeBackend(r, size, str(tmp_path), b"secret", shm=False, quic=True, neighbours=False, **how)
            for r in (range(size) if only is None else only)
        ]
        made.extend(ranks)
        if issuer is not None:
            cards = [rank.card() for rank in ranks]
            for rank in ranks:
                rank.connect(cards, issuer.credentials(rank.rank))
        return ranks

    yield start
    for backend in made:
        backend.close()


def ranks_through(between: Relay, make: Make, **how: Any) -> list[NativeBackend]:
    """Two ranks, of which the first reaches the second through a relay."""
    issuer = Issuer(2)
    ranks = make(2, datagram_bytes=1452, **how)
    between.forward_to(ranks[1].card().port)
    # Without the pid the peer counts as one of another host: a peer on this host is not declared dead while
    # the system does not schedule it.
    cards = [rank.card()._replace(pid=0) for rank in ranks]
    cards[1] = cards[1]._replace(port=between.port)
    for rank in ranks:
        rank.connect(cards, issuer.credentials(rank.rank))
    return ranks


def wait_for_all(*requests: Request) -> None:
    """Wait until all requests have ended, with or without an error."""
    ends = time.monotonic() + PATIENCE_S
    while not all(request.done for request in requests):
        assert time.monotonic() < ends, "a request does not end"
        time.sleep(0.001)


def exchange(one: NativeBackend, other: NativeBackend, tag: int = 1) -> None:
    """Send a long message and get a short one back, and check what arrives. `one` opens the link."""
    data = (np.arange(300_001) * 7 + tag).astype(np.uint8)
    into = np.zeros_like(data)
    receive = other.start_recv(one.rank, 5, tag, memoryview(into))
    send = one.start_send(other.rank, 5, tag, memoryview(data))
    # A send back at once would make `other` open a link of its own, which may come first.
    wait_for_all(receive, send)
    back = one.start_recv(other.rank, 5, tag, None)
    other.start_send(one.rank, 5, tag, memoryview(b"back"))
    wait_for_all(back)
    for request in (receive, send, back):
        if request.error is not None:
            raise request.error
    assert np.array_equal(into, data)
    assert back.data == b"back"
