"""How a value travels: in its frame, in attachments or in one piece; and into which memory it is received."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unisono.errors import ProtocolError
from unisono.rpc import wire
from unisono.rpc.attachments import allocate
from unisono.rpc.wire import Packed, pack, part_kinds, part_lengths, unpack

BLOB = 16 * 1024
FRAME = 2048


def delivered(value: Any) -> tuple[Any, Packed, list[np.ndarray]]:
    """The value after its attachments were copied as a transport does, the frame's part, and their memory."""
    packed, parts = pack(value)
    frame = wire.decode(wire.encode(wire.PackedAnswer(1, 2, packed)))
    assert isinstance(frame, wire.PackedAnswer)
    buffers = allocate(part_lengths(frame.body), part_kinds(frame.body))
    for buffer, part in zip(buffers, parts, strict=True):
        buffer[:] = np.frombuffer(part, np.uint8)
    return unpack(frame.body, buffers), frame.body, buffers


def ramp(length: int) -> bytes:
    return (np.arange(length) % 251).astype(np.uint8).tobytes()


KINDS = {
    "bytes": lambda n: ramp(n),
    "bytearray": lambda n: bytearray(ramp(n)),
    "text": lambda n: "".join(chr(40 + i % 80) for i in range(n)),
    "array": lambda n: np.frombuffer(ramp(n), np.uint8).copy(),
}


@pytest.mark.parametrize("length", [0, 8, FRAME - 60, FRAME, BLOB - 1, BLOB, BLOB + 1, 300_007])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_length_arrive_as_they_left(kind: str, length: int) -> None:
    value = KINDS[kind](length)
    got, packed, buffers = delivered([value, {"k": (1, value)}])
    for each in (got[0], got[1]["k"][1]):
        assert type(each) is type(value)
        assert (each == value).all() if kind == "array" else each == value
    assert len(packed.sizes) == (2 if length >= BLOB else 0)
    assert len(packed.head) <= FRAME
    assert len(buffers) == (2 if length >= BLOB else int(packed.piece_bytes > 0))


@pytest.mark.parametrize("length", [8, 1024])
def test_short_values_travel_in_the_frame(length: int) -> None:
    for make in KINDS.values():
        assert pack([[make(length)], {}])[1] == []


def test_long_values_are_received_into_the_memory_that_they_keep() -> None:
    data, buffer, array = ramp(BLOB), bytearray(ramp(BLOB)), np.arange(BLOB)
    packed, parts = pack([data, buffer, array])
    assert [part.obj for part in parts[:2]] == [data, buffer]
    assert parts[2].obj is not array  # another form of the same memory
    assert np.frombuffer(parts[2], np.uint8).ctypes.data == array.ctypes.data
    assert part_kinds(packed) == [bytes, bytearray, None]
    (got_data, got_buffer, got_array), _, buffers = delivered([data, buffer, array])
    assert got_data == data
    for got, memory in ((np.frombuffer(got_data, np.uint8), buffers[0]), (got_array, buffers[2])):
        assert np.shares_memory(got, memory)
    assert np.frombuffer(got_buffer, np.uint8).ctypes.data == buffers[1].ctypes.data
    got_buffer.append(1)  # nothing holds it at its length


def test_a_long_head_is_attached_and_its_blobs_are_not_copied_into_it() -> None:
    array = np.arange(BLOB)
    packed, parts = pack([list(range(5000)), array])
    assert packed.head == b""
    assert parts[0].nbytes == packed.piece_bytes < 40_000
    got, _, _ = delivered([list(range(5000)), array])
    assert got[0] == list(range(5000))
    assert (got[1] == array).all()


@pytest.mark.parametrize("count", [256, 257])
def test_many_blobs_travel_in_one_piece(count: int) -> None:
    value = [np.full(BLOB, i % 251, np.uint8) for i in range(count)]
    got, packed, buffers = delivered(value)
    assert len(buffers) == (count + 1 if count <= 256 else 1)
    assert (packed.sizes == []) is (count > 256)
    for i, each in enumerate(got):
        assert each.shape == (BLOB,)
        assert (each == i % 251).all()
        each[0] = 1


@pytest.mark.parametrize(
    "packed",
    [
        Packed(b""),
        Packed(b"head", piece_bytes=5),
        Packed(b"", piece_bytes=-5),
        Packed(b"head", [BLOB], b""),
        Packed(b"head", [], b"\1"),
        Packed(b"head", [BLOB], b"\3"),
        Packed(b"head", [BLOB - 1], b"\1"),
        Packed(b"head", [0], b"\0"),
        Packed(b"head", [-BLOB], b"\0"),
        Packed(b"head", [BLOB] * 257, bytes(257)),
        Packed(b"head", [1 << 30], b"\1"),
        Packed(b"head", [1 << 29, 1 << 29], b"\1\1"),
        Packed(b"", [], b"", 1 << 62),
    ],
    ids=str,
)
def test_lengths_that_no_agent_announces_take_no_memory(packed: Packed) -> None:
    with pytest.raises(ProtocolError, match="malformed frame"):
        part_lengths(packed)
