"""Checks of what users pass to collectives: whatever is refused here is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from unisono.comm.dispatch import check_order
from unisono.comm.point_to_point import receivable
from unisono.core import buffers
from unisono.core.buffers import Array
from unisono.core.dtypes import DType
from unisono.core.ops import ReduceOp
from unisono.errors import UsageError
from unisono.plans import algorithms, entry_of

__all__ = [
    "by_rank",
    "check_algorithm",
    "check_reduction",
    "checked_counts",
    "checked_out",
    "is_slot",
    "no_mean",
    "parts_by_rank",
    "rows",
]


def by_rank(x: Any, what: str, size: int) -> Array:
    """An array whose leading axis is the rank."""
    array = buffers.view(x, what)
    if not array.shape or array.shape[0] != size:
        raise UsageError(
            f"{what} has shape {array.shape}; allowed: a leading axis of {size}, one per rank",
            next_step=f"give it that axis, as by {what}.reshape({size}, -1), or use a verb for uneven parts",
        )
    return array


def parts_by_rank(parts: Any, size: int) -> list[Array]:
    """Arrays of which each rank gets one: they may differ along axis 0 only."""
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence) or len(parts) != size:
        raise UsageError(
            f"parts must be a list of length {size}: one array per rank",
            next_step="pass a list of that many arrays, empty ones too",
        )
    arrays = [rows(part, f"parts[{i}]") for i, part in enumerate(parts)]
    if len({(a.dtype.name, a.shape[1:]) for a in arrays}) > 1:
        raise UsageError("parts differ in dtype or in shape beyond axis 0; allowed: the same for all ranks")
    return arrays


def checked_counts(array: Array, counts: Sequence[int], size: int) -> tuple[int, ...]:
    """The lengths of the parts into which axis 0 is cut, one for each rank."""
    try:
        lengths = tuple(index(n) for n in counts)
    except TypeError:
        raise UsageError(f"counts={counts!r}; allowed: a list of {size} lengths") from None
    total = array.shape[0] if array.shape else None
    if len(lengths) != size or any(n < 0 for n in lengths) or sum(lengths) != total:
        raise UsageError(
            f"counts={list(lengths)} do not cut axis 0 of x, shape {array.shape}; allowed: {size} "
            f"lengths >= 0 that add up to {total}"
        )
    return lengths


def checked_out(out: Any, array: Array, shape: tuple[int, ...], *, may_share: bool = False) -> Array:
    """The memory that a user gave for a result."""
    target = receivable(out, "out")
    if target.dtype is not array.dtype or target.shape != shape:
        raise UsageError(
            f"out is {target.dtype} of shape {target.shape}; allowed: {array.dtype} of shape {shape}"
        )
    if not may_share and target.overlaps(array):
        raise UsageError("out overlaps x; allowed: separate memory")
    return target


def is_slot(part: Array, whole: Array, rank: int) -> bool:
    """Whether `part` is exactly the part of `whole` that belongs to a rank."""
    return (
        part.dtype is whole.dtype
        and part.shape == whole.shape[1:]
        and part.flat.ctypes.data == whole.flat.ctypes.data + rank * part.flat.nbytes
    )


def rows(x: Any, what: str) -> Array:
    """An array that can differ in length from those of other ranks."""
    array = buffers.view(x, what)
    if not array.shape:
        raise UsageError(f"{what} has no axis 0; allowed: arrays of one dimension or more")
    return array


def check_reduction(collective: str, op: ReduceOp, dtype: DType, algorithm: str, reproducible: bool) -> None:
    """Refuse a reduction that is not defined for the type, or an algorithm that does not keep its order."""
    op.check(dtype)
    check_algorithm(collective, algorithm)
    if algorithm != "auto":
        check_order(collective, op, algorithm, reproducible)


def no_mean(operation: str) -> UsageError:
    """The error of a scan with op "mean"."""
    return UsageError(
        f"{operation} has no mean: the contributions of a prefix differ in number; allowed: sum",
        next_step='op="sum", and divide by the number of ranks in the prefix',
    )


def check_algorithm(collective: str, algorithm: str, *, is_uneven: bool = False) -> None:
    """Refuse an algorithm that the collective does not have."""
    if algorithm == "auto":
        return
    fit = [n for n in algorithms(collective) if not is_uneven or entry_of(collective, n).takes_uneven]
    if algorithm not in fit:
        kind = f"an uneven {collective}" if is_uneven else collective
        raise UsageError(
            f"algorithm={algorithm!r} is unknown for {kind}; allowed: {', '.join(['auto', *fit])}"
        )
