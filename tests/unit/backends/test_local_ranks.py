"""The ranks of uni.local, which engines host: their start, their ends, and the threads that use them."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S, run_each, wait_until

import unisono as uni
from unisono.backends.native.local_ranks import LocalRank
from unisono.config import Config
from unisono.core.envelope import ANY
from unisono.errors import ClosedError, Deadlock, PeerAborted, PeerLost, UsageError

QUICK = Config(deadlock_after_s=0.15, stall_query_s=0.05)


def close_all(worlds: list[uni.Communicator]) -> None:
    run_each(lambda world: world.close(), worlds).values()


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_a_size_that_makes_no_sense_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match="allowed: an integer >= 1"):
        LocalRank.create(size)


@pytest.mark.parametrize("shm", [True, False])
def test_ranks_are_linked_by_memory_whatever_processes_use(shm: bool) -> None:
    worlds = uni.local(3, Config(shm=shm))
    run_each(lambda world: world.all_to_all(np.arange(3.0)), worlds).values()
    for world in worlds:
        links = world.backend.links()  # type: ignore[attr-defined]
        assert links[world.rank] == "self"
        assert {link.removesuffix("+read") for link in links} == {"self", "shm"}
        assert world.backend.capabilities.name == "local"
    close_all(worlds)


def test_many_ranks_need_few_descriptors_and_all_meet() -> None:
    """64 ranks, each linked to every other: 2,016 links without a descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    worlds = uni.local(64)

    def program(world: uni.Communicator) -> Any:
        x = np.arange(64, dtype=np.int64) * 1000 + world.rank
        got = world.all_to_all(x)
        assert got.tolist() == [world.rank * 1000 + other for other in range(64)]
        return world.all_reduce(np.array([world.rank, 1]))

    for total in run_each(program, worlds).values():
        assert total.tolist() == [64 * 63 // 2, 64]
    assert len(os.listdir("/proc/self/fd")) - before <= 5 * 64
    close_all(worlds)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize("count", [1, 2047, 2049, 40_000, 300_001])
def test_sums_of_any_length_are_right(count: int) -> None:
    """Lengths around the eager limit, and lengths at which ranks read each other's memory."""
    rows = np.stack([(np.arange(count) * (rank + 3)) % 251 for rank in range(4)]).astype(np.float64)

    def program(world: uni.Communicator) -> Any:
        for _ in range(3):  # the second call takes the fast path
            got = world.all_reduce(rows[world.rank].copy())
        return got

    worlds = uni.local(4)
    for got in run_each(program, worlds).values():
        np.testing.assert_array_equal(got, rows.sum(0))
    close_all(worlds)


def test_a_dropped_world_leaves_no_thread_and_no_descriptor() -> None:
    gc.collect()
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(5):
        worlds = uni.local(3)
        run_each(lambda world: world.barrier(), worlds).values()
        del worlds
        gc.collect()
    # The thread that closes dropped communicators stays until the process ends.
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= threads + 1)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_a_rank_that_was_dropped_has_left_for_the_others() -> None:
    worlds = uni.local(2)
    work = worlds[0].start.recv_bytes(1)
    del worlds[1]
    gc.collect()
    with pytest.raises(PeerLost, match="left"):
        work.wait(PATIENCE_S)
    close_all(worlds)


@pytest.mark.parametrize("was_linked", [True, False])
def test_a_rank_learns_that_another_left_with_and_without_a_link(was_linked: bool) -> None:
    ranks = LocalRank.create(3)
    if was_linked:
        pending = ranks[1].start_recv(ANY, 77, 0, None)
        ranks[0].start_send(1, 77, 0, memoryview(b"hello"))
        wait_until(lambda: pending.done)
    downs: list[Any] = []
    ranks[0].watch(downs.append)
    ranks[1].close()
    wait_until(lambda: bool(downs))
    assert (downs[0].rank, downs[0].left) == (1, True)
    late = ranks[0].start_recv(1, 77, 0, None)
    assert isinstance(late.error, PeerLost)
    for rank in ranks:
        rank.close()


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    worlds = uni.local(2)
    run_each(lambda world: world.barrier(), worlds).values()
    child = os.fork()
    if child == 0:
        try:
            worlds[0].send(b"from the child", 1)
        except ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    run_each(lambda world: world.all_reduce(world.rank), worlds).values()
    close_all(worlds)


def test_a_rank_whose_thread_used_only_the_fast_path_and_ended_is_missed() -> None:
    """After its first call the thread waited in the engine; it has ended without closing its rank."""
    worlds = uni.local(2, QUICK)
    x = [np.ones(1), np.ones(1)]

    def program(world: uni.Communicator) -> Any:
        for _ in range(20 if world.rank else 21):
            world.all_reduce(x[world.rank])

    ended = run_each(program, worlds)
    assert isinstance(ended[0], Deadlock), ended
    assert "rank 1" in str(ended[0])
    close_all(worlds)


def test_no_deadlock_while_a_thread_that_only_sends_may_send_again() -> None:
    """The thread of the test, which is older than the world, sends by the fast path, which runs no Python."""
    worlds = uni.local(2, QUICK)

    def program(world: uni.Communicator) -> list[bytes]:
        return [world.recv_bytes(1 - world.rank) for _ in range(2)]

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run_each(program, worlds)))
    thread.start()
    for world in worlds:
        world.send(np.frombuffer(b"first", np.uint8), 1 - world.rank)
    time.sleep(4 * QUICK.deadlock_after_s)
    for world in worlds:
        world.send(np.frombuffer(b"second", np.uint8), 1 - world.rank)
    thread.join(PATIENCE_S)
    assert results[0].values() == [[b"first", b"second"]] * 2
    close_all(worlds)


def test_a_thread_waits_in_the_engine_while_another_cancels_the_work() -> None:
    """Python adopts the call for the rank that cancels; the other rank gets the error."""
    for _ in range(20):
        worlds = uni.local(2)
        work = worlds[0].start.recv(np.zeros(3), 1)
        errors: list[BaseException] = []

        def wait(work: uni.Work[Any] = work, errors: list[BaseException] = errors) -> None:
            try:
                work.wait()
            except PeerAborted as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.002)
        assert work.cancel()
        thread.join(PATIENCE_S)
        assert len(errors) == 1
        close_all(worlds)


def test_many_threads_that_wait_for_one_work_let_python_adopt_it_once() -> None:
    worlds = uni.local(2, Config(stall_query_s=0.02))
    buf = np.zeros(3)
    work = worlds[0].start.recv(buf, 1)
    sources: list[int] = []
    threads = [threading.Thread(target=lambda: sources.append(work.wait().source)) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    worlds[1].send(np.arange(3.0), 0)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sources == [1] * 8
    np.testing.assert_array_equal(buf, [0, 1, 2])
    close_all(worlds)


def test_no_deadlock_while_a_thread_waits_in_the_engine_and_another_is_between_calls() -> None:
    """Rank 0 waits in Python; rank 1 makes short calls to itself, which end in the engine."""
    worlds = uni.local(2, QUICK)

    def program(world: uni.Communicator) -> Any:
        x = np.zeros(1)
        if world.rank == 0:
            return world.recv(x, 1).source
        end = time.monotonic() + 6 * QUICK.deadlock_after_s
        while time.monotonic() < end:
            world.sendrecv(np.ones(1), 1, x, 1)
            time.sleep(0.01)
        world.send(x, 0)
        return None

    assert run_each(program, worlds).values() == [1, None]
    close_all(worlds)


def test_a_work_that_ended_and_was_never_waited_for_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    (world,) = uni.local(1)
    seen, unseen = world.start.all_reduce(1.0), world.start.barrier()
    seen.wait()
    world.close()
    assert [r.getMessage().count("barrier at") for r in caplog.records] == [1]
    assert "all_reduce" not in caplog.text
    assert unseen.done()
