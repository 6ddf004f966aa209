"""NumPy's results of reductions, bit for bit as the kernels promise them, and operands for them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from unisono.core.dtypes import DTYPES, DType, Kind
from unisono.core.ops import OpCode

__all__ = [
    "assert_same_bits",
    "at_offset",
    "nan_bits",
    "numpy_type",
    "one_nan",
    "oracle",
    "sample",
    "special_bits",
]

Array = np.ndarray[Any, Any]

MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
COMPONENT = {name: {"complex64": "float32", "complex128": "float64"}.get(name, name) for name in DTYPES}
UFUNC = {
    OpCode.SUM: np.add,
    OpCode.PROD: np.multiply,
    OpCode.MIN: np.minimum,
    OpCode.MAX: np.maximum,
    OpCode.BAND: np.bitwise_and,
    OpCode.BOR: np.bitwise_or,
    OpCode.BXOR: np.bitwise_xor,
    OpCode.LAND: np.logical_and,
    OpCode.LOR: np.logical_or,
    OpCode.LXOR: np.logical_xor,
}


def oracle(a: Array, b: Array, dtype: DType, code: OpCode) -> Array:
    """NumPy's result of a op b, with the single NaN and the order of zeros that the kernels promise."""
    if dtype.kind is Kind.COMPLEX:
        name = COMPONENT[dtype.name]
        a, b = (x.view(numpy_type(name)).reshape(-1, 2) for x in (a, b))
        if code is OpCode.SUM:
            result = a + b
        else:
            (a_re, a_im), (b_re, b_im) = a.T, b.T
            result = np.stack([a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re], axis=1)
        return one_nan(result, name).view(dtype.storage).ravel()
    if dtype.kind is Kind.FLOAT:
        x, y = (bits.view(numpy_type(dtype.name)) for bits in (a, b))
        result = one_nan(UFUNC[code](x, y), dtype.name)
        if code in (OpCode.MIN, OpCode.MAX):
            zeros = (x == 0) & (y == 0)
            result[zeros] = UFUNC[code](np.copysign(1, x[zeros]), np.copysign(1, y[zeros])) * 0
        return result.view(dtype.storage)
    return UFUNC[code](a, b).astype(dtype.storage)


def numpy_type(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def bits_type(name: str) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * numpy_type(name).itemsize}")


def infinity_bits(name: str) -> int:
    width, mantissa = 8 * numpy_type(name).itemsize, MANTISSA_BITS[name]
    return (1 << (width - 1)) - (1 << mantissa)


def nan_bits(name: str) -> int:
    return infinity_bits(name) + (1 << (MANTISSA_BITS[name] - 1))


def one_nan(numbers: Array, name: str) -> Array:
    cleaned = numbers.copy()
    cleaned.view(bits_type(name))[np.isnan(numbers)] = nan_bits(name)
    return cleaned


def special_bits(name: str) -> Array:
    """Zeros, subnormals, both sides of every boundary, infinities, quiet and signalling NaNs."""
    mantissa, infinity = MANTISSA_BITS[name], infinity_bits(name)
    one = infinity // 2 // (1 << mantissa) * (1 << mantissa)
    least_normal = 1 << mantissa
    positive = [0, 1, 2, least_normal - 1, least_normal, one - 1, one, one + 1, infinity - 1, infinity]
    positive += [
        infinity + 1,
        nan_bits(name) - 1,
        nan_bits(name),
        nan_bits(name) + 1,
        infinity + least_normal - 1,
    ]
    sign = infinity + least_normal
    return np.array([*positive, *(bits + sign for bits in positive)], bits_type(name))


def sample(dtype: DType, length: int, seed: int) -> Array:
    """Return random bits with a good share of ordinary numbers and of special values."""
    rng = np.random.default_rng([seed, dtype.code, length])
    if dtype.kind is Kind.BOOL:
        return rng.integers(0, 2, length).astype(np.bool_)
    raw = rng.integers(0, 256, length * dtype.itemsize, np.uint8)
    if dtype.kind is Kind.INTEGER:
        ints = raw.view(dtype.storage)
        info = np.iinfo(dtype.storage)
        edges = np.array([info.min, info.max, 0, 1, 2], dtype.storage)
        return np.where(rng.random(length) < 0.4, rng.choice(edges, length), ints)
    name = COMPONENT[dtype.name]
    bits = raw.view(bits_type(name))
    ordinary = (rng.standard_normal(len(bits)) * 100).astype(numpy_type(name)).view(bits.dtype)
    which = rng.random(len(bits))
    bits = np.where(
        which < 0.3, rng.choice(special_bits(name), len(bits)), np.where(which < 0.6, ordinary, bits)
    )
    return bits.view(dtype.storage)


def at_offset(x: Array, offset: int) -> Array:
    """Copy x to memory that starts `offset` bytes after the start of a cache line."""
    memory = np.empty(x.nbytes + 64 + offset, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    moved = memory[start : start + x.nbytes].view(x.dtype)
    moved[:] = x
    return moved


def assert_same_bits(got: Array, want: Array) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.tobytes() == want.tobytes():
        return
    got_bits, want_bits = (np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in (got, want))
    at = int(np.flatnonzero((got_bits != want_bits).any(axis=1))[0])
    raise AssertionError(
        f"element {at} of {len(got)}: got {got[at]} ({got_bits[at, ::-1].tobytes().hex()}), "
        f"want {want[at]} ({want_bits[at, ::-1].tobytes().hex()})"
    )
