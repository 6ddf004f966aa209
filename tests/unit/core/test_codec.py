"""The codec: values come back unchanged, with their types, places and memory."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from tests.support.ranks import run_ranks
from tests.support.typed_values import MANY, SOME, VALUES, Point, same

import unisono as uni
from unisono._native import BLOB_BYTES_MIN
from unisono.core.codec import pack, pack_parts, pack_writable, register, unpack, unpack_parts
from unisono.core.dtypes import BFLOAT16, DTYPES


@MANY
@given(VALUES)
@example((1, [2, (3,)], {"a": (), 5: {None: frozenset()}}))
@example([2**64 - 1, 2**64, -(2**63), -(2**63) - 1, True, 1, 1.0, -0.0, float("nan")])
@example([np.array(5.0), np.zeros((0, 3)), b"", bytearray(), ""])  # whose memory may have no address
def test_any_value_comes_back_as_itself(value):
    assert same(unpack(pack(value)), value)


@SOME
@given(VALUES)
def test_a_value_in_parts_is_the_same_value(value):
    head, blobs = pack_parts(value, None, 256)
    copies = [bytearray(blob) for blob in blobs]
    assert same(unpack_parts(head, copies), value)


# Lengths around every threshold of the format: u8 or u64 lengths, inline or a blob.
LENGTHS = [
    0,
    1,
    2,
    31,
    32,
    33,
    255,
    256,
    257,
    BLOB_BYTES_MIN - 1,
    BLOB_BYTES_MIN,
    BLOB_BYTES_MIN + 1,
    100_003,
]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_of_every_kind_comes_back(length):
    text = "".join(chr(33 + i % 90) for i in range(length))
    data = text.encode()
    value = {
        "text": text,
        "wide": ("\u00e4\u20ac\U0001f600" * (length // 9 + 1))[: length // 3],
        "bytes": data,
        "bytearray": bytearray(data),
        "array": np.arange(length, dtype=np.uint8),
        "columns": np.arange(4 * (length // 8), dtype=np.int16).reshape(-1, 4).T,
        "tensor": torch.arange(length),
        "list": list(range(length)),
        "tuple": tuple(range(-length, 0)),
        "dict": {i: -i for i in range(length)},
        text: "as a key",
    }
    assert same(unpack(pack(value)), value)
    assert same(unpack(bytearray(pack(value))), value)
    head, blobs = pack_parts(value)
    assert all(blob.nbytes >= BLOB_BYTES_MIN for blob in blobs)
    for kind in (bytes, bytearray):
        assert same(unpack_parts(head, [kind(blob) for blob in blobs]), value)


def test_long_arrays_start_at_multiples_of_64_bytes_also_in_several_objects_in_a_row():
    one = [np.arange(2000.0), "x", torch.arange(5001), np.arange(BLOB_BYTES_MIN, dtype=np.uint8)]
    packed = pack(one)
    row = np.empty(2 * len(packed) + 64, np.uint8)
    start = -row.ctypes.data % 64
    for turn in range(2):
        part = row[start + turn * len(packed) :][: len(packed)]
        part[:] = np.frombuffer(packed, np.uint8)
        first, _, tensor, last = unpack(part)
        for address in (first.ctypes.data, tensor.data_ptr(), last.ctypes.data):
            assert row.ctypes.data <= address < row.ctypes.data + row.nbytes
            assert address % 64 == 0
    shifted = row[1 : 1 + len(packed)]
    shifted[:] = np.frombuffer(packed, np.uint8)
    first = unpack(shifted)[0]  # a double at an odd address cannot be used, so it was copied
    assert first.ctypes.data % 8 == 0
    assert same(first, one[0])


def test_bytearrays_and_memoryviews_arrive_as_bytearrays():
    strided = memoryview(b"abcdef")[::2]
    got = unpack(pack([bytearray(b"ab"), memoryview(b"cd"), strided, b"ef", {"k": (bytearray(),)}]))
    assert same(got, [bytearray(b"ab"), bytearray(b"cd"), bytearray(b"ace"), b"ef", {"k": (bytearray(),)}])


class Rows(list):
    """A list with an additional attribute, which is not sent."""


class Locked(dict):
    """A dict that overrides its lookup."""

    def __getitem__(self, key):
        raise KeyError(key)


def test_subclasses_of_dict_and_list_arrive_as_dict_and_list():
    by_key: defaultdict = defaultdict(list, {(1, 2): [3]})
    ordered = OrderedDict([("z", 1), ("a", by_key)])
    got = unpack(pack((Counter("abca"), ordered, Rows([1, Rows()]), Locked(x=1))))
    assert same(got, ({"a": 2, "b": 1, "c": 1}, {"z": 1, "a": {(1, 2): [3]}}, [1, []], {"x": 1}))
    assert list(got[1]) == ["z", "a"]


def test_arrays_in_keys_and_values_keep_their_places():
    @register
    @dataclasses.dataclass(frozen=True, eq=False)
    class Keyed:
        x: np.ndarray

    ((key, item),) = unpack(pack({Keyed(np.arange(2)): np.arange(5.0)})).items()
    assert same(key.x, np.arange(2))
    assert same(item, np.arange(5.0))


def test_blobs_are_not_copied_on_either_side():
    x, data, buffer, text = np.arange(1000.0), b"d" * 9000, bytearray(b"b" * 9000), "t" * 9000
    head, blobs = pack_parts({"x": x, "list": [data, buffer, text]})
    assert len(head) < 200
    assert np.frombuffer(blobs[0], np.uint8).ctypes.data == x.ctypes.data
    assert blobs[1].obj is data
    assert blobs[2].obj is buffer
    assert bytes(blobs[3]) == text.encode()
    assert all(blob.format == "B" and blob.ndim == 1 for blob in blobs)
    arrived = [np.frombuffer(bytearray(blobs[0]), np.uint8), bytes(data), bytearray(buffer), bytes(blobs[3])]
    back = unpack_parts(head, arrived)
    assert np.shares_memory(back["x"], arrived[0])
    assert back["list"][0] is arrived[1]
    assert back["list"][1] is arrived[2]
    assert same(back["list"], [data, buffer, text])


def test_a_bytearray_cannot_be_resized_while_it_is_lent_and_can_be_after_it_has_arrived():
    given = bytearray(10_000)
    head, blobs = pack_parts([given])
    with pytest.raises(BufferError):
        given.append(1)
    arrived = bytearray(blobs[0])
    (back,) = unpack_parts(head, [arrived])
    back.append(1)
    del blobs
    given.append(1)


@pytest.mark.parametrize("count", [3, 5000])
def test_arrays_can_be_written_whatever_memory_they_came_in(count):
    for value in (np.arange(count), torch.arange(count)):
        packed = pack(value)
        for memory in (packed, bytearray(packed), memoryview(packed)):
            back = unpack(memory)
            assert type(back) is type(value)
            back[0] = 7
    assert unpack(packed).tolist() == list(range(count))  # bytes stay bytes


@pytest.mark.parametrize("value", [None, [1, "x"], {"k": np.arange(5000)}], ids=["none", "short", "long"])
def test_the_same_bytes_come_as_memory_that_may_be_written_to(value):
    memory = memoryview(pack_writable(value))
    assert not memory.readonly
    assert memory == pack(value)
    memory[:] = bytes(memory)
    assert same(unpack(memory), value)


def test_memoryviews_of_other_forms_travel_as_their_bytes():
    numbers = np.arange(6000, dtype=np.int32).reshape(2, -1)
    characters = memoryview(bytearray(range(256))).cast("c")
    backwards = memoryview(bytes(range(256)) * 40)[::-1]
    for value in (memoryview(numbers), memoryview(numbers[:, ::2]), characters, characters[3:], backwards):
        head, blobs = pack_parts(value, None, 256)
        expected = bytearray(value.tobytes())
        assert same(unpack(pack(value)), expected)
        assert same(unpack_parts(head, [bytes(blob) for blob in blobs]), expected)


def test_arrays_that_are_not_contiguous_travel_by_their_values():
    x = np.arange(12).reshape(3, 4)
    assert unpack(pack(x.T)).tolist() == x.T.tolist()
    assert unpack(pack(torch.arange(12).reshape(3, 4).T)).tolist() == x.T.tolist()


def test_bfloat16_travels_without_ml_dtypes(monkeypatch):
    bits = np.array([0x3FC0, 0x4000], np.uint16)
    packed = pack([uni.typed(bits, "bfloat16"), ml_dtypes.bfloat16(1.5), bits.view(ml_dtypes.bfloat16)])
    monkeypatch.delitem(sys.modules, "ml_dtypes")
    for back in unpack(packed):
        assert isinstance(back, uni.Typed)
        assert back.dtype.name == "bfloat16"
        assert back.data.reshape(-1)[0] == 0x3FC0


def test_a_tensor_arrives_as_an_array_where_torch_is_not_loaded(monkeypatch):
    packed = pack(torch.arange(3))
    monkeypatch.delitem(sys.modules, "torch")
    assert isinstance(unpack(packed), np.ndarray)


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d is not BFLOAT16], ids=str)
def test_a_scalar_of_numpy_comes_back_with_its_type_and_its_bits(dtype):
    extremes = [dtype.storage.type(0), dtype.storage.type(1)]
    if dtype.storage.kind in "iu":
        extremes += [np.iinfo(dtype.storage).min, np.iinfo(dtype.storage).max]
    elif dtype.storage.kind in "fc":
        extremes += [np.nan, -np.inf, 1 / 3]
    for extreme in extremes:
        scalar = dtype.storage.type(extreme)
        back = unpack(pack([scalar, {"k": (scalar,)}]))
        assert [type(back[0]), type(back[1]["k"][0])] == [type(scalar)] * 2
        assert back[0].tobytes() == back[1]["k"][0].tobytes() == scalar.tobytes()


def test_scalars_do_not_share_memory():
    one, two = unpack(pack([np.float64(1.5), np.float64(2.5)]))
    assert (one, two, unpack(pack(np.float64(3.5)))) == (1.5, 2.5, 3.5)


def test_objects_keep_their_types_across_ranks():
    def program(comm):
        value = {"rank": comm.rank, "pair": (1, 2.5), "point": Point(0.5, {3: np.arange(comm.rank + 1)})}
        first = comm.broadcast_object(value if comm.rank == 1 else None, root=1)
        everyone = comm.all_gather_object((comm.rank, torch.full((2,), comm.rank)))
        long = comm.all_gather_object([b"x" * (5000 + comm.rank), np.arange(9001.0) + comm.rank, "y" * 4097])
        for rank, (data, array, text) in enumerate(long):
            assert same([data, text], [b"x" * (5000 + rank), "y" * 4097])
            assert same(array, np.arange(9001.0) + rank)
            array[:] = -1  # its own memory, not shared with another rank
        assert [len(data) for data, _, _ in long] == [5000 + rank for rank in range(comm.size)]
        return same(first, {"rank": 1, "pair": (1, 2.5), "point": Point(0.5, {3: np.arange(2)})}) and all(
            same(v, (r, torch.full((2,), r))) for r, v in enumerate(everyone)
        )

    assert run_ranks(program, 3).values() == [True] * 3
