"""The codec: what goes in comes out, and no bytes from outside do more than raise a ProtocolError."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
import resource
import struct
import subprocess
import sys
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
from unisono.core import codec
from unisono.core.codec import decode, encode, pack, register, unpack
from unisono.core.dtypes import DTYPES
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
    """Frozen, and with a field that its constructor would not take."""

    name: str
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.name))


@register
@dataclasses.dataclass(slots=True)
class Empty:
    pass


# -- what goes in comes out ---------------------------------------------------------------------------


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
def test_any_value_comes_back_as_itself(value):
    assert same(unpack(pack(value)), value)


@SOME
@given(VALUES)
def test_a_value_in_parts_is_the_same_value(value):
    head, blobs = encode(value)
    copies = [memoryview(bytearray(blob)) for blob in blobs]
    assert same(decode(head, copies), value)


@SOME
@given(VALUES)
def test_blobs_start_at_multiples_of_64_bytes(value):
    packed = pack(value)
    address = np.frombuffer(packed, np.uint8).ctypes.data
    seen = []

    def look(value):
        if isinstance(value, np.ndarray | torch.Tensor) and math.prod(value.shape):
            at = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
            seen.append((at - address) % 64)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)

    look(unpack(packed))
    assert not any(seen)


def test_bytearrays_and_memoryviews_arrive_as_bytearrays():
    strided = memoryview(b"abcdef")[::2]
    got = unpack(pack([bytearray(b"ab"), memoryview(b"cd"), strided, b"ef", {"k": (bytearray(),)}]))
    assert same(got, [bytearray(b"ab"), bytearray(b"cd"), bytearray(b"ace"), b"ef", {"k": (bytearray(),)}])


class Rows(list):
    """A list with something more, which does not travel."""


class Locked(dict):
    """A dict whose own way of looking up is another."""

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
    assert same(unpack(pack((1, (2,)))), (1, (2,)))  # a plain tuple stays one


def test_arrays_in_keys_and_values_keep_their_places():
    @register
    @dataclasses.dataclass(frozen=True, eq=False)
    class Keyed:
        x: np.ndarray

    ((key, item),) = unpack(pack({Keyed(np.arange(2)): np.arange(5.0)})).items()
    assert same(key.x, np.arange(2))
    assert same(item, np.arange(5.0))


def test_what_cannot_travel_is_refused_with_the_next_step():
    steps: list[tuple[object, str]] = [
        (Pair(1, 2), r"Next: uni.register\(Pair\) on every rank"),
        (Unregistered(), r"Next: uni.register\(Unregistered\) on every rank"),
        (torch.Size([1]), r"Next: send tuple\(...\) of it"),
        (Unknown(), "Next: send its values as plain data"),
    ]
    for value, words in steps:
        with pytest.raises(UsageError, match=words):
            pack([value])


def test_arrays_are_not_copied_on_either_side():
    x = np.arange(1000.0)
    _, blobs = encode({"x": x})
    assert np.frombuffer(blobs[0], np.uint8).ctypes.data == x.ctypes.data
    packed = pack(x)
    back = unpack(packed)
    assert np.shares_memory(back, np.frombuffer(packed, np.uint8))
    assert back.flags.writeable


def test_arrays_in_what_was_received_as_bytes_cannot_be_written():
    assert not unpack(bytes(pack(np.arange(3)))).flags.writeable
    back = unpack(bytes(pack(torch.arange(3))))
    assert isinstance(back, np.ndarray)
    assert back.tolist() == [0, 1, 2]


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


# -- what has no place in it --------------------------------------------------------------------------


class Unknown:
    pass


@dataclasses.dataclass
class Unregistered:
    x: int = 0


class Special(str):
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
        (Special("x"), "Special; allowed"),
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
def test_what_cannot_travel_is_refused_with_the_place_where_it_stands(value, words):
    with pytest.raises(UsageError, match=words):
        pack(value)


@pytest.mark.parametrize(
    "make", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}, lambda x: Point(0.0, x)]
)
def test_what_may_be_packed_may_be_unpacked_however_deep(make):
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


def test_only_dataclasses_are_registered():
    for wrong in (Unknown, 3, Point(1.0), "Point"):
        with pytest.raises(UsageError, match="register takes a dataclass"):
            register(wrong)


def test_a_name_means_one_dataclass():
    again = dataclasses.make_dataclass("Point", ["x", "y"], namespace={"__module__": Point.__module__})
    assert register(again) is again  # the same fields: a module that was loaded twice
    other = dataclasses.make_dataclass("Point", ["x", "z"], namespace={"__module__": Point.__module__})
    with pytest.raises(UsageError, match=r"another class is registered as '.*\.Point'"):
        register(other)
    register(Point)


def test_objects_keep_their_types_across_ranks():
    def program(comm):
        value = {"rank": comm.rank, "pair": (1, 2.5), "point": Point(0.5, {3: np.arange(comm.rank + 1)})}
        first = comm.broadcast_object(value if comm.rank == 1 else None, root=1)
        everyone = comm.all_gather_object((comm.rank, torch.full((2,), comm.rank)))
        return same(first, {"rank": 1, "pair": (1, 2.5), "point": Point(0.5, {3: np.arange(2)})}) and all(
            same(v, (r, torch.full((2,), r))) for r, v in enumerate(everyone)
        )

    assert run_ranks(program, 3).values() == [True] * 3


# -- bytes from outside -------------------------------------------------------------------------------


def value_or_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        unpack(data)


@MANY
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_protocol_error(data):
    value_or_protocol_error(data)
    value_or_protocol_error(struct.pack("<IIII", codec._MAGIC, len(data), 0, 0) + data)
    with contextlib.suppress(ProtocolError):
        decode(data, [memoryview(bytearray(8))])


@MANY
@given(VALUES, st.data())
def test_a_spoiled_pack_is_a_value_or_a_protocol_error(value, data):
    packed = bytearray(pack(value))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packed) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "insert", "double"])):
            case "flip":
                packed[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                packed[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xC1, 0xC9, 0xDD, 0xDF, 0xFF]))
            case "cut":
                del packed[at:]
                packed = packed or bytearray(1)
            case "insert":
                packed[at:at] = data.draw(st.binary(max_size=9))
            case "double":
                packed[at:at] = packed[at : at + 20]
    value_or_protocol_error(bytes(packed))


def ext(code: int, parts: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def head(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _nested_extensions(levels: int) -> bytes:
    inner = b"\x90"
    for _ in range(levels):
        inner = b"\xc9" + struct.pack(">I", len(inner) + 2) + b"\x01" + b"\x91" + inner
        inner = inner[:1] + struct.pack(">I", len(inner) - 6) + inner[5:]
    return inner


FLOAT = DTYPES["float32"].code
EIGHT = [bytes(8)]
MALFORMED = [
    ("nothing", b"", []),
    ("half a value", b"\x92\x01", []),
    ("two values", b"\x01\x02", []),
    ("a list of 2^32 - 1", b"\xdd\xff\xff\xff\xff", []),
    ("lists of 2^31 in lists", b"\xdd\x80\x00\x00\x00" * 60, []),
    ("a map of 2^32 - 1", b"\xdf\xff\xff\xff\xff", []),
    ("bytes of 2^32 - 1", b"\xc6\xff\xff\xff\xff", []),
    ("a string of 2^31", b"\xdb\x80\x00\x00\x00a", []),
    ("an extension of 2^31", b"\xc9\x80\x00\x00\x00\x01", []),
    ("a string that is no UTF-8", b"\xa2\xff\xfe", []),
    ("lists nested 100,000 deep", b"\x91" * 100_000, []),
    ("maps nested 100,000 deep", b"\x81\xa1a" * 100_000, []),
    ("extensions nested 1,000 deep", _nested_extensions(1000), []),
    ("an unknown extension", head(msgspec.msgpack.Ext(99, b"")), []),
    ("a tuple that is a number", head(ext(1, 5)), []),
    ("a map with half a pair", head(ext(2, [1])), []),
    ("a map with a list for a key", head(ext(2, [[], 1])), []),
    ("a set of lists", head(ext(3, [[1]])), []),
    ("half a complex number", head(msgspec.msgpack.Ext(6, bytes(15))), []),
    ("a scalar without a type", head(msgspec.msgpack.Ext(8, b"")), []),
    ("a scalar of an unknown type", head(msgspec.msgpack.Ext(8, b"\x63" + bytes(8))), []),
    ("a scalar that is too long", head(msgspec.msgpack.Ext(8, bytes([FLOAT]) + bytes(5))), []),
    ("an array without memory", head(ext(7, [FLOAT, False, [2]])), []),
    ("memory without an array", head(1), EIGHT),
    ("an array of another length", head(ext(7, [FLOAT, False, [3]])), EIGHT),
    ("an array of 2^31 elements", head(ext(7, [FLOAT, False, [2**31]])), EIGHT),
    ("an array of 2^63 elements", head(ext(7, [FLOAT, False, [2**63]])), EIGHT),
    ("an array of 2^64 - 1 elements", head(ext(7, [FLOAT, False, [2**64 - 1]])), EIGHT),
    ("dimensions that wrap around to 2", head(ext(7, [FLOAT, False, [2**63, 2, 2**63 + 1, 2]])), EIGHT),
    ("negative dimensions that multiply to 2", head(ext(7, [FLOAT, False, [-1, -2]])), EIGHT),
    ("a dimension that is a truth value", head(ext(7, [FLOAT, False, [True, 2]])), EIGHT),
    ("a dimension that is a fraction", head(ext(7, [FLOAT, False, [2.0]])), EIGHT),
    ("no elements along 2^63", head(ext(7, [FLOAT, False, [0, 2**63]])), [b""]),
    ("no elements along 2^62 thrice", head(ext(7, [FLOAT, False, [0, 2**62, 2**62, 2**62]])), [b""]),
    (
        "no elements in torch along 2^62 thrice",
        head(ext(7, [FLOAT, True, [0, 2**62, 2**62, 2**62]])),
        [bytearray()],
    ),
    ("no elements in torch along 2^63", head(ext(7, [FLOAT, True, [0, 2**63]])), [bytearray()]),
    ("65 dimensions", head(ext(7, [FLOAT, False, [1] * 64 + [2]])), EIGHT),
    ("a shape that is a number", head(ext(7, [FLOAT, False, 2])), EIGHT),
    ("a type that is a truth value", head(ext(7, [True, False, [8]])), EIGHT),
    ("a type that is text", head(ext(7, ["float32", False, [2]])), EIGHT),
    ("a negative type", head(ext(7, [-1, False, [2]])), EIGHT),
    ("an array in two parts", head(ext(7, [FLOAT, [2]])), EIGHT),
    ("one memory for two arrays", head([ext(7, [FLOAT, False, [2]])] * 2), EIGHT),
    ("a dataclass without a name", head(ext(9, [None, [], []])), []),
    ("a dataclass that nobody registered", head(ext(9, ["os.system", ["command"], ["true"]])), []),
    ("a class that is importable", head(ext(9, ["subprocess.Popen", [], []])), []),
    ("a dataclass with other fields", head(ext(9, [f"{__name__}.Point", ["x"], [1]])), []),
    ("a dataclass with too few values", head(ext(9, [f"{__name__}.Point", ["x", "y"], [1]])), []),
    ("a dataclass with fields that are no list", head(ext(9, [f"{__name__}.Point", "xy", [1, 2]])), []),
    ("a dataclass with a number for values", head(ext(9, [f"{__name__}.Point", ["x", "y"], 2])), []),
]


@pytest.mark.parametrize(("data", "blobs"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED])
def test_malformed_objects_are_protocol_errors(data, blobs):
    with pytest.raises(ProtocolError):
        decode(data, [memoryview(blob) for blob in blobs])


def prefix(magic=None, head_bytes=1, blobs=0, zero=0) -> bytes:
    return struct.pack("<IIII", codec._MAGIC if magic is None else magic, head_bytes, blobs, zero)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        prefix()[:15],
        prefix(),
        prefix(magic=0) + b"\x01",
        prefix(zero=1) + b"\x01",
        prefix(head_bytes=2**32 - 1) + b"\x01",
        prefix(head_bytes=2) + b"\x01",
        prefix(head_bytes=0) + b"\x01",
        prefix(blobs=1) + b"\x01",
        prefix(blobs=2**32 - 1) + b"\x01" * 64,
        prefix(blobs=2**31) + b"\x01" * 64,
        prefix(blobs=1) + struct.pack("<Q", 2**63) + b"\x01",
        prefix(blobs=1) + struct.pack("<Q", 2**64 - 1) + b"\x01" * 64,
        prefix(blobs=2) + struct.pack("<QQ", 2**63, 2**63) + b"\x01" * 64,
        bytes(pack([1, np.arange(3)]))[:-1],
        bytes(pack([1, np.arange(3)])) + b"\0",
    ],
    ids=lambda data: f"{len(data)} bytes {data[4:12].hex()}",
)
def test_malformed_packs_are_protocol_errors(data):
    with pytest.raises(ProtocolError):
        unpack(data)


@pytest.fixture
def little_memory():
    """The process may take 64 MiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_no_bomb_takes_memory():
    """A length that was believed would be a MemoryError here."""
    for _, data, blobs in MALFORMED:
        with pytest.raises(ProtocolError):
            decode(data, [memoryview(blob) for blob in blobs])
    with pytest.raises(MemoryError):
        bytearray(1 << 27)


def test_a_long_head_costs_no_more_than_its_length():
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        with pytest.raises(ProtocolError):
            decode(b"\xdd\x7f\xff\xff\xff" + b"\x01" * 1000, [])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 32 << 10  # KiB


# -- no code from the wire ----------------------------------------------------------------------------

# What turns data into code, or finds code by a name that data may hold.
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
# Subcommands by the names in a table of its own; a spawned rank runs what its parent process names.
EXEMPT = {"cli/__init__.py": ("import_module",), "launcher/program.py": ("runpy", "import_module")}
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
def test_the_scan_would_see_it(source):
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
    assert ours == theirs  # NumPy brings its own


def test_structs_travel_like_dataclasses():
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


def test_a_struct_that_refuses_what_came_is_a_protocol_error():
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
