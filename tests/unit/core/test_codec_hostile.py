"""Arbitrary bytes from peers: the codec gives a value or a ProtocolError, and uses little memory."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.core.codec import pack, pack_parts, register, unpack, unpack_parts
from unisono.core.dtypes import DTYPES
from unisono.errors import ProtocolError

MANY = settings(derandomize=True, deadline=None, database=None, max_examples=300)

# native/python/codec.hpp: Tag
(NONE, NO, YES, INT8, INT32, INT64, FLOAT64, TEXT, TEXT_LONG, TEXT_BLOB, BYTES, BYTES_LONG, BYTES_BLOB) = (
    range(13)
)
(BYTEARRAY, BYTEARRAY_BLOB, LIST, LIST_LONG, TUPLE, TUPLE_LONG, DICT, DICT_LONG, ARRAY, ARRAY_BLOB) = range(
    13, 23
)
STATUS, RECORD, EXTENSION = range(23, 26)
# unisono/core/codec.py
SET, FROZENSET, BIG_INT, COMPLEX, SCALAR, RARE_ARRAY = range(6)


@register
@dataclasses.dataclass
class Point:
    x: float
    y: object = None


def head(*parts: int | bytes) -> bytes:
    """A head of tags and bytes, with its prefix."""
    body = b"".join(bytes([part]) if isinstance(part, int) else part for part in parts)
    return struct.pack("<Q", (8 + len(body)) << 16 | 0x7575) + body


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(word: str) -> bytes:
    return bytes([TEXT, len(word)]) + word.encode()


def shape(*lengths: int) -> bytes:
    return bytes([len(lengths)]) + b"".join(map(u64, lengths))


def record(name: bytes, fields: bytes, values: bytes) -> bytes:
    return head(RECORD, name, fields, values)


FLOAT = DTYPES["float32"].code
BF16 = DTYPES["bfloat16"].code
EIGHT = [bytearray(8)]
POINT = text(f"{__name__}.Point")
XY = bytes([TUPLE, 2]) + text("x") + text("y")
HUGE = (2**32, 2**62, 2**63, 2**64 - 1)
MALFORMED = [
    ("nothing", b"", []),
    ("half a prefix", head(NONE)[:5], []),
    ("a prefix and nothing", head(), []),
    ("another magic number", b"\0" + head(NONE)[1:], []),
    ("a head that is longer than its bytes", u64(10 << 16 | 0x7575) + b"\0", []),
    ("a head of 2^48 - 1", u64((2**48 - 1) << 16 | 0x7575) + b"\0", []),
    ("a head without a tag", u64(8 << 16 | 0x7575) + b"\0", []),
    ("two values", head(NONE, NONE), []),
    *((f"the tag {tag}", head(tag, bytes(64)), []) for tag in (26, 27, 127, 128, 255)),
    *((f"half a value of tag {tag}", head(tag), []) for tag in range(INT8, EXTENSION + 1)),
    *((f"half a number of tag {tag}", head(tag, b"\1" * 3)[:-2], []) for tag in (INT32, INT64, FLOAT64)),
    *(
        (f"tag {tag} of {length}", head(tag, u64(length), bytes(9)), [])
        for tag in (
            TEXT_LONG,
            TEXT_BLOB,
            BYTES_LONG,
            BYTES_BLOB,
            BYTEARRAY,
            BYTEARRAY_BLOB,
            LIST_LONG,
            TUPLE_LONG,
            DICT_LONG,
        )
        for length in (10, *HUGE)
    ),
    (
        "lists of all that is left in lists",
        head(b"".join(bytes([LIST_LONG]) + u64(9 * n) for n in range(60, 0, -1))),
        [],
    ),
    ("text that is no UTF-8", head(TEXT, 2, b"\xff\xfe"), []),
    ("a lone surrogate", head(TEXT, 3, b"\xed\xa0\x80"), []),
    ("a key that is no UTF-8", head(DICT, 1, TEXT, 2, b"\xff\xfe", NONE), []),
    ("lists nested 100,000 deep", head(bytes([LIST, 1]) * 100_000, NONE), []),
    ("tuples nested 66 deep", head(bytes([TUPLE, 1]) * 66, NONE), []),
    ("dicts nested 100,000 deep", head(bytes([DICT, 1, NONE]) * 100_000, NONE), []),
    ("keys nested 100,000 deep", head(bytes([DICT, 1]) * 100_000, NONE), []),
    ("statuses nested 100,000 deep", head(bytes([STATUS]) * 100_000), []),
    ("sets nested 100,000 deep", head(bytes([EXTENSION, SET, LIST, 1]) * 100_000, NONE), []),
    ("extensions of extensions", head(bytes([EXTENSION, SET]) * 100_000), []),
    ("an extension of a record", head(EXTENSION, SET, RECORD, POINT, XY, LIST, 2, NONE, NONE), []),
    ("records nested 100,000 deep", head((bytes([RECORD]) + POINT + XY + bytes([LIST, 2])) * 100_000), []),
    ("a record of records", head(bytes([RECORD]) * 100_000), []),
    ("a dict with half a pair", head(DICT, 1, NONE), []),
    ("a dict with a list for a key", head(DICT, 1, LIST, 0, NONE), []),
    ("an unknown extension", head(EXTENSION, 99, NONE), []),
    ("a set of a number", head(EXTENSION, SET, INT8, 1), []),
    ("a set of lists", head(EXTENSION, SET, LIST, 1, LIST, 0), []),
    ("a big integer of text", head(EXTENSION, BIG_INT, text("7")), []),
    ("half a complex number", head(EXTENSION, COMPLEX, TUPLE, 1, FLOAT64, bytes(8)), []),
    ("a complex number of integers", head(EXTENSION, COMPLEX, TUPLE, 2, INT8, 1, INT8, 1), []),
    ("a scalar without a type", head(EXTENSION, SCALAR, TUPLE, 1, BYTES, 4, bytes(4)), []),
    ("a scalar of an unknown type", head(EXTENSION, SCALAR, TUPLE, 2, INT8, 99, BYTES, 4, bytes(4)), []),
    ("a scalar of a negative type", head(EXTENSION, SCALAR, TUPLE, 2, INT8, 255, BYTES, 4, bytes(4)), []),
    ("a scalar of a type that is a truth value", head(EXTENSION, SCALAR, TUPLE, 2, YES, BYTES, 1, 0), []),
    ("a scalar that is too long", head(EXTENSION, SCALAR, TUPLE, 2, INT8, FLOAT, BYTES, 5, bytes(5)), []),
    ("a scalar of text", head(EXTENSION, SCALAR, TUPLE, 2, INT8, FLOAT, text("abcd")), []),
    ("a tensor of nothing", head(EXTENSION, RARE_ARRAY, TUPLE, 3, INT8, FLOAT, YES, NONE), []),
    (
        "a tensor of another type",
        head(EXTENSION, RARE_ARRAY, TUPLE, 3, INT8, FLOAT, YES, ARRAY, FLOAT + 1, shape(1), bytes(8)),
        [],
    ),
    ("an array of an unknown type", head(ARRAY, 15, shape(1), bytes(16)), []),
    ("an array of a type that NumPy lacks", head(ARRAY, BF16, shape(1), bytes(2)), []),
    ("an array without elements", head(ARRAY, FLOAT, shape(2), bytes(7)), []),
    ("an array without memory", head(ARRAY_BLOB, FLOAT, shape(2)), []),
    ("memory without an array", head(NONE), EIGHT),
    ("an array of another length", head(ARRAY_BLOB, FLOAT, shape(3)), EIGHT),
    *((f"an array of {n} elements", head(ARRAY, FLOAT, shape(n), bytes(8)), []) for n in HUGE),
    *((f"an array of {n} elements in memory", head(ARRAY_BLOB, FLOAT, shape(n)), EIGHT) for n in HUGE),
    ("dimensions that wrap around to 2", head(ARRAY_BLOB, FLOAT, shape(2**62 + 1, 2)), EIGHT),
    ("dimensions that wrap around to 0", head(ARRAY, FLOAT, shape(2**32, 2**32)), []),
    ("no elements along 2^63", head(ARRAY, FLOAT, shape(0, 2**63)), []),
    ("no elements along 2^62 thrice", head(ARRAY, FLOAT, shape(0, 2**62, 2**62, 2**62)), []),
    ("65 dimensions", head(ARRAY_BLOB, FLOAT, shape(*[1] * 64, 2)), EIGHT),
    ("dimensions that are not there", head(ARRAY_BLOB, FLOAT, 60, u64(2)), EIGHT),
    ("one memory for two arrays", head(LIST, 2, (bytes([ARRAY_BLOB, FLOAT]) + shape(2)) * 2), EIGHT),
    ("bytes of another length", head(BYTES_BLOB, u64(7)), EIGHT),
    ("text in memory that is no UTF-8", head(TEXT_BLOB, u64(8)), [b"\xff" * 8]),
    ("a class without a name", record(bytes([NONE]), bytes([TUPLE, 0]), bytes([LIST, 0])), []),
    ("a class that is not registered", record(text("os.system"), XY, bytes([LIST, 2, NONE, NONE])), []),
    ("a class that is importable", record(text("subprocess.Popen"), bytes([TUPLE, 0]), bytes([LIST, 0])), []),
    ("other fields", record(POINT, bytes([TUPLE, 1]) + text("x"), bytes([LIST, 1, NONE])), []),
    ("too few values", record(POINT, XY, bytes([LIST, 1, NONE])), []),
    ("fields that are no tuple", record(POINT, text("xy"), bytes([LIST, 2, NONE, NONE])), []),
    ("a number for values", record(POINT, XY, bytes([INT8, 2])), []),
]


@pytest.mark.parametrize(("data", "blobs"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_malformed_objects_are_protocol_errors(data, blobs):
    with pytest.raises(ProtocolError):
        unpack_parts(data, blobs)
    if not blobs:
        with pytest.raises(ProtocolError):
            unpack(data)


def test_the_builder_of_these_tests_makes_what_the_codec_reads():
    """Otherwise the cases above might be refused for another reason."""
    assert unpack(head(LIST, 2, INT8, 5, text("x"))) == [5, "x"]
    assert unpack(record(POINT, XY, bytes([LIST, 2, INT8, 1, NONE]))) == Point(1)
    assert unpack(head(EXTENSION, SET, LIST, 1, NONE)) == {None}
    assert unpack_parts(head(ARRAY_BLOB, FLOAT, shape(2)), EIGHT).tolist() == [0, 0]
    assert unpack(head(ARRAY, FLOAT, shape(0, 3))).shape == (0, 3)
    assert unpack(head(bytes([TUPLE, 1]) * 65, NONE)) is not None
    assert unpack(head(EXTENSION, COMPLEX, TUPLE, 2, (bytes([FLOAT64]) + bytes(8)) * 2)) == 0j


def test_a_truncated_or_extended_pack_is_a_protocol_error():
    value = ["text" * 80, b"x" * 300, {"k": (1, 2.5, None)}, np.arange(3), 2**70, {1}, Point(1.0), "t" * 5000]
    packed = pack(value)
    for at in range(len(packed)):
        with pytest.raises(ProtocolError):
            unpack(packed[:at])
    with pytest.raises(ProtocolError):
        unpack(packed + b"\0")
    parts, blobs = pack_parts(value)
    for wrong in ([], [*blobs, b"more"], [blobs[0][1:]], [bytes(blobs[0]) + b"x"]):
        with pytest.raises(ProtocolError):
            unpack_parts(parts, wrong)
    for cut in (parts[:-1], parts + b"\0", packed):
        with pytest.raises(ProtocolError):
            unpack_parts(cut, blobs)


@MANY
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_protocol_error(data):
    for attempt in (data, head(data)):
        with contextlib.suppress(ProtocolError):
            unpack(attempt)
        with contextlib.suppress(ProtocolError):
            unpack_parts(attempt, [bytearray(8)])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=300)
    | st.integers(0, 700).map(lambda n: np.arange(n, dtype=np.float64))
    | st.integers(0, 700).map(torch.arange)
    | st.builds(Point, st.floats()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@MANY
@given(VALUES, st.data())
def test_a_corrupted_pack_is_a_value_or_a_protocol_error(value, data):
    packed = bytearray(pack(value))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packed) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "insert", "double"])):
            case "flip":
                packed[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                packed[at] = data.draw(st.sampled_from([*range(27), 0x7F, 0x80, 0xFF]))
            case "cut":
                del packed[at:]
                packed = packed or bytearray(1)
            case "insert":
                packed[at:at] = data.draw(st.binary(max_size=9))
            case "double":
                packed[at:at] = packed[at : at + 20]
    for attempt in (bytes(packed), packed):
        with contextlib.suppress(ProtocolError):
            unpack(attempt)


@pytest.fixture
def little_memory():
    """Limit the process to 64 MiB more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_forged_lengths_take_no_memory():
    """Memory allocated by a forged length would raise a MemoryError here."""
    for _, data, blobs in MALFORMED:
        with pytest.raises(ProtocolError):
            unpack_parts(data, blobs)
    with pytest.raises(MemoryError):
        bytearray(1 << 27)


@pytest.mark.parametrize(
    "data",
    [
        head((bytes([LIST_LONG]) + u64(10_000)) * 60, bytes(10_000)),
        head((bytes([TUPLE_LONG]) + u64(9_000)) * 60, bytes([255]) * 10_000),
        head((bytes([DICT_LONG]) + u64(5_000)) * 60, bytes(10_000)),
        head(LIST_LONG, u64(5_000), bytes([LIST, 0]) * 5_000),
        head(LIST_LONG, u64(5_000), bytes([DICT, 0]) * 5_000),
        head(LIST_LONG, u64(2_500), bytes([EXTENSION, SET, LIST, 0]) * 2_500),
    ],
    ids=["lists in lists", "tuples in tuples", "dicts in dicts", "empty lists", "empty dicts", "empty sets"],
)
def test_the_memory_for_a_message_is_bounded_by_its_length(data):
    tracemalloc.start()
    try:
        with contextlib.suppress(ProtocolError):
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(data)
    finally:
        tracemalloc.stop()
