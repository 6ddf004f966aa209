"""Cases with values at the edge of their types: overflow, NaN, signed zeros, infinities, subnormals.

Results are the same on every backend: integers wrap around, min and max propagate NaN, and -0.0 is smaller
than 0.0. A backend that passes collectives on to a library must not do so where the library differs.

All values are chosen so that the result does not depend on the order in which contributions are combined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from unisono.core.buffers import Typed, typed
from unisono.core.dtypes import BFLOAT16, DTYPES, DType, Kind
from unisono.core.kernels import narrow, widen
from unisono.core.ops import as_op
from unisono.core.ops import op as op_of
from unisono.errors import UsageError
from unisono.testing.case import Suite
from unisono.testing.case_rank import CaseRank

__all__ = ["SUITE"]

SUITE = Suite()

Array = np.ndarray[Any, Any]

# Neither is a multiple of a SIMD width: 31 elements are eager in every type, 1033 leave a remainder after
# many full vectors.
_COUNTS: Final = (31, 1033)


@SUITE.case(size=3)
def all_reduce_keeps_special_values(me: CaseRank) -> None:
    """all_reduce of overflow, NaN, signed zeros and infinities is the same on every rank and backend."""
    with me.world() as world:
        results = []
        for dtype, op in _pairs():
            for count in _COUNTS:
                every = [_special(dtype, count, rank) for rank in range(world.size)]
                got = world.all_reduce(_given(every[world.rank], dtype), op)
                _check(me, got, _reduced(every, op, dtype), f"all_reduce of {count} {dtype} by {op}")
                results.append(_storage(got).view(np.uint8))
        bits = world.all_gather(np.concatenate(results))
        me.check(bool((bits == bits[0]).all()), "all ranks have the same bits", "they differ, NaN included")


@SUITE.case(size=3)
def the_other_reductions_keep_special_values(me: CaseRank) -> None:
    """reduce, scan, exscan and reduce_scatter treat special values as all_reduce does."""
    with me.world() as world:
        size, rank, count = world.size, world.rank, _COUNTS[-1]
        for root, (dtype, op) in enumerate(_pairs()):
            if op not in ("sum", "prod", "min", "max", "mean"):
                continue  # bitwise operations have no special values
            rows = [_special(dtype, count * size, peer).reshape(size, count) for peer in range(size)]
            every = [row[0] for row in rows]
            what = f"of {count} {dtype} by {op}"
            got = world.reduce(_given(every[rank], dtype), root % size, op)
            if rank == root % size:
                _check(me, got, _reduced(every, op, dtype), f"reduce {what}")
            parts = [row[rank] for row in rows]
            got = world.reduce_scatter(_given(rows[rank], dtype), op)
            _check(me, got, _reduced(parts, op, dtype), f"reduce_scatter {what}")
            if op == "mean":
                continue
            got = world.scan(_given(every[rank], dtype), op)
            _check(me, got, _reduced(every[: rank + 1], op, dtype), f"scan {what}")
            got = world.exscan(_given(every[rank], dtype), op)
            if rank:  # rank 0 has no predecessor
                _check(me, got, _reduced(every[:rank], op, dtype), f"exscan {what}")


@SUITE.case(size=3)
def items_of_several_elements_stay_together(me: CaseRank) -> None:
    """maxloc, minloc and a user's operation on rows: no backend, and no library behind one, cuts a row."""
    with me.world() as world:
        size, rank = world.size, world.rank
        for dtype in DTYPES.values():
            if dtype.kind not in (Kind.INTEGER, Kind.FLOAT):
                continue
            for op in ("maxloc", "minloc"):
                for count in _COUNTS:
                    every = [_located(dtype, count, peer) for peer in range(size)]
                    what = f"of {count} {dtype} by {op}"
                    got = world.all_reduce(_given(every[rank], dtype), op)
                    _check(me, got, _best(every, op), f"all_reduce {what}")
                    got = world.scan(_given(every[rank], dtype), op)
                    _check(me, got, _best(every[: rank + 1], op), f"scan {what}")
        matrices = [np.arange(4 * _COUNTS[-1]).reshape(-1, 2, 2) * (peer + 2) + peer for peer in range(size)]
        product = op_of(_matrix_product, commutative=False, width=4, name="matrix product")
        got = world.all_reduce(matrices[rank].reshape(-1, 4).copy(), product)
        wanted = matrices[0]
        for matrix in matrices[1:]:
            wanted = wanted @ matrix
        me.check_array(got, wanted.reshape(-1, 4), "all_reduce of 2 x 2 matrices in the order of ranks")


def _located(dtype: DType, count: int, rank: int) -> Array:
    """A rank's rows (value, index): many values are equal, some are NaN."""
    row = np.arange(count)
    kind = _REAL.get(dtype.name, dtype.storage)
    values = ((3 * row + 5 * rank) % 7).astype(kind)
    if dtype.kind is Kind.FLOAT:
        values[(row + rank) % 11 == 3] = np.nan
    return np.stack([values, ((row + 41 * rank) % 97).astype(kind)], axis=1)


def _best(every: list[Array], op: str) -> Array:
    """The expected rows: NaN wins, and of equal values the lower index."""
    rows = np.stack(every)
    values, indices = rows[..., 0], rows[..., 1]
    best = values.max(axis=0) if op == "maxloc" else values.min(axis=0)
    wins = (values == best) | ((values != values) & (best != best))
    return np.stack([best, np.where(wins, indices, indices.max()).min(axis=0)], axis=1)


def _matrix_product(left: Array, right: Array) -> Array:
    return (left.reshape(-1, 2, 2) @ right.reshape(-1, 2, 2)).reshape(-1, 4)


def _pairs() -> list[tuple[DType, str]]:
    """Every type with every operation that it has, but not products whose result depends on the order."""
    pairs = []
    for dtype in DTYPES.values():
        for op in (*_COMBINE, "mean"):
            try:
                as_op(op).check(dtype)
            except UsageError:
                continue
            if (dtype.kind, op) != (Kind.COMPLEX, "prod"):
                pairs.append((dtype, op))
    return pairs


def _special(dtype: DType, count: int, rank: int) -> Array:
    """A rank's contribution in a type that NumPy computes with: 16-bit floats as float32."""
    rng = np.random.default_rng([dtype.code, count, rank])
    if dtype.kind is Kind.BOOL:
        return rng.integers(0, 2, count).astype(bool)
    if dtype.kind is Kind.INTEGER:
        info = np.iinfo(dtype.storage)
        some = rng.integers(info.min, info.max, count, dtype.storage, endpoint=True)
        edges = np.array([info.min, info.max, info.max - 1, 1], dtype.storage)
        return np.where(rng.integers(0, 2, count) == 0, rng.choice(edges, count), some)
    kind = _REAL[dtype.name]
    real = np.finfo(kind)
    largest, smallest = _LIMITS.get(dtype.name) or (real.max, real.smallest_subnormal)
    parts = count * (2 if dtype.kind is Kind.COMPLEX else 1)
    index = np.arange(parts)
    any_order = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0]), parts)
    overflow = np.where(index % 2, largest, -largest)  # of one sign on all ranks
    tiny = rng.choice(np.array([smallest, -smallest, 0.0, -0.0]), parts)
    numbers: Array = np.select([index % 5 == 3, index % 5 == 4], [overflow, tiny], any_order).astype(kind)
    return numbers.view(dtype.storage) if dtype.kind is Kind.COMPLEX else numbers


def _reduced(every: list[Array], op: str, dtype: DType) -> Array:
    """The expected result, combined in rank order. 16-bit floats are rounded at every step, a mean once."""
    total = every[0]
    with np.errstate(all="ignore"):
        for other in every[1:]:
            total = _COMBINE["sum" if op == "mean" else op](total, other).astype(total.dtype)
            total = total if op == "mean" else _rounded(total, dtype)
        if op == "mean":
            real = total.view(_REAL[dtype.name])
            total = _rounded((real / real.dtype.type(len(every))).view(total.dtype), dtype)
    return total


def _minimum(a: Array, b: Array) -> Array:
    """NumPy's minimum, but -0.0 is smaller than 0.0, where NumPy returns either."""
    least = np.minimum(a, b)
    return np.where((a == 0) & (b == 0) & np.signbit(a), a, least) if a.dtype.kind == "f" else least


def _maximum(a: Array, b: Array) -> Array:
    return -_minimum(-a, -b) if a.dtype.kind == "f" else np.maximum(a, b)


_COMBINE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": _minimum,
    "max": _maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}
# The type in which a float or complex type is computed and compared.
_REAL: Final[dict[str, Any]] = {
    "float16": np.float32,
    "bfloat16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.float32,
    "complex128": np.float64,
}
# The largest and the smallest positive number of types that are computed in another type.
_LIMITS: Final = {"float16": (65504.0, 2.0**-24), "bfloat16": (255 * 2.0**120, 2.0**-133)}


def _rounded(numbers: Array, dtype: DType) -> Array:
    """Numbers, rounded to what their type can hold."""
    return widen(_bits(numbers, dtype), dtype) if dtype.is_half else numbers


def _bits(numbers: Array, dtype: DType) -> Array:
    if not dtype.is_half:
        return numbers
    bits = np.empty(numbers.size, dtype.storage)
    narrow(np.ascontiguousarray(numbers.reshape(-1)), bits, dtype)
    return bits.reshape(numbers.shape)


def _given(numbers: Array, dtype: DType) -> Any:
    """The contribution as a user passes it, in memory that is not aligned to a SIMD vector."""
    bits = _bits(numbers, dtype)
    memory = np.empty(bits.size + 1, dtype.storage)[1:].reshape(bits.shape)
    memory[...] = bits
    return typed(memory, dtype.name) if dtype is BFLOAT16 else memory


def _storage(got: Any) -> Array:
    return got.data if isinstance(got, Typed) else got


def _check(me: CaseRank, got: Any, expected: Array, what: str) -> None:
    """Compare bit by bit; all NaNs are equal."""
    bits = _storage(got)
    dtype = got.dtype if isinstance(got, Typed) else DTYPES[bits.dtype.name]
    held = widen(bits, dtype).reshape(bits.shape) if dtype.is_half else bits
    if held.dtype.kind in "fc":
        real = held.real.dtype
        held, expected = held.view(real).copy(), expected.view(real).copy()
        held[np.isnan(held)] = expected[np.isnan(expected)] = np.nan
    me.check_array(held, expected, what)
