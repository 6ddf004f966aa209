"""The kernels of maxloc and minloc, bit for bit, against plain Python, on every instruction set."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unisono import _native
from unisono.core.dtypes import DTYPES, DType, Kind
from unisono.core.kernels import reduce_into
from unisono.core.ops import OpCode, as_op

Array = np.ndarray[Any, Any]

TYPES = [dtype for dtype in DTYPES.values() if dtype.kind in (Kind.INTEGER, Kind.FLOAT)]
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
every_op = pytest.mark.parametrize("op", ["maxloc", "minloc"])


def numpy_type(dtype: DType) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype.name == "bfloat16" else dtype.name)


def special(dtype: DType) -> list[Any]:
    """Few values, so that ties are common; the ends of the type, both zeros and two kinds of NaN."""
    if dtype.kind is Kind.INTEGER:
        info = np.iinfo(dtype.storage)
        return [info.min, info.max, 0, 1, 2]
    return [-math.inf, math.inf, -0.0, 0.0, 1.0, -2.0, math.nan, -math.nan]


def sample(dtype: DType, rows: int, seed: int) -> Array:
    chosen = np.random.default_rng([seed, rows]).integers(0, len(special(dtype)), 2 * rows)
    return np.array(special(dtype), numpy_type(dtype))[chosen].view(dtype.storage)


def oracle(a: Array, b: Array, dtype: DType, op: str) -> Array:
    """The rule of native/kernels/kernels.hpp in Python's own numbers, row by row."""
    kind = numpy_type(dtype)
    both = (x.view(kind).reshape(-1, 2).tolist() for x in (a, b))
    rows = [
        min(row, key=lambda pair: (_place(pair[0], op), _order(pair[1]))) for row in zip(*both, strict=True)
    ]
    result = np.array(rows, kind).reshape(-1)
    if dtype.kind is Kind.FLOAT:
        result[np.isnan(result.astype(np.float64))] = np.nan
    return result.view(dtype.storage)


def _order(x: float) -> tuple[Any, ...]:
    """A sort key for numbers: -0.0 is below 0.0, and NaN above all."""
    return (x != x, 0 if x != x else x, 0 if x != x else math.copysign(1, x))


def _place(value: float, op: str) -> tuple[Any, ...]:
    """A sort key with the best value first: NaN, then the largest or the smallest."""
    if value != value:
        return (0,)
    sign = -1 if op == "maxloc" else 1
    return (1, sign * value, sign * math.copysign(1, value))


@every_op
@every_type
def test_pairs_are_those_of_the_rule_at_every_length(isa: str, dtype: DType, op: str) -> None:
    for rows in (*range(20), 67, 2053):
        a, b = sample(dtype, rows, 1), sample(dtype, rows, 2)
        want = oracle(a, b, dtype, op).tobytes()
        for left in (False, True):  # the order does not change a bit
            dst, src = a.copy(), b.copy()
            reduce_into(dst, src, as_op(op), dtype, left)
            assert dst.tobytes() == want
            assert src.tobytes() == b.tobytes()
        moved = np.empty(a.nbytes + 1, np.uint8)[1:]
        moved[:] = a.view(np.uint8)
        _native.reduce(moved, moved, b, dtype.code, OpCode[op.upper()])
        assert moved.tobytes() == want


@every_op
@every_type
def test_the_bracketing_does_not_matter(isa: str, dtype: DType, op: str) -> None:
    a, b, c = (sample(dtype, 4099, seed) for seed in (3, 4, 5))
    code = OpCode[op.upper()]
    first, second = np.empty_like(a), np.empty_like(a)
    _native.reduce(first, a, b, dtype.code, code)
    _native.reduce(first, first, c, dtype.code, code)
    _native.reduce(second, b, c, dtype.code, code)
    _native.reduce(second, a, second, dtype.code, code)
    assert first.tobytes() == second.tobytes()


@every_op
@every_type
def test_an_identity_changes_nothing(dtype: DType, op: str) -> None:
    x = sample(dtype, 301, 6)
    pairs = x.view(numpy_type(dtype)).reshape(-1, 2)
    if dtype.kind is Kind.FLOAT:  # an index is a number
        pairs[:, 1][np.isnan(pairs[:, 1].astype(np.float64))] = 7
        pairs[:, 0][np.isnan(pairs[:, 0].astype(np.float64))] = np.nan
    identity = np.broadcast_to(np.array(as_op(op).identity_for(dtype), pairs.dtype), pairs.shape)
    for left in (False, True):
        dst = x.copy()
        reduce_into(
            dst, np.ascontiguousarray(identity).reshape(-1).view(dtype.storage), as_op(op), dtype, left
        )
        assert dst.tobytes() == x.tobytes()


def test_half_a_pair_is_refused() -> None:
    x = np.arange(5, dtype=np.float32)
    with pytest.raises(ValueError, match="20 bytes are not a whole number of elements of 8 bytes"):
        _native.reduce(x, x, x, DTYPES["float32"].code, OpCode.MAXLOC)
    with pytest.raises(ValueError, match="2 elements, an operand 1"):
        _native.reduce(x[:4], x[:4], x[:2].copy(), DTYPES["float32"].code, OpCode.MAXLOC)
    assert x.tolist() == [0, 1, 2, 3, 4]
