"""Announcements: type and lengths of a rank's arrays, sent before the arrays, or with them if they are short.

Where ranks cannot know each other's lengths, the first stage of a collective carries one *row* of bytes per
rank, of equal length: dtype, kind of array, number of dimensions beyond axis 0, and what follows (a byte
each), how many bytes of the row are used (4 bytes), these dimensions, the length along axis 0 of each part
(8 bytes each), and then the elements of all parts, if they fit. If all of them do, there is no second stage.
The engine does not send the unused end of a row.

The parts of a collective of objects are packed objects, as bytes. The engine may send the *heads* of objects
in the row instead of elements, each behind a byte that says what its blob becomes: then a part is only what
travels beside the head: its one blob, or all its blobs in one piece (core/codec.py).

The native twin is native/python/announcement.hpp: the same layout.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from unisono.comm.object_payload import RAISE_LIMIT, ObjectHead, heads_in
from unisono.core.buffers import Array
from unisono.core.dtypes import DTYPES, DType
from unisono.errors import ProtocolError, UsageError

__all__ = ["ARRAY_BYTES_MAX", "Announcement", "row_bytes"]

_DIMENSIONS_MAX: Final = 32  # the limit of NumPy 1; NumPy 2 allows 64
_HEAD: Final = struct.Struct("<BBBBI")
# What follows the lengths.
_ELEMENTS, _HEADS = 0, 1
_NUMBER: Final = 8
# What all rows of a group may hold together beyond numbers; each holds some hundred bytes, and up to 2 KiB.
_ROWS_BYTES: Final = 8192
_ROW_BYTES_MIN, _ROW_BYTES_MAX = 256, 2048
_TYPES: Final = list(DTYPES.values())
# Upper bound on an announced array, in bytes. Memory is allocated only by a call that receives it.
ARRAY_BYTES_MAX: Final = 1 << 48

Flat: TypeAlias = np.ndarray[Any, Any]


def row_bytes(size: int, lengths: int) -> int:
    """The bytes of a row in a group of `size` ranks, if each rank announces `lengths` lengths."""
    free = min(max(_ROWS_BYTES // size // _NUMBER * _NUMBER, _ROW_BYTES_MIN), _ROW_BYTES_MAX)
    return _HEAD.size + _NUMBER * lengths + max(free, _NUMBER * _DIMENSIONS_MAX)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one rank says of its array or list of arrays."""

    dtype: DType
    family: int
    shape: tuple[int, ...]  # beyond axis 0
    lengths: tuple[int, ...]  # along axis 0
    elements: Flat | None = None  # those of all parts, if they are in the row
    heads: tuple[ObjectHead, ...] | None = None  # those of all parts, if they are objects in two pieces

    @staticmethod
    def of(arrays: Sequence[Array], family: int) -> Announcement:
        """An announcement of arrays that differ along axis 0 only."""
        shape = arrays[0].shape[1:]
        if len(shape) > _DIMENSIONS_MAX:
            raise UsageError(f"an array has {len(shape) + 1} dimensions; allowed: {_DIMENSIONS_MAX + 1}")
        return Announcement(arrays[0].dtype, family, shape, tuple(array.shape[0] for array in arrays))

    @property
    def step(self) -> int:
        """Elements per step along axis 0."""
        return math.prod(self.shape)

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements of each part."""
        return tuple(length * self.step for length in self.lengths)

    def fits(self, nbytes: int) -> bool:
        """Whether a row of this length has room for the parts."""
        return self._numbers() + self._bytes() <= nbytes

    def part(self, number: int) -> Flat:
        """The elements of a part that are in the row."""
        assert self.elements is not None, "asked only if they are here"
        counts = self.counts
        start = sum(counts[:number])
        return self.elements[start : start + counts[number]]

    def head_of(self, number: int) -> ObjectHead | None:
        """The head of a part, if the part is only what travels beside it."""
        return None if self.heads is None else self.heads[number]

    def encoded(self, nbytes: int, parts: Iterable[Flat]) -> Flat:
        """As a row of this length, with the parts if they fit."""
        row = np.zeros(nbytes, np.uint8)
        numbers = self._numbers()
        used = numbers + (self._bytes() if self.fits(nbytes) else 0)
        head = _HEAD.pack(self.dtype.code, self.family, len(self.shape), _ELEMENTS, used)
        row[: _HEAD.size] = np.frombuffer(head, np.uint8)
        row[_HEAD.size : numbers] = np.array((*self.shape, *self.lengths), np.int64).view(np.uint8)
        if self.fits(nbytes):
            row[numbers : numbers + self._bytes()] = np.concatenate(
                [np.asarray(part).view(np.uint8) for part in parts]
            )
        return row

    @staticmethod
    def decoded(row: Flat, lengths: int, bytes_max: int) -> Announcement:
        """Read a row that another rank sent: every field is checked."""
        code, family, dimensions, form, used = _HEAD.unpack(row[: _HEAD.size].tobytes())
        if code >= len(_TYPES) or dimensions > _DIMENSIONS_MAX or form not in (_ELEMENTS, _HEADS):
            raise ProtocolError("malformed announcement in a collective")
        numbers = _HEAD.size + _NUMBER * (dimensions + lengths)
        values = row[_HEAD.size : numbers].view(np.int64).tolist()
        if any(n < 0 for n in values):
            raise ProtocolError("malformed lengths in a collective")
        said = Announcement(_TYPES[code], family, tuple(values[:dimensions]), tuple(values[dimensions:]))
        longest = max(said.counts) * said.dtype.itemsize
        if longest > bytes_max:
            raise ProtocolError(
                f"a rank announced {longest} bytes; allowed: {bytes_max}",
                next_step=RAISE_LIMIT if bytes_max < ARRAY_BYTES_MAX else None,
            )
        if form == _HEADS:
            return replace(said, heads=heads_in(row[numbers:used].tobytes(), lengths))
        stop = numbers + said._bytes()
        if stop > row.size:
            return said
        elements = row[numbers:stop].view(said.dtype.storage)
        return Announcement(said.dtype, family, said.shape, said.lengths, elements)

    def _numbers(self) -> int:
        """Where the elements begin in a row."""
        return _HEAD.size + _NUMBER * (len(self.shape) + len(self.lengths))

    def _bytes(self) -> int:
        return sum(self.counts) * self.dtype.itemsize
