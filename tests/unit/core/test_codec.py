"""The codec: values come back unchanged, and hostile bytes can only cause a ProtocolError."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import math
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.ranks import run_ranks

import unisono as uni
from unisono._native import BLOB_BYTES_MIN
from unisono.core.codec import pack, pack_parts, pack_writable, register, unpack, unpack_parts
from unisono.core.dtypes import BFLOAT16, DTYPES
from unisono.errors import ProtocolError, UsageError

SOME = settings(derandomize=True, deadline=None, database=None, max_examples=80)
MANY = settings(derandomize=True, deadline=None, database=None, max_examples=300)
PACKAGE = Path(uni.__file__).parent


@register
@dataclasses.dataclass
class Point:
    x: float
    y: object = None


@register
@dataclasses.dataclass(frozen=True)
class Sealed:
    """A frozen dataclass with a field that its constructor does not accept."""

    name: str
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.name))


@register
@dataclasses.dataclass(slots=True)
class Empty:
    pass


# -- values come back unchanged -----------------------------------------------------------------------


def same(a, b) -> bool:
    """Equal in value and in type, NaN included."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    match a:
        case float():
            return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
        case complex():
            return same(a.real, b.real) and same(a.imag, b.imag)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case dict():
            return len(a) == len(b) and all(map(same, a.items(), b.items()))
        case np.ndarray():
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        case np.generic():
            return a.tobytes() == b.tobytes()
        case torch.Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    return a == b


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return (flat.view(torch.int16) if tensor.dtype == torch.bfloat16 else flat).numpy().tobytes()


NUMPY_TYPES = [np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES]
TORCH_TYPES = [getattr(torch, name) for name in DTYPES]


@st.composite
def arrays(draw, types=NUMPY_TYPES):
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    kind = draw(st.sampled_from(types))
    count = math.prod(shape)
    bits = draw(st.binary(min_size=count * kind.itemsize, max_size=count * kind.itemsize))
    if kind == np.dtype(bool):
        bits = bytes(b & 1 for b in bits)
    return np.frombuffer(bits, np.uint8).view(kind).reshape(shape)


TENSORS = arrays([np.dtype(name) for name in DTYPES if name != "bfloat16"]).map(
    lambda a: torch.from_numpy(a.copy())
) | hnp.arrays(np.int16, hnp.array_shapes(max_dims=2, min_side=0, max_side=4)).map(
    lambda a: torch.from_numpy(a).view(torch.bfloat16)
)
SCALARS = st.sampled_from(NUMPY_TYPES).flatmap(
    lambda kind: st.integers(0, 1).map(lambda n: np.array([n], kind)[0])
)
INTEGERS = (
    st.integers()
    | st.integers(-(2**200), 2**200)
    | st.sampled_from([s * 2**k + d for s in (1, -1) for k in (31, 32, 62, 63, 64, 127) for d in (-1, 0, 1)])
)
HASHABLE = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9)
)
KEYS = HASHABLE | st.tuples(HASHABLE, HASHABLE) | st.frozensets(HASHABLE, max_size=2)
LEAVES = (
    HASHABLE
    | st.floats()
    | st.complex_numbers()
    | st.sets(KEYS, max_size=3)
    | st.frozensets(KEYS, max_size=3)
    | arrays()
    | TENSORS
    | SCALARS
    | st.builds(Sealed, st.text(max_size=4))
    | st.builds(Empty)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Point, st.floats(), inner)
    ),
    max_leaves=12,
)


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


@register
class Span(NamedTuple):
    """A named tuple that is registered."""

    start: int
    stop: object = None


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - one of the old kind


def test_a_status_and_registered_named_tuples_arrive_as_themselves():
    value = [uni.Status(1, 2, 3), Span(1, {"x": np.arange(3)}), {Span(0): uni.Status(0, 0, 0)}]
    got = unpack(pack(value))
    assert [type(each) for each in got] == [uni.Status, Span, dict]
    assert got[0] == value[0]
    assert same(got[1].stop, {"x": np.arange(3)})
    assert [type(key) for key in got[2]] == [Span]
    assert same(unpack(pack((1, (2,)))), (1, (2,)))  # a plain tuple stays a tuple


def test_a_status_with_forged_fields_is_packed_by_its_fields():
    with pytest.raises((AttributeError, IndexError)):
        pack(tuple.__new__(uni.Status, (1,)))
    odd = tuple.__new__(uni.Status, (1, 2, 3, 4))
    assert unpack(pack(odd)) == uni.Status(1, 2, 3)


def test_arrays_in_keys_and_values_keep_their_places():
    @register
    @dataclasses.dataclass(frozen=True, eq=False)
    class Keyed:
        x: np.ndarray

    ((key, item),) = unpack(pack({Keyed(np.arange(2)): np.arange(5.0)})).items()
    assert same(key.x, np.arange(2))
    assert same(item, np.arange(5.0))


def test_values_that_cannot_be_packed_are_refused_with_the_next_step():
    steps: list[tuple[object, str]] = [
        (Pair(1, 2), r"Next: uni.register\(Pair\) on every rank"),
        (Unregistered(), r"Next: uni.register\(Unregistered\) on every rank"),
        (torch.Size([1]), r"Next: send tuple\(...\) of it"),
        (Unknown(), "Next: send its values as plain data"),
    ]
    for value, words in steps:
        with pytest.raises(UsageError, match=words):
            pack([value])


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


def test_dataclasses_come_back_with_the_fields_that_were_sent_and_no_constructor_run():
    changed = Sealed("abc")
    object.__setattr__(changed, "size", 99)
    assert unpack(pack(changed)).size == 99


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


@register
@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    label: str
    inner: object = None


@register
class Grid(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    row_count: int
    cells: object = None


@register
class Corner(NamedTuple):
    x: int
    y: object


@register
@dataclasses.dataclass
class Bare:
    pass


@register
@dataclasses.dataclass
class Hooked:
    """A class whose own constructor and attribute setter must not be called."""

    x: int

    def __init__(self) -> None:
        raise AssertionError("not called")

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError("not called")


def _hooked(x: int) -> Hooked:
    made = object.__new__(Hooked)
    object.__setattr__(made, "x", x)
    return made


WIDE = register(dataclasses.make_dataclass("Wide", [(f"field_{i:03}", int) for i in range(300)]))
WIDE.__module__ = __name__


@pytest.mark.parametrize(
    "value",
    [
        Slotted("a", Slotted("ü" * 300, [1.5])),
        Grid(row_count=3, cells=[Corner(1, None), Corner(2, Grid(row_count=0))]),
        Corner(2**40, {"k": Bare()}),
        _hooked(5),
        WIDE(*range(300)),
        [Bare()] * 300,
        {Corner(i, i): Slotted(str(i), Corner(-i, b"x" * i)) for i in range(40)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_instances_of_registered_classes_come_back_as_themselves(value):
    back = unpack(pack(value))
    assert type(back) is type(value)
    assert back == value


def test_a_field_that_is_missing_is_the_users_own_error():
    broken = object.__new__(Slotted)
    with pytest.raises(AttributeError, match="label"):
        pack([broken])


@pytest.mark.parametrize("value", [Slotted("a", 1), Grid(row_count=1), Corner(1, 2)], ids=str)
def test_a_record_of_other_values_or_fields_is_a_protocol_error(value):
    packed = pack(value)
    field = b"label" if isinstance(value, Slotted) else b"row_count" if isinstance(value, Grid) else b"\x01x"
    renamed = packed.replace(field, b"\x01q" if len(field) == 2 else b"q" * len(field))
    with pytest.raises(ProtocolError, match=r"has other fields here.* Next: use the same definition"):
        unpack(renamed)
    with pytest.raises(ProtocolError, match=r"is not registered here\. Next: give it to uni\.register"):
        unpack(packed.replace(b"test_codec", b"test_codeq"))
    for cut in range(9, len(packed)):
        with pytest.raises(ProtocolError):
            unpack((cut << 16 | packed[0] | packed[1] << 8).to_bytes(8, "little") + packed[8:cut])


# -- values that are refused --------------------------------------------------------------------------


class Unknown:
    pass


@dataclasses.dataclass
class Unregistered:
    x: int = 0


class Special(str):
    pass


class Lent(bytearray):
    pass


def _endless() -> list:
    loop: list = []
    loop.append(loop)
    return loop


def _deep(levels: int, make=lambda inner: [inner]) -> object:
    value: object = 1
    for _ in range(levels):
        value = make(value)
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Unknown(), r"^the object is .*Unknown; allowed: plain data, bytes, arrays, and dataclasses"),
        ([1, {"a": Unknown()}], r"^\[1\]\['a'\] of the object is"),
        ((1, {2: {3: Unknown}}), r"^\[1\]\[2\]\[3\] of the object is type;"),
        (Point(1.0, Unknown()), r"^.y of the object is"),
        ({"a": {frozenset({Unknown}): 1}}, r"^\['a'\].keys\(\)\[0\] of the object is type;"),
        (Unregistered(), "Unregistered; allowed: .*named tuples given to unisono.register"),
        (Special("x"), r"Special; allowed.*send str\(...\) of it"),
        (Lent(b"x"), r"Lent; allowed.*send bytearray\(...\) of it"),
        (lambda: 0, "function; allowed"),
        (range(3), "is range; allowed"),
        (np.array([{}], object), "^the object has dtype object; allowed"),
        ({"w": np.zeros(2, ">f4")}, r"^\['w'\] of the object has foreign byte order"),
        (torch.eye(2).to_sparse(), "sparse"),
        (_endless(), "nested deeper than 64 levels, or contains itself"),
        (_deep(70, lambda inner: {"k": inner}), "nested deeper than 64 levels"),
        ("\ud800", "cannot be encoded"),
        ({"\udfff": 1}, "cannot be encoded"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_that_cannot_be_packed_are_refused_with_their_position(value, words):
    with pytest.raises(UsageError, match=words):
        pack(value)


@pytest.mark.parametrize(
    "make", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}, lambda x: Point(0.0, x)]
)
def test_every_depth_that_can_be_packed_can_be_unpacked(make):
    deepest = 0
    for levels in range(1, 70):
        value = _deep(levels, make)
        try:
            packed = pack(value)
        except UsageError:
            break
        assert same(unpack(packed), value)
        deepest = levels
    assert deepest >= 60


class Refusing:
    """Raises on every access."""

    @property
    def __dlpack__(self):
        raise KeyError("not today")


@register
@dataclasses.dataclass
class Shrinking:
    """Changes its container while it is packed."""

    neighbours: object

    def __getattribute__(self, name):
        if name == "neighbours":
            found = object.__getattribute__(self, name)
            found.pop() if isinstance(found, list) else found.popitem()
            return None
        return object.__getattribute__(self, name)


def test_an_error_of_the_users_own_comes_out_as_it_is_and_nothing_is_kept():
    refusing, data = Refusing(), b"x" * 5000
    value = [data, {"k": (bytearray(5000), refusing)}, data]
    before = sys.getrefcount(data), sys.getrefcount(refusing), sys.getrefcount(value[1])
    for _ in range(20):
        with pytest.raises(KeyError, match="not today"):
            pack(value)
        with pytest.raises(KeyError, match="not today"):
            pack_parts(value)
    value[1]["k"][0].append(1)  # no reference is left
    assert (sys.getrefcount(data), sys.getrefcount(refusing), sys.getrefcount(value[1])) == before


def test_containers_that_change_while_they_are_packed_are_an_error():
    rows: list = [1, 2, 3]
    rows.insert(0, Shrinking(rows))
    with pytest.raises(RuntimeError, match="changed its length"):
        pack(rows)
    table: dict = {"a": None, "b": 2, "c": 3}
    table["a"] = Shrinking(table)
    with pytest.raises(RuntimeError, match="changed size"):
        pack(table)


def test_nothing_leaks():
    value = {"k": [1.5, "text", (b"bytes", 2**80, {3}), np.arange(5), Point(1.0, "y"), uni.Status(1, 2, 3)]}
    value["long"] = ["x" * 5000, b"y" * 5000, bytearray(5000), np.arange(5000), torch.arange(3000)]
    packed = pack(value)
    head, blobs = pack_parts(value)
    spoiled = [packed[:at] for at in range(8, 400, 7)] + [
        packed[:at] + b"\xff" + packed[at + 1 :] for at in range(400)
    ]

    def turn():
        unpack(pack(value))
        unpack(bytearray(packed))
        unpack_parts(head, [bytearray(blob) for blob in blobs])
        for data in spoiled:
            value_or_protocol_error(data)
        with pytest.raises(UsageError):
            pack([value, Unknown()])

    turn()
    tracemalloc.start()
    try:
        turn()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            turn()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4000
    finally:
        tracemalloc.stop()


def value_or_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        unpack(data)


def test_only_dataclasses_are_registered():
    for wrong in (Unknown, 3, Point(1.0), "Point"):
        with pytest.raises(UsageError, match="register takes a dataclass"):
            register(wrong)


@dataclasses.dataclass
class Mapped(OrderedDict):
    """A dataclass and a dict: of the entries of a dict, the fields know nothing."""

    x: int = 1


@dataclasses.dataclass
class Failed(Exception):
    code: int = 1


@pytest.mark.parametrize(("cls", "base"), [(Mapped, "dict"), (Failed, "Exception")])
def test_a_dataclass_that_is_a_builtin_type_too_is_refused_when_it_is_registered(cls, base):
    with pytest.raises(UsageError, match=rf"not .*: it inherits from {base}, .*without this base"):
        register(cls)


def test_a_dataclass_that_is_a_dict_too_arrives_as_a_dict():
    value = Mapped()
    value["k"] = 2
    assert same(unpack(pack(value)), {"k": 2})
    with pytest.raises(UsageError, match="Failed; allowed"):
        pack(Failed())


def test_a_name_means_one_dataclass():
    again = dataclasses.make_dataclass("Point", ["x", "y"], namespace={"__module__": Point.__module__})
    assert register(again) is again  # the same fields: the module was loaded twice
    other = dataclasses.make_dataclass("Point", ["x", "z"], namespace={"__module__": Point.__module__})
    with pytest.raises(UsageError, match=r"another class is registered as '.*\.Point'"):
        register(other)
    register(Point)


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


# -- no code from the wire ----------------------------------------------------------------------------

# Modules that turn data into code, or find code by a name that data may contain.
FORBIDDEN_IMPORTS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "copyreg",
    "joblib",
    "runpy",
    "code",
}
# Subcommands are found by names in the module's own table; a spawned rank runs what its parent names.
EXEMPT = {
    "cli/__init__.py": ("import_module",),
    "launcher/program.py": ("runpy", "import_module"),
    # The measured loops are lines of its own table (bench/operations.py): no text comes from outside.
    "bench/libraries.py": ("eval", "exec", "compile"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "import_module"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS]
            case ast.ImportFrom(module=str(module), names=names):
                names_of = [module.split(".")[0], *(alias.name for alias in names)]
                found += [name for name in names_of if name in FORBIDDEN_IMPORTS | FORBIDDEN_CALLS]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name, value=ast.Name(id="importlib"))):
                found += [name] if name in FORBIDDEN_CALLS else []
            case ast.Attribute(attr=name):
                found += [name] if name in ("__reduce__", "__reduce_ex__", "allow_pickle") else []
            case ast.keyword(arg="allow_pickle"):
                found.append("allow_pickle")
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_module_turns_bytes_into_code(path):
    allowed = EXEMPT.get(str(path.relative_to(PACKAGE)), ())
    assert [name for name in offences(path.read_text()) if name not in allowed] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from pickle import loads",
        "from importlib import import_module",
        "eval('1')",
        "exec(data)",
        "__import__(name)",
        "import importlib\nimportlib.import_module(name)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_scan_finds_forbidden_code(source):
    assert offences(source)


def test_nothing_of_pickle_is_loaded_by_the_codec():
    script = (
        "import sys, unisono.core.codec as c; c.unpack(c.pack([1, (2,)])); print('pickle' in sys.modules)"
    )
    clean = "import sys, numpy, msgspec; print('pickle' in sys.modules)"
    ours, theirs = (
        subprocess.run([sys.executable, "-c", s], capture_output=True, text=True, check=True).stdout
        for s in (script, clean)
    )
    assert ours == theirs  # NumPy loads its own


def test_structs_are_packed_like_dataclasses():
    @register
    class Setting(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
        step_size: float
        names: tuple[str, ...] = ()
        table: object = None

    there = Setting(step_size=0.5, names=("a",), table=np.arange(7))
    back = unpack(pack([there, {"k": Setting(step_size=2.0)}]))
    assert type(back[0]) is Setting
    assert (back[0].step_size, back[0].names) == (0.5, ("a",))
    np.testing.assert_array_equal(back[0].table, np.arange(7))
    assert back[1] == {"k": Setting(step_size=2.0)}


def test_a_struct_that_rejects_its_fields_is_a_protocol_error():
    @register
    class Positive(msgspec.Struct):
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x: allowed: 0 or more")

    value = Positive(1)
    value.x = -1
    with pytest.raises(ProtocolError, match="allowed: 0 or more"):
        unpack(pack(value))
    with pytest.raises(UsageError, match=r"dataclass, a msgspec\.Struct or a named tuple"):
        register(msgspec.Struct)
