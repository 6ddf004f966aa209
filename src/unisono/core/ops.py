"""Reduce operations: their names, identities and allowed element types. kernels.py computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np

from unisono.core.dtypes import BFLOAT16, DType, Kind
from unisono.errors import UsageError

__all__ = ["DIVIDED_SUM", "OP_NAMES", "SCALED_SUM", "OpCode", "OpLike", "ReduceOp", "as_op", "op"]


class OpCode(IntEnum):
    """The numbers of the operations in the native kernels."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    LAND = 7
    LOR = 8
    LXOR = 9
    MAXLOC = 10
    MINLOC = 11


_LOCATIONS = ("maxloc", "minloc")
_BITWISE = ("band", "bor", "bxor", "land", "lor", "lxor")
_ALLOWED: Final[dict[Kind, tuple[str, ...]]] = {
    Kind.BOOL: ("min", "max", *_BITWISE),
    Kind.INTEGER: ("sum", "prod", "min", "max", *_BITWISE, *_LOCATIONS),
    Kind.FLOAT: ("sum", "prod", "min", "max", "mean", *_LOCATIONS),
    Kind.COMPLEX: ("sum", "prod", "mean"),
}


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """An operation that combines two contributions to one.

    A built-in operation has a `code` for the kernels; mean is a sum that is divided at the end. A user's
    operation has `fn(left, right) -> array`, where left comes from lower ranks. An *item* of the operation is
    `width` neighbouring elements, which are never separated: maxloc and minloc take pairs (value, index).
    """

    name: str
    code: OpCode | None = None
    fn: Callable[[Any, Any], Any] | None = None
    commutative: bool = True
    identity: Any = None
    width: int = 1

    @property
    def is_mean(self) -> bool:
        """Whether the sum is divided by the number of contributions at the end."""
        return self.fn is None and self.name == "mean"

    def check(self, dtype: DType) -> None:
        """Refuse an element type that the operation is not defined for.

        Raises:
            UsageError: the text lists the operations that are allowed for the type.
        """
        name = "sum" if self.name in _FINISHED_ABOVE else self.name
        if self.fn is None and name not in _ALLOWED[dtype.kind]:
            raise UsageError(
                f"op {self.name!r} is not defined for {dtype}; allowed for {dtype.kind.value} types: "
                f"{', '.join(_ALLOWED[dtype.kind])}"
            )

    def check_shape(self, shape: tuple[int, ...], parts: Sequence[int] = ()) -> None:
        """Refuse an array whose shape, or `parts` (elements of each), would separate an item.

        Raises:
            UsageError: the last axis does not hold whole items, or is not the pair of maxloc and minloc.
        """
        if self.width == 1:
            return
        if self.fn is None:
            is_whole, wanted = shape[-1:] == (self.width,), f"a last axis of {self.width}, (value, index)"
        else:
            is_whole = bool(shape) and shape[-1] % self.width == 0
            wanted = f"a last axis whose length is a multiple of {self.width}, the width of the op"
        if not is_whole:
            raise UsageError(f"op {self.name!r} on an array of shape {shape}; allowed: {wanted}")
        cut = next((part for part in parts if part % self.width), None)
        if cut is not None:
            raise UsageError(
                f"op {self.name!r} on a part of {cut} elements; allowed: multiples of its width, {self.width}"
            )

    def identity_for(self, dtype: DType) -> Any:
        """Return the identity element, which exscan gives to rank 0: one number, or one for each of `width`.

        Raises:
            UsageError: a user's operation has none, or the type cannot hold it.
        """
        if self.fn is not None:
            if self.identity is None:
                raise UsageError(
                    f"exscan needs an identity for op {self.name!r}, which is the result of rank 0",
                    next_step="uni.op(fn, identity=...)",
                )
            return self._checked_identity(dtype)
        return _IDENTITY[self.name](dtype)

    def shown_identity(self, dtype: DType) -> str:
        """The identity as text, converted to the type: 0 and 0.0 are equal for float32, and read alike."""
        held = self._held(self.identity_for(dtype), dtype)
        assert held is not None, "identity_for has checked it"
        # One number for every element of an item reads like as many equal ones.
        return repr(np.broadcast_to(held, self.width).tolist() if self.width > 1 else held.item())

    def _held(self, value: Any, dtype: DType) -> np.ndarray[Any, Any] | None:
        try:
            return np.array(value, np.float32 if dtype is BFLOAT16 else dtype.storage)
        except (TypeError, ValueError, OverflowError):
            return None

    def _checked_identity(self, dtype: DType) -> Any:
        """The user's identity, or a UsageError if the type cannot hold it."""
        held = self._held(self.identity, dtype)
        is_exact_kind = dtype.kind in (Kind.BOOL, Kind.INTEGER)
        shapes: list[tuple[int, ...]] = [()] if self.width == 1 else [(), (self.width,)]
        if (
            held is None
            or held.shape not in shapes
            or (is_exact_kind and not np.array_equal(held, self.identity))
        ):
            raise UsageError(
                f"identity={self.identity!r} of op {self.name!r} is not a value of {dtype}; "
                f"allowed: one number{f', or {self.width} of them' if self.width > 1 else ''}"
            )
        return self.identity

    def __str__(self) -> str:
        return self.name


def _extreme(dtype: DType, largest: bool) -> Any:
    if dtype.kind is Kind.BOOL:
        return largest
    if dtype.kind is Kind.INTEGER:
        info = np.iinfo(dtype.storage)
        return info.max if largest else info.min
    return float("inf") if largest else float("-inf")


def _all_bits(dtype: DType) -> Any:
    return (
        True if dtype.kind is Kind.BOOL else (-1 if dtype.name.startswith("int") else _extreme(dtype, True))
    )


_IDENTITY: Final[dict[str, Callable[[DType], Any]]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "min": lambda dtype: _extreme(dtype, largest=True),
    "max": lambda dtype: _extreme(dtype, largest=False),
    "band": _all_bits,
    "bor": lambda dtype: 0,
    "bxor": lambda dtype: 0,
    "land": lambda dtype: 1,
    "lor": lambda dtype: 0,
    "lxor": lambda dtype: 0,
    # The index that loses to every other one.
    "maxloc": lambda dtype: (_extreme(dtype, largest=False), _extreme(dtype, largest=True)),
    "minloc": lambda dtype: (_extreme(dtype, largest=True), _extreme(dtype, largest=True)),
}

_BUILT_IN: Final[dict[str, ReduceOp]] = {
    **{
        name: ReduceOp(name, code, width=2 if name in _LOCATIONS else 1)
        for code in OpCode
        for name in [code.name.lower()]
    },
    "mean": ReduceOp("mean", OpCode.SUM),
}

# Sums that a layer above begins or finishes in its own way: equal here, other results there, so ranks must
# not mix them. They are passed as objects; their names are no values of `op=`.
DIVIDED_SUM: Final = ReduceOp("sum, then divided", OpCode.SUM)
SCALED_SUM: Final = ReduceOp("sum of scaled", OpCode.SUM)
_FINISHED_ABOVE: Final = {each.name: each for each in (DIVIDED_SUM, SCALED_SUM)}

# Every operation by its number in fingerprints; an op of a user has the last.
OP_NAMES: Final = (*_BUILT_IN, *_FINISHED_ABOVE, "user")

# Names in other libraries, for the hint in an error.
_OTHER_NAMES: Final = {
    "avg": "mean",
    "average": "mean",
    "add": "sum",
    "product": "prod",
    "mul": "prod",
    "minimum": "min",
    "maximum": "max",
    "and": "band",
    "or": "bor",
    "xor": "bxor",
    "argmax": "maxloc",
    "argmin": "minloc",
}

OpLike: TypeAlias = str | ReduceOp


def op(
    fn: Callable[[Any, Any], Any],
    commutative: bool = True,
    identity: Any = None,
    width: int = 1,
    name: str | None = None,
) -> ReduceOp:
    """Make a reduce operation from `fn(left, right) -> array`, which must be associative.

    `left` and `right` are read-only flat NumPy arrays of equal length, which are valid only during the call;
    left holds the contributions of lower ranks. They are parts of the arrays that the ranks gave, cut at
    multiples of `width`: an operation on whole rows gives the rows' length, and sees them again as
    `left.reshape(-1, width)`. All ranks must pass the same name, `commutative`, `width` and, in exscan,
    identity: the ranks compare them.

    Args:
        fn: the function. It may be called in any order that associativity and `commutative` allow. It returns
            an array of the same shape, or of rows of `width`.
        commutative: False keeps the order of ranks.
        identity: the result of exscan on rank 0: a number, or one for each of `width` elements.
        width: how many neighbouring elements stay together. The last axis of an array must be a multiple.
        name: the name in errors and comparisons; by default the function's qualified name.

    Raises:
        UsageError: `fn` is not callable, the width is no positive integer, or the name is that of a built-in
            operation.
    """
    if not callable(fn):
        raise UsageError(
            f"op needs a function of two arrays, not {type(fn).__name__}", next_step="uni.op(fn)"
        )
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise UsageError(f"width={width!r}; allowed: how many elements stay together, 1 or more")
    if name in OP_NAMES:
        raise UsageError(f"name={name!r} is the name of a built-in operation; allowed: any other")
    label = name if name is not None else f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__name__)}"
    return ReduceOp(label, None, fn, commutative, identity, width)


def as_op(given: OpLike) -> ReduceOp:
    """The operation for an argument `op=`: a name, or a ReduceOp.

    Raises:
        UsageError: there is no such operation; names of other libraries get a hint.
    """
    if isinstance(given, ReduceOp):
        return given
    if isinstance(given, str) and (known_op := _BUILT_IN.get(given) or _FINISHED_ABOVE.get(given)):
        return known_op
    word = str(given).rpartition(".")[2].lower()
    known = _OTHER_NAMES.get(word, word)
    raise UsageError(
        f"op {given!r} is unknown; allowed: {', '.join(_BUILT_IN)} or one made by unisono.op(fn)",
        next_step=f"op={known!r}" if known in _BUILT_IN else "choose one of these",
    )
