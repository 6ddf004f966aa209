"""A link accepts valid frames, and ends at an invalid one. The tests need no network and no iroh."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import select
import shutil
import struct
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from iroh import iroh_ffi

from unisono._native import CompletionEventFd
from unisono.backends.iroh import iroh_repairs
from unisono.backends.iroh.endpoint import Card
from unisono.backends.iroh.link import Introduction, Link
from unisono.backends.iroh.watch import TICKS, Pulse, open_process, own_process
from unisono.core.envelope import Lane
from unisono.errors import ProtocolError

FRAME_MAX, PIECE_MAX, STREAMS = 2000, 1 << 20, 2
PREFIX = struct.Struct("<QQQ")
ONE = Introduction(0, 1, b"a" * 32, b"b" * 32, b"secret")
OTHER = Introduction(1, 0, b"b" * 32, b"a" * 32, b"secret")


class Pipe:
    """A stream between a writer and a reader in this process."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.came = asyncio.Event()

    async def set_priority(self, priority: int) -> None: ...

    async def write_all(self, data: Any) -> None:
        self.data += bytes(data)
        self.came.set()

    async def read(self, limit: int) -> bytes:
        while not self.data:
            self.came.clear()
            await self.came.wait()
        taken = bytes(self.data[: min(limit, 1000)])  # parts of any length must work
        del self.data[: len(taken)]
        return taken


class Connection:
    """One end of a connection between two links, or between a link and the test."""

    def __init__(self) -> None:
        self.opened: list[Pipe] = []
        self.accepted: asyncio.Queue[Pipe] = asyncio.Queue()
        self.peer: Connection | None = None

    def set_max_concurrent_bi_streams(self, count: int) -> None: ...

    def set_max_concurrent_uni_streams(self, count: int) -> None: ...

    def rtt(self) -> int:
        return 0

    def close_reason(self) -> None: ...

    def close(self, code: int, reason: bytes) -> None: ...

    async def open_uni(self) -> Pipe:
        pipe = Pipe()
        self.opened.append(pipe)
        if self.peer is not None:
            self.peer.accepted.put_nowait(pipe)
        return pipe

    async def accept_uni(self) -> Pipe:
        return await self.accepted.get()


def link_of(connection: Connection, introduction: Introduction, arrive: Any) -> Link:
    return Link(
        connection,
        introduction,
        streams=STREAMS,
        frame_bytes_max=FRAME_MAX,
        piece_bytes=PIECE_MAX,
        arrive=arrive,
        is_over=lambda: False,
    )


async def receiving(lane: int, *sent: bytes, arrive: Any = lambda frame: None) -> None:
    """A link whose peer sends bytes on one stream, until the link refuses them."""
    connection = Connection()
    pipes = [Pipe() for _ in range(2 + STREAMS)]
    for number, pipe in enumerate(pipes):
        await pipe.write_all(OTHER.opening(number))
        connection.accepted.put_nowait(pipe)
    link = link_of(connection, ONE, arrive)
    await link.open()
    for data in sent:
        await pipes[lane].write_all(data)
    try:
        await asyncio.wait_for(link.receive(), 0.2)
    finally:
        await link.close(0)


@pytest.mark.parametrize(
    ("lane", "sent"),
    [
        (0, PREFIX.pack(FRAME_MAX + 1, 0, 0)),
        (1, PREFIX.pack(1 << 63, 0, 0)),
        (1, PREFIX.pack(10, PIECE_MAX, 0)),  # a long payload among the messages
        (2, PREFIX.pack(10, PIECE_MAX + 1, 0)),
        (2, PREFIX.pack(10, 100, 0)),  # a short one among the pieces
        (2, PREFIX.pack(10, 0, 0)),
        (0, PREFIX.pack(10, 0, 5)),  # only messages wait for the control lane
        (0, PREFIX.pack(0, 0, 7)),  # an acknowledgement of bytes that were never sent
        (1, PREFIX.pack(10, 100, 0) + bytes(10)),  # a payload that the frame does not announce
        (3, PREFIX.pack(10, PIECE_MAX, 0) + bytes(10)),
    ],
)
def test_an_invalid_frame_ends_the_link(lane: int, sent: bytes) -> None:
    with pytest.raises(ProtocolError):
        asyncio.run(receiving(lane, sent))


def test_a_frame_that_promises_a_payload_must_bring_it() -> None:
    landing = (memoryview(bytearray(50)), lambda: None)
    with pytest.raises(ProtocolError, match="with another length"):
        asyncio.run(receiving(1, PREFIX.pack(10, 49, 0) + bytes(10), arrive=lambda frame: landing))


def test_a_last_word_waits_for_the_control_lane() -> None:
    arrived: list[bytes] = []
    last, first = PREFIX.pack(4, 0, 2) + b"last", PREFIX.pack(5, 0, 0) + b"first"

    async def both() -> None:
        connection = Connection()
        pipes = [Pipe() for _ in range(2 + STREAMS)]
        for number, pipe in enumerate(pipes):
            await pipe.write_all(OTHER.opening(number))
            connection.accepted.put_nowait(pipe)
        link = link_of(connection, ONE, lambda frame: arrived.append(bytes(frame)))
        await link.open()
        listening = asyncio.ensure_future(link.receive())
        await pipes[1].write_all(last)
        for _ in range(20):
            await asyncio.sleep(0)
        assert arrived == []
        await pipes[0].write_all(first)
        for _ in range(20):
            await asyncio.sleep(0)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await link.close(0)

    asyncio.run(both())
    assert arrived == [b"first", b"last"]


def test_two_links_carry_frames_and_pieces_and_keep_the_window() -> None:
    sizes = [0, 1, 16 << 10, (16 << 10) + 1, 300_000, PIECE_MAX]
    sent = [bytes([i]) * n for i, n in enumerate(sizes * 4)]
    received: dict[int, bytearray] = {}
    done: list[int] = []

    def arrive(frame: memoryview) -> Any:
        number = frame[0]
        received[number] = bytearray(len(sent[number]))
        if not received[number]:
            done.append(number)
            return None
        return memoryview(received[number]), lambda: done.append(number)

    async def both() -> None:
        ends = Connection(), Connection()
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        links = [link_of(ends[0], ONE, lambda frame: None), link_of(ends[1], OTHER, arrive)]
        await asyncio.gather(*(link.open() for link in links))
        listening = [asyncio.ensure_future(link.receive()) for link in links]
        for link in links:
            link.start()
        for number, data in enumerate(sent):
            links[0].send(bytes([number]), memoryview(data) if data else None, Lane.BULK)
        while len(done) < len(sent):
            await asyncio.sleep(0)
            under_way = links[0]._pieces_sent - links[1]._pieces_received
            assert under_way <= links[0]._window()
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
        for link in links:
            await link.close(0)

    asyncio.run(asyncio.wait_for(both(), 60))
    assert [bytes(received[number]) for number in range(len(sent))] == sent


@pytest.mark.parametrize(
    "opening",
    [
        bytes(60),
        OTHER._replace(secret=b"a guess").opening(0),
        OTHER._replace(rank=2).opening(0),
        OTHER._replace(own_id=b"c" * 32).opening(0),
        OTHER.opening(2 + STREAMS),
        ONE.opening(0),  # our own frame, sent back
    ],
)
def test_a_stream_that_opens_in_another_way_is_refused(opening: bytes) -> None:
    async def open_it() -> None:
        connection = Connection()
        pipe = Pipe()
        await pipe.write_all(opening)
        connection.accepted.put_nowait(pipe)
        await link_of(connection, ONE, None).open()

    with pytest.raises(ProtocolError):
        asyncio.run(open_it())


@pytest.mark.parametrize(
    "card",
    [
        b"",
        b"\xc1",
        Card(b"short", ["127.0.0.1:1"], None, ["", "", "", ""]).encoded(),
        Card(b"k" * 32, [], None, ["", "", "", ""]).encoded(),
        Card(b"k" * 32, ["127.0.0.1:1"], None, []).encoded(),
    ],
)
def test_a_card_that_is_none_is_refused(card: bytes) -> None:
    with pytest.raises(ProtocolError, match="card"):
        Card.parse(card)


# -- liveness ---------------------------------------------------------------------------------------------


def test_a_silent_peer_is_queried_and_declared_dead_after_its_ticks() -> None:
    pulse = Pulse()
    assert pulse.tick(5) == (False, False)
    assert [pulse.tick(5) for _ in range(TICKS)] == [(True, False)] * TICKS
    assert pulse.tick(6) == (False, False)
    assert [pulse.tick(6) for _ in range(TICKS + 1)][-1] == (True, True)


def test_only_the_very_process_of_a_card_is_watched() -> None:
    boot, namespace, number, start = own_process()

    descriptor = open_process([boot, namespace, number, start])
    assert descriptor is not None
    os.close(descriptor)
    for other in (
        ["another host", namespace, number, start],
        [boot, "another", number, start],
        [boot, namespace, number, "1"],
        [boot, namespace, "-1", start],
        [boot, namespace, "x", start],
        ["", "", "", ""],
    ):
        assert open_process(other) is None


# -- repairs of iroh's bindings ---------------------------------------------------------------------------


def bindings(tmp_path: Path, change: tuple[str, str]) -> ModuleType:
    """A copy of iroh's bindings with a change in it."""
    folder = Path(iroh_ffi.__file__).parent
    source = Path(iroh_ffi.__file__).read_text()
    assert change[0] in source
    (tmp_path / "iroh_ffi.py").write_text(source.replace(*change))
    for library in folder.glob("*.so"):
        shutil.copy(library, tmp_path)
    spec = importlib.util.spec_from_file_location("other_iroh_ffi", tmp_path / "iroh_ffi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_known_bindings_are_repaired_once_and_keep_every_byte(tmp_path: Path) -> None:
    same = bindings(tmp_path, ("import threading\n", "import threading\n"))
    slow = same._UniffiRustBufferBuilder.write
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert iroh_repairs.repair(same, "1.2.0") == (True, True)
        quick = same._UniffiRustBufferBuilder.write
        assert quick is not slow
        assert iroh_repairs.repair(same, "1.2.7") == (True, True)
    assert same._UniffiRustBufferBuilder.write is quick
    converter = same._UniffiFfiConverterBytes
    for data in (b"", b"x", bytes(range(256)) * 999, memoryview(bytearray(b"abc"))[1:]):
        assert converter.lift(converter.lower(data)) == bytes(data)


@pytest.mark.parametrize(
    ("change", "version", "repaired", "why"),
    [
        (("import threading\n", "import threading\n"), "1.3.0", (False, False), "not of the series"),
        (("import threading\n", "import threading\n"), "0.35.0", (False, False), "not of the series"),
        (
            ("for i, byte in enumerate(value):", "for i, byte in enumerate(bytes(value)):"),
            "1.2.0",
            (False, True),
            "write differs from the known one",
        ),
        (
            ("poll_code = await future", "poll_code = (await future)"),
            "1.2.0",
            (True, False),
            "_uniffi_rust_call_async differs from the known one",
        ),
    ],
)
def test_other_bindings_are_left_alone_with_a_warning(
    tmp_path: Path, change: tuple[str, str], version: str, repaired: tuple[bool, bool], why: str
) -> None:
    other = bindings(tmp_path, change)
    write, call = other._UniffiRustBufferBuilder.write, other._uniffi_rust_call_async
    with pytest.warns(UserWarning, match=why):
        assert iroh_repairs.repair(other, version) == repaired
    assert (other._UniffiRustBufferBuilder.write is not write) == repaired[0]
    assert (other._uniffi_rust_call_async is not call) == repaired[1]
    converter = other._UniffiFfiConverterBytes
    assert converter.lift(converter.lower(memoryview(b"still right"))) == b"still right"


def test_an_eventfd_keeps_completions_of_threads_until_they_are_taken() -> None:
    completions, ring = (
        CompletionEventFd(),
        ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int8)(CompletionEventFd.ring()),
    )
    assert completions.take() == []

    def ring_some(first: int) -> None:
        for number in range(first, first + 100):
            ring(completions.token(number), number % 2)

    threads = [threading.Thread(target=ring_some, args=(first,)) for first in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert select.select([completions.descriptor()], [], [], 10)[0] == [completions.descriptor()]
    assert sorted(completions.take()) == [(number, number % 2) for number in range(400)]
    assert select.select([completions.descriptor()], [], [], 0)[0] == []
    last = CompletionEventFd().token(7)
    ring(last, 0)  # a token keeps the queue alive
