"""A link: one QUIC connection with one peer, and its lanes.

Knows how frames lie in streams, which stream a frame takes, and what a peer must show first. Does not know
what a frame says (the backend does), nor how a connection is made. All of it runs on the loop's thread,
except `send`.

The lanes, in each direction a stream of its own: *control* for the messages of that lane, *messages* for
short messages and all that is said about long ones, and some for the *pieces* of long messages. A stream that
stands still holds up nobody but itself. Whichever of the last has room takes the next piece; the backend puts
them together.

The *window* is how many bytes of pieces may be on their way; the receiver notes what has landed. Without it
some MiB would lie in the sockets' buffers, and whatever is short and urgent would wait behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from iroh import IrohError

from unisono.core.envelope import Lane
from unisono.errors import ProtocolError

__all__ = ["Introduction", "Link", "LinkError"]

_CONTROL, _MESSAGES, _PIECES = 0, 1, 2
# What iroh sends first of all that waits.
_PRIORITIES: Final = {_CONTROL: 2, _MESSAGES: 1}
# One write or read of a long message: from here on a longer one is not quicker, and a shorter one is slower.
_PART_BYTES: Final = 256 * 1024
# What frames that wait together are put into, and what they are read by.
_BATCH_BYTES: Final = 64 * 1024
# A payload up to this length goes with the messages.
_SHORT_BYTES: Final = 16 * 1024
# On one host this much keeps both sides busy, and takes 10 ms; what is further away gets more.
_WINDOW_BYTES: Final = 2 << 20
_WINDOW_BYTES_PER_MS: Final = 256 * 1024
# What has landed is noted in steps of so many bytes: a step and a part are less than the window.
_NOTE_BYTES: Final = 512 * 1024
# Why we close a connection, in numbers.
_LEFT, _BROKEN = 0, 1

_MAGIC: Final = b"unisono quic 1\0\0"
# Magic, lane, rank and proof open every stream.
_OPENING: Final = struct.Struct("<16sIQ32s")
# Before each frame: its length, that of the payload behind it, and how many frames of the control lane are to
# be heard before, plus one; 0: it need not wait for any. A frame of no length is a note: how many bytes of
# pieces have landed in all.
_PREFIX: Final = struct.Struct("<QQQ")


class LinkError(Exception):
    """The connection is gone."""


class Introduction(NamedTuple):
    """What two ranks show each other: that they know the job's secret, and are whom the seed named."""

    rank: int
    peer: int
    own_id: bytes
    peer_id: bytes
    secret: bytes

    def opening(self, lane: int) -> bytes:
        """The first bytes of a stream of ours."""
        return _OPENING.pack(
            _MAGIC, lane, self.rank, self._proof(lane, self.rank, self.peer, self.own_id + self.peer_id)
        )

    def check(self, data: bytes, lanes: int) -> int:
        """The lane of a stream of the peer's.

        Raises:
            ProtocolError: it does not open as a stream of this peer must.
        """
        magic, lane, rank, proof = _OPENING.unpack(data)
        if magic != _MAGIC or rank != self.peer or lane >= lanes:
            raise ProtocolError("a stream that is none of ours")
        if not hmac.compare_digest(
            proof, self._proof(lane, self.peer, self.rank, self.peer_id + self.own_id)
        ):
            raise ProtocolError("a stream of somebody who does not know the job's secret")
        return int(lane)

    def _proof(self, lane: int, source: int, target: int, ids: bytes) -> bytes:
        said = _MAGIC + struct.pack("<IQQ", lane, source, target) + ids
        return hmac.digest(self.secret, said, hashlib.sha256)


class Link:
    """One peer. `hear` takes each frame and says where its payload shall lie; `is_over` after the last."""

    def __init__(
        self,
        connection: Any,
        introduction: Introduction,
        *,
        streams: int,
        frame_bytes_max: int,
        piece_bytes: int,
        hear: Callable[[memoryview], tuple[memoryview, Callable[[], None]] | None],
        is_over: Callable[[], bool],
    ) -> None:
        self.connection = connection
        self.peer = introduction.peer
        self.bytes_heard = 0
        self._introduction = introduction
        self._lanes = _PIECES + streams
        self._frame_bytes_max = frame_bytes_max
        self._piece_bytes = piece_bytes
        self._hear = hear
        self._is_over = is_over
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._control_sent = 0
        self._control_heard = 0
        self._control_came = asyncio.Event()
        self._pieces_sent = 0
        self._pieces_noted = 0
        self._note_came = asyncio.Event()
        self._pieces_landed = 0
        self._landed_noted = 0
        self._rtt_ms: int | None = None
        self._queues = [_Queue(self._loop) for _ in range(_PIECES + 1)]
        self._streams: list[Any] = []
        self._readers: list[_Reader] = []
        self._writing: list[asyncio.Task[None]] = []
        self._listening: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open the streams of this side, and wait for those of the other.

        Raises:
            LinkError: the connection is gone.
            ProtocolError: the peer is not whom it should be.
        """
        self.connection.set_max_concurrent_bi_streams(0)
        self.connection.set_max_concurrent_uni_streams(self._lanes)
        with _link_errors:
            for lane in range(self._lanes):
                stream = await self.connection.open_uni()
                await stream.set_priority(_PRIORITIES.get(lane, 0))
                await stream.write_all(self._introduction.opening(lane))
                self._streams.append(stream)
        self._measure()
        found: dict[int, _Reader] = {}
        for _ in range(self._lanes):
            with _link_errors:
                reader = _Reader(await self.connection.accept_uni())
            lane = self._introduction.check(bytes(await reader.take(_OPENING.size)), self._lanes)
            if lane in found:
                raise ProtocolError(f"two streams for lane {lane}")
            found[lane] = reader
        self._readers = [found[lane] for lane in range(self._lanes)]

    def start(self) -> None:
        """Begin to write what was sent; listening is `listen`'s."""
        for lane, stream in enumerate(self._streams):
            write = self._write_frames if lane < _PIECES else self._write_pieces
            self._writing.append(self._loop.create_task(write(stream, self._queues[min(lane, _PIECES)])))

    def send(self, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        """Queue a frame, from any thread."""
        nbytes = 0 if payload is None else payload.nbytes
        if nbytes > _SHORT_BYTES:
            self._queues[_PIECES].put(_PREFIX.pack(len(frame), nbytes, 0) + frame, payload)
            return
        if payload is not None:
            frame += payload
        with self._lock:
            if lane is Lane.CONTROL:
                self._control_sent += 1
            fence = self._control_sent + 1 if lane is None else 0
            queue = self._queues[_CONTROL if lane is Lane.CONTROL else _MESSAGES]
            queue.put(_PREFIX.pack(len(frame) - nbytes, nbytes, fence) + frame)

    async def listen(self) -> None:
        """Hear the peer until its last word.

        Raises:
            LinkError: the connection is gone; all that came before was heard.
            ProtocolError: the peer said what makes no sense.
        """
        self._listening = [
            self._loop.create_task(self._listen(lane, reader)) for lane, reader in enumerate(self._readers)
        ]
        lost: BaseException | None = None
        try:
            for ended in asyncio.as_completed(self._listening):
                try:
                    await ended
                    return
                except LinkError as error:
                    # The other lanes may still have something that came before; they end in the same way.
                    lost = lost or error
                    self.connection.close(_BROKEN, b"a lane has ended")
        finally:
            await _cancelled(self._listening)
        if lost is not None:
            raise lost

    async def close(self, flush_s: float) -> None:
        """Let what was said get through, if somebody listens, and close the connection."""
        if flush_s > 0 and not self._is_closed():
            with contextlib.suppress(TimeoutError, Exception):
                await asyncio.wait_for(self._flush(), flush_s)
        await _cancelled(self._listening)
        await _cancelled(self._writing)
        self.connection.close(_LEFT, b"left")

    def rx_datagrams(self) -> int:
        """How many datagrams have come: answers of iroh's own included, which need no Python over there."""
        self._measure()
        return int(self.connection.stats().udp_rx_datagrams)

    def ping(self) -> None:
        """Make the other side's iroh answer."""
        with contextlib.suppress(Exception):
            self.connection.send_datagram(b"?")

    def _measure(self) -> None:
        """Note how far away the peer is: the shortest time seen, because a busy link looks longer."""
        rtt_ms = self.connection.rtt()
        if rtt_ms is not None:
            self._rtt_ms = rtt_ms if self._rtt_ms is None else min(self._rtt_ms, rtt_ms)

    def _is_closed(self) -> bool:
        return self.connection.close_reason() is not None

    async def _flush(self) -> None:
        for queue in self._queues[:_PIECES]:
            await queue.wait_empty()
        for stream in self._streams[:_PIECES]:
            await stream.finish()
        for stream in self._streams[:_PIECES]:
            await stream.stopped()

    # -- writing ------------------------------------------------------------------------------------------

    async def _write_frames(self, stream: Any, queue: _Queue) -> None:
        with contextlib.suppress(LinkError):
            while True:
                batch = [(await queue.get())[0]]
                size = len(batch[0])
                while size < _BATCH_BYTES and (more := queue.get_now()) is not None:
                    batch.append(more[0])
                    size += len(more[0])
                with _link_errors:
                    await stream.write_all(batch[0] if len(batch) == 1 else b"".join(batch))
                queue.done(len(batch))

    async def _write_pieces(self, stream: Any, queue: _Queue) -> None:
        with contextlib.suppress(LinkError):
            while True:
                frame, payload = await queue.get()
                assert payload is not None
                with _link_errors:
                    await stream.write_all(frame)
                    for at in range(0, payload.nbytes, _PART_BYTES):
                        part = payload[at : at + _PART_BYTES]
                        await self._wait_room(part.nbytes)
                        await stream.write_all(part)
                queue.done(1)
                del part
                payload = None  # it may be the users' memory, and the next may be long in coming

    async def _wait_room(self, count: int) -> None:
        while self._pieces_sent + count - self._pieces_noted > self._window():
            self._note_came.clear()
            await self._note_came.wait()
        self._pieces_sent += count

    def _window(self) -> int:
        return _WINDOW_BYTES + (self._rtt_ms or 0) * _WINDOW_BYTES_PER_MS

    # -- listening ----------------------------------------------------------------------------------------

    async def _listen(self, lane: int, reader: _Reader) -> None:
        while not self._is_over():
            frame_bytes, payload_bytes, fence = _PREFIX.unpack(await reader.take(_PREFIX.size))
            if not frame_bytes and lane == _CONTROL and not payload_bytes:
                self._hear_note(fence)
                continue
            if frame_bytes > self._frame_bytes_max or payload_bytes > self._piece_bytes:
                raise ProtocolError(f"a frame of {frame_bytes} bytes with {payload_bytes} behind it")
            if (payload_bytes > _SHORT_BYTES) != (lane >= _PIECES) or (fence and lane != _MESSAGES):
                raise ProtocolError(f"a frame of another kind in lane {lane}")
            frame = await reader.take(frame_bytes)
            while self._control_heard + 1 < fence:
                self._control_came.clear()
                await self._control_came.wait()
            reassembly = self._hear(frame)
            self.bytes_heard += frame_bytes
            if lane == _CONTROL:
                self._control_heard += 1
                self._control_came.set()
            if payload_bytes != (0 if reassembly is None else reassembly[0].nbytes):
                raise ProtocolError(f"{payload_bytes} bytes behind a frame that announces others")
            if reassembly is not None:
                memory, on_landed = reassembly
                filled = reader.take_into(memory)
                self._note(lane, filled)
                while filled < payload_bytes:
                    part = await reader.read(min(_PART_BYTES, payload_bytes - filled))
                    if self._is_over():
                        return  # another lane has ended the receive: its memory is its user's again
                    memory[filled : filled + len(part)] = part
                    filled += len(part)
                    self._note(lane, len(part))
                on_landed()

    def _note(self, lane: int, count: int) -> None:
        """Part of a piece has landed: tell its sender now and then."""
        self.bytes_heard += count
        if lane < _PIECES:
            return
        self._pieces_landed += count
        if self._pieces_landed - self._landed_noted >= _NOTE_BYTES:
            self._landed_noted = self._pieces_landed
            self._queues[_CONTROL].put(_PREFIX.pack(0, 0, self._pieces_landed))

    def _hear_note(self, landed: int) -> None:
        if not self._pieces_noted <= landed <= self._pieces_sent:
            raise ProtocolError(f"{landed} bytes have landed of {self._pieces_sent}")
        self._pieces_noted = landed
        self._note_came.set()


class _Queue:
    """What waits to be written, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._entries: deque[tuple[bytes, memoryview | None]] = deque()
        self._came = asyncio.Event()
        self._unwritten = 0  # taken from the queue, and not yet with iroh
        self._is_empty = asyncio.Event()
        self._sleepers = 0

    def put(self, frame: bytes, payload: memoryview | None = None) -> None:
        self._entries.append((frame, payload))
        if self._sleepers:
            # Whoever is about to sleep looks once more after it has said so.
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._came.set)

    async def get(self) -> tuple[bytes, memoryview | None]:
        while True:
            if (entry := self.get_now()) is not None:
                return entry
            self._sleepers += 1
            try:
                if not self._entries:
                    self._came.clear()
                    await self._came.wait()
            finally:
                self._sleepers -= 1

    def get_now(self) -> tuple[bytes, memoryview | None] | None:
        try:
            entry = self._entries.popleft()
        except IndexError:
            return None
        self._unwritten += 1
        return entry

    def done(self, count: int) -> None:
        self._unwritten -= count
        if not self._unwritten and not self._entries:
            self._is_empty.set()

    async def wait_empty(self) -> None:
        while self._unwritten or self._entries:
            self._is_empty.clear()
            await self._is_empty.wait()


class _Reader:
    """A stream, with what was read beyond what was asked for."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    async def take(self, count: int) -> memoryview:
        """The next bytes, in one piece."""
        if len(self._rest) >= count:
            taken, self._rest = self._rest[:count], self._rest[count:]
            return taken
        parts = [self._rest]
        missing = count - len(self._rest)
        while missing > 0:
            part = memoryview(await self.read(_BATCH_BYTES))
            parts.append(part[:missing])
            self._rest = part[missing:]
            missing -= len(part)
        return memoryview(b"".join(parts))

    def take_into(self, memory: memoryview) -> int:
        """Fill the beginning of memory with what is here already."""
        count = min(len(self._rest), memory.nbytes)
        memory[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    async def read(self, limit: int) -> bytes:
        with _link_errors:
            data: bytes = await self._stream.read(limit)
        if not data:
            raise LinkError("a stream has ended")
        return data


class _LinkErrors:
    """An error of iroh's is the end of the connection."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, IrohError):
            raise LinkError(_first_line(error.message())) from None


_link_errors: Final = _LinkErrors()


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """End tasks, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
