"""Runs on ranks under mpiexec, for conformance/test_mpi.py: `python -m tests.support.mpi_program cases`.

The last line that rank 0 prints is the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from tests.conformance.test_properties import equal
from tests.support.mismatch_corpus import CORPUS, mismatches
from tests.support.rank_pool import RankPool
from tests.support.sums import SUMS, sums

import unisono as uni
from unisono.backends.mpi.backend import MpiBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import CollectiveMismatch, DeadlineExceeded, UnisonoError

WORLD = MPI.COMM_WORLD


class MpiRankPool(RankPool):
    """A pool of the ranks that mpiexec started."""

    rank = WORLD.rank
    kind = "mpi"

    def open_world(self, size: int, config: Config) -> MpiBackend | None:
        part = WORLD.Split(0 if WORLD.rank < size else 1, WORLD.rank)
        backend = MpiBackend(part, config) if WORLD.rank < size else None
        part.Free()
        return backend

    def gather(self, value: Any) -> list[Any]:
        return WORLD.allgather(value)


def fails(left: Any, right: Any) -> Any:
    raise ArithmeticError("no such sum")


def behaviour() -> dict[str, Any]:
    """`uni.init` under mpiexec, MPI's own collectives, a user's operation and a `with` block that raise."""
    said: dict[str, Any] = {}
    with uni.init(backend="mpi") as world:
        said["name"], said["size"] = world.backend.capabilities.name, world.size
        said["own"] = own_or_not(world)
        known(world)
        every_way(world)
        shapes_differ(world)
        overlapping(world)
        late(world)
        left_alone(world)
        different(world)
        said["fraction"] = fraction_lost(world)
        try:
            world.all_reduce(np.arange(500.0), uni.op(fails))
        except (UnisonoError, ArithmeticError) as error:
            said["failed"] = f"{type(error).__name__}: {error}"
    return said


def own_or_not(world: Communicator) -> list[tuple[str, bool]]:
    """Which collectives are run by MPI's own functions."""
    seen: list[tuple[str, bool]] = []
    real = world.backend.run_collective

    def spy(problem: Any, stage: Any) -> Any:
        request = real(problem, stage)
        seen.append((problem.collective, request is not None))
        return request

    world.backend.run_collective = spy  # type: ignore[method-assign]
    x = np.arange(500.0) + world.rank
    start = world.start  # a blocking call goes straight to MPI, and comes here only if MPI cannot make it
    start.all_reduce(x.copy(), uni.op(lambda a, b: a + b, name="plus")).wait()
    start.scan(x).wait()
    start.all_reduce(x.copy(), "max").wait()
    start.all_reduce(x.astype(np.float16)).wait()
    start.all_reduce(x[:5].copy(), "max").wait()
    start.barrier().wait()
    seen_started, seen = seen, []
    world.scan(x)
    world.all_reduce(x.copy(), "max")
    world.all_reduce(x.astype(np.float16))
    world.all_reduce(x[:5].copy(), "max")
    world.barrier()
    # A call that finds completions of earlier messages also comes here; MPI makes this call, too.
    assert [each for each in seen if not each[1]] == [("all_reduce", False)] * 2, seen
    world.backend.run_collective = real  # type: ignore[method-assign]
    return seen_started


def known(world: Communicator) -> None:
    """Calls from one place: the first is decided, the others go straight to MPI."""
    size, calls = world.size, world._group.verb_group
    assert calls is not None
    before = calls.ended
    for turn in range(8):
        for count in (1, 37, 300_001):  # with the agreement, by one call of MPI, by several
            every = [np.arange(count) * (rank + 1.5) + turn for rank in range(size)]
            mine = every[world.rank].copy()
            assert world.all_reduce(mine) is mine
            equal(mine, sum(every))
            mine = every[world.rank].copy()
            equal(world.all_reduce(mine, "mean"), sum(every) / size)
            mine = every[world.rank].copy()
            equal(world.broadcast(mine, root=turn % size), every[turn % size])
            equal(world.all_gather(every[world.rank]), np.stack(every))
            rows = np.stack([every[world.rank] + 10 * peer for peer in range(size)])
            equal(world.all_to_all(rows), np.stack([x + 10 * world.rank for x in every]))
            equal(world.reduce_scatter(rows), sum(x + 10 * world.rank for x in every))
        world.barrier()
    assert calls.ended > before  # the number depends on which rank was late


def every_way(world: Communicator) -> None:
    """Every even verb, with arguments of every form, goes straight to MPI and is NumPy's."""
    size, rank, calls = world.size, world.rank, world._group.verb_group
    assert calls is not None
    for turn, count in enumerate((1, 5, 37, 64, 65, 4099)):
        every = [np.arange(count) * (each + 2) + turn for each in range(size)]
        root, x = turn % size, every[rank]
        before = calls.ended
        got = world.reduce(x.copy(), root, "max", timeout=30)
        assert (got is None) == (rank != root)
        if got is not None:
            equal(got, np.max(every, axis=0))
        gathered = world.gather(x, root=root)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            equal(gathered, np.stack(every))
        equal(world.scan(x), sum(every[: rank + 1]))
        equal(world.exscan(x, "max"), np.max(every[:rank], axis=0) if rank else np.full(count, -(2**63)))
        out = np.empty((2, 3, count))
        given = np.stack([x * (k + 1.5) for k in range(6)]).reshape(2, 3, count)
        assert world.all_reduce(given, "mean", out=out, timeout=30.0) is out
        want = sum(np.stack([each * (k + 1.5) for k in range(6)]) for each in every) / size
        assert np.allclose(out.reshape(6, count), want)
        tensor = torch.arange(count, dtype=torch.float32) + rank
        assert world.all_reduce(tensor) is tensor
        equal(tensor.numpy(), sum(np.arange(count, dtype=np.float32) + each for each in range(size)))
        strided = np.stack([x, x], axis=1)[:, 0]
        equal(world.all_gather(strided), np.stack(every))
        assert world.all_reduce(rank + turn) == sum(range(size)) + turn * size
        world.barrier(timeout=30)
        assert calls.ended > before  # the number depends on which rank was late
    before = calls.ended
    for turn in range(20):
        every = [float(each + turn) for each in range(size)]
        for kind in (float, np.float64, lambda x: array("d", [x]), np.array):
            got = world.all_reduce(kind(every[rank]))
            assert np.asarray(got).item() == sum(every), (got, every)
            equal(np.asarray(world.all_gather(kind(every[rank]))).ravel(), np.array(every))
        assert world.gather(every[rank], root=turn % size) is None or rank == turn % size
    assert calls.ended > before + 60  # 40 of them are arrays


def shapes_differ(world: Communicator) -> None:
    """The report of a call that went straight to MPI names its shape."""
    group = world.split(0)
    assert group is not None
    for _ in range(3):
        group.all_gather(np.ones((2, 3)))
        group.all_gather(np.ones((3, 2)))
    with pytest.raises(CollectiveMismatch, match=r"shape: (2,3|3,2)") as caught:
        group.all_gather(np.ones((2, 3) if world.rank == 1 else (3, 2)))
    assert "all_gather float64[2,3] algorithm=auto segment=" in caught.value.report, caught.value.report
    assert "mpi_program.py:" in caught.value.report
    group.close()
    world.barrier()


def overlapping(world: Communicator) -> None:
    """Several at once in groups that overlap, begun in different orders."""
    pair = world.sub([0, 1]) if world.rank < 2 else None
    others = world.split(0, key=-world.rank)
    assert others is not None
    for _ in range(5):
        x = [np.arange(2000.0) + world.rank for _ in range(3)]
        begin = list(zip((pair, others, world), x, strict=True))
        works = [
            comm.start.all_reduce(operand)
            for comm, operand in (begin if world.rank % 2 else begin[::-1])
            if comm is not None
        ]
        uni.wait_all(works, timeout=30)
        for got in x[1:]:
            equal(got, sum(np.arange(2000.0) + rank for rank in range(world.size)))
        if pair is not None:
            equal(x[0], 2 * np.arange(2000.0) + 1)
    others.close()


def late(world: Communicator) -> None:
    """A rank that waits longer than `stall_query_s` for a late one has the right result, too."""
    size, rank = world.size, world.rank
    every = [np.arange(41.0) * (each + 1.5) for each in range(size)]
    for turn in range(3):
        if rank == turn % size:
            time.sleep(0.6)
        equal(world.all_reduce(every[rank].copy()), sum(every))
        if rank == (turn + 1) % size:
            time.sleep(0.6)
        equal(world.all_gather(every[rank], timeout=30), np.stack(every))
        if rank == (turn + 2) % size:
            time.sleep(0.6)
        assert world.all_reduce(rank + turn) == sum(range(size)) + turn * size


def left_alone(world: Communicator) -> None:
    """A rank that cancels gets its buffer back; a rank that enters later gets an error or the result."""
    for count in (5, 100_000):
        group = world.split(0)
        assert group is not None
        x = np.full(count, world.rank + 1.0)
        if world.rank == 0:
            with pytest.raises(DeadlineExceeded):
                group.all_reduce(x, timeout=0.3)
            x[:] = 99
            world.send(b"gave up", 1)
            world.send(b"gave up", 2)
        else:
            world.recv_bytes(0)
            with contextlib.suppress(DeadlineExceeded):
                equal(group.all_reduce(x), np.full(count, sum(range(1, world.size + 1)) + 0.0))
        with pytest.raises(DeadlineExceeded):
            group.barrier()
        group.close()
        world.barrier()


def different(world: Communicator) -> None:
    """Different calls are a mismatch, however long their operands are."""
    for count in (3, 5000):
        group = world.split(0)
        assert group is not None
        with pytest.raises(CollectiveMismatch):
            group.all_reduce(np.ones(count + (world.rank == 1)))
        group.close()
        world.barrier()


def fraction_lost(world: Communicator) -> str:
    """A user's operation that gives floats for integers."""
    group = world.split(0)
    assert group is not None
    with pytest.raises(UnisonoError) as caught:
        group.all_reduce(np.arange(500), uni.op(lambda a, b: (a + b) / 2, name="middle"))
    group.close()
    world.barrier()
    return str(caught.value)


def main() -> None:
    match sys.argv[1]:
        case "cases":
            said: Any = MpiRankPool().cases()
        case "properties":
            said = MpiRankPool().properties(examples=4)
        case "behaviour":
            said = behaviour()
        case "mismatches":
            with uni.init(backend="mpi") as world:
                said = mismatches(world, CORPUS)
        case "death":
            with uni.init(backend="mpi") as world:
                world.barrier()
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                world.barrier()
            said = "it went on"
        case _:
            with uni.init(backend="mpi", config=Config(reproducible=True)) as world:
                said = world.all_gather_object(sums(world))
            assert len(said[0]) == SUMS
    everyone = WORLD.allgather(said)
    if WORLD.rank == 0:
        print("said " + json.dumps(everyone), flush=True)


if __name__ == "__main__":
    main()
