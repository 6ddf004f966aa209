"""Element types: names, sizes, kinds and the NumPy type that stores each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np

from unisono.errors import UsageError

__all__ = ["BFLOAT16", "DTYPES", "DType", "Kind", "dtype_named"]


class Kind(Enum):
    """The kind of an element type, which decides what reduce operations are allowed."""

    BOOL = "bool"
    INTEGER = "integer"
    FLOAT = "float"
    COMPLEX = "complex"


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `storage` is the NumPy type that holds its bits.

    bfloat16 is stored as uint16, because NumPy has no such type unless ml_dtypes is installed. `code` is its
    number in the native code and on the wire. With a `width` above 1 it is the type of an *item*: that many
    neighbouring elements that a collective never separates, stored as one opaque value.
    """

    name: str
    code: int
    kind: Kind
    itemsize: int
    width: int = 1

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy type of arrays that hold the bits."""
        return _STORAGE[self.code] if self.width == 1 else np.dtype((np.void, self.itemsize))

    @property
    def element(self) -> DType:
        """The type of one element of an item."""
        return self if self.width == 1 else DTYPES[self.name]

    def item(self, width: int) -> DType:
        """The type of `width` elements that stay together."""
        return self if width == 1 else replace(self, itemsize=width * self.itemsize, width=width)

    @property
    def is_half(self) -> bool:
        """Whether it is a 16-bit float, which is computed in float32."""
        return self.name in ("float16", "bfloat16")

    def __str__(self) -> str:
        return self.name


def _dtypes() -> dict[str, DType]:
    table: list[tuple[str, Kind, int]] = [
        ("bool", Kind.BOOL, 1),
        ("int8", Kind.INTEGER, 1),
        ("int16", Kind.INTEGER, 2),
        ("int32", Kind.INTEGER, 4),
        ("int64", Kind.INTEGER, 8),
        ("uint8", Kind.INTEGER, 1),
        ("uint16", Kind.INTEGER, 2),
        ("uint32", Kind.INTEGER, 4),
        ("uint64", Kind.INTEGER, 8),
        ("float16", Kind.FLOAT, 2),
        ("bfloat16", Kind.FLOAT, 2),
        ("float32", Kind.FLOAT, 4),
        ("float64", Kind.FLOAT, 8),
        ("complex64", Kind.COMPLEX, 8),
        ("complex128", Kind.COMPLEX, 16),
    ]
    return {name: DType(name, code, kind, size) for code, (name, kind, size) in enumerate(table)}


DTYPES: Final[dict[str, DType]] = _dtypes()
BFLOAT16: Final = DTYPES["bfloat16"]
_STORAGE: Final = [np.dtype("uint16" if name == "bfloat16" else name) for name in DTYPES]


def dtype_named(name: str) -> DType:
    """Look an element type up by its name.

    Raises:
        UsageError: there is no such type.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise UsageError(f"dtype {name!r} is not supported; allowed: {', '.join(DTYPES)}") from None
