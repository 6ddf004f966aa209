"""The measured operations in each library, called from Python as its users call them.

`prepared` returns the call to repeat; before it is timed, its result can be checked once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unisono as uni
from unisono.bench.arrays import array_of
from unisono.bench.cases import Case

__all__ = ["Library", "opened"]

Call = Callable[[], Any]


class Library:
    """One rank of a library. Arrays are NumPy's; a library with tensors wraps the same memory."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait for all ranks."""
        raise NotImplementedError

    def call(self, operation: str, x: Any, out: Any) -> Call:
        """A function that runs the operation on these arrays; it is called repeatedly."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave."""

    def prepared(self, case: Case, check: bool) -> Call:
        """Make the arrays and return the call to repeat; with `check`, check its result once.

        Raises:
            ArithmeticError: the result was wrong.
        """
        x, out = _arrays(case)
        call = self.call(case.operation, x, out)
        if check:
            x.reshape(-1)[:] = _input(self.rank, x.size)
            call()
            if not _is_right(case, self.rank, x, out):
                raise ArithmeticError(f"wrong: {case.operation} of {case.nbytes} bytes on rank {self.rank}")
        x.fill(0)  # repeated sums of zeros do not overflow
        return call


class _Unisono(Library):
    def __init__(self) -> None:
        self._world = uni.init()
        self.rank, self.size = self._world.rank, self._world.size

    def barrier(self) -> None:
        self._world.barrier()

    def call(self, operation: str, x: Any, out: Any) -> Call:
        world = self._world
        match operation:
            case "all_reduce":
                return lambda: world.all_reduce(x)
            case "broadcast":
                return lambda: world.broadcast(x)
            case "all_gather":
                return lambda: world.all_gather(x, out=out)
            case "reduce_scatter":
                return lambda: world.reduce_scatter(x, out=out)
            case "all_to_all":
                return lambda: world.all_to_all(x, out=out)
            case "barrier":
                return world.barrier
            case "ping" if self.rank == 0:
                return lambda: (world.send(x, 1), world.recv(x, 1))
            case "ping" if self.rank == 1:
                return lambda: (world.recv(x, 0), world.send(x, 0))
            case "ping":
                return _nothing
            case _:
                raise ValueError(operation)

    def close(self) -> None:
        self._world.close()


class _Mpi(Library):
    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size

    def barrier(self) -> None:
        self._world.Barrier()

    def call(self, operation: str, x: Any, out: Any) -> Call:
        world = self._world
        match operation:
            case "all_reduce":
                in_place = self._mpi.IN_PLACE
                return lambda: world.Allreduce(in_place, x)
            case "broadcast":
                return lambda: world.Bcast(x)
            case "all_gather":
                return lambda: world.Allgather(x, out)
            case "reduce_scatter":
                return lambda: world.Reduce_scatter_block(x, out)
            case "all_to_all":
                return lambda: world.Alltoall(x, out)
            case "barrier":
                return lambda: world.Barrier()
            case "ping" if self.rank == 0:
                return lambda: (world.Send(x, 1), world.Recv(x, 1))
            case "ping" if self.rank == 1:
                return lambda: (world.Recv(x, 0), world.Send(x, 0))
            case "ping":
                return _nothing
            case _:
                raise ValueError(operation)


class _Gloo(Library):
    def __init__(self, folder: Path, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist

        warnings.simplefilter("ignore")  # names of the same calls change between versions
        self._torch, self._dist = torch, dist
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=size)

    def barrier(self) -> None:
        self._dist.barrier()

    def call(self, operation: str, x: Any, out: Any) -> Call:
        dist = self._dist
        mine, theirs = (self._torch.from_numpy(array.reshape(-1)) for array in (x, out))
        match operation:
            case "all_reduce":
                return lambda: dist.all_reduce(mine)
            case "broadcast":
                return lambda: dist.broadcast(mine, 0)
            case "all_gather":
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                return lambda: gather(theirs, mine)
            case "reduce_scatter":
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                return lambda: scatter(theirs, mine)
            case "all_to_all":
                return lambda: dist.all_to_all_single(theirs, mine)
            case "barrier":
                return lambda: dist.barrier()
            case "ping" if self.rank == 0:
                return lambda: (dist.send(mine, 1), dist.recv(mine, 1))
            case "ping" if self.rank == 1:
                return lambda: (dist.recv(mine, 0), dist.send(mine, 0))
            case "ping":
                return _nothing
            case _:
                raise ValueError(operation)

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


def _nothing() -> None:
    """The call of a rank that takes no part."""


def _arrays(case: Case) -> tuple[Any, Any]:
    """Input and output."""
    rows = (case.ranks, case.block)
    shape = {"all_gather": (case.block,), "reduce_scatter": rows, "all_to_all": rows}
    out_shape = {"all_gather": rows, "reduce_scatter": (case.block,), "all_to_all": rows}
    x = array_of(shape.get(case.operation, (case.count,)))
    out = array_of(out_shape.get(case.operation, (0,)))
    out.fill(0)  # touch every page before the timed calls
    return x, out


def _input(rank: int, count: int) -> Any:
    """A rank's input: it shows a wrong order or offset, and sums of small integers are exact."""
    return np.resize(np.arange(1 + rank, 8 + rank, dtype=np.float32), count)


def _is_right(case: Case, rank: int, x: Any, out: Any) -> bool:
    ranks, count, block = range(case.ranks), case.count, case.block
    mine = slice(rank * block, (rank + 1) * block)
    match case.operation:
        case "all_reduce":
            return np.array_equal(x, sum(_input(r, count) for r in ranks))
        case "broadcast":
            return np.array_equal(x, _input(0, count))
        case "all_gather":
            return np.array_equal(out, [_input(r, block) for r in ranks])
        case "reduce_scatter":
            return np.array_equal(out, sum(_input(r, count)[mine] for r in ranks))
        case "all_to_all":
            return np.array_equal(out, [_input(r, count)[mine] for r in ranks])
        case "ping" if rank < 2:
            return np.array_equal(x, _input(0, count))
        case _:
            return True
