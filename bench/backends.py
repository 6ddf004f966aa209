"""Latency and bandwidth of every backend, and of the library under it: two ranks on this host.

    python bench/backends.py [backend ...]

Prints the rows of the table in docs/backends.md: half a round trip of 8 bytes, all_reduce of 8 bytes, and the
rate of messages and of all_reduce of 16 MiB; medians of turns that alternate between the backend and the bare
library.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni

TURNS = 7
LARGE = 16 << 20

# One side's part in a round trip or an all_reduce, for each column of the table.
Calls = dict[str, Callable[[Any], Any]]


def ours(world: uni.Communicator) -> Calls:
    peer = 1 - world.rank

    def ping(x: Any) -> None:
        if world.rank == 0:
            world.send(x, peer)
            world.recv(x, peer)
        else:
            world.recv(x, peer)
            world.send(x, peer)

    return {"ping": ping, "all_reduce": world.all_reduce}


def bare_mpi(world: uni.Communicator) -> Calls:
    from mpi4py import MPI

    comm, peer = MPI.COMM_WORLD, 1 - world.rank

    def ping(x: Any) -> None:
        if world.rank == 0:
            comm.Send(x, peer)
            comm.Recv(x, peer)
        else:
            comm.Recv(x, peer)
            comm.Send(x, peer)

    return {"ping": ping, "all_reduce": lambda x: comm.Allreduce(MPI.IN_PLACE, x)}


def bare_gloo(world: uni.Communicator) -> Calls:
    import torch
    import torch.distributed as dist

    path = os.environ["BENCH_STORE"]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=world.rank, world_size=2)
    peer = 1 - world.rank

    def ping(x: Any) -> None:
        tensor = torch.from_numpy(x)
        if world.rank == 0:
            dist.send(tensor, peer)
            dist.recv(tensor, peer)
        else:
            dist.recv(tensor, peer)
            dist.send(tensor, peer)

    return {"ping": ping, "all_reduce": lambda x: dist.all_reduce(torch.from_numpy(x))}


BARE: dict[str, tuple[str, Callable[[uni.Communicator], Calls]]] = {
    "mpi": ("bare mpi4py", bare_mpi),
    "gloo": ("bare torch", bare_gloo),
}


def measured(calls: list[Callable[[Any], Any]], x: Any, world: uni.Communicator, count: int) -> list[float]:
    """Median seconds per call of each system, in alternating turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS + 1):
        for call, mine in zip(calls, times, strict=True):
            world.barrier()
            started = time.perf_counter()
            for _ in range(count):
                call(x)
            mine.append((time.perf_counter() - started) / count)
    return [statistics.median(mine[1:]) for mine in times]


def rank() -> None:
    with uni.init() as world:
        name = world.backend.capabilities.name
        sides = {name: ours(world)}
        if name in BARE:
            label, make = BARE[name]
            sides[label] = make(world)
        small, large = np.zeros(1), np.zeros(LARGE // 4, np.float32)

        def column(call: str, x: Any, count: int) -> list[float]:
            return measured([side[call] for side in sides.values()], x, world, count)

        columns = [
            [f"{seconds / 2 * 1e6:.1f} us" for seconds in column("ping", small, 50)],
            [f"{seconds * 1e6:.1f} us" for seconds in column("all_reduce", small, 100)],
            [f"{LARGE / (seconds / 2) / 1e9:.2f} GB/s" for seconds in column("ping", large, 2)],
            [f"{LARGE / seconds / 1e9:.2f} GB/s" for seconds in column("all_reduce", large, 2)],
        ]
        if world.rank == 0:
            for label, *figures in zip(sides, *columns, strict=True):
                print(f"| {label} | {' | '.join(figures)} |", flush=True)


def main() -> None:
    if sys.argv[1:] == ["--rank"]:
        rank()
        return
    print("| backend | 8 B one way | all_reduce 8 B | 16 MiB one way | all_reduce 16 MiB |")
    print("|---|---|---|---|---|")
    for name in sys.argv[1:] or ("native", "quic", "gloo", "mpi", "iroh"):
        command = [sys.executable, "-m", "unisono", "run", "--backend", name, "-n", "2", __file__, "--rank"]
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "BENCH_STORE": f"{folder}/store"}
            ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        rows = [line.partition("| ") for line in ended.stdout.splitlines() if "| " in line]
        failure = f"| {name} | {ended.stderr.strip()[-200:]} |"
        print("\n".join(bar + rest for _, bar, rest in rows) or failure)


if __name__ == "__main__":
    main()
