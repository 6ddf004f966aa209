"""The arithmetic of reductions, on flat contiguous arrays.

An array is read as bits of `dtype`, whatever NumPy type it has: bfloat16 is stored as uint16, and a view of a
byte buffer may be unaligned. Built-in operations release the GIL unless the arrays are small.
native/kernels/kernels.hpp defines their results for NaN, zeros and overflow.
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

    dst and src have equal length, a whole number of the operation's items, and are the same memory or do not
    overlap. A user's function gets both arrays as flat elements, read-only, bfloat16 as float32, and must not
    keep them after the call.

    Raises:
        ValueError: a built-in operation got other lengths or overlapping memory; nothing was written.
        UsageError: a user's function returned a wrong shape or type; dst is unchanged, as it is if the
            function raises.
    """
    if op.code is None:
        _reduce_by_function(dst, src, op, dtype.element, left)
    elif left:
        _native.reduce(dst, src, dst, dtype.code, op.code)
    else:
        _native.reduce(dst, dst, src, dtype.code, op.code)


def divide(x: Array, n: int, dtype: DType) -> None:
    """Divide every element by `n` in place, which turns a sum into a mean. 16-bit floats use float32."""
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
    if op.width > 1 and result.shape == (mine.size // op.width, op.width):
        result = result.reshape(-1)
    if result.shape != mine.shape:
        raise UsageError(
            f"op {op} returned shape {result.shape} for two arrays of shape {mine.shape}",
            next_step="return one array of the same shape",
        )
    # Otherwise a float result for integers would silently lose its fraction.
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
