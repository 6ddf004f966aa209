"""Attachments: the long parts of a value, which travel beside its frame, and memory to receive them into."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from unisono._native import new_memory
from unisono.rpc.transport import LentBuffer, OnDone, RpcTransport

__all__ = ["InboundBudget", "InboundParts", "OutboundParts", "UnreadParts", "allocate"]

# Below this the allocator keeps freed memory by itself.
_BLOCK_BYTES_MIN: Final = 256 * 1024
# Freed blocks that a process keeps for the next attachment. Fresh memory is slow: the system provides it page
# by page, which on a virtual machine takes longer than copying a message into it.
_IDLE_BYTES_MAX: Final = 160 << 20
# A huge page costs the system little more than a small one: a block of at least half of one uses them.
_HUGE_PAGE: Final = 2 << 20
# From this size on NumPy asks for huge pages by itself.
_NUMPY_HUGE_BYTES: Final = 4 << 20
# Attachments of calls that do not run yet.
_HELD_BYTES_MAX: Final = 256 << 20
# How many of the oldest answers are checked for arrival whenever one is sent: more than one, so that the list
# shrinks, and few, so that a call never pays for all of them.
_CHECKS: Final = 8


class OutboundParts:
    """Attachments being sent. Their memory is lent until `is_done`."""

    def __init__(self, transport: RpcTransport, dst: int, number: int, parts: Sequence[memoryview]) -> None:
        self._lent: list[LentBuffer] = [transport.lend(dst, number, part) for part in parts]

    def is_done(self) -> bool:
        """Whether the receiver has all of them, or never will."""
        return all(lent.done for lent in self._lent)

    def cancel(self) -> None:
        """Withdraw those that the receiver has not begun to read."""
        for lent in self._lent:
            lent.cancel()


class InboundParts:
    """Attachments being received; `on_done` is called once, with the first error or None."""

    def __init__(
        self,
        transport: RpcTransport,
        src: int,
        number: int,
        buffers: Sequence[np.ndarray[Any, Any]],
        on_done: OnDone,
    ) -> None:
        self._on_done = on_done
        self._lock = threading.Lock()
        self._left = len(buffers) + 1
        self._error: BaseException | None = None
        self._cancels = [transport.receive(src, number, buffer, self._on_part) for buffer in buffers]
        self._on_part(None)

    @property
    def is_done(self) -> bool:
        """Whether all have arrived, or will not."""
        return self._left == 0

    def cancel(self) -> None:
        """Receive no more of them."""
        for cancel in self._cancels:
            cancel()

    def _on_part(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        self._on_done(self._error)


class InboundBudget:
    """Bounds the bytes that are received for calls which do not run yet; the rest waits at its sender."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()

    def admit(self, nbytes: int, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as this many bytes may be received."""
        with self._lock:
            if not self._has_room_for(nbytes):
                self._queue.append((nbytes, begin))
                return
            self._bytes += nbytes
        begin()

    def release(self, nbytes: int) -> None:
        """A call that was admitted with this many bytes runs, or never will."""
        ready = []
        with self._lock:
            self._bytes -= nbytes
            while self._queue and self._has_room_for(self._queue[0][0]):
                more, begin = self._queue.popleft()
                self._bytes += more
                ready.append(begin)
        for begin in ready:
            begin()

    def _has_room_for(self, nbytes: int) -> bool:
        """One call is always admitted, however large. The caller holds the lock."""
        return not self._bytes or self._bytes + nbytes <= _HELD_BYTES_MAX


class UnreadParts:
    """Attachments of answers and items that their receivers may not have read yet, by receiver and key."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._by_rank: list[OrderedDict[int, OutboundParts]] = [OrderedDict() for _ in range(size)]

    def add(self, rank: int, key: int, parts: OutboundParts) -> None:
        """Keep attachments until they are read."""
        with self._lock:
            self._drop_some(rank)
            self._by_rank[rank][key] = parts

    def has_more_than(self, rank: int, limit: int) -> bool:
        """Whether a receiver leaves more answers unread than allowed."""
        if len(self._by_rank[rank]) <= limit:
            return False
        with self._lock:
            self._drop_some(rank)
        return len(self._by_rank[rank]) > limit

    def cancel(self, rank: int, key: int) -> None:
        """The receiver does not want one."""
        with self._lock:
            parts = self._by_rank[rank].pop(key, None)
        if parts is not None:
            parts.cancel()

    def cancel_all(self, rank: int) -> None:
        """The receiver is gone."""
        with self._lock:
            unread, self._by_rank[rank] = self._by_rank[rank], OrderedDict()
        for parts in unread.values():
            parts.cancel()

    def are_all_read(self) -> bool:
        """Whether no receiver has anything left to read."""
        with self._lock:
            unread = [parts for kept in self._by_rank for parts in kept.values()]
        return all(parts.is_done() for parts in unread)

    def _drop_some(self, rank: int) -> None:
        """Drop those of the oldest few that have been read. The caller holds the lock."""
        unread = self._by_rank[rank]
        for _ in range(min(_CHECKS, len(unread))):
            key, parts = unread.popitem(last=False)
            if not parts.is_done():
                unread[key] = parts


# -- memory -----------------------------------------------------------------------------------------------

# Used by whole operations only, without a lock: a block returns when its last view dies, on any thread.
_idle: deque[np.ndarray[Any, Any]] = deque()


def allocate(
    lengths: Sequence[int], kinds: Sequence[type[bytes | bytearray] | None]
) -> list[np.ndarray[Any, Any]]:
    """Buffers to receive into: the memory of a new object of the kind, or any, which the caller reads.

    A large one of no kind is used again once no view of it is left.
    """
    return [_buffer(nbytes, kind) for nbytes, kind in zip(lengths, kinds, strict=True)]


def _buffer(nbytes: int, kind: type[bytes | bytearray] | None) -> np.ndarray[Any, Any]:
    if kind is not None:
        memory: Any = new_memory(kind, nbytes)
        received: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)
        return received
    if nbytes < _BLOCK_BYTES_MIN:
        return np.empty(nbytes, np.uint8)
    block = _idle_block(nbytes)
    # An array of its own over the block: every view keeps it alive, and its end returns the block.
    buffer: np.ndarray[Any, Any] = np.frombuffer(block.data, np.uint8, nbytes)
    weakref.finalize(buffer, _give_back, block).atexit = False
    return buffer


def _idle_block(nbytes: int) -> np.ndarray[Any, Any]:
    """An idle block of this size up to twice of it, or a new one."""
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:
            break
        if nbytes <= block.nbytes <= 2 * nbytes:
            return block
        _idle.append(block)
    return _new_block(nbytes)


def _new_block(nbytes: int) -> np.ndarray[Any, Any]:
    """Memory from the system, in huge pages where NumPy would not ask for them."""
    if not _HUGE_PAGE // 2 <= nbytes < _NUMPY_HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(nbytes, np.uint8)
    length = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    mapping = mmap.mmap(-1, length + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    block: np.ndarray[Any, Any] = np.frombuffer(mapping, np.uint8)
    start = -block.ctypes.data % _HUGE_PAGE
    return block[start : start + length]


def _give_back(block: np.ndarray[Any, Any]) -> None:
    _idle.append(block)
    while sum(one.nbytes for one in list(_idle)) > _IDLE_BYTES_MAX:
        try:
            _idle.popleft()
        except IndexError:
            break
