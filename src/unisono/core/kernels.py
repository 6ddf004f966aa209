"""The arithmetic of reductions, on flat contiguous arrays.

Knows the native kernels and how to call a user's own function. Does not know ranks, plans or whose turn it
is.

Arrays are taken as the bits of `dtype`, whatever type they carry themselves: bfloat16 is uint16 storage, and
a view of a byte buffer at an odd offset will do. Built-in operations let go of the GIL unless the arrays are
small. What they do to NaN, zeros and overflow stands in native/kernels/kernels.hpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unisono import _native
from unisono.core.dtypes import BFLOAT16, DType
from unisono.core.ops import ReduceOp
from unisono.errors import UsageError

__all__ = ["divide", "narrow", "reduce_into", "widen"]

Array = npt.NDArray[Any]


def reduce_into(dst: Array, src: Array, op: ReduceOp, dtype: DType, left: bool = False) -> None:
    """Write op(dst, src) to `dst`, or op(src, dst) if src is the `left` operand.

    dst and src are of equal length and separate memory, or the same. A built-in refuses anything else with
    ValueError before it writes. A user's function sees both arrays read-only, bfloat16 as float32, and may
    not keep them: they are lent for the call. If it raises or returns nonsense, dst is as it was.
    """
    if op.code is None:
        _reduce_by_function(dst, src, op, dtype, left)
    elif left:
        _native.reduce(dst, src, dst, dtype.code, op.code)
    else:
        _native.reduce(dst, dst, src, dtype.code, op.code)


def divide(x: Array, n: int, dtype: DType) -> None:
    """Divide every element by `n` in place: it makes a mean of a sum. Half types go through float32."""
    _native.divide(x, n, dtype.code)


def widen(src: Array, dtype: DType) -> npt.NDArray[np.float32]:
    """Return the float32 values of float16 or bfloat16 bits."""
    wide = np.empty(src.nbytes // dtype.itemsize, np.float32)
    _native.widen(wide, src, dtype.code)
    return wide


def narrow(src: npt.NDArray[np.float32], dst: Array, dtype: DType) -> None:
    """Round float32 values to nearest even, into float16 or bfloat16 bits."""
    _native.narrow(dst, src, dtype.code)


def _reduce_by_function(dst: Array, src: Array, op: ReduceOp, dtype: DType, left: bool) -> None:
    assert op.fn is not None
    mine, other = _lend(dst, dtype), _lend(src, dtype)
    result = np.asarray(op.fn(other, mine) if left else op.fn(mine, other))
    if result.shape != mine.shape:
        raise UsageError(
            f"op {op} returned shape {result.shape} for two arrays of shape {mine.shape}",
            next_step="return one array of the same shape",
        )
    # A float for integers would lose its fraction without a word.
    if not np.can_cast(result.dtype, mine.dtype, "same_kind"):
        raise UsageError(
            f"op {op} returned {result.dtype} for two arrays of {mine.dtype}",
            next_step=f"return an array of {mine.dtype}",
        )
    if dtype == BFLOAT16:
        narrow(np.ascontiguousarray(result, np.float32), dst, dtype)
    else:
        np.copyto(dst.view(dtype.storage), result, casting="same_kind")


def _lend(x: Array, dtype: DType) -> Array:
    lent = widen(x, dtype) if dtype == BFLOAT16 else x.view(dtype.storage)
    lent.flags.writeable = False
    return lent
