"""A link: one QUIC connection with one peer, and how frames lie in its streams.

Everything but `send` runs on the loop's thread.

Each direction has these streams: *control* for the messages of that lane, *messages* for short messages and
the RTS, CTS and FIN of long ones, and several for the *pieces* of long messages. A stream that stalls delays
no other stream. The next piece takes whichever of the piece streams is ready first; the backend reassembles
the pieces.

The *window* bounds the bytes of pieces in flight; the receiver acknowledges the pieces that it has received.
Without a window some MiB would lie in socket buffers, and short urgent messages would wait behind them.
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
# iroh sends queued bytes of the stream with the highest priority first.
_PRIORITIES: Final = {_CONTROL: 2, _MESSAGES: 1}
# One write or read of a long message: longer ones are not faster, shorter ones are slower.
_PART_BYTES: Final = 256 * 1024
# Frames that wait together are written in batches of about this length; a read asks for as much.
_BATCH_BYTES: Final = 64 * 1024
# A payload up to this length goes in the frame's own stream.
_SHORT_BYTES: Final = 16 * 1024
# On one host 2 MiB keep both sides busy and take 10 ms; a peer further away gets more per millisecond.
_WINDOW_BYTES: Final = 2 << 20
_WINDOW_BYTES_PER_MS: Final = 256 * 1024
# Received bytes between two acknowledgements: one such step and one part must be less than the window.
_ACK_BYTES: Final = 512 * 1024
# QUIC's application error codes, with which we close a connection.
_LEFT, _BROKEN = 0, 1

_MAGIC: Final = b"unisono iroh 1\0\0"
# Magic, lane, rank and proof open every stream.
_OPENING: Final = struct.Struct("<16sIQ32s")
# Before each frame: its length, the length of the payload behind it, and a fence: 0, or one more than the
# number of control-lane frames that must be handled first. A prefix without a frame is an acknowledgement:
# its fence field holds the total of received bytes of pieces.
_PREFIX: Final = struct.Struct("<QQQ")


class LinkError(Exception):
    """The connection is gone."""


class Introduction(NamedTuple):
    """What opens each stream: a proof that the rank knows the job's secret and has the key in its card."""

    rank: int
    peer: int
    own_id: bytes
    peer_id: bytes
    secret: bytes

    def opening(self, lane: int) -> bytes:
        """The first bytes of a stream from this rank."""
        return _OPENING.pack(
            _MAGIC, lane, self.rank, self._proof(lane, self.rank, self.peer, self.own_id + self.peer_id)
        )

    def check(self, data: bytes, lanes: int) -> int:
        """Check the first bytes of a stream from the peer, and return its lane.

        Raises:
            ProtocolError: this peer would open a stream in another way.
        """
        magic, lane, rank, proof = _OPENING.unpack(data)
        if magic != _MAGIC or rank != self.peer or lane >= lanes:
            raise ProtocolError("a stream with a wrong opening")
        if not hmac.compare_digest(
            proof, self._proof(lane, self.peer, self.rank, self.peer_id + self.own_id)
        ):
            raise ProtocolError("a stream whose proof of the job's secret is wrong")
        return int(lane)

    def _proof(self, lane: int, source: int, target: int, ids: bytes) -> bytes:
        claim = _MAGIC + struct.pack("<IQQ", lane, source, target) + ids
        return hmac.digest(self.secret, claim, hashlib.sha256)


class Link:
    """The connection with one peer.

    `arrive` handles each frame and returns the memory for its payload, like `FramedBackend.arrive`; `is_over`
    says whether the peer has left.
    """

    def __init__(
        self,
        connection: Any,
        introduction: Introduction,
        *,
        streams: int,
        frame_bytes_max: int,
        piece_bytes: int,
        arrive: Callable[[memoryview], tuple[memoryview, Callable[[], None]] | None],
        is_over: Callable[[], bool],
    ) -> None:
        self.connection = connection
        self.peer = introduction.peer
        self.bytes_received = 0
        self._introduction = introduction
        self._lanes = _PIECES + streams
        self._frame_bytes_max = frame_bytes_max
        self._piece_bytes = piece_bytes
        self._arrive = arrive
        self._is_over = is_over
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._control_sent = 0
        self._control_handled = 0
        self._control_event = asyncio.Event()
        self._pieces_sent = 0
        self._pieces_acked = 0
        self._ack_event = asyncio.Event()
        self._pieces_received = 0
        self._received_acked = 0
        self._rtt_ms: int | None = None
        self._queues = [_Queue(self._loop) for _ in range(_PIECES + 1)]
        self._streams: list[Any] = []
        self._readers: list[_Reader] = []
        self._writing: list[asyncio.Task[None]] = []
        self._receiving: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open the streams of this side, and wait for those of the other.

        Raises:
            LinkError: the connection is gone.
            ProtocolError: the peer could not prove its identity.
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
        """Begin to write queued frames. Receiving begins with `receive`."""
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

    async def receive(self) -> None:
        """Receive frames until the peer has left.

        Raises:
            LinkError: the connection is gone; all frames that came before were handled.
            ProtocolError: the peer broke the protocol.
        """
        self._receiving = [
            self._loop.create_task(self._receive(lane, reader)) for lane, reader in enumerate(self._readers)
        ]
        lost: BaseException | None = None
        try:
            for ended in asyncio.as_completed(self._receiving):
                try:
                    await ended
                    return
                except LinkError as error:
                    # The other streams may still hold frames that came before; then they end too.
                    lost = lost or error
                    self.connection.close(_BROKEN, b"a lane has ended")
        finally:
            await _cancelled(self._receiving)
        if lost is not None:
            raise lost

    async def close(self, flush_s: float) -> None:
        """Wait up to `flush_s` until the peer has received what was sent, and close the connection."""
        if flush_s > 0 and not self._is_closed():
            with contextlib.suppress(TimeoutError, Exception):
                await asyncio.wait_for(self._flush(), flush_s)
        await _cancelled(self._receiving)
        await _cancelled(self._writing)
        self.connection.close(_LEFT, b"left")

    def rx_datagrams(self) -> int:
        """Datagrams received so far. The peer's iroh acknowledges pings without its Python."""
        self._measure()
        return int(self.connection.stats().udp_rx_datagrams)

    def ping(self) -> None:
        """Make the peer's iroh answer."""
        with contextlib.suppress(Exception):
            self.connection.send_datagram(b"?")

    def _measure(self) -> None:
        """Note the shortest round-trip time seen: load makes it look longer than the distance is."""
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
                        await self._wait_for_window(part.nbytes)
                        await stream.write_all(part)
                queue.done(1)
                del part
                payload = None  # it may be a user's memory: do not keep it until the next one comes

    async def _wait_for_window(self, count: int) -> None:
        while self._pieces_sent + count - self._pieces_acked > self._window():
            self._ack_event.clear()
            await self._ack_event.wait()
        self._pieces_sent += count

    def _window(self) -> int:
        return _WINDOW_BYTES + (self._rtt_ms or 0) * _WINDOW_BYTES_PER_MS

    # -- receiving ----------------------------------------------------------------------------------------

    async def _receive(self, lane: int, reader: _Reader) -> None:
        while not self._is_over():
            frame_bytes, payload_bytes, fence = _PREFIX.unpack(await reader.take(_PREFIX.size))
            if not frame_bytes and lane == _CONTROL and not payload_bytes:
                self._on_ack(fence)
                continue
            if frame_bytes > self._frame_bytes_max or payload_bytes > self._piece_bytes:
                raise ProtocolError(f"a frame of {frame_bytes} bytes with a payload of {payload_bytes}")
            if (payload_bytes > _SHORT_BYTES) != (lane >= _PIECES) or (fence and lane != _MESSAGES):
                raise ProtocolError(f"a frame that does not belong in stream {lane}")
            frame = await reader.take(frame_bytes)
            while self._control_handled + 1 < fence:
                self._control_event.clear()
                await self._control_event.wait()
            payload = self._arrive(frame)
            self.bytes_received += frame_bytes
            if lane == _CONTROL:
                self._control_handled += 1
                self._control_event.set()
            if payload_bytes != (0 if payload is None else payload[0].nbytes):
                raise ProtocolError(f"a payload of {payload_bytes} bytes behind a frame with another length")
            if payload is not None:
                memory, on_received = payload
                filled = reader.take_into(memory)
                self._count_received(lane, filled)
                while filled < payload_bytes:
                    part = await reader.read(min(_PART_BYTES, payload_bytes - filled))
                    if self._is_over():
                        return  # another stream has ended the receive: the user has the memory back
                    memory[filled : filled + len(part)] = part
                    filled += len(part)
                    self._count_received(lane, len(part))
                on_received()

    def _count_received(self, lane: int, count: int) -> None:
        """Part of a payload was received: acknowledge pieces every `_ACK_BYTES`."""
        self.bytes_received += count
        if lane < _PIECES:
            return
        self._pieces_received += count
        if self._pieces_received - self._received_acked >= _ACK_BYTES:
            self._received_acked = self._pieces_received
            self._queues[_CONTROL].put(_PREFIX.pack(0, 0, self._pieces_received))

    def _on_ack(self, received: int) -> None:
        if not self._pieces_acked <= received <= self._pieces_sent:
            raise ProtocolError(f"it acknowledged {received} of {self._pieces_sent} bytes")
        self._pieces_acked = received
        self._ack_event.set()


class _Queue:
    """Frames that wait to be written, put from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._entries: deque[tuple[bytes, memoryview | None]] = deque()
        self._has_entries = asyncio.Event()
        self._unwritten = 0  # entries taken from the queue that iroh does not have yet
        self._is_empty = asyncio.Event()
        self._sleepers = 0

    def put(self, frame: bytes, payload: memoryview | None = None) -> None:
        self._entries.append((frame, payload))
        if self._sleepers:
            # `get` counts itself as a sleeper before it checks the entries again, so no wake-up is lost.
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is written any more
                self._loop.call_soon_threadsafe(self._has_entries.set)

    async def get(self) -> tuple[bytes, memoryview | None]:
        while True:
            if (entry := self.get_now()) is not None:
                return entry
            self._sleepers += 1
            try:
                if not self._entries:
                    self._has_entries.clear()
                    await self._has_entries.wait()
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
    """A stream, and the bytes that were read ahead."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    async def take(self, count: int) -> memoryview:
        """The next `count` bytes, contiguous."""
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
        """Copy bytes that were read ahead into the beginning of `memory`."""
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
    """Turns an error of iroh into a LinkError: the connection is gone."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, IrohError):
            raise LinkError(_first_line(error.message())) from None


_link_errors: Final = _LinkErrors()


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
