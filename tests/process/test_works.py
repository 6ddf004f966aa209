"""Works of native ranks: awaits, waits for several works, and dropped works."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from tests.support.engines import NO_STALL, MakeWorld, calls_adopted, every_kind, world
from tests.support.oracle import ramp, summed
from tests.support.processes import forked
from tests.support.ranks import PATIENCE_S, run_each, wait_until
from tests.support.system import skip_without

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.errors import ClosedError, DeadlineExceeded, PeerAborted, PeerLost, UnisonoError, UsageError
from unisono.messaging.backend import Backend

__all__ = ["world"]


# -- waiting ------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("way", ["a collective", "a message", "a work"])
def test_a_waiting_thread_dispatches_completions_of_other_groups_and_stays_in_the_engine(
    world: MakeWorld, kind: str, way: str
):
    comms = world(2, kind, **NO_STALL)
    groups: dict[int, Communicator] = {}

    def meet(comm: Communicator) -> Any:
        match way:
            case "a collective":
                return comm.all_reduce(ramp(comm.rank))
            case "a message":
                mine = ramp(1) if comm.rank else np.empty(1021)
                comm.send(mine, 0) if comm.rank else comm.recv(mine, 1)
                return mine + ramp(0)
        return comm.start.all_reduce(ramp(comm.rank)).wait()

    def program(comm: Communicator) -> int:
        before = calls_adopted(comm)
        for turn in range(5):
            group = comm.split(0)
            assert group is not None
            groups[comm.rank] = group
            comm.barrier()
            if comm.rank == 1:
                group.close()
                wait_until(lambda: 1 in groups[0]._group.state.left)  # rank 0 waits, and receives the goodbye
            assert np.array_equal(meet(comm), summed(2)), turn
        return calls_adopted(comm) - before

    assert run_each(program, list(comms)).values() == [0, 0]


# -- waits for several ------------------------------------------------------------------------------------


def test_wait_any_gives_the_one_that_has_ended_and_wait_some_all_of_them(world: MakeWorld):
    comms = world(2, **NO_STALL)
    buffers = [np.zeros(5) for _ in range(8)]
    works = [comms[1].start.recv(buffer, src=0, tag=tag) for tag, buffer in enumerate(buffers)]
    for wait in (uni.wait_any, uni.wait_some):
        for timeout in (0, 0.01):
            with pytest.raises(DeadlineExceeded, match="none of 8 works"):
                wait(works, timeout=timeout)
    sender = threading.Timer(0.05, lambda: comms[0].send(np.arange(5.0) + 6, dst=1, tag=6))
    sender.start()
    assert uni.wait_any(works, timeout=PATIENCE_S) == 6
    sender.join()
    assert works[6].wait(0).nbytes == 40
    assert np.array_equal(buffers[6], np.arange(5.0) + 6)
    comms[0].send(np.arange(5.0) + 2, dst=1, tag=2)
    wait_until(lambda: works[2].done())
    assert uni.wait_some(works) == [2, 6]
    assert uni.wait_any(works, timeout=0) == 2
    assert calls_adopted(comms[1]) == 0
    for tag in (0, 1, 3, 4, 5, 7):
        comms[0].send(np.arange(5.0) + tag, dst=1, tag=tag)
    uni.wait_all(works)
    assert [buffer[0] for buffer in buffers] == list(range(8))


def test_as_completed_gives_each_work_once_as_it_ends(world: MakeWorld):
    comms = world(2)
    order = [3, 0, 4, 1, 2]
    works = [comms[1].start.recv(np.zeros(1), src=0, tag=tag) for tag in range(5)]
    given = uni.as_completed([*works, works[0]], timeout=PATIENCE_S)
    for tag in order:
        comms[0].send(np.zeros(1), dst=1, tag=tag)
        assert next(given) is works[tag]
    assert list(given) == list(uni.as_completed([])) == []


def test_a_wait_for_something_else_than_a_work_is_refused(world: MakeWorld):
    comms = world(2)
    work = comms[0].start.send(np.arange(3), dst=1)
    for wait in (uni.wait_any, uni.wait_some):
        with pytest.raises(UsageError, match="at least one"):
            wait([])
    for wait in (uni.wait_any, uni.wait_some, uni.wait_all, uni.as_completed):
        for wrong in ([work, 3], work, None):
            with pytest.raises(UsageError, match="allowed: works"):
                wait(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="timeout"):
            wait([work], timeout=-1)
    comms[1].recv(np.zeros(3, int), src=0)
    work.wait()


def test_works_of_several_backends_are_waited_for_together(world: MakeWorld):
    first, second = world(2), world(2)
    threads = uni.local(2)
    buffers = [np.zeros(2) for _ in range(3)]
    works = [
        comms[1].start.recv(buffer, src=0)
        for comms, buffer in zip((first, second, threads), buffers, strict=True)
    ]
    with pytest.raises(DeadlineExceeded):
        uni.wait_any(works, timeout=0.01)
    for index, comms in ((1, second), (2, threads), (0, first)):
        sender = threading.Timer(0.02, lambda comms=comms: comms[0].send(np.ones(2), dst=1))
        sender.start()
        left = [work for work in works if not work.done()]
        assert left[uni.wait_any(left, timeout=PATIENCE_S)] is works[index]
        sender.join()
    assert uni.wait_some(works) == [0, 1, 2]
    for comm in threads:
        comm.close()


def test_a_wait_for_several_that_stalls_still_gets_its_message(world: MakeWorld):
    """After the stall limit the wait goes on in Python; the receives stay in the engine."""
    comms = world(2, stall_query_s=0.05, deadlock_after_s=0.05)
    works = [comms[1].start.recv(np.zeros(1), src=0, tag=tag) for tag in range(3)]
    sender = threading.Timer(0.3, lambda: comms[0].send(np.zeros(1), dst=1, tag=1))
    sender.start()
    assert uni.wait_any(works, timeout=PATIENCE_S) == 1
    sender.join()
    assert calls_adopted(comms[1]) == 0
    for tag in (0, 2):
        comms[0].send(np.zeros(1), dst=1, tag=tag)
    assert len(uni.wait_all(works)) == 3


def test_a_deadline_of_one_ends_the_wait_for_any(world: MakeWorld):
    comms = world(2)
    works = [comms[1].start.recv(np.zeros(1), src=0, tag=tag, timeout=[60, 0.1][tag]) for tag in range(2)]
    assert uni.wait_any(works, timeout=PATIENCE_S) == 1
    with pytest.raises(DeadlineExceeded, match=r"did not end within 0\.1 s"):
        works[1].wait()
    assert works[0].cancel()


def killed_while_waiting(comm: Communicator) -> Any:
    """Rank 2 is killed while the others wait for any of their receives from it."""
    if comm.rank == 2:
        comm.recv(np.zeros(1), src=0)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [comm.start.recv(np.zeros(1), src=src, tag=7) for src in (1 - comm.rank, 2)]
    errors: list[str] = []
    works[1].add_done_callback(lambda work: errors.append("called"))
    if comm.rank == 0:
        comm.send(np.zeros(1), dst=2)
    for work in uni.as_completed(works, timeout=60):
        if work is works[0]:
            assert work.wait().source == 1 - comm.rank
            continue
        with pytest.raises(PeerLost, match="rank 2"):
            work.wait()
        wait_until(lambda: errors)
        comm.send(np.zeros(1), dst=1 - comm.rank, tag=7)
    return errors


def test_a_kill_ends_the_wait_for_several():
    def live(backend: Backend, _: Connection) -> Any:
        with Communicator.world(backend) as comm:
            return killed_while_waiting(comm)

    with forked(live, 3) as ranks:
        assert [ranks.result(rank, PATIENCE_S) for rank in range(2)] == [["called"]] * 2
        assert ranks.code(2) == -signal.SIGKILL


# -- several threads, cancelling, polling -------------------------------------------------------------------


def test_threads_that_wait_for_one_work_all_get_it(world: MakeWorld):
    comms = world(2)
    buffer = np.zeros(3)
    work = comms[1].start.recv(buffer, src=0)
    results: list[Any] = []
    waits: list[Callable[[], Any]] = [
        work.wait,
        lambda: work.wait(PATIENCE_S),
        lambda: uni.wait_any([work]),
        lambda: [work.done() or time.sleep(0.001) for _ in iter(lambda: work.done(), True)] and None,
        lambda: uni.wait_all([work]),
    ]
    threads = [threading.Thread(target=lambda wait=wait: results.append(wait())) for wait in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    comms[0].send(np.arange(3.0), dst=1)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(results) == 5
    assert buffer.tolist() == [0, 1, 2]


def test_a_work_can_be_cancelled_while_another_thread_waits_for_it(world: MakeWorld):
    comms = world(2)
    work = comms[1].start.recv(np.zeros(3), src=0, tag=1)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            work.wait()
        except UnisonoError as error:
            errors.append(error)

    waiter = threading.Thread(target=ask)
    waiter.start()
    time.sleep(0.02)
    assert work.cancel()
    waiter.join(PATIENCE_S)
    assert isinstance(errors[0], PeerAborted)
    assert not work.cancel()
    buffer = np.zeros(3)
    comms[0].send(np.arange(3.0), dst=1, tag=1)
    comms[1].recv(buffer, src=0, tag=1)  # the cancelled receive took no message
    assert buffer.tolist() == [0, 1, 2]


def test_cancelled_collectives_end_everywhere(world: MakeWorld):
    comms = world(2)
    called = threading.Event()
    work = comms[0].start.all_reduce(ramp(0, 100_003))
    work.add_done_callback(lambda _: called.set())
    assert work.cancel()
    assert called.wait(PATIENCE_S)
    with pytest.raises(PeerAborted):
        comms[1].all_reduce(ramp(1, 100_003), timeout=30)


def test_polling_ends_and_gives_the_right_sums(world: MakeWorld):
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> None:
        for count in (1, 7, 1021, 100_003):
            work = comm.start.all_reduce(ramp(comm.rank, count))
            while not work.done():
                pass
            assert np.array_equal(work.wait(timeout=0), summed(2, count))
        assert calls_adopted(comm) == 0

    run_each(program, comms).values()


# -- await ----------------------------------------------------------------------------------


@every_kind
def test_awaited_works_are_concluded_in_the_engine(world: MakeWorld, kind: str):
    comms = world(2, kind, **NO_STALL)

    def program(comm: Communicator) -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                one = group.create_task(comm.start.all_reduce(ramp(comm.rank)))
                work = comm.start.all_reduce(ramp(comm.rank, 7))
                twice = [group.create_task(work), group.create_task(work)]
            assert np.array_equal(one.result(), summed(2))
            assert all(np.array_equal(task.result(), summed(2, 7)) for task in twice)
            both = await asyncio.gather(
                comm.start.all_reduce(ramp(comm.rank, 3)), comm.start.all_reduce(ramp(comm.rank, 100_003))
            )
            assert [len(each) for each in both] == [3, 100_003]
            assert np.array_equal(both[1], summed(2, 100_003))
            await asyncio.wait_for(comm.start.barrier(), PATIENCE_S)
            for count in range(50):
                assert np.array_equal(await comm.start.all_reduce(ramp(comm.rank, count)), summed(2, count))

        asyncio.run(main())
        assert calls_adopted(comm) == 0

    run_each(program, comms).values()


def test_cancelling_an_await_leaves_the_work_running(world: MakeWorld):
    comms = world(2)
    buffer = np.zeros(3)
    work = comms[1].start.recv(buffer, src=0)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 0.01)
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not work.done()
    comms[0].send(np.arange(3.0), dst=1)
    assert work.wait(PATIENCE_S).source == 0
    assert buffer.tolist() == [0, 1, 2]
    work.close()  # as a coroutine that is not running


# -- dropped works ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True], ids=["ends in the engine", "adopted"])
def test_a_dropped_work_goes_on_and_frees_its_memory_when_it_ends(world: MakeWorld, is_late: bool):
    comms = world(2, stall_query_s=0.05 if is_late else 60.0)
    given, taken = np.arange(300_007.0), np.zeros(300_007)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            comms[0].start.send(given, dst=1)
            comms[1].start.reduce_scatter(np.arange(200_006.0).reshape(2, -1))
        dropped = [weakref.ref(given)]
        del given
        assert len(warned) == 2
        assert "dropped before it ended" in str(warned[0].message)
        if is_late:
            comms[0]._group.state.adopt_started(all_messages=True)  # a message does not stall
            wait_until(lambda: calls_adopted(comms[0]) and calls_adopted(comms[1]))
        assert dropped[0]() is not None, "the engine still reads the memory"
        before = rss()
        comms[1].recv(taken, src=0)
        assert np.array_equal(taken, np.arange(300_007.0))
        mine = comms[0].reduce_scatter(np.full((2, 100_003), 7.0))
        assert np.array_equal(mine, np.arange(100_003.0) + 7)
        wait_until(lambda: dropped[0]() is None)
        assert rss() <= before + 40 * 2**20
    finally:
        gc.enable()


def rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_dropped_collectives_do_not_pile_up(world: MakeWorld):
    """Thirty dropped all_gathers of 8 MiB: their results are freed without the garbage collector."""
    if "libtsan" in os.environ.get("LD_PRELOAD", ""):
        skip_without("an allocator that returns memory", "TSan keeps shadows of freed memory")
    comms = world(2)
    gc.collect()
    gc.disable()
    before = rss()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for turn in range(30):
                mine = np.full(2**19, float(turn))
                for comm in comms:
                    comm.start.all_gather(mine)
                del mine
                run_each(lambda comm: comm.barrier(), comms).values()
        wait_until(lambda: rss() < before + 100 * 2**20)
    finally:
        gc.enable()


def test_works_that_were_dropped_are_named_when_the_communicator_closes(world: MakeWorld, caplog):
    comms = world(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comms[0].start.send(np.arange(3), dst=1)
        comms[0].start.recv(np.zeros(3), src=1)
    comms[1].recv(np.zeros(3, int), src=0)
    comms[1].send(np.zeros(3), dst=0)
    with caplog.at_level(logging.WARNING, "unisono"):
        run_each(lambda comm: comm.close(), comms)
    assert "works never waited for" in caplog.text
    assert "test_works.py" in caplog.text


# -- fork, Ctrl-C, the end of the interpreter ----------------------------------------------------------------


def test_a_forked_child_refuses_the_works_of_its_parent(world: MakeWorld):
    comms = world(2)
    work = comms[1].start.recv(np.zeros(3), src=0)
    uses: list[Callable[[], Any]] = [
        work.wait,
        work.done,
        work.cancel,
        lambda: work.add_done_callback(print),
        lambda: uni.wait_any([work]),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        refused = 0
        for use in uses:
            try:
                use()
            except ClosedError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(uses)
    comms[0].send(np.arange(3.0), dst=1)
    work.wait(PATIENCE_S)


@pytest.mark.parametrize("wait", ["wait", "any", "all"])
def test_ctrl_c_ends_a_wait_and_the_work_goes_on(world: MakeWorld, wait: str):
    comms = world(2)
    buffer = np.zeros(3)
    work = comms[1].start.recv(buffer, src=0)
    waits: dict[str, Callable[[], Any]] = {
        "wait": work.wait,
        "any": lambda: uni.wait_any([work]),
        "all": lambda: uni.wait_all([work]),
    }
    striker = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    striker.start()
    with pytest.raises(KeyboardInterrupt):
        waits[wait]()
    striker.join()
    comms[0].send(np.arange(3.0), dst=1)
    assert work.wait(PATIENCE_S).nbytes == 24
    assert buffer.tolist() == [0, 1, 2]


LAST_WORDS = """
import contextlib, sys, threading, warnings
import numpy as np
import unisono as uni

warnings.simplefilter("ignore")
comm = uni.init(backend="native")
works = [comm.start.recv(np.zeros(1), src=0, tag=tag) for tag in range(5)]
works[0].add_done_callback(lambda work: work.done())

def wait(how):
    with contextlib.suppress(uni.ClosedError):  # the main thread has ended
        how()

threading.Thread(target=wait, args=(works[1].wait,), daemon=True).start()
threading.Thread(target=wait, args=(lambda: uni.wait_any(works),), daemon=True).start()
del works[2]
print("last line")
"""


def test_an_interpreter_ends_with_works_under_way():
    ended = subprocess.run(
        [sys.executable, "-c", LAST_WORDS], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "last line\n"
    assert "Traceback" not in ended.stderr, ended.stderr
