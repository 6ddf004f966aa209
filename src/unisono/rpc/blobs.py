"""Blobs: the long parts of a value, which travel beside its frame; and bounds on those under way.

A blob of up to CERTAIN_BLOB_BYTES is sent without asking the receiver, which always receives it, and drops it
if it is no longer wanted: neither side withdraws it. A longer one is sent when the receiver asks for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from unisono._native import CERTAIN_BLOB_BYTES, Frame, frame_lengths, frame_memory, frame_value
from unisono.rpc.transport import LentBuffer, RpcTransport

__all__ = ["InboundBudget", "InboundValue", "OutboundBlobs", "UnreadBlobs", "discard"]

# Blobs of calls that do not run yet.
_HELD_BYTES_MAX: Final = 256 << 20
# How many of the oldest answers are checked for arrival whenever one is sent: more than one, so that the list
# shrinks, and few, so that a call never pays for all of them.
_CHECKS: Final = 8


def _tag(number: int, index: int) -> int:
    """The tag of one blob of a frame."""
    return index << 48 | number


def discard(transport: RpcTransport, source: int, frame: Frame) -> None:
    """Receive and drop those blobs of an unwanted frame that their sender sends in any case."""
    for index, length in enumerate(frame_lengths(frame.data)):
        if length <= CERTAIN_BLOB_BYTES:
            transport.receive(source, _tag(frame.number, index), bytearray(length), lambda error: None)


class OutboundBlobs:
    """The blobs of one frame. Their memory is lent until `is_done`.

    It exists before its frame is sent, so that whatever the receiver says to that finds it.
    """

    def __init__(self, number: int, blobs: Sequence[memoryview]) -> None:
        self.parts: Sequence[tuple[int, memoryview]] = [
            (_tag(number, index), blob) for index, blob in enumerate(blobs)
        ]
        self._lent: Sequence[LentBuffer] | None = None
        self._uncertain: list[LentBuffer] = []  # those that can be withdrawn
        self._is_cancelled = False

    def on_lent(self, lent: Sequence[LentBuffer]) -> None:
        """They are sent, with their frame."""
        for one, (_, blob) in zip(lent, self.parts, strict=True):
            if blob.nbytes > CERTAIN_BLOB_BYTES:
                self._uncertain.append(one)
        self.parts = ()
        self._lent = lent
        if self._is_cancelled:
            self.cancel()

    def is_done(self) -> bool:
        """Whether the receiver has all of them, or never will."""
        return self._lent is not None and all(lent.done for lent in self._lent)

    def cancel(self, *, is_receiver_gone: bool = False) -> None:
        """Withdraw those that the receiver has not begun to read, and may not want."""
        self._is_cancelled = True
        for lent in (self._lent or ()) if is_receiver_gone else self._uncertain:
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
            discard(transport, source, frame)
        self._on_end: Callable[[Any, BaseException | None], None] | None = on_end
        self._lock = threading.Lock()
        self._left = len(self._memory) + 1
        self._error: BaseException | None = None
        self._cancels = []
        are_certain = frame.blob_bytes <= CERTAIN_BLOB_BYTES
        for index, memory in enumerate(self._memory):
            cancel = transport.receive(source, _tag(frame.number, index), memory, self._on_blob)
            if not are_certain and memoryview(memory).nbytes > CERTAIN_BLOB_BYTES:
                self._cancels.append(cancel)
        self._on_blob(no_memory)

    @property
    def is_done(self) -> bool:
        """Whether all blobs have arrived, or will not."""
        return self._left == 0

    def cancel(self) -> None:
        """Receive no more of them than their sender sends in any case."""
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
    """Blobs that their receivers may not have read yet, by receiver and call."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        # By the number of the blobs, the oldest first; and these numbers by call: a stream has many.
        self._by_rank: list[OrderedDict[int, tuple[int, OutboundBlobs]]] = [
            OrderedDict() for _ in range(size)
        ]
        self._by_call: list[dict[int, set[int]]] = [{} for _ in range(size)]

    def add(self, rank: int, call: int, number: int, blobs: Sequence[memoryview]) -> OutboundBlobs:
        """Keep the blobs of a frame until they are read."""
        outbound = OutboundBlobs(number, blobs)
        with self._lock:
            self._drop_some(rank)
            self._by_rank[rank][number] = (call, outbound)
            self._by_call[rank].setdefault(call, set()).add(number)
        return outbound

    def has_more_than(self, rank: int, limit: int) -> bool:
        """Whether a receiver leaves more of them unread than allowed."""
        if len(self._by_rank[rank]) <= limit:
            return False
        with self._lock:
            self._drop_some(rank)
        return len(self._by_rank[rank]) > limit

    def cancel(self, rank: int, call: int) -> None:
        """The receiver does not want those of a call."""
        with self._lock:
            numbers = self._by_call[rank].pop(call, ())
            unread = [self._by_rank[rank].pop(number)[1] for number in numbers]
        for blobs in unread:
            blobs.cancel()

    def cancel_all(self, rank: int) -> None:
        """The receiver is gone."""
        with self._lock:
            unread, self._by_rank[rank] = self._by_rank[rank], OrderedDict()
            self._by_call[rank] = {}
        for _, blobs in unread.values():
            blobs.cancel(is_receiver_gone=True)

    def are_all_read(self) -> bool:
        """Whether no receiver has anything left to read."""
        with self._lock:
            unread = [blobs for kept in self._by_rank for _, blobs in kept.values()]
        return all(blobs.is_done() for blobs in unread)

    def _drop_some(self, rank: int) -> None:
        """Drop those of the oldest few that have been read. The caller holds the lock."""
        unread = self._by_rank[rank]
        for _ in range(min(_CHECKS, len(unread))):
            number, (call, blobs) = unread.popitem(last=False)
            if not blobs.is_done():
                unread[number] = (call, blobs)
                continue
            numbers = self._by_call[rank][call]
            numbers.discard(number)
            if not numbers:
                del self._by_call[rank][call]
