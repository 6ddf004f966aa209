"""The arrays of a measurement, with the same memory layout for every system."""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np

from unisono.bench.cases import ITEM_BYTES

__all__ = ["array_of"]

# NumPy, too, asks for huge pages from this length on.
_HUGE_FROM_BYTES: Final = 4 << 20
_HUGE_PAGE_BYTES: Final = 2 << 20


def array_of(shape: tuple[int, ...]) -> Any:
    """An array whose memory has huge pages from 4 MiB on, every time and for every system.

    With the allocator that is a matter of luck: after the first long array is freed, later ones come from a
    heap with and without huge pages, and copies to another process take twice as long without.
    """
    nbytes = int(np.prod(shape)) * ITEM_BYTES
    if nbytes < _HUGE_FROM_BYTES:
        return np.empty(shape, np.float32)
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    return np.frombuffer(memory, np.float32, nbytes // ITEM_BYTES, start).reshape(shape)
