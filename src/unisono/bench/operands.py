"""The operands of a case: arrays cut for each rank, objects, and the result that they must give.

Knows layouts, not libraries. Inputs depend on rank and index, so that a wrong order or offset shows; they are
small integers, so that sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from unisono.bench.arrays import array_of
from unisono.bench.operations import MANY, Operation

__all__ = ["Pool", "expected", "given", "lengths", "names_of", "object_of", "operands_of"]

# The names that a line may use, by layout. Every rank has them; what a rank does not need is None.
_NAMES: Final = {
    "none": (),
    "vector": ("x", "out"),
    "pair": ("x",),
    "gather": ("x", "out"),
    "gather to root": ("x", "out", "rows"),
    "scatter": ("x", "out"),
    "scatter from root": ("x", "out", "rows"),
    "exchange": ("x", "out"),
    "many": ("xs",),
    "uneven gather": ("x", "out", "n", "counts", "vector_out"),
    "uneven gather to root": ("x", "out", "n", "counts", "vector_out"),
    "uneven scatter from root": ("parts", "out", "n", "counts", "vector_x"),
    "uneven exchange": ("parts", "out", "counts", "theirs", "vector_x", "vector_out"),
    "uneven reduce": ("x", "out", "counts"),
    "number": ("x",),
    "object": ("value", "holder", "outputs"),
    "objects": ("values", "holder"),
}


def names_of(layout: str) -> tuple[str, ...]:
    """The names of a layout's operands, in the order of `operands_of`."""
    return _NAMES[layout]


class Pool:
    """Where arrays come from: always the same memory, or new memory for every operand."""

    def __init__(self, *, is_fresh: bool, wrap: Callable[[Any], Any]) -> None:
        self._is_fresh = is_fresh
        self._wrap = wrap
        self._memory: dict[str, Any] = {}
        self._made: list[Any] = []

    def reserve(self, name: str, count: int) -> None:
        """Have memory for this many elements."""
        if name not in self._memory or self._memory[name].size < count:
            self._memory[name] = array_of((count,))
            self._memory[name].fill(0)  # touch every page before the timed calls

    def take(self, name: str, shape: tuple[int, ...], values: Any = None) -> Any:
        """An array of the shape, filled with the values if there are any."""
        count = math.prod(shape)
        if self._is_fresh:
            array = array_of(shape)
            array.fill(0)
            self._made.append(array)
        else:
            self.reserve(name, count)
            array = self._memory[name][:count].reshape(shape)
        if values is not None:
            array.reshape(-1)[:] = values
        return self._wrap(array)

    def clear(self) -> None:
        """Make everything zero: repeated sums do not overflow."""
        for array in (*self._memory.values(), *self._made):
            array.fill(0)


def operands_of(
    operation: Operation, data: str, rank: int, size: int, block: int, pool: Pool, *, filled: bool
) -> tuple[Any, ...]:
    """One tuple of operands in the order of `names_of`."""
    layout, is_root = operation.layout, rank == 0

    def mine(count: int) -> Any:
        return given(rank, count) if filled else None

    match layout:
        case "none":
            return ()
        case "number":
            return (float(given(rank, 1)[0]),)
        case "object":
            value = object_of(data, rank)
            return value, [value], [None] * size
        case "objects":
            values = [object_of(data, rank + other) for other in range(size)]
            rooted = operation.name == "scatter_object" and not is_root
            return None if rooted else values, [None]
        case "many":
            return ([pool.take(f"x{i}", (block,), mine(block)) for i in range(MANY)],)
        case "vector":
            return pool.take("x", (block,), mine(block)), pool.take("out", (block,))
        case "pair":
            return (pool.take("x", (block,), mine(block)),)
        case "gather" | "gather to root":
            x = pool.take("x", (block,), mine(block))
            if layout == "gather":
                return x, pool.take("out", (size, block))
            out = pool.take("out", (size, block)) if is_root else None
            return x, out, _cut(out, [block] * size)
        case "scatter":
            return pool.take("x", (size, block), mine(size * block)), pool.take("out", (block,))
        case "scatter from root":
            x = pool.take("x", (size, block), mine(size * block)) if is_root else None
            return x, pool.take("out", (block,)), _cut(x, [block] * size)
        case "exchange":
            return pool.take("x", (size, block), mine(size * block)), pool.take("out", (size, block))
        case _:
            return _uneven(layout, rank, size, block, pool, mine)


def _uneven(
    layout: str, rank: int, size: int, block: int, pool: Pool, mine: Callable[[int], Any]
) -> tuple[Any, ...]:
    parts = lengths(size, block)
    total, is_root = sum(parts), rank == 0
    counts = np.array(parts, np.intc)
    n = np.array([parts[rank]], np.intc)
    match layout:
        case "uneven gather" | "uneven gather to root":
            x = pool.take("x", (parts[rank],), mine(parts[rank]))
            if layout.endswith("root") and not is_root:
                return x, None, n, None, None
            out, theirs = pool.take("out", (total,)), np.zeros(size, np.intc)
            return x, out, n, theirs, (out, theirs)
        case "uneven scatter from root":
            out = pool.take("out", (parts[rank],))
            n[0] = 0
            if not is_root:
                return None, out, n, None, None
            x = pool.take("x", (total,), mine(total))
            return _cut(x, parts), out, n, counts, (x, counts)
        case "uneven exchange":
            x = pool.take("x", (total,), mine(total))
            out, theirs = pool.take("out", (size * parts[rank],)), np.zeros(size, np.intc)
            return _cut(x, parts), out, counts, theirs, (x, counts), (out, theirs)
        case _:
            return pool.take("x", (total,), mine(total)), pool.take("out", (parts[rank],)), parts


def lengths(size: int, block: int) -> list[int]:
    """The lengths of uneven parts: each rank's is one longer than the one before."""
    return [block + rank for rank in range(size)]


def _cut(x: Any, parts: list[int]) -> list[Any] | None:
    if x is None:
        return None
    ends = np.cumsum(parts).tolist()
    flat = x.reshape(-1)
    return [flat[end - length : end] for end, length in zip(ends, parts, strict=True)]


def given(rank: int, count: int) -> Any:
    """The input of a rank."""
    return np.resize(np.arange(1 + rank, 8 + rank, dtype=np.float32), count)


def object_of(data: str, number: int) -> Any:
    """An object of a kind, different for every number."""
    match data:
        case "100 B dict":
            return {"step": 12_000 + number, "loss": 0.125, "name": "encoder.3.weight", "shape": (64, number)}
        case "200 dicts":
            return [{"id": i + number, "score": i * 0.5, "name": f"item {i}"} for i in range(200)]
        case "1,000 floats":
            return [i * 0.5 + number for i in range(1000)]
        case _:
            return bytes([number % 256]) * (1 << 20)


# What a rank has afterwards, by operation: (rank, size, block) -> flat elements. None: nothing to compare.
_Rule = Callable[[int, int, int], Any]
_RULES: Final[dict[str, _Rule]] = {
    "all_reduce": lambda rank, size, n: _sum(size, n),
    "all_reduce_many": lambda rank, size, n: np.tile(_sum(size, n), MANY),
    "broadcast": lambda rank, size, n: given(0, n),
    "reduce": lambda rank, size, n: _sum(size, n) if rank == 0 else None,
    "all_gather": lambda rank, size, n: _joined(size, [n] * size),
    "gather": lambda rank, size, n: _joined(size, [n] * size) if rank == 0 else None,
    "scatter": lambda rank, size, n: given(0, n * size)[rank * n : (rank + 1) * n],
    "reduce_scatter": lambda rank, size, n: _sum(size, n * size)[rank * n : (rank + 1) * n],
    "all_to_all": lambda rank, size, n: _transposed(rank, size, [n] * size),
    "scan": lambda rank, size, n: _sum(rank + 1, n),
    # MPI leaves rank 0's result undefined.
    "exscan": lambda rank, size, n: _sum(rank, n) if rank else None,
    "all_gather_v": lambda rank, size, n: _joined(size, lengths(size, n)),
    "gather_v": lambda rank, size, n: _joined(size, lengths(size, n)) if rank == 0 else None,
    "scatter_v": lambda rank, size, n: _part(given(0, sum(lengths(size, n))), rank, lengths(size, n)),
    "all_to_all_v": lambda rank, size, n: _transposed(rank, size, lengths(size, n)),
    "reduce_scatter_v": lambda rank, size, n: _part(
        _sum(size, sum(lengths(size, n))), rank, lengths(size, n)
    ),
    "ping": lambda rank, size, n: given(0, n) if rank < 2 else None,
    "probe": lambda rank, size, n: given(0, n) if rank < 2 else None,
    "sendrecv": lambda rank, size, n: given((rank - 1) % size, n),
    "isend_irecv": lambda rank, size, n: given((rank - 1) % size, n),
}
# The same for what is varied otherwise than by the type of the elements.
_VARIED_RULES: Final[dict[tuple[str, str], _Rule]] = {
    ("broadcast", "root 1"): lambda rank, size, n: given(1, n),
    ("reduce", "root 1"): lambda rank, size, n: _sum(size, n) if rank == 1 else None,
    ("all_reduce", "max"): lambda rank, size, n: np.max([given(r, n) for r in range(size)], axis=0),
}
_OBJECT_RULES: Final[dict[str, Callable[[str, int, int], Any]]] = {
    "broadcast_object": lambda data, rank, size: object_of(data, 0),
    "all_gather_object": lambda data, rank, size: [object_of(data, r) for r in range(size)],
    "gather_object": lambda data, rank, size: (
        [object_of(data, r) for r in range(size)] if rank == 0 else None
    ),
    "scatter_object": lambda data, rank, size: object_of(data, rank),
    "all_to_all_object": lambda data, rank, size: [object_of(data, r + rank) for r in range(size)],
    "all_reduce_object": lambda data, rank, size: object_of(data, 0),
    "ping_object": lambda data, rank, size: object_of(data, 1) if rank == 0 else None,
}


def expected(operation: Operation, data: str, rank: int, size: int, block: int) -> Any:
    """The result of this rank: an object, or flat elements; None if there is nothing to compare."""
    if operation.layout in ("object", "objects"):
        return _OBJECT_RULES[operation.name](data, rank, size)
    rule = _VARIED_RULES.get((operation.name, data)) or _RULES.get(operation.name)
    return None if rule is None else rule(rank, size, block)


def _sum(size: int, count: int) -> Any:
    return np.sum([given(rank, count) for rank in range(size)], axis=0)


def _joined(size: int, counts: list[int]) -> Any:
    return np.concatenate([given(rank, counts[rank]) for rank in range(size)])


def _part(whole: Any, rank: int, counts: list[int]) -> Any:
    begin = sum(counts[:rank])
    return whole[begin : begin + counts[rank]]


def _transposed(rank: int, size: int, counts: list[int]) -> Any:
    return np.concatenate([_part(given(source, sum(counts)), rank, counts) for source in range(size)])
