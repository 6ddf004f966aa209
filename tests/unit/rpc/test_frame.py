"""How a value is sent (in its frame, in blobs or detached), and into which memory it is received."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from unisono import _native
from unisono._native import frame_memory, frame_value
from unisono.config import Config
from unisono.core.envelope import Lane
from unisono.errors import ProtocolError, UsageError
from unisono.messaging.credit import eager_limits
from unisono.rpc.frame import (
    ANSWER,
    ASK,
    FAILURE,
    GOODBYE,
    TEXT_CHARS_MAX,
    arguments_of,
    failure,
    open_frame,
    pack,
    short,
    texts_of,
)

BLOB, FRAME = _native.FRAME_BLOB_BYTES, _native.FRAME_BYTES_MAX
HEAD = 40  # native/python/rpc_frame.cpp
ARRAY, BYTES, BYTEARRAY, ASCII, DETACHED = range(5)


def delivered(value: Any) -> tuple[Any, _native.Frame, list[memoryview], list[Any]]:
    """Copy the blobs of a value as a transport does; return the value, frame, blobs and their memory."""
    data, number, blobs = pack(ANSWER, 1, 2, value)
    assert number == 2
    assert len(data) <= FRAME
    memory = frame_memory(data)
    for into, blob in zip(memory, blobs, strict=True):
        memoryview(into)[:] = blob
    return frame_value(data, memory), open_frame(data), list(blobs), memory


def ramp(length: int) -> bytes:
    return (np.arange(length) % 251).astype(np.uint8).tobytes()


KINDS = {
    "bytes": lambda n: ramp(n),
    "bytearray": lambda n: bytearray(ramp(n)),
    "text": lambda n: "".join(chr(40 + i % 80) for i in range(n)),
    "text in UTF-8": lambda n: "ü" * (n // 2) + "x" * (n % 2),
    "array": lambda n: np.frombuffer(ramp(n), np.uint8).copy(),
}


def same(got: Any, value: Any) -> bool:
    return type(got) is type(value) and bool(np.all(got == value)) and len(got) == len(value)


@pytest.mark.parametrize("length", [0, 1, 8, 255, 256, 5000, BLOB // 2, BLOB - 1, BLOB, BLOB + 1, 300_007])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_length_arrive_as_they_left(kind: str, length: int) -> None:
    value = KINDS[kind](length)
    got, frame, blobs, _ = delivered([value, {"k": (1, value)}])
    assert same(got[0], value)
    assert same(got[1]["k"][1], value)
    is_detached = BLOB > length > FRAME // 2 - 60
    assert len(blobs) == (2 if length >= BLOB else int(is_detached))
    assert frame.blob_bytes == sum(blob.nbytes for blob in blobs)


def test_the_longest_frame_is_one_message_without_an_announcement() -> None:
    assert eager_limits(Config(), Lane.CONTROL)[0] >= FRAME
    value = list(range(8000))
    lengths = set()
    for count in range(2000, 4000, 7):
        data, _, blobs = pack(ASK, 1, 1, value[:count], None, "name", 1.0)
        assert len(data) <= FRAME
        assert len(blobs) == int(len(data) < 100)
        lengths.add(len(data))
    assert max(lengths) > FRAME - 100
    assert min(lengths) < 100


def test_long_values_are_received_into_the_memory_that_they_keep() -> None:
    data, buffer, array, text = ramp(BLOB), bytearray(ramp(BLOB)), np.arange(BLOB), "t" * BLOB
    _, _, blobs = pack(ANSWER, 1, 2, [data, buffer, array, text])
    assert [blob.obj for blob in blobs[:2]] == [data, buffer]
    assert blobs[2].obj is not array  # another form of the same memory
    assert np.frombuffer(blobs[2], np.uint8).ctypes.data == array.ctypes.data
    (got_data, got_buffer, got_array, got_text), _, _, memory = delivered([data, buffer, array, text])
    assert got_data is memory[0].owner
    assert got_buffer is memory[1].owner
    assert np.shares_memory(got_array, np.frombuffer(memory[2], np.uint8))
    assert got_text is memory[3].owner
    assert (got_data, got_buffer, got_text) == (data, buffer, text)
    assert got_array.flags.writeable
    got_buffer.append(1)  # no other object refers to it, so its length may change
    assert {got_text: 1}[text] == 1


def test_a_detached_value_leaves_its_blobs_where_they_are() -> None:
    array = np.arange(BLOB)
    _, _, blobs = pack(ANSWER, 1, 2, [list(range(5000)), array])
    assert len(blobs) == 2
    assert blobs[0].nbytes < 40_000
    got, _, _, _ = delivered([list(range(5000)), array])
    assert got[0] == list(range(5000))
    assert (got[1] == array).all()


@pytest.mark.parametrize("count", [256, 257])
def test_too_many_blobs_travel_in_one_piece(count: int) -> None:
    value = [np.full(BLOB, i % 251, np.uint8) for i in range(count)]
    got, _, blobs, _ = delivered(value)
    assert len(blobs) == (count if count <= 256 else 1)
    for i, each in enumerate(got):
        assert each.shape == (BLOB,)
        assert (each == i % 251).all()
        each[0] = 1


def test_a_frame_keeps_its_fields() -> None:
    data, number, blobs = pack(ASK, 2**64 - 1, 2**40, ((1,), {"k": 2}), None, "naïve.name", 0.25, 16)
    frame = open_frame(data)
    assert (frame.kind, frame.call, frame.number, frame.name) == (ASK, 2**64 - 1, 2**40, "naïve.name")
    assert (frame.timeout_s, frame.count, frame.blob_bytes, frame.data) == (0.25, 16, 0, data)
    assert (number, len(blobs)) == (2**40, 0)
    assert arguments_of(frame_value(data)) == ((1,), {"k": 2})
    assert open_frame(short(GOODBYE, value=("",))).timeout_s is None


def test_a_failure_fits_into_a_frame_whatever_its_texts() -> None:
    data = failure(5, "raised", "\U0001f600" * 99_999, "T" * 999, "é\ud800" * 99_999)
    frame = open_frame(data)
    assert (frame.kind, frame.call, frame.blob_bytes) == (FAILURE, 5, 0)
    kind, what, type_name, trace = texts_of(frame, 4)
    assert (kind, len(what), len(type_name)) == ("raised", TEXT_CHARS_MAX, 256)
    assert trace.endswith("é\\ud800")


@pytest.mark.parametrize("text", ["\ud800", "\U0001f600", "a"])
def test_texts_of_any_characters_fit_into_a_failure(text: str) -> None:
    kind, what, type_name, trace = texts_of(open_frame(failure(1, "raised", *[text * 99_999] * 3)), 4)
    assert kind == "raised"
    assert (len(what), len(type_name)) == (TEXT_CHARS_MAX, 256)
    assert len(trace) == 2 * TEXT_CHARS_MAX


def test_a_message_of_more_than_a_gibibyte_is_refused() -> None:
    large = np.empty((1 << 30) + 1, np.uint8)  # never touched
    with pytest.raises(UsageError, match=f"allowed: up to {1 << 30}"):
        pack(ANSWER, 1, 2, large)


# -- frames that no agent makes ---------------------------------------------------------------------------


def made(*table: tuple[int, int], kind: int = ANSWER, name: bytes = b"", value: bytes | None = None) -> bytes:
    """A frame with this table of blobs."""
    if value is None:
        value = b"" if table and table[0][0] == DETACHED else _native.pack(None)
    head = struct.pack("<BBHIQQQd", kind, 0, len(name), len(table), 1, 2, 0, float("nan"))
    return head + name + b"".join(struct.pack("<Q", what << 56 | nbytes) for what, nbytes in table) + value


def test_frames_are_laid_out_as_described() -> None:
    assert frame_value(made()) is None
    assert len(frame_memory(made((DETACHED, 9), (BYTES, BLOB)))) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        made()[:39],
        made(kind=9),
        made(kind=255),
        made(name=b"\xff"),
        made(name=b"abc", value=b"")[:-1],
        made((5, BLOB)),
        made((BYTES, BLOB - 1)),
        made((ARRAY, 0)),
        made((BYTES, BLOB), (DETACHED, BLOB)),
        made((DETACHED, 8)),
        made((DETACHED, 9), value=b"x"),
        made((BYTES, BLOB), value=b""),
        made(value=b""),
        made(*[(BYTES, BLOB)] * 258),
        made((BYTES, (1 << 30) + 1)),
        made((BYTES, 1 << 29), (BYTEARRAY, 1 << 29), (ASCII, BLOB)),
        made((ARRAY, (1 << 56) - 1)),
        struct.pack("<BBHIQQQd", 0, 0, 0, (1 << 32) - 1, 1, 2, 0, 1.0),
    ],
    ids=lambda data: data[:60].hex(),
)
def test_a_frame_that_no_agent_makes_is_refused_before_memory_is_taken(data: bytes) -> None:
    for read in (open_frame, frame_memory, frame_value):
        if read is open_frame or data != made(name=b"\xff"):
            with pytest.raises(ProtocolError, match=r"malformed frame|bad prefix"):
                read(data)


def test_memory_of_another_kind_or_number_gives_no_wrong_value() -> None:
    data, _, blobs = pack(ANSWER, 1, 2, ["t" * BLOB])
    memory = frame_memory(data)
    memoryview(memory[0])[:] = bytes([200]) * BLOB
    with pytest.raises(ProtocolError, match="not ASCII"):
        frame_value(data, memory)
    with pytest.raises(ValueError, match="each blob"):
        frame_value(data)
    with pytest.raises(ValueError, match="each blob"):
        frame_value(data, [*memory, *memory])
    with pytest.raises(ProtocolError):
        frame_value(data, [bytearray(BLOB + 1)])
    assert frame_value(data, [bytes(blobs[0])]) == ["t" * BLOB]
    # A table that says another kind than the value: the memory is copied, not taken for what it is not.
    for kind, value in ((BYTES, b"b" * BLOB), (BYTEARRAY, bytearray(BLOB)), (ARRAY, "t" * BLOB)):
        for other in (ARRAY, BYTES, BYTEARRAY, ASCII):
            data, _, blobs = pack(ANSWER, 1, 2, value)
            changed = data[:47] + bytes([other]) + data[48:]
            memory = frame_memory(changed)
            memoryview(memory[0])[:] = blobs[0]
            assert same(frame_value(changed, memory), value), (kind, other)


@pytest.mark.parametrize(
    "value", [None, (), ((), {}, 1), ([], {}), ((), []), ((), {1: 2}), ((), {"a": 1, b"b": 2}), "text"]
)
def test_arguments_of_another_shape_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed call"):
        arguments_of(value)


@pytest.mark.parametrize("value", [None, "text", ("a",), ("a", "b", 1, "d"), ("a" * BLOB, "", "", "")])
def test_texts_of_another_shape_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="texts"):
        texts_of(open_frame(pack(FAILURE, 1, 2, value)[0]), 4)
