"""Cancelled operations: messages are withdrawn, collectives end for all ranks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S, run_ranks
from tests.support.stepped_works import careful, start

import unisono as uni
from unisono.backends.native.completions import CompletionDispatcher
from unisono.core.clock import RealRuntime
from unisono.core.request import Request
from unisono.errors import DeadlineExceeded, PeerAborted


def test_cancelling_ends_the_work_and_returns_whether_it_did():
    thrown: list[str] = []
    work = start(careful(Request(0), thrown))
    assert work.cancel() is True
    assert work.done()
    assert work.cancel() is False
    with pytest.raises(PeerAborted, match="rank 3 cancelled test"):
        work.wait()
    assert thrown == ["rank 3 cancelled test"]


def test_cancelling_waits_until_the_memory_is_free_again():
    cleanup = Request(0)
    work = start(careful(Request(0), [], cleanup))
    threading.Timer(0.05, cleanup.complete).start()
    assert work.cancel()
    assert cleanup.done
    assert work.done()


def test_a_cancelled_receive_leaves_its_message_to_the_next():
    def program(comm):
        buf = np.zeros(3)
        work = comm.start.recv(buf, src=(comm.rank + 1) % 2)
        assert work.cancel()
        comm.barrier()
        comm.send(np.arange(3.0) + comm.rank, (comm.rank + 1) % 2)
        comm.barrier()
        assert not buf.any()
        comm.recv(buf)
        return buf.tolist()

    assert run_ranks(program, 2).values() == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("is_slow", [False, True], ids=["", "another thread hears of it"])
def test_a_cancelled_collective_ends_the_communicator_for_all_and_messages_still_pass(is_slow: bool):
    """Its messages are sent already, but rank 1 gets the reason of rank 0's end before rank 0's message."""
    is_ready, is_dispatched = threading.Event(), threading.Event()

    def program(comm):
        if comm.rank == 0:
            is_ready.wait(PATIENCE_S)
            work = comm.start.all_reduce(np.ones(5))
            assert work.cancel()
            comm.send(np.ones(1), 1)
        else:
            if is_slow:
                dispatch_slowly(comm.backend.runtime._completions)
            is_ready.set()
            if is_slow:
                assert is_dispatched.wait(PATIENCE_S)
            comm.recv(np.ones(1), 0)
        for _ in range(2):
            with pytest.raises(PeerAborted, match="rank 0 cancelled all_reduce") as caught:
                comm.barrier()
            assert caught.value.rank == 0
        comm.sendrecv(np.ones(2), 1 - comm.rank, np.ones(2), 1 - comm.rank)

    def dispatch_slowly(completions: CompletionDispatcher) -> None:
        dispatch_one = completions._dispatch_one

        def dispatch_late(*details) -> None:
            is_dispatched.set()
            time.sleep(0.005)
            dispatch_one(*details)

        completions._dispatch_one = dispatch_late  # type: ignore[method-assign]

    run_ranks(program, 2).values()


def test_a_cancelled_sendrecv_withdraws_its_message():
    def program(comm):
        if comm.rank == 0:
            big = np.ones(100_000)
            with pytest.raises(DeadlineExceeded):
                comm.sendrecv(big, 1, np.empty(1), 1, timeout=0.01)
        comm.barrier()
        return comm.probe(timeout=0)

    assert run_ranks(program, 2).values() == [None, None]


class InterruptedClock(RealRuntime):
    """A clock that raises KeyboardInterrupt at the first wait."""

    def block(self, event, timeout, waiting, *, is_limited=True):
        if timeout is None or timeout > 0:
            raise KeyboardInterrupt
        return super().block(event, timeout, waiting)


def test_ctrl_c_in_a_receive_withdraws_it(monkeypatch):
    (world,) = uni.local(1)
    with world:
        runtime = world.backend.runtime
        with monkeypatch.context() as patch:
            patch.setattr(type(runtime), "block", InterruptedClock.block)
            with pytest.raises(KeyboardInterrupt):
                world.recv(np.empty(1), src=0, tag=4)
        world.send(np.ones(1), 0, tag=4)
        assert world.recv(np.empty(1), timeout=0).tag == 4


def test_a_reduce_operation_that_raises_ends_the_collective_everywhere():
    def fail(left, right):
        raise ZeroDivisionError("mine")

    def program(comm):
        with pytest.raises((ZeroDivisionError, PeerAborted)) as caught:
            comm.all_reduce(np.ones(3), op=uni.op(fail, name="fail"), algorithm="flat")
        with pytest.raises(PeerAborted, match="ZeroDivisionError: mine") as later:
            comm.barrier()
        return type(caught.value).__name__, later.value.rank

    ended = run_ranks(program, 3).values()
    culprits = [rank for rank, (name, _) in enumerate(ended) if name == "ZeroDivisionError"]
    assert culprits
    assert {rank for _, rank in ended} <= set(culprits), "every rank names a rank that failed"
