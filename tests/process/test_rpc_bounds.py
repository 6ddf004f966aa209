"""Calls leave nothing behind, however they end: no memory, no used credit, no table entry."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.calls import run
from tests.support.ranks import PATIENCE_S, wait_until

import unisono as uni
from unisono._native import CERTAIN_BLOB_BYTES, FRAME_BLOB_BYTES
from unisono.rpc import Agent
from unisono.rpc.streams import WINDOW

LINKS = ["local", "shm", "tcp"]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- results ---------------------------------------------------------------------------------------------


def drops_results(comm: uni.Communicator) -> int:
    agent = Agent(comm)
    agent.register("zeros", lambda n: np.zeros(n))
    comm.barrier()
    alive = 0
    if comm.rank == 0:
        gc.disable()
        kept = []
        for _ in range(5):
            came = agent.start(1, "zeros", 100_000).wait()
            kept.append(weakref.ref(came))
            del came
        for came in agent.call_all("zeros", 100_000):
            kept.append(weakref.ref(came))
        del came
        alive = sum(ref() is not None for ref in kept)
        gc.enable()
    comm.barrier()
    return alive


@pytest.mark.parametrize("kind", LINKS)
def test_a_result_lives_no_longer_than_its_receiver_keeps_it(kind: str) -> None:
    assert run(kind, drops_results, 2) == [0, 0]


def grows(comm: uni.Communicator, rounds: int) -> int:
    """The bytes by which a rank has grown after 2 GiB of started calls, in either direction."""
    agent = Agent(comm)
    agent.register("echo", lambda x: x)
    comm.barrier()
    value = np.ones(1 << 20)
    before = 0
    for i in range(rounds + 3):
        if i == 3:
            before = resident_bytes()
        if comm.rank == 0:
            for came in uni.wait_all([agent.start(1, "echo", value) for _ in range(4)]):
                assert came[-1] == 1
            del came
        comm.barrier()
    return resident_bytes() - before


@pytest.mark.parametrize("kind", LINKS)
def test_large_started_calls_leave_no_memory_behind(kind: str) -> None:
    """4 calls of 8 MiB at a time: only a pool of a few such buffers remains, not 30 s of results."""
    assert max(run(kind, grows, 2, 60)) < 160 << 20


# -- blobs that are never received -----------------------------------------------------------------------


def leaves_streams(comm: uni.Communicator, count: int) -> int:
    agent = Agent(comm)
    ended = []

    @agent.expose
    def items(n: int) -> Iterator[Any]:
        try:
            for i in range(n):
                yield np.full(5000, i)
        finally:
            ended.append(n)

    comm.barrier()
    if comm.rank == 0:
        for _ in range(count):
            stream = agent.stream(1, "items", WINDOW - 4)  # the stream is closed before the generator ends
            assert next(stream)[0] == 0
            stream.close()
    comm.barrier()
    unread = agent._server._unread
    if comm.rank == 1:
        wait_until(lambda: len(ended) == count, "every generator has ended")
        wait_until(unread.are_all_read, "the items of streams that were closed are withdrawn")
    comm.barrier()
    left = len(unread._by_rank[0])
    comm.barrier()
    return left


@pytest.mark.parametrize("kind", LINKS)
def test_a_stream_that_is_closed_early_leaves_no_items_behind(kind: str) -> None:
    assert run(kind, leaves_streams, 2, 40)[1] <= 2 * WINDOW


def streams_long(comm: uni.Communicator, count: int) -> int:
    agent = Agent(comm)
    most = [0]

    @agent.expose
    def items() -> Iterator[Any]:
        incoming = uni.rpc.here()
        assert incoming is not None
        for i in range(count):
            most[0] = max(most[0], len(incoming.on_cancel))
            yield np.full(5000, i)

    comm.barrier()
    if comm.rank == 0:
        assert sum(int(item[0]) for item in agent.stream(1, "items")) == sum(range(count))
    comm.barrier()
    return most[0]


@pytest.mark.parametrize("kind", LINKS)
def test_a_long_stream_of_large_items_keeps_no_record_of_them(kind: str) -> None:
    assert run(kind, streams_long, 2, 200)[1] <= 2


def uses_all_credit(comm: uni.Communicator, targets: list[int]) -> None:
    """Send until 16 messages end that no rank receives yet: a send without credit waits for its receive.

    A blob uses credit until its receiver has dispatched the frame beside it, which a busy machine may delay.
    A message that found no credit waits even if it comes back, so there are further tries.
    """
    works: list[uni.Work[Any]] = []
    counts = np.zeros(comm.size, np.int64)
    comm.barrier()
    for dst in targets:
        sent: list[uni.Work[Any]] = []
        for _ in range(PATIENCE_S // 4):
            batch = [
                comm.start.send(np.zeros(1000), dst) for _ in range(16 - sum(one.done() for one in sent))
            ]
            sent += batch
            with contextlib.suppress(uni.DeadlineExceeded):
                uni.wait_all(batch, timeout=1.0)
                break
        assert sum(one.done() for one in sent) >= 16, f"credit with rank {dst} is lost"
        counts[dst] = len(sent)
        works += sent
    counts = comm.all_to_all(counts)
    for src, count in enumerate(counts):
        for _ in range(count):
            comm.recv(np.ones(1000), src)
    uni.wait_all(works, timeout=PATIENCE_S)


def refuses_blobs(comm: uni.Communicator, nbytes: int) -> int:
    """Rank 1 is closing and refuses calls and notifications; the credit for messages comes back."""
    agent = Agent(comm)
    agent.register("take", len)
    comm.barrier()
    value = b"x" * nbytes
    if comm.rank == 0:
        assert agent.call(1, "take", value) == nbytes
    comm.barrier()
    if comm.rank == 1:
        agent._server.refuse_calls()
    comm.barrier()
    for _ in range(200 if comm.rank == 0 else 0):
        with pytest.raises(uni.PeerLost, match="closed its agent"):
            agent.call(1, "take", value)
        agent.notify(1, "take", value)
    comm.barrier()
    if comm.rank == 0:
        wait_until(agent._client._notified.are_all_read, "refused notifications are withdrawn")
    uses_all_credit(comm, [1] if comm.rank == 0 else [])
    return len(agent._client._notified._by_rank[1])


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("nbytes", [FRAME_BLOB_BYTES, CERTAIN_BLOB_BYTES, CERTAIN_BLOB_BYTES + 1, 1 << 20])
def test_refused_calls_and_notifications_leave_no_blobs_behind(kind: str, nbytes: int) -> None:
    assert run(kind, refuses_blobs, 2, nbytes)[0] <= 16


def gives_up(comm: uni.Communicator, nbytes: int) -> int:
    """Calls, answers and items that are cancelled or expire: their blobs are received or withdrawn."""
    agent = Agent(comm)
    agent.register("echo", lambda x, s: (time.sleep(s), x)[1])

    @agent.expose
    def each(x: bytes) -> Iterator[bytes]:
        yield from [x] * 12

    comm.barrier()
    value, other = b"x" * nbytes, 1 - comm.rank
    for i in range(120):
        work = agent.start(other, "echo", value, (i % 4) * 0.0005, timeout=30 if i % 3 else 0.0005)
        if i % 3:
            time.sleep((i % 7) * 0.0001)
            work.cancel()
        with contextlib.suppress(uni.UnisonoError):
            work.wait()
        with agent.stream(other, "each", value) as stream:
            if i % 2:
                next(stream)
    comm.barrier()
    wait_until(lambda: not any(agent._server._tables) and agent._server.pool.is_idle(), "all handlers end")
    comm.barrier()
    wait_until(agent._server._unread.are_all_read, "every blob is received or withdrawn")
    expected = agent._transport._expected  # type: ignore[attr-defined]
    wait_until(lambda: not expected, "nothing is expected any more")
    uses_all_credit(comm, [other])
    assert agent.call(other, "echo", value, 0) == value
    comm.barrier()
    return len(expected)


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("nbytes", [FRAME_BLOB_BYTES, CERTAIN_BLOB_BYTES, CERTAIN_BLOB_BYTES + 1])
def test_calls_that_are_given_up_leave_no_blobs_behind(kind: str, nbytes: int) -> None:
    assert run(kind, gives_up, 2, nbytes) == [0, 0]


# -- failures --------------------------------------------------------------------------------------------


def raises_surrogates(comm: uni.Communicator) -> str:
    agent = Agent(comm)

    def fails() -> None:
        raise ValueError("\ud800" * 5000)

    agent.register("fails", fails)
    agent.register("later", lambda: threading.Event().wait(0.1))
    comm.barrier()
    if comm.rank == 0:
        other = agent.start(1, "later")
        with pytest.raises(uni.RemoteError, match=r"ValueError.*ud800"):
            agent.call(1, "fails")
        assert other.wait(PATIENCE_S) is False
    comm.barrier()
    return "ok"


@pytest.mark.parametrize("kind", LINKS)
def test_an_exception_of_lone_surrogates_fails_only_its_own_call(kind: str) -> None:
    assert run(kind, raises_surrogates, 2) == ["ok"] * 2


# -- signals ---------------------------------------------------------------------------------------------


class _Interrupt(Exception):
    """The exception that the signal handler raises."""


def is_interrupted(comm: uni.Communicator, rounds: int) -> int:
    """Signals interrupt the main thread of rank 0 while it reads frames for itself and for another thread."""
    agent = Agent(comm)
    agent.register("echo", lambda x: x, inline=True)
    agent.register("swap", lambda x: agent.call(0, "echo", x))
    comm.barrier()
    served, over = [0], threading.Event()
    if comm.rank == 0:

        def interrupt(number: int, frame: Any) -> None:
            raise _Interrupt

        def other_thread() -> None:
            while not over.is_set():
                for i, came in enumerate(uni.wait_all([agent.start(1, "swap", i) for i in range(20)])):
                    assert came == i
                    served[0] += 1

        before = signal.signal(signal.SIGALRM, interrupt)
        thread = threading.Thread(target=other_thread)
        thread.start()
        struck = 0
        while struck < rounds:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0001 * (struck % 10))
                while True:
                    agent.call(1, "swap", 5)
            except _Interrupt:
                struck += 1
        signal.signal(signal.SIGALRM, before)
        over.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    comm.barrier()
    return served[0]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_signal_does_not_lose_the_frames_of_other_threads(kind: str) -> None:
    """After a lost frame the other thread would wait 30 s for its answer and raise DeadlineExceeded."""
    assert run(kind, is_interrupted, 2, 300)[0] > 0
