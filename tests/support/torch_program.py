"""A torch program on the backend "unisono": it makes process groups in the given ways, computes, and ends.

    python torch_program.py WAY ... [stay]

WAY is `env` (torchrun, `unisono run` or MASTER_*), `file=PATH` or `tcp=HOST:PORT`, which are each made and
destroyed three times in this process; or `beside`, a default group of Gloo with groups of ours beside it,
made once. With `stay` the last group is not destroyed before the process ends.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

__all__ = ["main"]


def check(rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
    """One sum in which every element depends on rank and index."""
    x = torch.arange(1003, dtype=torch.float64) * (rank + 1) + rank
    dist.all_reduce(x, group=group)
    expected = torch.arange(1003, dtype=torch.float64) * (size * (size + 1) // 2) + size * (size - 1) // 2
    assert torch.equal(x, expected), (rank, x[:3], expected[:3])
    assert dist.get_backend(group) == "unisono"


def begin_and_end(way: str, rank: int, size: int, time: int) -> None:
    """Make the world in one way, make groups of it, and compute."""
    kind, _, where = way.partition("=")
    if kind == "beside":
        dist.init_process_group("gloo")
        for ranks in (None, list(range(size))[::-1]) * 2:
            group = dist.new_group(ranks, backend="unisono", sort_ranks=False)
            check(dist.get_rank(group), size, group)
            dist.destroy_process_group(group)
        return
    if kind == "env" and "RANK" in os.environ:
        dist.init_process_group("unisono")
    elif kind == "env":
        dist.init_process_group("unisono", rank=rank, world_size=size)
    else:
        place = f"tcp://{where}" if kind == "tcp" else f"file://{where}-{time}"
        dist.init_process_group("unisono", init_method=place, rank=rank, world_size=size)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    check(rank, size)
    for first in range(size):
        pair = [first, (first + 1) % size][:size]  # need not be torch's order of ranks
        group = dist.new_group(pair, sort_ranks=False)
        if rank in pair:
            check(pair.index(rank), len(pair), group)


def main(rank: int, words: list[str], size: int) -> None:
    """The program of a rank; torch.multiprocessing also calls it, with these arguments."""
    ways = [(word, time) for word in words if word != "stay" for time in range(1 if word == "beside" else 3)]
    for number, (way, time) in enumerate(ways, 1):
        begin_and_end(way, rank, size, time)
        if number < len(ways) or "stay" not in words:
            dist.destroy_process_group()
        # One write: the ranks may share a pipe, and Python may be unbuffered.
        os.write(1, f"{way.partition('=')[0]} {time} right {rank} of {size}\n".encode())


if __name__ == "__main__":
    main(int(os.environ["RANK"]), sys.argv[1:], int(os.environ["WORLD_SIZE"]))
