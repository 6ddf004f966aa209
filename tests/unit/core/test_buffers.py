"""Buffers: arrays of every family are used without a copy, returned in their family, or refused clearly."""

from __future__ import annotations

import array
import mmap
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.core import buffers
from unisono.core.buffers import Typed, as_bytes, typed, view
from unisono.core.dtypes import DTYPES
from unisono.errors import UsageError

QUICK = settings(derandomize=True, deadline=None, database=None, max_examples=120)
NATIVE = [name for name in DTYPES if name != "bfloat16"]


class Foreign:
    """An array of another library, like JAX's, with nothing but DLPack; with `is_old` its first version."""

    def __init__(self, held, *, is_old: bool = False, device: tuple[int, int] | None = None) -> None:
        self.held = held
        self.is_old = is_old
        self.device = device

    def __dlpack__(self, **options):
        if self.is_old and options.keys() - {"stream"}:
            raise TypeError("unexpected keyword argument")
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device if self.device is not None else self.held.__dlpack_device__()


def ramp(n: int, dtype="float32") -> np.ndarray:
    return (np.arange(n) % 7).astype(dtype)


def pointer(given) -> int:
    """The address of an array's memory, found without the code under test."""
    if isinstance(given, torch.Tensor):
        return given.data_ptr()
    if isinstance(given, Foreign):
        return pointer(given.held)
    if isinstance(given, Typed):
        return given.data.ctypes.data
    return np.frombuffer(given, np.uint8).ctypes.data


def memories():
    tensor = torch.arange(6, dtype=torch.float32)
    yield "numpy", ramp(6), "float32", (6,)
    yield "numpy 2d", ramp(6).reshape(2, 3), "float32", (2, 3)
    yield "numpy 0d", np.array(3.5), "float64", ()
    yield "memoryview", memoryview(ramp(6)), "float32", (6,)
    yield "memoryview 2d", memoryview(ramp(6).reshape(3, 2)), "float32", (3, 2)
    yield "array.array", array.array("i", range(6)), "int32", (6,)
    yield "array.array of doubles", array.array("d", range(6)), "float64", (6,)
    yield "bytearray", bytearray(b"unison"), "uint8", (6,)
    yield "bytes", b"unison", "uint8", (6,)
    yield "mmap", mmap.mmap(-1, 6), "uint8", (6,)
    yield "torch", tensor, "float32", (6,)
    yield "torch 2d", tensor.reshape(3, 2), "float32", (3, 2)
    yield "torch parameter", torch.nn.Parameter(torch.ones(6)), "float32", (6,)
    yield "torch bfloat16", tensor.to(torch.bfloat16), "bfloat16", (6,)
    yield "torch bool", tensor > 2, "bool", (6,)
    yield "torch complex", torch.ones(6, dtype=torch.complex64), "complex64", (6,)
    yield "DLPack", Foreign(ramp(6)), "float32", (6,)
    yield "old DLPack", Foreign(ramp(6), is_old=True), "float32", (6,)
    yield "bfloat16 by DLPack", Foreign(tensor.to(torch.bfloat16)), "bfloat16", (6,)
    yield "typed", typed(np.arange(6, dtype=np.uint16), "bfloat16"), "bfloat16", (6,)
    yield "ml_dtypes", ramp(6, ml_dtypes.bfloat16), "bfloat16", (6,)


MEMORIES = {name: rest for name, *rest in memories()}


@pytest.mark.parametrize("name", MEMORIES)
def test_contiguous_memory_is_seen_without_a_copy(name):
    given, dtype, shape = MEMORIES[name]
    seen = view(given, "x")
    assert seen.flat.ctypes.data == pointer(given)
    assert (seen.dtype.name, seen.shape) == (dtype, shape)
    assert seen.flat.shape == (int(np.prod(shape)),)
    assert seen.flat.dtype == DTYPES[dtype].storage
    assert seen.give() is given


@pytest.mark.parametrize("name", [n for n in MEMORIES if n not in ("bytes", "old DLPack")])
def test_writable_memory_is_filled_where_it_lies(name):
    given, _, _ = MEMORIES[name]
    seen = view(given, "x", writable=True)
    assert seen.flat.ctypes.data == pointer(given)
    before = seen.flat.copy()
    as_bytes(seen.flat)[0] ^= 1
    again = view(given, "x").flat
    assert again.tobytes() != before.tobytes()
    as_bytes(seen.flat)[0] ^= 1


@pytest.mark.parametrize("name", NATIVE)
def test_every_type_of_numpy_and_torch_is_seen_as_itself(name):
    x = ramp(5, name)
    assert view(x, "x").dtype.name == name
    tensor = torch.from_numpy(x)
    assert view(tensor, "x").dtype.name == name
    assert view(tensor, "x").flat.ctypes.data == x.ctypes.data
    given_back = view(tensor, "x").like((5,)).give()
    assert isinstance(given_back, torch.Tensor)
    assert given_back.dtype == tensor.dtype


@pytest.mark.parametrize(
    ("number", "dtype", "kind"),
    [
        (7, "int64", int),
        (-(2**63), "int64", int),
        (2.5, "float64", float),
        (1 + 2j, "complex128", complex),
        (True, "bool", bool),
        (np.float32(2.5), "float32", np.float32),
        (np.int8(-3), "int8", np.int8),
        (np.bool_(True), "bool", np.bool_),
        (ml_dtypes.bfloat16(1.5), "bfloat16", ml_dtypes.bfloat16),
    ],
)
def test_a_number_comes_back_as_a_number_of_its_kind(number, dtype, kind):
    seen = view(number, "x", writable=True)
    assert (seen.dtype.name, seen.shape, seen.count) == (dtype, (), 1)
    assert seen.is_value
    assert type(seen.give()) is kind
    assert seen.give() == number
    row = seen.like((3,)).give()
    assert isinstance(row, np.ndarray)
    assert row.shape == (3,)


def test_a_number_of_a_subclass_is_sent_as_its_base_type():
    class Metres(float):
        pass

    class Level(int):
        pass

    assert view(Metres(2.5), "x").dtype.name == "float64"
    assert view(Level(3), "x").dtype.name == "int64"


def test_results_come_back_in_the_kind_of_the_arguments():
    kinds = {name: type(view(given, "x").like(shape).give()) for name, (given, _, shape) in MEMORIES.items()}
    for name, kind in kinds.items():
        wanted = torch.Tensor if name.startswith("torch") else np.ndarray
        if name in ("typed", "bfloat16 by DLPack"):
            wanted = Typed
        assert kind is wanted, name
    assert view(MEMORIES["ml_dtypes"][0], "x").like((2,)).give().dtype == ml_dtypes.bfloat16
    assert view(MEMORIES["torch bfloat16"][0], "x").like((2, 3)).give().dtype == torch.bfloat16
    assert view(MEMORIES["torch bfloat16"][0], "x").like((0, 3)).give().shape == (0, 3)


def test_a_copy_is_equal_and_shares_no_memory():
    seen = view(ramp(6), "x")
    copied = seen.copy()
    assert not copied.overlaps(seen)
    np.testing.assert_array_equal(copied.give(), ramp(6))


@pytest.mark.parametrize(
    ("left", "right", "overlap"),
    [
        (slice(0, 5), slice(4, 9), True),
        (slice(0, 5), slice(5, 9), False),
        (slice(0, 9), slice(3, 4), True),
        (slice(3, 3), slice(0, 9), False),
    ],
)
def test_overlap_is_shared_memory(left, right, overlap):
    x = ramp(9)
    assert view(x[left], "a").overlaps(view(x[right], "b")) is overlap
    tensor = torch.from_numpy(x)
    assert view(x[left], "a").overlaps(view(tensor[right], "b")) is overlap


@QUICK
@given(
    hnp.arrays(np.int32, hnp.array_shapes(max_dims=3, min_side=0, max_side=5), elements=st.integers(-9, 9)),
    st.data(),
)
def test_any_slice_is_read_right_and_filled_in_place_or_refused(base, data):
    x = base[data.draw(hnp.basic_indices(base.shape, allow_newaxis=False))]
    x = np.asarray(x).T if data.draw(st.booleans()) else np.asarray(x)
    seen = view(x, "x")
    np.testing.assert_array_equal(seen.flat, x.ravel())
    assert seen.shape == x.shape
    if x.size:
        assert np.shares_memory(seen.flat, x) is bool(x.flags.c_contiguous)
    if not x.flags.writeable:
        return
    if x.flags.c_contiguous:
        view(x, "x", writable=True).flat[:] = 77
        assert (x == 77).all()
    else:
        with pytest.raises(UsageError, match="not contiguous"):
            view(x, "x", writable=True)


@QUICK
@given(st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_torch_slices_are_read_right(n, step, turned):
    tensor = torch.arange(4 * n, dtype=torch.bfloat16).reshape(n, 4)[:, ::step]
    tensor = tensor.T if turned else tensor
    seen = view(tensor, "x")
    wanted = tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel()
    np.testing.assert_array_equal(seen.flat, wanted)
    assert seen.shape == tuple(tensor.shape)


class _Broken:
    """Has `__array__`, which raises."""

    def __array__(self):
        raise RuntimeError


def _closed() -> memoryview:
    shut = memoryview(bytearray(4))
    shut.release()
    return shut


REFUSED = [
    ("None", None, "x is NoneType; allowed: an array with the buffer protocol or DLPack, or a number"),
    ("a list", [1, 2], "or a number. Next: pass an array, or use a verb for objects, such as send_object"),
    ("a string", "abc", "x is str; allowed: an array"),
    ("a dict", {}, "x is dict; allowed: an array"),
    ("an object", _Broken(), "_Broken; allowed: an array"),
    ("a released view", _closed(), "x is memoryview; allowed: an array"),
    ("objects", np.array([{}, []], object), "x has dtype object; allowed: bool, int8"),
    ("strings", np.array(["a"]), "x has dtype <U1; allowed: bool, int8"),
    ("times", np.array(["2020"], "datetime64[s]"), "x has dtype datetime64[s]; allowed: bool"),
    ("records", np.zeros(2, [("a", "i4")]), "allowed: bool, int8"),
    ("long doubles", np.zeros(2, np.longdouble), "allowed: bool, int8"),
    ("an object scalar", np.array([{}], object)[0], "x is dict; allowed: an array"),
    (
        "other endianness",
        np.arange(3, dtype=">i4"),
        "x has foreign byte order (>i4); allowed: the machine's byte order",
    ),
    ("a mask", np.ma.masked_array([1, 2], [0, 1]), "masked array"),
    ("float8", torch.zeros(2).to(torch.float8_e4m3fn), "x has dtype torch.float8_e4m3fn; allowed: bool"),
    (
        "a sparse tensor",
        torch.eye(3).to_sparse(),
        "sparse_coo tensor on cpu; allowed: dense tensors on the CPU",
    ),
    ("a tensor elsewhere", torch.zeros(2, device="meta"), "on meta; allowed: dense tensors on the CPU"),
    ("a conjugate", torch.ones(2, dtype=torch.complex64).conj(), "allowed: x.resolve_conj()"),
    (
        "DLPack elsewhere",
        Foreign(ramp(3), device=(2, 1)),
        "x is on DLPack device (2, 1); allowed: CPU memory",
    ),
    ("a huge number", 2**63, "beyond 64 bits; allowed: -2**63 to 2**63 - 1"),
    ("a number beyond text", 10**5000, "beyond 64 bits"),
]


@pytest.mark.parametrize(("given", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_unsupported_memory_is_refused_with_a_reason(given, words):
    with pytest.raises(UsageError) as caught:
        view(given, "x")
    assert words in str(caught.value)


UNWRITABLE = [
    ("bytes", b"abc", "x is read-only; allowed: writable memory"),
    ("a read-only view", memoryview(b"abc"), "read-only"),
    ("a frozen array", np.broadcast_to(ramp(1), (1,)), "read-only"),
    ("an old DLPack export", Foreign(ramp(3), is_old=True), "read-only"),
    (
        "every second element",
        ramp(6)[::2],
        "x is not contiguous (strides (8,)); allowed: C-contiguous memory",
    ),
    ("a column", ramp(6).reshape(2, 3)[:, 1], "not contiguous"),
    ("columns first", np.asfortranarray(ramp(6).reshape(2, 3)), "not contiguous"),
    ("a reversed array", ramp(6)[::-1], "not contiguous"),
    ("a transposed tensor", torch.zeros(2, 3).T, "not contiguous"),
    ("an expanded tensor", torch.zeros(1).expand(4), "not contiguous"),
    ("a strided bfloat16", torch.zeros(6, dtype=torch.bfloat16)[::2], "not contiguous"),
    ("a strided view", memoryview(bytearray(6))[::2], "not contiguous"),
]


@pytest.mark.parametrize(("given", "words"), [r[1:] for r in UNWRITABLE], ids=[r[0] for r in UNWRITABLE])
def test_memory_that_cannot_be_filled_in_place_is_refused_but_can_be_read(given, words):
    with pytest.raises(UsageError) as caught:
        view(given, "x", writable=True)
    assert words in str(caught.value)
    view(given, "x")


def test_dlpack_that_only_torch_can_read_needs_torch(monkeypatch):
    exporter = Foreign(torch.zeros(3, dtype=torch.bfloat16))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="offers DLPack that NumPy cannot read"):
        view(exporter, "x")


@pytest.mark.parametrize(
    "data",
    [[1, 2], np.zeros(3, np.uint8), np.zeros(3, ">u2"), np.ma.masked_array(np.zeros(2, np.uint16)), None],
)
def test_typed_takes_plain_arrays_of_the_right_width(data):
    with pytest.raises(
        UsageError, match=r"typed\(..., 'bfloat16'\) got .*; allowed: a NumPy array of 2-byte"
    ):
        typed(data, "bfloat16")


def test_typed_refuses_objects_and_unknown_types():
    with pytest.raises(UsageError, match="got an array of object"):
        typed(np.array([{}], object), "int64")
    with pytest.raises(UsageError, match="'bfloat17' is not supported; allowed: bool"):
        typed(np.zeros(2, np.uint16), "bfloat17")


def test_typed_gives_any_bits_a_type():
    bits = np.array([0x3FC0, 0x4000], np.uint16)
    seen = view(typed(bits.view(np.float16), "bfloat16"), "x")
    assert seen.dtype.name == "bfloat16"
    np.testing.assert_array_equal(seen.flat, bits)


def test_the_bfloat16_of_numpy_stays_raw_without_ml_dtypes(monkeypatch):
    assert isinstance(
        buffers.numpy_family(DTYPES["bfloat16"]).give(np.zeros(1, np.uint16), (1,), DTYPES["bfloat16"]),
        np.ndarray,
    )
    monkeypatch.delitem(sys.modules, "ml_dtypes")
    assert buffers.numpy_family(DTYPES["bfloat16"]) is buffers.RAW
    assert buffers.numpy_family(DTYPES["int8"]) is not buffers.RAW


def test_empty_memory_has_no_bytes():
    for empty in (np.empty((0, 3)), b"", torch.zeros(0), typed(np.empty(0, np.uint16), "bfloat16")):
        assert view(empty, "x").bytes().nbytes == 0


def test_torch_memory_is_filled_without_disturbing_autograd():
    leaf = torch.ones(4, requires_grad=True)
    view(leaf, "x", writable=True).flat[:] = 3
    assert leaf.requires_grad
    (leaf * 2).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2, 2]
    assert leaf.tolist() == [3, 3, 3, 3]


def contribution(kind: str, rank: int):
    """The same values in arrays of every family: rank 0 has 0..5, rank 1 has 1..6, ..."""
    values = np.arange(6) + rank
    match kind:
        case "memoryview":
            return memoryview(values.astype(np.float32))
        case "array.array":
            return array.array("d", values.tolist())
        case "torch":
            return torch.from_numpy(values.astype(np.float32))
        case "torch bfloat16":
            return torch.from_numpy(values).to(torch.bfloat16)
        case "ml_dtypes":
            return values.astype(ml_dtypes.bfloat16)
        case "DLPack":
            return Foreign(values.astype(np.float32))
        case "typed":
            return typed(values.astype(ml_dtypes.bfloat16).view(np.uint16), "bfloat16")
    return values.astype(np.float32)


def values_of(given) -> list[float]:
    match given:
        case Typed():
            return given.data.view(ml_dtypes.bfloat16).astype(float).tolist()
        case Foreign():
            return values_of(given.held)
        case torch.Tensor():
            return given.to(torch.float64).tolist()
    return np.asarray(given).astype(float).tolist()


@pytest.mark.parametrize(
    "kind", ["numpy", "memoryview", "array.array", "torch", "torch bfloat16", "ml_dtypes", "DLPack", "typed"]
)
def test_every_kind_of_memory_goes_through_a_reduction_in_place(kind):
    def program(comm):
        x = contribution(kind, comm.rank)
        assert comm.all_reduce(x) is x
        return values_of(x)

    wanted = (3 * np.arange(6) + 3).astype(float).tolist()
    assert run_ranks(program, 3).values() == [wanted] * 3


def test_scalars_are_reduced_and_come_back_as_their_kind():
    def program(comm):
        given = (comm.rank + 1, comm.rank + 0.5, np.int16(comm.rank), ml_dtypes.bfloat16(comm.rank + 0.5))
        return [comm.all_reduce(number) for number in given]

    for results in run_ranks(program, 3).values():
        assert results == [6, 4.5, 3, 4.5]
        assert [type(r) for r in results] == [int, float, np.int16, ml_dtypes.bfloat16]


def test_an_immutable_array_of_another_library_can_be_gathered_but_not_reduced_in_place():
    def program(comm):
        x = Foreign(np.arange(3, dtype=np.int32) + comm.rank, is_old=True)
        with pytest.raises(UsageError, match="read-only"):
            comm.all_reduce(x)
        out = np.empty(3, np.int32)
        comm.all_reduce(x, out=out)
        return comm.all_gather(x).tolist(), out.tolist()

    assert run_ranks(program, 2).values() == [([[0, 1, 2], [1, 2, 3]], [1, 3, 5])] * 2


def test_the_public_names_are_there():
    assert uni.typed is typed
    assert uni.Typed is Typed
