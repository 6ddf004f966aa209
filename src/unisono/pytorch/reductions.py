"""torch's reduce operations as the engine's."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from unisono.core.dtypes import DTYPES, Kind
from unisono.core.ops import DIVIDED_SUM, SCALED_SUM, OpLike
from unisono.errors import UsageError

__all__ = ["OPS", "divided", "is_divided", "is_mean", "op_of", "scaled"]

_RED = ReduceOp.RedOpType
_BITS: Final = {_RED.BAND: "band", _RED.BOR: "bor", _RED.BXOR: "bxor"}
_SUMS: Final = {_RED.SUM: "sum", _RED.AVG: "mean", _RED.PRODUCT: "prod"}
_ORDER: Final = {_RED.MIN: "min", _RED.MAX: "max"}
_BY_KIND: Final[dict[Kind, dict[Any, str]]] = {
    Kind.FLOAT: {**_SUMS, **_ORDER},
    Kind.COMPLEX: _SUMS,
    Kind.INTEGER: {_RED.SUM: "sum", _RED.PRODUCT: "prod", **_ORDER, **_BITS},
    Kind.BOOL: {
        **_ORDER,
        **_BITS,
        _RED.SUM: "lor",
        _RED.PRODUCT: "land",
    },
}
_COUNT: Final = 1 + max(op.value for op in _RED.__members__.values())


def _row(kind: Kind) -> list[str | None]:
    names = {op.value: name for op, name in _BY_KIND[kind].items()}
    return [names.get(number) for number in range(_COUNT)]


# By element type and number of torch's operation; None where it is not defined, or scales first.
OPS: Final[dict[torch.dtype, list[str | None]]] = {
    getattr(torch, name): _row(dtype.kind) for name, dtype in DTYPES.items()
}
# The engine adds its real and imaginary parts.
OPS[torch.complex32] = [name if name != "prod" else None for name in OPS[torch.complex64]]
_INTEGERS: Final = frozenset(getattr(torch, n) for n, dtype in DTYPES.items() if dtype.kind is Kind.INTEGER)
_AVG: Final = _RED.AVG.value
_PREMUL_SUM: Final = _RED.PREMUL_SUM.value


def op_of(op: Any, dtype: torch.dtype) -> OpLike:
    """The engine's operation for torch's on a type.

    Raises:
        UsageError: it is not defined for the type.
    """
    number: int = op.op.value
    names = OPS.get(dtype)
    if names is None:
        raise UsageError(f"a reduction of {dtype}; allowed: {', '.join(DTYPES)}")
    if is_divided(op, dtype):
        return DIVIDED_SUM
    if number == _PREMUL_SUM and dtype is not torch.bool:
        return SCALED_SUM
    name = names[number]
    if name is None:
        allowed = ", ".join(each for each, code in _RED.__members__.items() if names[code.value] is not None)
        raise UsageError(f"ReduceOp.{op.op.name} of {dtype}; allowed: {allowed}")
    return name


def is_mean(op: Any) -> bool:
    """Whether it is a mean."""
    return bool(op.op.value == _AVG)


def is_divided(op: Any, dtype: torch.dtype) -> bool:
    """Whether the result is to be divided by the number of ranks: the mean of integers."""
    return is_mean(op) and dtype in _INTEGERS


def scaled(op: Any, tensor: torch.Tensor) -> torch.Tensor:
    """What a rank contributes: a product in new memory for PREMUL_SUM, else the tensor itself."""
    return (tensor * op.factor).to(tensor.dtype) if op.op.value == _PREMUL_SUM else tensor


def divided(tensor: torch.Tensor, size: int) -> None:
    """Divide integers by the number of ranks, in place, toward zero."""
    if tensor.dtype.is_signed:
        tensor.div_(size, rounding_mode="trunc")
    else:
        tensor.numpy()[...] //= size  # torch divides no unsigned integers but uint8
