"""Blobs: the long parts of a value, which travel beside its frame; and bounds on those under way."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from unisono._native import Frame, frame_memory, frame_value
from unisono.rpc.transport import LentBuffer, RpcTransport

__all__ = ["InboundBudget", "InboundValue", "OutboundBlobs", "UnreadBlobs"]

# Blobs of calls that do not run yet.
_HELD_BYTES_MAX: Final = 256 << 20
# How many of the oldest answers are checked for arrival whenever one is sent: more than one, so that the list
# shrinks, and few, so that a call never pays for all of them.
_CHECKS: Final = 8


class OutboundBlobs:
    """Blobs being sent. Their memory is lent until `is_done`."""

    def __init__(self, transport: RpcTransport, dst: int, number: int, blobs: Sequence[memoryview]) -> None:
        self._lent: list[LentBuffer] = [transport.lend(dst, number, blob) for blob in blobs]

    def is_done(self) -> bool:
        """Whether the receiver has all of them, or never will."""
        return all(lent.done for lent in self._lent)

    def cancel(self) -> None:
        """Withdraw those that the receiver has not begun to read."""
        for lent in self._lent:
            lent.cancel()


class InboundValue:
    """A value whose blobs are being received; `on_end` is called once, with the value or an error."""

    def __init__(
        self,
        transport: RpcTransport,
        source: int,
        frame: Frame,
        on_end: Callable[[Any, BaseException | None], None],
    ) -> None:
        self._data = frame.data
        # The call refers to this, and this to the call: what is long is dropped when it has ended.
        self._memory: list[Any] | None = []
        no_memory: BaseException | None = None
        try:
            self._memory = frame_memory(frame.data)
        except MemoryError as error:
            no_memory = error
        self._on_end: Callable[[Any, BaseException | None], None] | None = on_end
        self._lock = threading.Lock()
        self._left = len(self._memory) + 1
        self._error: BaseException | None = None
        self._cancels = [transport.receive(source, frame.number, m, self._on_blob) for m in self._memory]
        self._on_blob(no_memory)

    @property
    def is_done(self) -> bool:
        """Whether all blobs have arrived, or will not."""
        return self._left == 0

    def cancel(self) -> None:
        """Receive no more of them."""
        for cancel in self._cancels:
            cancel()

    def _on_blob(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        value, error = None, self._error
        if error is None:
            try:
                value = frame_value(self._data, self._memory or ())
            except Exception as fault:
                error = fault
        on_end, self._on_end, self._memory = self._on_end, None, None
        assert on_end is not None
        on_end(value, error)


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


class UnreadBlobs:
    """Blobs of answers and items that their receivers may not have read yet, by receiver and key."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._by_rank: list[OrderedDict[int, OutboundBlobs]] = [OrderedDict() for _ in range(size)]

    def add(self, rank: int, key: int, blobs: OutboundBlobs) -> None:
        """Keep blobs until they are read."""
        with self._lock:
            self._drop_some(rank)
            self._by_rank[rank][key] = blobs

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
            blobs = self._by_rank[rank].pop(key, None)
        if blobs is not None:
            blobs.cancel()

    def cancel_all(self, rank: int) -> None:
        """The receiver is gone."""
        with self._lock:
            unread, self._by_rank[rank] = self._by_rank[rank], OrderedDict()
        for blobs in unread.values():
            blobs.cancel()

    def are_all_read(self) -> bool:
        """Whether no receiver has anything left to read."""
        with self._lock:
            unread = [blobs for kept in self._by_rank for blobs in kept.values()]
        return all(blobs.is_done() for blobs in unread)

    def _drop_some(self, rank: int) -> None:
        """Drop those of the oldest few that have been read. The caller holds the lock."""
        unread = self._by_rank[rank]
        for _ in range(min(_CHECKS, len(unread))):
            key, blobs = unread.popitem(last=False)
            if not blobs.is_done():
                unread[key] = blobs
