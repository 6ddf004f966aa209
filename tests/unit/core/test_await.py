"""Works in an event loop, and their callbacks."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Coroutine

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S, run_ranks, wait_until
from tests.support.stepped_works import gate, start

import unisono as uni
from unisono.core.clock import RealRuntime
from unisono.errors import DeadlineExceeded, PeerLost, UsageError
from unisono.simulation import Network, now, sleep

# -- await ---------------------------------------------------------------------------------------------


def test_a_work_can_be_awaited_while_another_thread_ends_it():
    request, steps = gate("awaited")
    work = start(steps)

    async def main():
        threading.Timer(0.02, request.complete).start()
        return await work

    assert asyncio.run(main()) == "awaited"


def test_a_work_that_is_done_is_awaited_at_once():
    request, steps = gate("x")
    work = start(steps)
    request.complete()

    async def main():
        return await work, await work

    assert asyncio.run(main()) == ("x", "x")


def test_many_may_await_one_work_and_one_may_await_many():
    gates = [gate(i) for i in range(10)]
    works = [start(steps) for _, steps in gates]

    async def one(work):
        return await work

    async def main():
        opener = asyncio.get_running_loop().run_in_executor(None, lambda: [r.complete() for r, _ in gates])
        results = await asyncio.gather(*(one(work) for work in works), *(one(works[0]) for _ in range(5)))
        await opener
        return results

    assert asyncio.run(main()) == [*range(10), 0, 0, 0, 0, 0]


def test_an_awaited_error_is_raised():
    request, steps = gate(error=PeerLost("gone", ranks=(2,)))
    work = start(steps)

    async def main():
        threading.Timer(0.01, request.complete).start()
        with pytest.raises(PeerLost, match="gone"):
            await work

    asyncio.run(main())


def test_an_await_that_is_given_up_leaves_the_work_going():
    request, steps = gate("later")
    work = start(steps)

    async def one():
        return await work

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one(), 0.01)
        assert not work.done()

    asyncio.run(main())
    request.complete()  # the loop is closed, so nothing is notified
    assert work.wait() == "later"


def test_ranks_can_live_on_one_loop():
    comms = uni.local(3)

    async def one(comm):
        x = np.arange(5.0) + comm.rank
        await comm.start.all_reduce(x)
        row = await comm.start.split(comm.rank % 2)
        await row.start.barrier()
        gathered = await comm.start.all_gather(np.full(2, comm.rank))
        return x.tolist(), gathered[:, 0].tolist()

    async def main():
        return await asyncio.gather(*map(one, comms))

    assert asyncio.run(main()) == [([3.0, 6.0, 9.0, 12.0, 15.0], [0, 1, 2])] * 3
    for comm in comms:
        comm.close()


def test_a_work_is_a_coroutine_that_many_tasks_may_drive():
    gates = [gate(i) for i in range(4)]
    works = [start(steps) for _, steps in gates]

    async def main():
        opener = asyncio.get_running_loop().run_in_executor(None, lambda: [r.complete() for r, _ in gates])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in (*works, works[2], works[2])]
        await opener
        assert await asyncio.wait_for(works[1], 1) == 1
        return [task.result() for task in tasks]

    assert isinstance(works[0], Coroutine)
    assert asyncio.run(main()) == [0, 1, 2, 3, 2, 2]


def test_a_cancelled_task_leaves_the_work_going():
    request, steps = gate("later")
    work = start(steps)

    async def main():
        tasks = [asyncio.create_task(work), asyncio.create_task(work)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        threading.Timer(0.02, request.complete).start()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, result = asyncio.run(main())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert result == "later"


# -- callbacks -----------------------------------------------------------------------------------------


def test_callbacks_run_in_the_order_of_the_ends_on_one_thread_that_ends_later():
    gates = [gate(i) for i in range(6)]
    runtime = RealRuntime()
    works = [start(steps, runtime=runtime) for _, steps in gates]
    called: list[tuple[int, str]] = []
    for work in works:
        work.add_done_callback(lambda work: called.append((work.wait(0), threading.current_thread().name)))
    for i in (5, 0, 3, 1, 4, 2):
        gates[i][0].complete()
    wait_until(lambda: len(called) == 6)
    works[4].add_done_callback(lambda work: called.append((work.wait(0), threading.current_thread().name)))
    wait_until(lambda: len(called) == 7)
    assert called == [(i, "unisono-callbacks-3") for i in (5, 0, 3, 1, 4, 2, 4)]
    wait_until(lambda: all(thread.name != "unisono-callbacks-3" for thread in threading.enumerate()))


def test_a_callback_that_raises_is_logged_and_the_others_run(caplog):
    runtime = RealRuntime()
    request, steps = gate(error=PeerLost("gone", ranks=(2,)))
    work = start(steps, runtime=runtime)
    called = threading.Event()
    work.add_done_callback(lambda work: work.wait())
    work.add_done_callback(lambda work: called.set())
    with caplog.at_level(logging.ERROR, "unisono"):
        request.complete()
        assert called.wait(PATIENCE_S)
    assert "a callback of a work failed" in caplog.text
    assert "gone" in caplog.text
    with pytest.raises(UsageError, match="cannot be called"):
        work.add_done_callback("no function")


def test_callbacks_of_local_ranks_start_and_wait_for_collectives():
    """Each rank has its own thread for callbacks: on a single thread they would wait for each other."""

    def program(comm):
        found: list[float] = []
        over = threading.Event()

        def go_on(work):
            found.append(float(work.wait()[1]))
            if len(found) == 5:
                over.set()
                return
            comm.barrier()
            comm.start.all_reduce(np.arange(3.0) * len(found) + comm.rank).add_done_callback(go_on)

        comm.start.all_reduce(np.arange(3.0) + comm.rank).add_done_callback(go_on)
        assert over.wait(PATIENCE_S)
        return found

    expected = [3.0 + 3 * max(1, turn) for turn in range(5)]
    assert run_ranks(program, 3).values() == [expected] * 3


def test_callbacks_of_simulated_ranks_run_in_virtual_time_and_repeat():
    def program(comm):
        found: list[tuple[float, int, float]] = []

        def note(work):
            total = comm.start.all_reduce(np.arange(3.0) + comm.rank).wait()  # a callback may wait
            found.append((now(), work.wait().tag, float(total[2])))

        works = [comm.start.recv(np.zeros(2), src=1 - comm.rank, tag=tag) for tag in range(4)]
        for work in works:
            work.add_done_callback(note)
        for tag in (2, 0, 3, 1):
            comm.send(np.ones(2), dst=1 - comm.rank, tag=tag)
        assert uni.wait_any(works[2:]) in (0, 1)
        assert len(list(uni.as_completed(works))) == 4
        while len(found) < 4:
            sleep(0.001)
        with pytest.raises(DeadlineExceeded):
            uni.wait_any([comm.start.recv(np.zeros(2), src=1 - comm.rank, tag=9)], timeout=3)
        return found

    network = Network(latency_s=1e-3, bytes_per_s=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        runs = [uni.simulate(program, 2, network=network, seed=7).raise_first().results for _ in range(2)]
    assert runs[0] == runs[1]
    for found in runs[0]:
        assert [tag for _, tag, _ in found] == [2, 0, 3, 1]
        assert {total for _, _, total in found} == {5.0}
        assert [at for at, _, _ in found] == sorted(at for at, _, _ in found)
        assert found[0][0] >= 2e-3
