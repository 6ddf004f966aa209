"""Does a started all_reduce go on while the caller computes?

    python bench/overlap.py [-n 2] [--bytes 67108864] [--rounds 7] [--with numpy,torch,idle]

All ranks take three measurements in turns: compute alone (a matrix product on one thread, by NumPy or torch),
the all_reduce alone, and both (start, compute, wait). Without overlap, both = compute + communication; with
full overlap, both = the longer of the two. With as many ranks as cores the engine's threads have no core of
their own, so only waiting can be hidden; a free core hides clearly more. `idle` is a caller that waits for
something else, such as a disk or a GPU, and leaves its core free.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", default="2", help="numbers of ranks, as in 2,4")
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--with", dest="libraries", default="numpy,idle", help="of numpy, torch, idle")
    args = parser.parse_args()
    print(f"all_reduce of {args.bytes >> 20} MiB, {len(os.sched_getaffinity(0))} cores;")
    print("ms, median (least to most); hidden: of the shorter of the two, how much the caller did not feel")
    for kind, shm in (("shm", "1"), ("tcp", "0")):
        for n in map(int, args.n.split(",")):
            for library in args.libraries.split(","):
                env = {**ONE_THREAD, "UNISONO_SHM": shm}
                rows = uni.spawn(rank, n, args.bytes, args.rounds, library, env=env, timeout=300)
                show(f"{kind}, {n} ranks, {library}", rows)


def show(what: str, of_ranks: list[Any]) -> None:
    """The time of the slowest rank, round by round."""
    rounds = [
        [max(times) for times in zip(*of_round, strict=True)] for of_round in zip(*of_ranks, strict=True)
    ]
    compute, alone, both = zip(*rounds, strict=True)
    hidden = [(a + b - c) / min(a, b) for a, b, c in rounds]
    cells = [
        f"{name} {statistics.median(times) * 1e3:.1f} ({min(times) * 1e3:.1f}-{max(times) * 1e3:.1f})"
        for name, times in (("compute", compute), ("all_reduce", alone), ("both", both))
    ]
    gain = f"hidden {statistics.median(hidden):.0%} ({min(hidden):.0%} to {max(hidden):.0%})"
    print(f"{what}: {', '.join(cells)}; {gain}")


def rank(comm: uni.Communicator, nbytes: int, rounds: int, library: str) -> list[list[float]]:
    x = np.ones(nbytes // 4, np.float32)
    product = product_of(library)

    def compute() -> None:
        for _ in range(repeats):
            product()

    def alone() -> None:
        comm.all_reduce(x, op="max")

    def both() -> None:
        work = comm.start.all_reduce(x, op="max")
        compute()
        work.wait()

    # Compute for about as long as the all_reduce takes, the same on every rank.
    repeats, _ = 1, alone()
    compute()
    longer = comm.all_reduce(timed(comm, alone), "max") / comm.all_reduce(timed(comm, compute), "max")
    repeats = max(1, round(longer))
    return [[timed(comm, each) for each in (compute, alone, both)] for _ in range(rounds)]


def product_of(library: str) -> Callable[[], Any]:
    if library == "idle":
        return lambda: time.sleep(0.002)
    a = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    if library == "numpy":
        return lambda: a @ a
    import torch

    torch.set_num_threads(1)
    tensor = torch.from_numpy(a)
    return lambda: tensor @ tensor


def timed(comm: uni.Communicator, call: Callable[[], None]) -> float:
    comm.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
