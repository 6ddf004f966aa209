"""The heat equation on a grid cut into slabs: the neighbours' edge rows are exchanged before every step.

    python bench/halo.py [-n 2,4] [--grids 64,256,1024,2048] [--rounds 5] [--links shm,tcp]

Two variants, each as a user of either library writes it: sendrecv up, then down; and two receives and two
sends started, then all waited for. unisono and mpi4py live in the same processes and take turns at the same
memory. Rows are periodic, columns end at a fixed temperature. The result of every variant is compared with
that of one process.
A ratio is mpi4py's time over ours, round by round: the median, and the least and the most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni
from unisono.bench.systems import SYSTEMS
from unisono.launcher.mpiexec import mpiexec

STEPS_CHECKED = 7
TURN_S = 0.1
MPI_OF = {"shm": "mpi", "tcp": "mpi-tcp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", default="2,4", help="numbers of ranks")
    parser.add_argument("--grids", default="64,256,1024,2048", help="rows and columns of each rank's slab")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--links", default="shm,tcp")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args)
        return
    if (why := SYSTEMS["mpi"].missing()) is not None:
        raise SystemExit(f"mpi4py is {why}")
    print("us per step, median; mpi / ours: median (least to most); the grid is that of one rank")
    for link in args.links.split(","):
        for n in args.n.split(","):
            print(f"\n{link}, {n} ranks\n{'grid':>12} {'variant':>10} {'ours':>10} {'mpi':>10}  mpi / ours")
            launcher = [mpiexec() or "mpiexec", "--allow-run-as-root", "--oversubscribe"]
            flags = [*SYSTEMS[MPI_OF[link]].flags, "-n", n]
            command = [sys.executable, __file__, "--rank", f"--grids={args.grids}", f"--rounds={args.rounds}"]
            env = {**os.environ, "UNISONO_SHM": "1" if link == "shm" else "0"}
            subprocess.run([*launcher, *flags, *command], env=env, check=True, timeout=1200)


def rank(args: argparse.Namespace) -> None:
    """One rank of both libraries."""
    from mpi4py import MPI

    with uni.init("native") as world:
        assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        for edge in map(int, args.grids.split(",")):
            for variant, exchanges in exchanges_of(world, MPI).items():
                for exchange in exchanges.values():
                    check(exchange, world.rank, world.size, edge)
                times = compete(exchanges, world, edge, args.rounds)
                if world.rank == 0:
                    show(edge, variant, times)


def exchanges_of(world: uni.Communicator, mpi: Any) -> dict[str, dict[str, Callable[[Any], None]]]:
    """By variant and library: the exchange of the edge rows of a slab, as the user writes it."""
    peers = mpi.COMM_WORLD
    up, down = (world.rank - 1) % world.size, (world.rank + 1) % world.size

    def ours_sendrecv(u: Any) -> None:
        world.sendrecv(u[1], up, u[-1], down, tag=0)
        world.sendrecv(u[-2], down, u[0], up, tag=1)

    def mpi_sendrecv(u: Any) -> None:
        peers.Sendrecv(u[1], up, 0, u[-1], down, 0)
        peers.Sendrecv(u[-2], down, 1, u[0], up, 1)

    def ours_started(u: Any) -> None:
        uni.wait_all(
            [
                world.start.recv(u[-1], down, tag=0),
                world.start.recv(u[0], up, tag=1),
                world.start.send(u[1], up, tag=0),
                world.start.send(u[-2], down, tag=1),
            ]
        )

    def mpi_started(u: Any) -> None:
        mpi.Request.Waitall(
            [
                peers.Irecv(u[-1], down, tag=0),
                peers.Irecv(u[0], up, tag=1),
                peers.Isend(u[1], up, tag=0),
                peers.Isend(u[-2], down, tag=1),
            ]
        )

    return {
        "sendrecv": {"ours": ours_sendrecv, "mpi": mpi_sendrecv},
        "started": {"ours": ours_started, "mpi": mpi_started},
    }


def diffuse(u: Any, v: Any, scratch: Any) -> None:
    """One explicit step from u to v; the outer rows and columns are not written."""
    inner = v[1:-1, 1:-1]
    np.add(u[:-2, 1:-1], u[2:, 1:-1], out=inner)
    np.add(u[1:-1, :-2], u[1:-1, 2:], out=scratch)
    inner += scratch
    inner *= 0.125
    np.multiply(u[1:-1, 1:-1], 0.5, out=scratch)
    inner += scratch


def temperatures(rows: int, columns: int) -> Any:
    """The start: different everywhere."""
    return np.arange(rows * columns, dtype=np.float64).reshape(rows, columns) % 101.0


def check(exchange: Callable[[Any], None], rank: int, size: int, edge: int) -> None:
    """Some steps, compared with one process that holds the whole grid."""
    whole = temperatures(size * edge, edge)
    mine = slice(rank * edge, (rank + 1) * edge)
    u = np.zeros((edge + 2, edge))
    u[1:-1] = whole[mine]
    v, scratch = u.copy(), np.empty((edge, edge - 2))
    for _ in range(STEPS_CHECKED):
        exchange(u)
        diffuse(u, v, scratch)
        u, v = v, u
        padded = np.vstack([whole[-1:], whole, whole[:1]])
        after = padded.copy()
        diffuse(padded, after, np.empty((size * edge, edge - 2)))
        whole = after[1:-1]
    if not np.array_equal(u[1:-1], whole[mine]):
        raise SystemExit(f"rank {rank}: {exchange.__name__} of a grid of {edge} gives a wrong result")


def compete(
    exchanges: dict[str, Callable[[Any], None]], world: uni.Communicator, edge: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per step on the slowest rank, one figure per round and library."""
    u = np.zeros((edge + 2, edge))
    v, scratch = u.copy(), np.empty((edge, edge - 2))

    def timed(exchange: Callable[[Any], None], steps: int) -> float:
        nonlocal u, v
        world.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            exchange(u)
            diffuse(u, v, scratch)
            u, v = v, u
        return float(world.all_reduce((time.perf_counter() - began) / steps, "max"))

    steps = {name: max(3, min(2000, int(TURN_S / timed(each, 3)))) for name, each in exchanges.items()}
    times: dict[str, list[float]] = {name: [] for name in exchanges}
    for round_ in range(rounds):
        # The order changes, so that neither always follows the other's warm caches.
        for name in list(exchanges)[:: 1 if round_ % 2 else -1]:
            timed(exchanges[name], max(1, steps[name] // 4))
            times[name].append(timed(exchanges[name], steps[name]))
    return times


def show(edge: int, variant: str, times: dict[str, list[float]]) -> None:
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["mpi"], strict=True)]
    ours, theirs = (f"{statistics.median(times[name]) * 1e6:10.1f}" for name in ("ours", "mpi"))
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    print(f"{f'{edge} x {edge}':>12} {variant:>10} {ours} {theirs}  {spread}", flush=True)


if __name__ == "__main__":
    main()
