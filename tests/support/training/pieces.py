"""The parts of a training test: a piece that ranks run, and the results that it must equal.

A piece is a function of a `Job` that returns tensors. It runs on Gloo and on our backend in the same
processes. The results are compared with each other, and with those of one process where that is defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GLOO", "PIECES", "Job", "Piece", "Tensors", "distance", "piece"]

Tensors = dict[str, Tensor]
GLOO = "gloo"

# Shorter than the test's own time limit, so that a hang is reported by the group.
GROUP_TIMEOUT = timedelta(seconds=60)

# Kept for good: where the last reference to a group of Gloo's ends on one of the group's own threads, torch
# joins that thread from itself, and std::system_error ends the process ("Resource deadlock avoided").
_gloo_groups: list[Any] = []


@dataclass(frozen=True)
class Job:
    """One rank of one run of a piece."""

    rank: int
    size: int
    backend: str
    folder: Path  # the same folder on all ranks, for this run only

    @contextmanager
    def world(self, size: int | None = None, name: str = "store") -> Iterator[Job | None]:
        """A world of the first `size` ranks while the block runs; None on the other ranks.

        A second world of the same size needs a store of another name.
        """
        size = self.size if size is None else size
        if self.rank >= size:
            yield None
            return
        dist.init_process_group(
            self.backend,
            init_method=f"file://{self.folder}/{name}.{size}",
            rank=self.rank,
            world_size=size,
            timeout=GROUP_TIMEOUT,
        )
        try:
            yield replace(self, size=size)
        finally:
            if self.backend == "gloo":
                _gloo_groups.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()


@dataclass(frozen=True)
class Piece:
    """A program of ranks, the same program in one process, and the numbers of ranks it is for."""

    run: Callable[[Job], Tensors]
    alone: Callable[[int], Tensors] | None
    makes_worlds: bool  # of its own, instead of one that is there when it begins
    is_on_gloo: bool  # Gloo can do it


PIECES: dict[str, Piece] = {}


def piece(
    *,
    alone: Callable[[int], Tensors] | None = None,
    makes_worlds: bool = False,
    is_on_gloo: bool = True,
) -> Callable[[Callable[[Job], Tensors]], Callable[[Job], Tensors]]:
    """Register a piece under the name of its function."""

    def register(run: Callable[[Job], Tensors]) -> Callable[[Job], Tensors]:
        PIECES[run.__name__] = Piece(run, alone, makes_worlds, is_on_gloo)
        return run

    return register


def distance(got: Tensors, wanted: Tensors) -> float:
    """The largest difference of any element; infinite if names, shapes or types differ."""
    if got.keys() != wanted.keys():
        return math.inf
    return max((_distance(got[name], wanted[name]) for name in wanted), default=0.0)


def _distance(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return math.inf
    if torch.equal(got, wanted) or not wanted.numel():
        return 0.0
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    apart = float((got.to(wide) - wanted.to(wide)).abs().max())
    return math.inf if math.isnan(apart) else max(apart, 5e-324)
