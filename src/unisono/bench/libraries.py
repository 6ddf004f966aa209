"""One rank of each library: it joins the others, and turns a case into the loop that is timed.

Everything is called from Python, as the library's users call it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

import unisono as uni
from unisono.bench.cases import Case
from unisono.bench.operands import Pool, expected, names_of, operands_of
from unisono.bench.ways import WAYS, Way, loop_text

__all__ = ["Library", "Prepared", "opened"]


class Prepared:
    """A case that is ready to be repeated: `run(items)` makes `calls` calls.

    `is_seen`: the timed calls are made once before.
    """

    def __init__(
        self,
        run: Callable[[Iterable[Any]], Any],
        items: Callable[[int], Iterable[Any]],
        way: Way,
    ):
        self.run = run
        self.is_seen = way.is_seen
        self._items = items
        self._lines = way.lines

    def items(self, repeats: int) -> tuple[Iterable[Any], int]:
        """Operands for at least this many calls, and the number of calls."""
        turns = -(-repeats // self._lines)
        return self._items(turns), turns * self._lines


class Library:
    """One rank of a library. Arrays are NumPy's; a library with tensors wraps the same memory."""

    name: str
    rank: int
    size: int

    def __init__(self) -> None:
        # Elements that sizes "never seen before" have been given so far, and those that repeat them.
        self._sizes_used: Counter[tuple[str, str, str]] = Counter()

    def barrier(self) -> None:
        """Wait for all ranks."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave."""

    def names(self) -> dict[str, Any]:
        """What the lines of the table may name, beside their operands."""
        raise NotImplementedError

    def wrapped(self, data: str) -> Callable[[Any], Any]:
        """Makes of NumPy's memory what this library's users hold."""
        if data == "torch":
            import torch

            from_numpy: Callable[[Any], Any] = torch.from_numpy
            return from_numpy
        return lambda array: array

    def prepared(self, case: Case, check: bool) -> Prepared:
        """Make the operands and the loop; with `check`, make one call and check its result.

        Raises:
            ArithmeticError: the result was wrong.
        """
        operation, way = case.row, WAYS[case.way]
        pool = Pool(is_fresh=way.operands == "new array", wrap=self.wrapped(case.data))

        def operands(block: int, filled: bool = False) -> tuple[Any, ...]:
            return operands_of(operation, case.data, self.rank, self.size, block, pool, filled=filled)

        def items(turns: int) -> Iterable[Any]:
            match way.operands:
                case "known":
                    return repeat(operands(case.block), turns)
                case "new size" | "seen size":
                    used = self._sizes_used[case.operation, case.data, way.operands]
                    self._sizes_used[case.operation, case.data, way.operands] += turns
                    operands(case.block + used + turns)  # all are views of memory for the longest
                    return [operands(case.block + used + turn) for turn in range(1, turns + 1)]
                case _:
                    return [operands(case.block) for _ in range(turns)]

        everywhere = {
            "rank": self.rank,
            "size": self.size,
            **_neighbours(self.rank, self.size),
            **self.names(),
        }

        def loop(lines: int) -> Callable[[Iterable[Any]], Any]:
            text = loop_text(
                self.name, operation, replace(way, lines=lines), self.rank, names_of(operation.layout)
            )
            return _compiled(text, everywhere)

        if check:
            mine = operands(case.block, filled=True)
            result = loop(1)([mine])
            known = dict(zip(names_of(operation.layout), mine, strict=True))
            right = expected(operation, case.data, self.rank, self.size, case.block)
            if right is not None:
                answer = eval(operation.lines[self.name].answer, everywhere, {**known, "result": result})
                if not _is_same(answer, right):
                    raise ArithmeticError(f"wrong: {case.label} on rank {self.rank}")
        pool.clear()
        return Prepared(loop(way.lines), items, way)


class _Unisono(Library):
    name = "unisono"

    def __init__(self) -> None:
        super().__init__()
        self._world = uni.init()
        self.rank, self.size = self._world.rank, self._world.size

    def barrier(self) -> None:
        self._world.barrier()

    def names(self) -> dict[str, Any]:
        return {"world": self._world, "first": _first}

    def close(self) -> None:
        self._world.close()


class _Mpi(Library):
    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        super().__init__()
        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def barrier(self) -> None:
        self._world.Barrier()

    def names(self) -> dict[str, Any]:
        return {
            "world": self._world,
            "IN_PLACE": self._mpi.IN_PLACE,
            "MAX": self._mpi.MAX,
            "Request": self._mpi.Request,
            "status": self._mpi.Status(),
            "group": self._world.Get_group(),
            "SHARED": self._mpi.COMM_TYPE_SHARED,
            "first": _first,
        }


class _Gloo(Library):
    name = "gloo"

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist

        super().__init__()
        warnings.simplefilter("ignore")  # names of the same calls change between versions
        self._torch, self._dist = torch, dist
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)

    def barrier(self) -> None:
        self._dist.barrier()

    def names(self) -> dict[str, Any]:
        return {"dist": self._dist}

    def wrapped(self, data: str) -> Callable[[Any], Any]:
        return lambda array: self._torch.from_numpy(array.reshape(-1))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the other ranks may be gone already
            self._dist.destroy_process_group()


def opened(name: str, folder: Path, rank_and_size: list[int]) -> Library:
    """Join the other ranks of a library; Gloo's ranks meet in the folder."""
    match name:
        case "unisono":
            return _Unisono()
        case "mpi":
            return _Mpi()
        case _:
            return _Gloo(folder, *rank_and_size)


def _neighbours(rank: int, size: int) -> dict[str, int]:
    return {"left": (rank - 1) % size, "right": (rank + 1) % size}


def _compiled(text: str, names: dict[str, Any]) -> Callable[[Iterable[Any]], Any]:
    # The file's name is that of no module: calls come from the user's side of every library.
    exec(compile(text, "<measured loop>", "exec"), names)
    run: Callable[[Iterable[Any]], Any] = names["run"]
    return run


def _first(one: Any, _other: Any) -> Any:
    """A reduction of objects that costs nothing itself."""
    return one


def _is_same(answer: Any, right: Any) -> bool:
    if not isinstance(right, np.ndarray):
        return bool(answer == right)
    listed = answer if isinstance(answer, list) else [answer]
    return np.array_equal(np.concatenate([np.asarray(each).reshape(-1) for each in listed]), right)
