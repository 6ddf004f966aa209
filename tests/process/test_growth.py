"""Memory does not grow with the number of operations; bench/growth.py shows this for many more of them."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest

import unisono as uni
from unisono.comm.group import Group
from unisono.testing import run_local

pytestmark = pytest.mark.more

# A leak of 512 bytes per operation exceeds this; the allocator's own growth stays below.
GROWTH_KIB_MAX = 2048


def resident_kib() -> int:
    line = next(t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith("VmRSS"))
    return int(line.split()[1])


def operations(comm: uni.Communicator, warm_up: int, count: int) -> int:
    """Run collectives and tagged messages in turn; return the growth of resident memory after the warm-up."""
    other, before = 1 - comm.rank, 0
    x, in_ = np.zeros(16, np.float32), np.zeros(64, np.int64)
    for i in range(warm_up + count):
        if i == warm_up:
            before = resident_kib()
        x[:] = comm.rank + i % 7
        comm.all_reduce(x)
        assert x[5] == 1 + 2 * (i % 7)
        comm.barrier()
        assert comm.all_gather(np.array([comm.rank, i]))[other, 1] == i
        works = [comm.start.send(np.full(64, 2 * i + k), other, tag=2 * i + k) for k in range(2)]
        for tag in (2 * i + 1, 2 * i):
            comm.recv(in_, other, tag)
            assert in_[9] == tag
        uni.wait_all(works)
    return resident_kib() - before


@pytest.mark.parametrize("shm", ["1", "0"])
def test_memory_does_not_grow_with_the_number_of_operations(shm: str) -> None:
    grown = uni.spawn(operations, 2, 400, 1200, env={"UNISONO_SHM": shm}, timeout=110)
    assert max(grown) < GROWTH_KIB_MAX, f"KiB over 6,000 operations: {grown}"


# A leaked group takes 16 KiB: 400 groups take 6.4 MiB, and 2,000 groups 32 MiB.
GROUPS_WARM_UP, GROUPS, GROUPS_LONG = 50, 400, 2000


def forgotten_groups(comm: uni.Communicator, count: int) -> tuple[int, int]:
    """Use and drop groups of every kind; return the growth of memory, and the number of groups left."""
    before = 0
    for i in range(GROUPS_WARM_UP + count):
        if i == GROUPS_WARM_UP:
            before = resident_kib()
        match i % 4:
            case 0:
                group = comm.sub(range(comm.size))
            case 1:
                group = comm.split(0, -comm.rank)
            case 2:
                group = comm.sub(range(comm.size)).sub(range(comm.size))
            case _:
                group = comm.mesh((comm.size, 1), ("row", "column"))["row"]
        assert group.all_reduce(comm.rank + i) == 1 + 2 * i
        group.sendrecv(np.full(3, i), 1 - group.rank, np.zeros(3, int), 1 - group.rank)
        del group
    grown, patience = resident_kib() - before, time.monotonic() + 30
    while len(groups_of(comm)) > 1 and time.monotonic() < patience:
        gc.collect()
        time.sleep(0.05)
    comm.barrier()
    return grown, len(groups_of(comm))


def groups_of(comm: uni.Communicator) -> list[Group]:
    backend = getattr(comm.backend, "parent", comm.backend)
    known = [each for each in gc.get_objects() if type(each) is Group]
    return [each for each in known if getattr(each.backend, "parent", each.backend) is backend]


@pytest.mark.parametrize("backend", ["local", "native"])
def test_groups_that_are_dropped_are_freed(backend: str, request: pytest.FixtureRequest) -> None:
    count = GROUPS_LONG if request.config.getoption("--long") else GROUPS
    if backend == "local":
        ended = run_local(forgotten_groups, 2, count)
    else:
        ended = uni.spawn(forgotten_groups, 2, count, backend=backend, timeout=110)
    assert [left for _, left in ended] == [1, 1], "only the world is left"
    assert max(grown for grown, _ in ended) < 2 * GROWTH_KIB_MAX
