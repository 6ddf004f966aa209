"""Memory to receive into, used again once nobody looks at it any more.

Knows blocks and who still holds them. Does not know what comes into them. Fresh memory is dear: the system
gives it page by page, and on a virtual machine that takes longer than to copy a message into it.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from typing import Any, Final

import numpy as np

__all__ = ["take"]

# Below this the allocator keeps what was freed by itself.
_BLOCK_BYTES_MIN: Final = 256 * 1024
# So much may lie idle in a process.
_IDLE_BYTES_MAX: Final = 160 << 20
# The system gives a large page for little more than a small one: a block that is at least half of one has it.
_HUGE_PAGE: Final = 2 << 20
# From here on NumPy asks for them.
_NUMPY_ASKS: Final = 4 << 20

# Only whole operations of the deque, and no lock: a block comes back when the collector finds it, anywhere.
_idle: deque[np.ndarray[Any, Any]] = deque()


def take(nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes of one's own, for as long as they, or any view on them, are held."""
    if nbytes < _BLOCK_BYTES_MIN:
        return np.empty(nbytes, np.uint8)
    block = _found(nbytes)
    # An array of its own on the block: all views keep this one alive, and its end is the block's return.
    given: np.ndarray[Any, Any] = np.frombuffer(block.data, np.uint8, nbytes)
    weakref.finalize(given, _give_back, block).atexit = False
    return given


def _found(nbytes: int) -> np.ndarray[Any, Any]:
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:
            break
        if nbytes <= block.nbytes <= 2 * nbytes:
            return block
        _idle.append(block)
    return _fresh(nbytes)


def _fresh(nbytes: int) -> np.ndarray[Any, Any]:
    """Memory from the system: of the size for which NumPy does not, ask for large pages."""
    if not _HUGE_PAGE // 2 <= nbytes < _NUMPY_ASKS or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(nbytes, np.uint8)
    length = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    room = mmap.mmap(-1, length + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system that has none
        room.madvise(mmap.MADV_HUGEPAGE)
    block: np.ndarray[Any, Any] = np.frombuffer(room, np.uint8)
    start = -block.ctypes.data % _HUGE_PAGE
    return block[start : start + length]


def _give_back(block: np.ndarray[Any, Any]) -> None:
    _idle.append(block)
    while sum(one.nbytes for one in list(_idle)) > _IDLE_BYTES_MAX:
        try:
            _idle.popleft()
        except IndexError:
            break
