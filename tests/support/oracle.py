"""The oracle: expected results of all collectives, computed by NumPy alone, and inputs that reveal mistakes.

Knows element types, operations and the promised rounding. Does not import unisono's tables: they are written
down again from DESIGN.md, so that a mistake in the code is not repeated here.

Inputs differ by rank and by index. For reductions they are chosen so that every order of the operands gives
the same bits (integers wrap; floats hold small whole numbers and powers of two), so results are compared
exactly. Where the order matters, `canonical` gives the result of the reproducible order.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

import unisono as uni

Array = np.ndarray[Any, Any]

# The ranks of a test ask for the same arrays at about the same time, and never later; the arrays may be long.
KEPT_MAX = 32

BOOLS = ("bool",)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
COMPLEXES = ("complex64", "complex128")
DTYPES = (*BOOLS, *INTEGERS, *FLOATS, *COMPLEXES)

_BITS = ("band", "bor", "bxor", "land", "lor", "lxor")
OPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BOOLS, ("min", "max", *_BITS)),
    **dict.fromkeys(INTEGERS, ("sum", "prod", "min", "max", *_BITS)),
    **dict.fromkeys(FLOATS, ("sum", "prod", "min", "max", "mean")),
    **dict.fromkeys(COMPLEXES, ("sum", "prod", "mean")),
}
ALL_OPS = ("sum", "prod", "min", "max", "mean", *_BITS)
PAIRS = [(name, op) for name in DTYPES for op in OPS[name]]
PREFIX_PAIRS = [(name, op) for name, op in PAIRS if op != "mean"]


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype with this name; bfloat16 is from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# -- inputs -----------------------------------------------------------------------------------------------


def rng(*seed: object) -> np.random.Generator:
    """A random generator; equal words give equal seeds."""
    return np.random.default_rng([zlib.crc32(repr(part).encode()) for part in seed])


@lru_cache(maxsize=KEPT_MAX)
def moved(name: str, shape: Any, *seed: object) -> Array:
    """Arbitrary bits, NaN with payloads included: moved data must arrive unchanged. Read-only."""
    kind = dtype_of(name)
    count = int(np.prod(shape, dtype=np.int64))
    if name == "bool":
        return _frozen(rng(*seed).integers(0, 2, count).astype(bool).reshape(shape))
    raw = rng(*seed).bytes(count * kind.itemsize)
    return np.frombuffer(raw, kind).reshape(shape)


@lru_cache(maxsize=KEPT_MAX)
def operand(name: str, op: str, shape: Any, rank: int, size: int, *seed: object) -> Array:
    """A rank's input to a reduction whose result does not depend on the operands' order. Read-only."""
    random = rng(name, op, rank, *seed)
    kind = dtype_of(name)
    count = int(np.prod(shape, dtype=np.int64))
    if name in BOOLS:
        flat = random.integers(0, 2, count).astype(bool)
    elif name in INTEGERS:
        info = np.iinfo(kind)
        flat = random.integers(info.min, info.max, count, dtype=kind, endpoint=True)
        if op == "prod":
            flat |= kind.type(1)  # a product of odd numbers is never 0
        if op in ("land", "lor", "lxor"):
            flat *= random.integers(0, 2, count).astype(kind)
        if op in ("band", "bor"):  # else over many ranks all bits are 0, or all are 1
            sparse = random.integers(info.min, info.max, count, dtype=kind, endpoint=True)
            flat = flat | sparse if op == "band" else flat & sparse
    else:
        flat = _exact(random, op, count, rank, size, name in COMPLEXES).astype(kind)
    return _frozen(flat.reshape(shape))


def operands(name: str, op: str, shape: Any, size: int, *seed: object) -> list[Array]:
    """The contributions of all ranks."""
    return [operand(name, op, shape, rank, size, *seed) for rank in range(size)]


@lru_cache(maxsize=KEPT_MAX)
def result(name: str, op: str, shape: Any, size: int, *seed: object) -> Array:
    """The result of a reduction of `operands`."""
    return _frozen(reduced(op, operands(name, op, shape, size, *seed)))


def ramp(rank: int, count: int = 1021) -> Array:
    """A rank's numbers, which differ by rank and index."""
    return np.arange(count) * 3.0 + rank


def summed(size: int, count: int = 1021) -> Array:
    """The sum of the ramps of all ranks."""
    return np.sum([ramp(rank, count) for rank in range(size)], axis=0)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _exact(random: np.random.Generator, op: str, count: int, rank: int, size: int, is_complex: bool) -> Array:
    """Values whose sums and products fit the 8 bits of bfloat16's significand in any order."""
    if op in ("sum", "mean"):
        high = max(1, 128 // size)
        real = random.integers(-high, high, count, endpoint=True).astype(np.float64)
        return real + 1j * random.integers(-high, high, count, endpoint=True) if is_complex else real
    if op == "prod":
        exponents = random.integers(-1, 1, count, endpoint=True)
        if is_complex:
            # No power of 2 + i lies on an axis, so neither part is a zero, whose sign would depend on the
            # order.
            turns = np.array([1, 1j, -1, -1j])[random.integers(0, 4, count)]
            return 2.0**exponents * turns * (2 + 1j)
        # One rank per index has a factor that is no power of two: a sum that leaves this rank out differs.
        odd = (np.arange(count) + rank) % size == 0
        signs = random.choice([-1.0, 1.0], count)
        return 2.0**exponents * signs * np.where(odd, 3.0, 1.0)
    return random.standard_normal(count) * 100


# -- reductions -------------------------------------------------------------------------------------------

UFUNCS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


def combined(op: str, left: Array, right: Array) -> Array:
    """One step of a reduction with the rounding of the type: 16-bit floats are computed in float32."""
    kind = left.dtype
    with np.errstate(all="ignore"):
        if kind.itemsize == 2 and kind.name in HALVES:
            wide: Array = np.asarray(UFUNCS[op](left.astype(np.float32), right.astype(np.float32)))
            return wide.astype(kind)
        if kind.kind == "c" and op == "prod":
            # Real and imaginary parts separately: NumPy's own product uses fused multiply-add where the CPU
            # has it.
            a, b, c, d = left.real, left.imag, right.real, right.imag
            parts = np.stack([a * c - b * d, a * d + b * c], axis=-1)
            return parts.view(kind).reshape(left.shape)
        return np.asarray(UFUNCS[op](left, right)).astype(kind)


def reduced(op: str, contributions: Sequence[Array]) -> Array:
    """All contributions combined, one after the other."""
    return _mean_of(op, contributions, _left_fold)


def canonical(op: str, contributions: Sequence[Array]) -> Array:
    """All contributions combined along the canonical tree: the reproducible bits."""
    return _mean_of(op, contributions, _tree)


def _left_fold(op: str, xs: Sequence[Array]) -> Array:
    total = xs[0].copy()
    for x in xs[1:]:
        total = combined(op, total, x)
    return total


def _tree(op: str, xs: Sequence[Array]) -> Array:
    return canonical_fold(lambda left, right: combined(op, left, right), xs)


def _mean_of(op: str, xs: Sequence[Array], fold: Callable[[str, Sequence[Array]], Array]) -> Array:
    if op != "mean":
        return fold(op, xs)
    if len(xs) == 1:
        return xs[0].copy()
    kind = xs[0].dtype
    wide = [x.astype(np.float32) if kind.name in HALVES else x for x in xs]
    total = fold("sum", wide)
    with np.errstate(all="ignore"):
        if total.dtype.kind == "c":
            # Real and imaginary parts separately: NumPy's complex division multiplies by a rounded
            # reciprocal.
            parts = total.reshape(-1).view(total.real.dtype)
            parts /= parts.dtype.type(len(xs))
        else:
            total = total / total.dtype.type(len(xs))
        return total.astype(kind)


def located(op: str, contributions: Sequence[Array]) -> Array:
    """The result of maxloc or minloc for rows (value, index): NaN wins; of equal values the lower index."""
    if len(contributions) == 1:
        return contributions[0].copy()
    rows = np.stack([x.reshape(-1, 2) for x in contributions])
    exact = np.float64 if rows.dtype.name in FLOATS else object  # both types hold every value
    values, indices = rows[..., 0].astype(exact), rows[..., 1].astype(exact)
    best = values.max(axis=0) if op == "maxloc" else values.min(axis=0)
    wins = (values == best) | ((values != values) & (best != best))
    highest = np.inf if exact is np.float64 else np.iinfo(rows.dtype).max
    index = np.where(wins, indices, highest).min(axis=0)
    return np.stack([best, index], axis=-1).astype(rows.dtype).reshape(contributions[0].shape)


def canonical_fold(fn: Callable[[Array, Array], Array], xs: Sequence[Array]) -> Array:
    """All contributions combined by a function along the canonical tree."""
    if len(xs) == 1:
        return xs[0].copy()
    middle = 1 << (len(xs) - 1).bit_length() - 1
    return fn(canonical_fold(fn, xs[:middle]), canonical_fold(fn, xs[middle:]))


def identity(name: str, op: str) -> Any:
    """The result of exscan on rank 0."""
    kind = dtype_of(name)
    if op in ("sum", "bor", "bxor", "lor", "lxor"):
        return kind.type(0)
    if op in ("prod", "land"):
        return kind.type(1)
    if op == "band":
        return kind.type(True) if name == "bool" else np.invert(kind.type(0))
    largest = op == "min"
    if name == "bool":
        return kind.type(largest)
    if name in INTEGERS:
        return kind.type(np.iinfo(kind).max if largest else np.iinfo(kind).min)
    return kind.type(np.inf if largest else -np.inf)


def prefix(op: str, contributions: Sequence[Array], rank: int, name: str, *, exclusive: bool) -> Array:
    """The result of scan or exscan on a rank."""
    if exclusive and rank == 0:
        return np.full_like(contributions[0], identity(name, op))
    return reduced(op, contributions[: rank if exclusive else rank + 1])


# -- arrays of every family -------------------------------------------------------------------------------


def in_family(kind: str, array: Array) -> Any:
    """The array in a form that a user may pass: a NumPy array, a torch tensor, or raw memory with a type."""
    if kind == "numpy":
        return array
    name = array.dtype.name
    if kind == "torch":
        import torch

        if name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    assert kind == "typed"
    return uni.typed(array.view(f"u{array.dtype.itemsize}") if array.itemsize <= 8 else array, name)


def as_numpy(x: Any) -> Array:
    """The result of a verb, in any of these forms, as a NumPy array."""
    if isinstance(x, uni.Typed):
        return x.data.view(dtype_of(x.dtype.name))
    if type(x).__module__ == "torch":
        import torch

        if x.dtype is torch.bfloat16:
            return x.contiguous().view(torch.int16).numpy().view(dtype_of("bfloat16"))
        return x.numpy()
    return np.asarray(x)


# -- comparing --------------------------------------------------------------------------------------------


class Notes(list[str]):
    """The wrong results that one rank found. Collecting them instead of raising keeps the ranks in step."""

    def expect(self, got: Any, want: Any, *label: object) -> None:
        """Note a difference in type, shape or any bit."""
        difference = differs(got, want)
        if difference is not None:
            self.append(f"{' '.join(map(str, label))}: {difference}")

    def check(self, holds: bool, *label: object) -> None:
        """Note that something does not hold."""
        if not holds:
            self.append(" ".join(map(str, label)))


def differs(got: Any, want: Any) -> str | None:
    """How two values differ, down to the bit; None if they do not."""
    if want is None or got is None:
        return None if got is want else f"got {got!r}, not {want!r}"
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return f"got {got!r}, not a list of {len(want)}"
        pairs = enumerate(zip(got, want, strict=True))
        return next((f"[{i}] {d}" for i, (g, w) in pairs if (d := differs(g, w))), None)
    mine, theirs = as_numpy(got), np.asarray(want)
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"got {mine.dtype}{list(mine.shape)}, not {theirs.dtype}{list(theirs.shape)}"
    if mine.tobytes() == theirs.tobytes():
        return None
    width = mine.dtype.itemsize
    bits = [np.frombuffer(a.tobytes(), f"V{width}") for a in (mine, theirs)]
    wrong = np.flatnonzero(bits[0] != bits[1])
    first = int(wrong[0])
    return (
        f"{wrong.size} of {mine.size} elements wrong, first at {first}: "
        f"got {mine.reshape(-1)[first]!r}, not {theirs.reshape(-1)[first]!r}"
    )


def same(one: Any, other: Any) -> bool:
    """Whether two objects have the same types and equal values, the items of dicts in the same order."""
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray():
            return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one)
        )
    return bool(one == other)


def counts_for(size: int, itemsize: int, segment_bytes: int) -> list[int]:
    """Lengths on both sides of every threshold: empty, per rank, per segment, per segment of each rank."""
    segment = max(1, segment_bytes // itemsize)
    edges = [size, 3 * size, segment, size * segment]
    near = {n + d for n in edges for d in (-1, 0, 1)}
    return sorted({0, 1, 2, 13} | near)
