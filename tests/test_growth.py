"""Memory does not grow with the number of operations; bench/growth.py shows it for many more of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import unisono as uni

# A leak of 512 bytes an operation would show; what the allocator does by itself stays below.
GROWTH_KIB_MAX = 2048


def resident_kib() -> int:
    line = next(t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith("VmRSS"))
    return int(line.split()[1])


def operations(comm: uni.Communicator, warm_up: int, count: int) -> int:
    """Collectives and tagged messages in turn; how much the resident memory grew after the warm-up."""
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
