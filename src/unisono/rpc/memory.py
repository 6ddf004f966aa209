"""Memory to receive into, used again once nobody looks at it any more.

Knows blocks and who still holds them. Does not know what comes into them. Fresh memory is dear: the system
gives it page by page, and on a virtual machine that takes longer than to copy a message into it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Final

import numpy as np

__all__ = ["take"]

# Below this the allocator keeps what was freed by itself.
_BLOCK_BYTES_MIN: Final = 256 * 1024
# So much may lie idle in a process.
_IDLE_BYTES_MAX: Final = 160 << 20

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
    return np.empty(nbytes, np.uint8)


def _give_back(block: np.ndarray[Any, Any]) -> None:
    _idle.append(block)
    while sum(one.nbytes for one in list(_idle)) > _IDLE_BYTES_MAX:
        try:
            _idle.popleft()
        except IndexError:
            break
