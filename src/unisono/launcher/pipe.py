"""Messages between a process and the ranks it has spawned: a length, then the typed codec's bytes.

Both ends are ours, on one host, so lengths are trusted.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Final

__all__ = ["FrameReceiver", "FrameSender", "frame", "receive_frame"]

_LENGTH: Final = struct.Struct("<Q")
_PIECE_BYTES: Final = 1 << 20


def frame(packed: bytes | bytearray) -> list[memoryview]:
    """The pieces of one message, in order."""
    return [memoryview(_LENGTH.pack(len(packed))), memoryview(packed)]


def receive_frame(sock: socket.socket) -> bytearray:
    """Wait for one message.

    Raises:
        EOFError: the other end is gone.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, length)


class FrameSender:
    """Sends frames without blocking."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = deque(pieces)

    def send(self, sock: socket.socket) -> bool:
        """Send what the socket takes; True once everything is sent. A blocking socket takes everything."""
        while self._pieces:
            try:
                sent = sock.send(self._pieces[0][:_PIECE_BYTES])
            except BlockingIOError:
                return False
            self._pieces[0] = self._pieces[0][sent:]
            if not self._pieces[0]:
                self._pieces.popleft()
        return True


class FrameReceiver:
    """Receives frames without blocking."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0

    def receive(self, sock: socket.socket) -> bytearray:
        """The next message.

        Raises:
            BlockingIOError: it is not complete yet; what has come is kept.
            EOFError: the other end is gone.
        """
        while True:
            if self._body is None:
                data = sock.recv(_LENGTH.size - len(self._head))
                if not data:
                    raise EOFError
                self._head += data
                if len(self._head) == _LENGTH.size:
                    self._body, self._filled = bytearray(_LENGTH.unpack(self._head)[0]), 0
                    self._head.clear()
            if self._body is not None:
                if self._filled == len(self._body):
                    body, self._body = self._body, None
                    return body
                count = sock.recv_into(memoryview(self._body)[self._filled : self._filled + _PIECE_BYTES])
                if not count:
                    raise EOFError
                self._filled += count


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count:
        got = sock.recv_into(view[filled:])
        if not got:
            raise EOFError("the other end is gone")
        filled += got
    return data
