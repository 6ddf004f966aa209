"""Signals interrupt system calls of the engine at any time, which never means that a peer is gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.support.calls import run

import unisono as uni

LINKS = ["shm", "rings", "tcp", *(pytest.param(kind, marks=pytest.mark.more) for kind in ("tls", "quic"))]


@contextmanager
def signals_every(interval_s: float) -> Iterator[list[int]]:
    """The main thread gets a signal at this interval; the list counts those that its handler saw."""
    seen = [0]

    def count(number: int, frame: object) -> None:
        seen[0] += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def exchanges_under_signals(comm: uni.Communicator, rounds: int) -> int:
    # 300,000 bytes are read directly from the peer's memory; whether it lives is asked after each piece.
    other, short, long = 1 - comm.rank, np.zeros(1, np.int64), np.zeros(37_501, np.int64)
    with signals_every(0.0001) as seen:
        for i in range(rounds):
            comm.sendrecv(np.full(1, 2 * i + comm.rank), other, short, other)
            assert short[0] == 2 * i + other
            comm.sendrecv(np.arange(long.size) * (i + comm.rank), other, long, other)
            assert (long == np.arange(long.size) * (i + other)).all()
    comm.barrier()
    return seen[0]


@pytest.mark.parametrize("kind", LINKS)
def test_signals_end_no_link_and_change_no_value(kind: str) -> None:
    assert all(seen > 0 for seen in run(kind, exchanges_under_signals, 2, 1000))
