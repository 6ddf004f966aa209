"""Collectives through the public API on the native backend, 2 and 4 processes of this host.

    python bench/collectives_native.py [--kind shm|tcp] [--sizes 2,4] [--runs 5] [--only all_reduce]
                                       [--largest 67108864]

Prints the best and the median of the runs in microseconds per call, and the median in GB/s of the bytes
named. "Bytes" is what one rank contributes to (all_gather: gets from each of) the collective, as float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

import unisono as uni

SIZES = [8, 64, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="shm", choices=["shm", "tcp"])
    parser.add_argument("--sizes", default="2,4")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default=",".join(COLLECTIVES))
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    args = parser.parse_args()
    env = {} if args.kind == "shm" else {"UNISONO_SHM": "0"}
    for size in map(int, args.sizes.split(",")):
        print(f"{size} ranks, {args.kind}: us per call, best / median (GB/s)")
        rows = uni.spawn(measure, size, args.only.split(","), args.runs, args.largest, env=env, timeout=600)[
            0
        ]
        print(f"{'bytes':>10} " + "".join(f"{name:>28}" for name in args.only.split(",")))
        for nbytes, *cells in rows:
            shown = (f"{best:.1f} / {median:.1f} ({nbytes / median / 1e3:.2f})" for best, median in cells)
            print(f"{nbytes:>10} " + "".join(f"{cell:>28}" for cell in shown))


def measure(comm: uni.Communicator, names: list[str], runs: int, largest: int) -> list[Any]:
    """One rank's part: (bytes, (best, median) per collective)."""
    rows: list[Any] = []
    for nbytes in SIZES:
        if nbytes > largest:
            break
        rows.append((nbytes, *(timed(comm, name, nbytes, runs) for name in names)))
    return rows


def timed(comm: uni.Communicator, name: str, nbytes: int, runs: int) -> tuple[float, float]:
    """Best and median microseconds per call."""
    count, size = max(1, nbytes // 4), comm.size
    x = np.ones(count, np.float32)
    whole = np.ones((size, max(1, count // size)), np.float32)
    gathered = np.empty((size, count), np.float32)
    row, swapped = np.empty_like(whole[0]), np.empty_like(whole)

    def call() -> None:
        if name == "all_reduce":
            comm.all_reduce(x, "max")
        elif name == "broadcast":
            comm.broadcast(x)
        elif name == "all_gather":
            comm.all_gather(x, out=gathered)
        elif name == "reduce_scatter":
            comm.reduce_scatter(whole, "max", out=row)
        else:
            comm.all_to_all(whole, out=swapped)

    rounds = max(3, min(500, (64 << 20) // nbytes))
    times = []
    for _ in range(runs + 1):
        comm.barrier()
        started = time.perf_counter()
        for _ in range(rounds):
            call()
        times.append((time.perf_counter() - started) / rounds * 1e6)
    del times[0]  # the first builds plans and links
    return min(times), statistics.median(times)


if __name__ == "__main__":
    main()
