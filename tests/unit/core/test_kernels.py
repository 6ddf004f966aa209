"""The kernels, bit for bit, against NumPy and ml_dtypes: on every instruction set that this CPU has."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.kernel_oracle import (
    COMPONENT,
    MANTISSA_BITS,
    assert_same_bits,
    at_offset,
    nan_bits,
    numpy_type,
    one_nan,
    oracle,
    sample,
    special_bits,
)

from unisono import _native
from unisono.core.dtypes import DTYPES, DType, Kind
from unisono.core.kernels import divide, narrow, reduce_into, widen
from unisono.core.ops import OpCode, as_op, op
from unisono.errors import UsageError

Array = np.ndarray[Any, Any]

# Every tail after zero to several vectors; both sides of the page size from which stores are aligned; odd
# lengths that are long enough to run without the GIL.
LENGTHS = [*range(68), 509, 1023, 1024, 2053, 4099, 100_003]

PAIRS = [
    (dtype, code)
    for dtype in DTYPES.values()
    for code in OpCode
    if code < OpCode.MAXLOC  # pairs: test_locations.py
    if not (dtype.kind is Kind.BOOL and code in (OpCode.SUM, OpCode.PROD))
    if not (dtype.kind is Kind.FLOAT and code > OpCode.MAX)
    if not (dtype.kind is Kind.COMPLEX and code > OpCode.PROD)
]
every_pair = pytest.mark.parametrize(
    ("dtype", "code"), PAIRS, ids=[f"{dtype}-{code.name.lower()}" for dtype, code in PAIRS]
)
HALVES = [DTYPES["float16"], DTYPES["bfloat16"]]
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
MEANS = [dtype for dtype in DTYPES.values() if dtype.kind in (Kind.FLOAT, Kind.COMPLEX)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence NumPy's warnings of overflow and NaN, which are what is tested."""
    with np.errstate(all="ignore"):
        yield


# ---- every operation of every type ----


@every_pair
def test_every_op_gives_numpys_bits_at_every_length(isa: str, dtype: DType, code: OpCode) -> None:
    for length in LENGTHS:
        a, b = sample(dtype, length, seed=1), sample(dtype, length, seed=2)
        want, swapped = oracle(a, b, dtype, code), oracle(b, a, dtype, code)

        out = sample(dtype, length, seed=3)
        _native.reduce(out, a, b, dtype.code, code)
        assert_same_bits(out, want)

        right = a.copy()
        reduce_into(right, b, as_op(code.name.lower()), dtype)
        assert_same_bits(right, want)

        left = a.copy()
        reduce_into(left, b, as_op(code.name.lower()), dtype, left=True)
        assert_same_bits(left, swapped)


@every_pair
def test_starts_may_be_unaligned(isa: str, dtype: DType, code: OpCode) -> None:
    for length in (1, 21, 5003 // dtype.itemsize):
        a, b = sample(dtype, length, seed=4), sample(dtype, length, seed=5)
        want = oracle(a, b, dtype, code)
        for dst_offset, src_offset in [(1, 0), (0, 1), (3, 3), (1, 2), (7, 61), (16, 48)]:
            dst, src = at_offset(a, dst_offset), at_offset(b, src_offset)
            reduce_into(dst, src, as_op(code.name.lower()), dtype)
            assert_same_bits(dst, want)
            assert_same_bits(src, b)


@every_pair
def test_nothing_beyond_the_end_is_written(isa: str, dtype: DType, code: OpCode) -> None:
    for length in range(35):
        fence = np.full((length + 2) * dtype.itemsize, 0xA5, np.uint8)
        inside = fence[dtype.itemsize : -dtype.itemsize].view(dtype.storage)
        inside[:] = sample(dtype, length, seed=6)
        reduce_into(inside, sample(dtype, length, seed=7), as_op(code.name.lower()), dtype)
        assert (fence[: dtype.itemsize] == 0xA5).all()
        assert (fence[-dtype.itemsize :] == 0xA5).all()


@every_pair
def test_all_operands_may_be_the_same_memory(isa: str, dtype: DType, code: OpCode) -> None:
    a, b = sample(dtype, 1021, seed=8), sample(dtype, 1021, seed=9)
    squared = a.copy()
    _native.reduce(squared, squared, squared, dtype.code, code)
    assert_same_bits(squared, oracle(a, a, dtype, code))
    # The same memory through another object.
    dst = a.copy()
    _native.reduce(dst, dst[:], b, dtype.code, code)
    assert_same_bits(dst, oracle(a, b, dtype, code))
    out = a.copy()
    _native.reduce(out, b, b, dtype.code, code)
    assert_same_bits(out, oracle(b, b, dtype, code))


def test_a_bool_byte_other_than_0_is_true(isa: str) -> None:
    a, b = (x.ravel() for x in np.meshgrid(*[np.array([0, 1, 2, 128, 255], np.uint8)] * 2))
    for code in OpCode:
        if OpCode.PROD < code < OpCode.MAXLOC:
            dst = a.copy()
            _native.reduce(dst, dst, b, DTYPES["bool"].code, code)
            assert_same_bits(dst, oracle(a != 0, b != 0, DTYPES["bool"], code).view(np.uint8))


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind is Kind.INTEGER], ids=str)
def test_integers_wrap_around(isa: str, dtype: DType) -> None:
    info = np.iinfo(dtype.storage)
    dst = np.full(67, info.max, dtype.storage)
    reduce_into(dst, np.ones(67, dtype.storage), as_op("sum"), dtype)
    assert (dst == info.min).all()
    dst = np.full(67, info.max, dtype.storage)
    reduce_into(dst, np.full(67, info.max, dtype.storage), as_op("prod"), dtype)
    assert (dst == 1).all()


# ---- float16 and bfloat16, exhaustively; NaN and zeros ----


@every_half
@pytest.mark.parametrize("name", ["sum", "prod", "min", "max"])
def test_every_half_meets_every_special_value(isa: str, dtype: DType, name: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(dtype.storage)
    for bits in [*special_bits(dtype.name), *sample(dtype, 8, seed=10).view(np.uint16)]:
        other = np.full(65536, bits, np.uint16).view(dtype.storage)
        for left in (False, True):
            dst = every.copy()
            reduce_into(dst, other, as_op(name), dtype, left)
            a, b = (other, every) if left else (every, other)
            assert_same_bits(dst, oracle(a, b, dtype, OpCode[name.upper()]))


@every_half
def test_every_half_widens_to_its_value(isa: str, dtype: DType) -> None:
    every = np.arange(65536, dtype=np.uint16)
    want = one_nan(every.view(numpy_type(dtype.name)).astype(np.float32), "float32")
    for first in range(17):
        assert_same_bits(widen(every[first:], dtype), want[first:])


@every_half
def test_narrowing_rounds_to_nearest_even(isa: str, dtype: DType) -> None:
    step = 1 << (MANTISSA_BITS["float32"] - MANTISSA_BITS[dtype.name])
    values = widen(np.arange(65536, dtype=np.uint16), dtype).view(np.uint32)
    # On every value, halfway to its neighbour, and just beside both. The halfway points of float16's
    # subnormals lie elsewhere: `tiny` holds multiples of an eighth of the smallest.
    near = [values + np.uint32(offset) for offset in (0, 1, step // 2 - 1, step // 2, step // 2 + 1)]
    near.append(values - np.uint32(1))
    rng = np.random.default_rng(11)
    anything = rng.integers(0, 2**32, 100_003, np.uint32)
    tiny = (
        rng.integers(0, 2**14, 100_003).astype(np.float32)
        * np.float32(2.0**-27)
        * rng.choice([-1, 1], 100_003)
    )
    wide = np.concatenate([*near, anything, tiny.astype(np.float32).view(np.uint32)]).view(np.float32)
    want = one_nan(wide.astype(numpy_type(dtype.name)), dtype.name).view(np.uint16)
    got = np.empty(len(wide), np.uint16)
    narrow(wide, got, dtype)
    assert_same_bits(got, want)
    for length in range(35):
        narrow(wide[70_000:][:length], got[:length], dtype)
        assert_same_bits(got[:length], want[70_000:][:length])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op_name", ["sum", "prod", "min", "max"])
def test_every_nan_that_comes_out_is_the_one_of_numpy(isa: str, name: str, op_name: str) -> None:
    dtype = DTYPES[name]
    special = special_bits(name)
    nans = special[np.isnan(special.view(numpy_type(name)).astype(np.float64))]
    assert len(nans) >= 6
    a, b = (x.ravel().astype(special.dtype) for x in np.meshgrid(nans, special))
    for left, right in ((a, b), (b, a)):
        dst = left.copy()
        reduce_into(dst, right, as_op(op_name), dtype)
        assert (dst == nan_bits(name)).all()
    canonical = np.array([np.nan]).astype(numpy_type(name)).view(special.dtype)
    assert canonical[0] == nan_bits(name)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_negative_zero_is_the_smaller_zero_in_either_order(isa: str, name: str) -> None:
    dtype = DTYPES[name]
    for length in (1, 7, 67):
        plus = np.zeros(length, numpy_type(name)).view(dtype.storage)
        minus = np.full(length, -0.0).astype(numpy_type(name)).view(dtype.storage)
        for op_name, want in (("min", minus), ("max", plus)):
            for left in (False, True):
                dst = plus.copy()
                reduce_into(dst, minus, as_op(op_name), dtype, left)
                assert_same_bits(dst, want)


def test_a_complex_product_is_the_plain_formula(isa: str) -> None:
    dst = np.array([1 + 2j, complex(np.inf, np.inf)], np.complex64)
    reduce_into(dst, np.array([3 - 4j, 1 + 1j], np.complex64), as_op("prod"), DTYPES["complex64"])
    assert dst[0] == 11 + 2j
    # inf*1 - inf*1: C's Annex G would turn this NaN into an infinity.
    assert np.isnan(dst[1].real)
    assert dst[1].imag == np.inf


# ---- division ----


@pytest.mark.parametrize("dtype", MEANS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 1023, 2**24 + 1, 2**62])
def test_divide_is_a_true_division(isa: str, dtype: DType, n: int) -> None:
    for length in (*range(35), 4099):
        x = sample(dtype, length, seed=12)
        name = COMPONENT[dtype.name]
        parts = x.view(numpy_type(name))
        if dtype in HALVES:
            want = (parts.astype(np.float32) / np.float32(n)).astype(numpy_type(name))
        else:
            want = parts / parts.dtype.type(n)
        divide(x, n, dtype)
        assert_same_bits(x, one_nan(want, name).view(dtype.storage))


@every_half
@pytest.mark.parametrize("n", [3, 6, 7, 10, 1000])
def test_every_half_is_divided_and_then_rounded(isa: str, dtype: DType, n: int) -> None:
    x = np.arange(65536, dtype=np.uint16)
    kind = numpy_type(dtype.name)
    want = one_nan((x.view(kind).astype(np.float32) / np.float32(n)).astype(kind), dtype.name)
    divide(x, n, dtype)
    assert_same_bits(x, want.view(np.uint16))


def test_divide_takes_an_unaligned_start(isa: str) -> None:
    for dtype in MEANS:
        x = sample(dtype, 131, seed=13)
        moved = at_offset(x, 1)
        divide(moved, 3, dtype)
        divide(x, 3, dtype)
        assert_same_bits(moved, x)


def test_a_third_is_not_a_product_with_a_rounded_reciprocal(isa: str) -> None:
    x = np.arange(1, 1000, dtype=np.float32)
    assert (x / np.float32(3) != x * np.float32(1 / 3)).any()
    want = x / np.float32(3)
    divide(x, 3, DTYPES["float32"])
    assert_same_bits(x, want)


# ---- operations of the user's own ----


def test_a_users_function_gets_left_and_right_in_order() -> None:
    dtype = DTYPES["float64"]
    minus = op(lambda left, right: left - right, commutative=False)
    dst = np.array([5.0, 6.0])
    reduce_into(dst, np.array([1.0, 10.0]), minus, dtype)
    assert dst.tolist() == [4.0, -4.0]
    reduce_into(dst, np.array([1.0, 1.0]), minus, dtype, left=True)
    assert dst.tolist() == [-3.0, 5.0]


def test_a_users_function_sees_bfloat16_as_float32() -> None:
    seen = []

    def hypotenuse(left: Array, right: Array) -> Array:
        seen.append((left.dtype, right.dtype))
        return np.sqrt(left**2 + right**2)

    a, b = (np.array(x, ml_dtypes.bfloat16) for x in ([3.0, 1.0, np.nan], [4.0, 1.0, 1.0]))
    dst = a.view(np.uint16).copy()
    reduce_into(dst, b.view(np.uint16), op(hypotenuse), DTYPES["bfloat16"])
    assert seen == [(np.float32, np.float32)]
    assert_same_bits(dst, np.array([5.0, np.sqrt(2), np.nan], ml_dtypes.bfloat16).view(np.uint16))


def test_a_users_function_may_return_an_operand_or_a_wider_type() -> None:
    dtype = DTYPES["float32"]
    dst, src = np.arange(3, dtype=np.float32), np.arange(3, 6, dtype=np.float32)
    reduce_into(dst, src, op(lambda left, right: left), dtype)
    assert dst.tolist() == [0, 1, 2]
    reduce_into(dst, src, op(lambda left, right: (left + right).astype(np.float64)), dtype)
    assert dst.tolist() == [3, 5, 7]
    reduce_into(dst, src, op(lambda left, right: (left + right)[::-1]), dtype)
    assert dst.tolist() == [12, 9, 6]


def reverse_too_long(left: Array, right: Array) -> Array:
    return np.concatenate([left, right])


def true_quotient(left: Array, right: Array) -> Array:
    return left / right


def add_in_place(left: Array, right: Array) -> Array:
    left += right
    return left


@pytest.mark.parametrize(
    ("fn", "dtype", "error", "match"),
    [
        (reverse_too_long, "int32", UsageError, r"reverse_too_long returned shape \(6,\) .* \(3,\)"),
        (reverse_too_long, "bfloat16", UsageError, r"returned shape \(6,\)"),
        (lambda left, right: np.float64(1), "float64", UsageError, r"returned shape \(\)"),
        (true_quotient, "int32", UsageError, "returned float64 for two arrays of int32"),
        (lambda left, right: left * 1j, "bfloat16", UsageError, "returned complex64"),
        (add_in_place, "int32", ValueError, "read-only"),
        (add_in_place, "bfloat16", ValueError, "read-only"),
        (lambda left, right: 1 // 0, "int32", ZeroDivisionError, None),
    ],
)
def test_a_users_function_that_fails_leaves_both_arrays(
    fn: Any, dtype: str, error: Any, match: str | None
) -> None:
    dst, src = (np.arange(first, first + 3).astype(DTYPES[dtype].storage) for first in (1, 4))
    for left in (False, True):
        with pytest.raises(error, match=match):
            reduce_into(dst, src, op(fn), DTYPES[dtype], left)
    assert dst.tolist() == [1, 2, 3]
    assert src.tolist() == [4, 5, 6]
    assert dst.flags.writeable
    assert src.flags.writeable


# ---- what is refused ----


def test_kernels_exist_exactly_for_the_operations_that_values_allows() -> None:
    for dtype in DTYPES.values():
        for code in OpCode:
            try:
                as_op(code.name.lower()).check(dtype)
                allowed = True
            except UsageError:
                allowed = False
            takes_pairs = code >= OpCode.MAXLOC and dtype.kind in (Kind.INTEGER, Kind.FLOAT)
            assert allowed == (takes_pairs or (dtype, code) in PAIRS)
            x = np.zeros(4, dtype.storage)
            if allowed:
                _native.reduce(x, x, x, dtype.code, code)
            else:
                with pytest.raises(ValueError, match="is not defined for dtype"):
                    _native.reduce(x, x, x, dtype.code, code)


F32 = DTYPES["float32"].code
F16 = DTYPES["float16"].code
SUM = OpCode.SUM
HUGE = 2**80


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: _native.reduce(x, x, x[:3], F32, SUM), ValueError, "4 elements, an operand 3"),
        (lambda x: _native.reduce(x, x[:3], x, F32, SUM), ValueError, "4 elements, an operand 3"),
        (lambda x: _native.reduce(x[:3], x, x, F32, SUM), ValueError, "3 elements, an operand 4"),
        (lambda x: _native.reduce(x.view(np.uint8)[:7], *[bytes(7)] * 2, F32, SUM), ValueError, "7 bytes"),
        (lambda x: _native.reduce(x, x, bytes(15), F32, SUM), ValueError, "15 bytes"),
        (lambda x: _native.reduce(x, x, x, 15, SUM), ValueError, "no dtype has the code 15"),
        (lambda x: _native.reduce(x, x, x, -1, SUM), ValueError, "no dtype has the code -1"),
        (lambda x: _native.reduce(x, x, x, F32, 12), ValueError, "no op has the code 12"),
        (lambda x: _native.reduce(x, x, x, F32, -1), ValueError, "no op has the code -1"),
        (lambda x: _native.reduce(x, x, x, F32, HUGE), ValueError, "no op has such a code"),
        (lambda x: _native.reduce(x, x, x, F32, "sum"), TypeError, None),
        (lambda x: _native.reduce(x, x, x, F32, None), TypeError, None),
        (lambda x: _native.reduce(x, x, [1.0] * 4, F32, SUM), TypeError, None),
        (lambda x: _native.reduce(x, x, x, F32), TypeError, None),
        (lambda x: _native.reduce(bytes(16), x, x, F32, SUM), BufferError, None),
        (lambda x: _native.divide(x, 0, F32), ValueError, "mean of 0"),
        (lambda x: _native.divide(x, -2, F32), ValueError, "mean of -2"),
        (lambda x: _native.divide(x, HUGE, F32), TypeError, None),
        (lambda x: _native.divide(x, 2.5, F32), TypeError, None),
        (lambda x: _native.divide(x, 2, DTYPES["int32"].code), ValueError, "not defined"),
        (lambda x: _native.divide(x.view(np.uint8)[:5], 2, F32), ValueError, "5 bytes"),
        (lambda x: _native.divide(x, 2, 99), ValueError, "no dtype"),
        (lambda x: _native.widen(x, bytes(6), F16), ValueError, "4 elements, an operand 3"),
        (lambda x: _native.widen(x, bytes(7), F16), ValueError, "7 bytes"),
        (lambda x: _native.widen(x, bytes(16), F32), ValueError, "not defined"),
        (lambda x: _native.widen(x, x.view(np.uint8)[:8], F16), ValueError, "overlaps"),
        (lambda x: _native.narrow(x, bytes(16), F16), ValueError, "8 elements, an operand 4"),
        (lambda x: _native.narrow(x.view(np.uint8)[:8], x, F16), ValueError, "overlaps"),
        (lambda x: _native.narrow(x, bytes(32), F32), ValueError, "not defined"),
        (lambda x: _native.use_isa("pdp11"), ValueError, "pdp11"),
    ],
)
def test_a_wrong_argument_is_refused_and_writes_nothing(call: Any, error: Any, match: str | None) -> None:
    x = np.arange(4, dtype=np.float32)
    isa_before = _native.isa()
    with pytest.raises(error, match=match):
        call(x)
    assert x.tolist() == [0, 1, 2, 3]
    assert _native.isa() == isa_before


def test_memory_that_is_not_contiguous_or_read_only_is_refused() -> None:
    x = np.arange(8, dtype=np.float32)
    fixed = x.copy()
    fixed.flags.writeable = False
    float32, total = DTYPES["float32"], as_op("sum")
    for dst, src in ((x[::2], x[:4]), (x[:4], x[4::-1][:4]), (fixed, x)):
        with pytest.raises(ValueError, match=r"contiguous|read-only"):
            reduce_into(dst, src, total, float32)
    with pytest.raises(ValueError, match="read-only"):
        divide(fixed, 2, float32)
    reduce_into(x, fixed, total, float32)
    assert x.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


@every_pair
def test_partial_overlap_is_refused_and_writes_nothing(dtype: DType, code: OpCode) -> None:
    memory, other = sample(dtype, 64, seed=14), sample(dtype, 40, seed=15)
    before = memory.copy()
    raw, size, item = memory.view(np.uint8), 40 * dtype.itemsize, dtype.itemsize
    for dst_start, src_start in [(0, 1), (1, 0), (0, item), (item, 0), (0, 24 * item), (24 * item, 0)]:
        dst, src = raw[dst_start:][:size], raw[src_start:][:size]
        for a, b in ((src, dst), (dst, src), (src, other), (other, src)):
            with pytest.raises(ValueError, match="overlaps"):
                _native.reduce(dst, a, b, dtype.code, code)
    assert_same_bits(memory, before)


def test_neighbours_without_overlap_are_fine(isa: str) -> None:
    x = np.arange(10, dtype=np.int32)
    reduce_into(x[:5], x[5:], as_op("sum"), DTYPES["int32"])
    assert x.tolist() == [5, 7, 9, 11, 13, 5, 6, 7, 8, 9]
    reduce_into(x[5:], x[:5], as_op("sum"), DTYPES["int32"])
    assert x[5:].tolist() == [10, 13, 16, 19, 22]


# ---- the machine ----


def test_the_fastest_instruction_set_is_in_use() -> None:
    assert _native.isas()[0] == "baseline"
    assert _native.isa() == _native.isas()[-1]


KERNELS_WITHOUT_GIL = {
    "reduce": lambda x, y: _native.reduce(x, x, y, F32, SUM),
    "divide": lambda x, y: _native.divide(x, 3, F32),
    "widen": lambda x, y: _native.widen(x, y[: len(y) // 2], F16),
    "narrow": lambda x, y: _native.narrow(x[: len(x) // 2], y, F16),
}


@pytest.mark.parametrize("kernel", KERNELS_WITHOUT_GIL.values(), ids=KERNELS_WITHOUT_GIL)
def test_a_long_call_lets_other_threads_run(kernel: Any) -> None:
    x, y = np.zeros((2, 1 << 20), np.float32)
    ready, go = threading.Event(), threading.Event()
    ran: list[bool] = []

    def run() -> None:
        ready.set()
        go.wait()
        ran.append(True)

    other = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    other.start()
    ready.wait()
    # The interpreter's own thread switches are disabled: the other thread runs only if a kernel releases the
    # GIL. A thread may wake slowly, so there are many calls.
    sys.setswitchinterval(100)
    try:
        go.set()
        calls_left = 1000
        while calls_left and not ran:
            kernel(x, y)
            calls_left -= 1
        assert ran
    finally:
        sys.setswitchinterval(interval)
        other.join()
