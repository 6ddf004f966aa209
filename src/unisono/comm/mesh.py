"""Ranks in a grid, with a communicator along each axis."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unisono.errors import UsageError, counted

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

__all__ = ["Grid", "Mesh"]


class Grid:
    """Index arithmetic: ranks 0 to n - 1 in row-major order, so the last axis varies fastest."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> None:
        if not shape or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in shape):
            raise UsageError(f"mesh shape {shape}; allowed: one or more lengths >= 1")
        if names is None:
            names = tuple(f"axis{i}" for i in range(len(shape)))
        if (
            len(names) != len(shape)
            or not all(isinstance(n, str) for n in names)
            or len(set(names)) != len(names)
        ):
            raise UsageError(f"mesh names {names}; allowed: {len(shape)} different names, one per axis")
        self.shape = shape
        self.names = names

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def number(self) -> int:
        """A signed 64-bit number that grids of different shapes do not share."""
        digest = hashlib.blake2b(repr(self.shape).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def check_size(self, size: int) -> None:
        """Refuse a shape that does not hold exactly `size` ranks."""
        if self.size != size:
            raise UsageError(
                f"mesh shape {self.shape} holds {counted(self.size, 'rank')}; allowed: exactly {size}"
            )

    def axis(self, name: str | int) -> int:
        """The number of an axis."""
        if isinstance(name, str) and name in self.names:
            return self.names.index(name)
        if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < len(self.shape):
            return name
        raise UsageError(f"mesh has no axis {name!r}; allowed: {', '.join(self.names)}")

    def coords(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(f"rank={rank!r}; allowed: 0 to {self.size - 1}")
        position = []
        for length in reversed(self.shape):
            rank, index = divmod(rank, length)
            position.append(index)
        return tuple(reversed(position))

    def rank_of(self, coords: Sequence[int]) -> int:
        """The rank at these coordinates."""
        if len(coords) != len(self.shape) or not all(
            0 <= c < n for c, n in zip(coords, self.shape, strict=True)
        ):
            raise UsageError(f"coords {tuple(coords)}; allowed: inside the shape {self.shape}")
        rank = 0
        for index, length in zip(coords, self.shape, strict=True):
            rank = rank * length + index
        return rank

    def ranks_along(self, axis: str | int, rank: int) -> tuple[int, ...]:
        """The ranks with the coordinates of `rank` on all other axes, itself included."""
        number = self.axis(axis)
        first, length, stride = rank, self.shape[number], math.prod(self.shape[number + 1 :])
        first -= self.coords(rank)[number] * stride
        return tuple(range(first, first + length * stride, stride))

    def groups_along(self, axis: str | int) -> tuple[tuple[int, ...], ...]:
        """All sets of ranks along an axis; together they hold every rank once."""
        number = self.axis(axis)
        others = [range(n) if i != number else range(1) for i, n in enumerate(self.shape)]
        return tuple(self.ranks_along(number, self.rank_of(start)) for start in itertools.product(*others))


class Mesh:
    """A grid of ranks with a communicator along each axis: `mesh["dp"]`, or by its number `mesh[0]`.

    `mesh["dp"].rank` is the coordinate of this rank along `dp`; its neighbours there are the ranks before and
    after it, and at the ends none.

    Attributes:
        rank: this rank in the communicator that the mesh was made from.
        grid: the arithmetic of the whole grid: `coords(rank)`, `rank_of(coords)`, `ranks_along(axis, rank)`,
            `groups_along(axis)`.
    """

    def __init__(self, grid: Grid, rank: int, axes: Mapping[str, Communicator]) -> None:
        self.grid = grid
        self.rank = rank
        self._axes = dict(axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return self.grid.shape

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each axis."""
        return self.grid.names

    @property
    def coords(self) -> tuple[int, ...]:
        """The coordinates of this rank."""
        return self.grid.coords(self.rank)

    def __getitem__(self, axis: str | int) -> Communicator:
        return self._axes[self.grid.names[self.grid.axis(axis)]]

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={n}" for name, n in zip(self.names, self.shape, strict=True))
        return f"<Mesh {axes}; rank {self.rank} at {self.coords}>"
