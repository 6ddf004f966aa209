"""The arrays that are measured.

Knows how memory lies. Does not know what is done with it.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np

from unisono.bench.cases import ITEM_BYTES

__all__ = ["array_of"]

# From here on NumPy, too, asks for huge pages.
_HUGE_FROM_BYTES: Final = 4 << 20
_HUGE_PAGE_BYTES: Final = 2 << 20


def array_of(shape: tuple[int, ...]) -> Any:
    """An array that lies the same way every time, for every system.

    What the allocator gives is a lottery: after the first long array is freed, the next ones come from a heap
    where some have huge pages and some have not, and crossing to another process takes twice as long without.
    """
    nbytes = int(np.prod(shape)) * ITEM_BYTES
    if nbytes < _HUGE_FROM_BYTES:
        return np.empty(shape, np.float32)
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    return np.frombuffer(memory, np.float32, nbytes // ITEM_BYTES, start).reshape(shape)
