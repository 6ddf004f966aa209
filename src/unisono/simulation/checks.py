"""Argument checks that networks and faults share; each raises UsageError."""

from __future__ import annotations

import math
from typing import Any

from unisono.errors import UsageError

__all__ = ["check_amount", "check_rank", "check_step"]


def check_amount(name: str, value: Any, *, above: float | None = None, finite: bool = True) -> None:
    """Check for a number of at least 0, or above `above`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    in_range = is_number and (value >= 0 if above is None else value > above)
    if not in_range or (finite and math.isinf(value)):
        raise UsageError(f"{name}={value!r}; allowed: numbers {'>= 0' if above is None else f'> {above:g}'}")


def check_step(name: str, value: Any) -> None:
    """Check for an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r}; allowed: integers >= 1")


def check_rank(name: str, value: Any, size: int | None = None) -> None:
    """Check for a rank; with `size`, for one that exists."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < 0
        or (size is not None and value >= size)
    ):
        allowed = "integers >= 0" if size is None else f"ranks 0 to {size - 1}"
        raise UsageError(f"{name}={value!r}; allowed: {allowed}")
