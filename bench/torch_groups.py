"""Ranks of torch.distributed with two process groups each, Gloo and ours, which take turns."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GLOO, OURS = "gloo", "unisono"

Turn = Callable[[], None]


def run_ranks(program: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run `program(rank, groups, *args)` on ranks with a group of each backend: what rank 0 returned."""
    # A fork of this process, which has computed nothing yet, need not import torch again.
    with tempfile.TemporaryDirectory() as folder, mp.get_context("fork").Manager() as manager:
        answer = manager.dict()
        mp.start_processes(_rank, (program, ranks, folder, answer, args), ranks, start_method="fork")
        return answer["value"]


def _rank(
    rank: int, program: Callable[..., Any], ranks: int, folder: str, answer: Any, args: tuple[Any, ...]
) -> None:
    import unisono.pytorch  # noqa: F401

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    dist.init_process_group(GLOO, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    groups = {name: dist.new_group(backend=name) for name in (GLOO, OURS)}
    value = program(rank, groups, *args)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        answer["value"] = value


def seconds_of(turn: Turn, times: int) -> float:
    """Seconds for one of so many calls, on the slowest rank. Every rank calls it."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        turn()
    took = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def agreed(number: float) -> float:
    """Rank 0's number, on all ranks."""
    said = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(said, 0)
    return float(said)


def compete(turns: dict[str, Turn], rounds: int, turn_s: float, times_max: int) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one figure per round."""
    times = {}
    for name, turn in turns.items():
        seconds_of(turn, 2)
        times[name] = max(1, min(times_max, int(turn_s / seconds_of(turn, 2))))
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for round_ in range(rounds):
        # The order changes, so that none always follows the same one.
        for name in list(turns)[:: 1 if round_ % 2 else -1]:
            seconds[name].append(seconds_of(turns[name], times[name]))
    return seconds


def ratios(theirs: list[float], ours: list[float]) -> str:
    """How many times as long they took, round by round: the median, and the least and the most."""
    each = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
