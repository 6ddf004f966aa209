"""Memory of results: reused once no reference to it is left, never before, and bounded."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono._native import POOLED_BYTES_MIN, result_memory
from unisono.core.buffers import empty
from unisono.core.dtypes import DTYPES

KIB, MIB = 2**10, 2**20
# Lengths around the thresholds between allocator, mapped pages and huge pages, some of them odd.
LENGTHS = [POOLED_BYTES_MIN, 100_003, MIB - 1, MIB, 3 * MIB + 5, 4 * MIB - 1, 4 * MIB, 17 * MIB + 1]


def address(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def mapped_bytes() -> int:
    """The address space of this process."""
    line = next(t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith("VmSize"))
    return int(line.split()[1]) * KIB


@pytest.mark.parametrize("length", LENGTHS)
def test_memory_is_used_again_once_it_is_dropped(length: int) -> None:
    memory = result_memory(length)
    first = address(memory)
    del memory
    assert address(result_memory(length)) == first


@pytest.mark.parametrize("length", LENGTHS)
def test_memory_that_a_view_holds_is_not_used_again(length: int) -> None:
    whole = empty(length, DTYPES["uint8"])
    whole[:] = np.arange(length) % 251
    part = whole[length // 2 :]
    del whole
    others = [empty(length, DTYPES["uint8"]) for _ in range(3)]
    for other in others:
        other[:] = 255
    assert np.array_equal(part, np.arange(length // 2, length) % 251)
    assert all(not np.shares_memory(a, b) for a in [part, *others] for b in others if a is not b)


def test_a_result_gets_no_block_that_is_much_longer() -> None:
    memory = result_memory(8 * MIB)
    long = address(memory)
    del memory
    short = result_memory(5 * MIB)
    assert address(short) != long
    assert address(result_memory(8 * MIB)) == long


@pytest.mark.parametrize(("length", "number"), [(4 * MIB, 60), (MIB, 200), (300 * MIB, 1)])
def test_what_is_kept_is_bounded(length: int, number: int) -> None:
    before = mapped_bytes()
    held = [result_memory(length) for _ in range(number)]
    assert mapped_bytes() > before + length * number - 80 * MIB
    held.clear()
    assert mapped_bytes() < before + 80 * MIB


def test_one_block_is_kept_however_long_the_others_are() -> None:
    memory = result_memory(100 * MIB)
    first = address(memory)
    del memory
    assert address(result_memory(100 * MIB)) == first


def test_a_short_result_has_memory_of_its_own() -> None:
    short = empty(POOLED_BYTES_MIN // 8 - 1, DTYPES["float64"])
    assert short.flags.owndata
    long = empty(POOLED_BYTES_MIN // 8, DTYPES["float64"])
    assert all((long.flags.writeable, long.flags.c_contiguous, long.flags.aligned))
    assert (long.dtype, long.shape) == (np.float64, (POOLED_BYTES_MIN // 8,))


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 on"):
        result_memory(-1)
    with pytest.raises(MemoryError):
        result_memory(2**60)
    assert memoryview(result_memory(0)).nbytes == 0


def test_threads_never_share_a_block() -> None:
    wrong: list[int] = []

    def program(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[np.ndarray[Any, Any], int]] = []
        for turn in range(300):
            mine = empty(rng.choice([40_000, 41_000, 300_000, 1_200_000]), DTYPES["uint8"])
            mark = (seed * 61 + turn) % 251
            mine[::997] = mark
            held.append((mine, mark))
            if len(held) > 4:
                block, expected = held.pop(rng.randrange(4))
                if not (block[::997] == expected).all():
                    wrong.append(seed)

    threads = [threading.Thread(target=program, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
