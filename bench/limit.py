"""How near large collectives come to what the machine's memory allows.

    python bench/limit.py [-n 2,4] [--mib 16,64,128] [--rounds 5] [--only all_reduce,broadcast]

For every collective: the fewest bytes that all ranks together must copy and reduce, at the bandwidth that as
many processes reach together with a bare copy (NumPy) and a bare reduction (our kernel) of arrays of that
length. Both are measured in the same rounds as the collective. The fraction is that least time over ours;
above 1 would mean that caches served a part.
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
from unisono.bench.arrays import array_of
from unisono.core.dtypes import DTYPES
from unisono.core.kernels import reduce_into
from unisono.core.ops import as_op

# Of a vector of one byte on n ranks: bytes copied, and bytes reduced, by all ranks together. The results of
# all_gather and all_to_all are whole vectors on each rank, own part included; so are reduce_scatter's inputs.
FEWEST: dict[str, Callable[[int], tuple[float, float]]] = {
    "all_reduce": lambda n: (n - 1, n - 1),
    "reduce": lambda n: (0, n - 1),
    "broadcast": lambda n: (n - 1, 0),
    "all_gather": lambda n: (n, 0),
    "gather": lambda n: (1, 0),
    "scatter": lambda n: (1, 0),
    "reduce_scatter": lambda n: (0, n - 1),
    "all_to_all": lambda n: (n, 0),
    "scan": lambda n: (1, n - 1),
}
# A turn goes on until it has lasted this long on rank 0.
TURN_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", default="2,4", help="numbers of ranks")
    parser.add_argument("--mib", default="16,64,128", help="MiB of the vector")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(FEWEST))
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores; medians; fraction of the limit: median (least to most)")
    for n in map(int, args.n.split(",")):
        for mib in map(int, args.mib.split(",")):
            names = args.only.split(",")
            of_ranks = uni.spawn(rank, n, names, mib << 20, args.rounds, timeout=1200)
            show(n, mib, names, slowest(of_ranks))


def slowest(of_ranks: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Round by round, the time of the slowest rank."""
    return [
        {name: max(times[name] for times in of_round) for name in of_round[0]}
        for of_round in zip(*of_ranks, strict=True)
    ]


def fraction(name: str, n: int, times: dict[str, float]) -> float:
    """The least time over the measured one. `copy` and `reduce` are of one vector on each of the n ranks."""
    copied, reduced = FEWEST[name](n)
    return (copied * times["bare copy"] + reduced * times["bare reduce"]) / n / times[name]


def show(n: int, mib: int, names: list[str], rounds: list[dict[str, float]]) -> None:
    together = {
        kind: n * (mib << 20) / statistics.median(times[kind] for times in rounds) / 1e9
        for kind in ("bare copy", "bare reduce")
    }
    print(f"\n{n} ranks, {mib} MiB;", ", ".join(f"{kind} {each:.1f} GB/s" for kind, each in together.items()))
    print(f"{'':>16} {'ms':>9}  of the limit")
    for name in names:
        fractions = [fraction(name, n, times) for times in rounds]
        ms = statistics.median(times[name] for times in rounds) * 1e3
        spread = f"{statistics.median(fractions):.2f} ({min(fractions):.2f}-{max(fractions):.2f})"
        print(f"{name:>16} {ms:>9.2f}  {spread}", flush=True)


def rank(comm: uni.Communicator, names: list[str], nbytes: int, rounds: int) -> list[dict[str, float]]:
    """One rank: all calls in turns, round after round."""
    calls = calls_of(comm, nbytes)
    chosen = {name: calls[name] for name in ("bare copy", "bare reduce", *names)}
    repeats = {
        name: max(1, min(50, int(TURN_S / comm.broadcast(timed(comm, call, 1)))))
        for name, call in chosen.items()
    }
    return [{name: timed(comm, call, repeats[name]) for name, call in chosen.items()} for _ in range(rounds)]


def timed(comm: uni.Communicator, call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, after a first one."""
    call()
    comm.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def calls_of(comm: uni.Communicator, nbytes: int) -> dict[str, Callable[[], Any]]:
    """The collectives and the bare calls on vectors of zeros; a vector is also a row of blocks."""
    count = nbytes // 4 // comm.size * comm.size
    x, out = (array_of((count,)) for _ in range(2))
    x.fill(0)
    out.fill(0)
    rows, rows_out = (array.reshape(comm.size, -1) for array in (x, out))
    block, is_root = array_of((count // comm.size,)), comm.rank == 0
    block.fill(0)
    add, float32 = as_op("sum"), DTYPES["float32"]
    return {
        "bare copy": lambda: np.copyto(out, x),
        "bare reduce": lambda: reduce_into(out, x, add, float32),
        "all_reduce": lambda: comm.all_reduce(x),
        "reduce": lambda: comm.reduce(x),
        "broadcast": lambda: comm.broadcast(x),
        "all_gather": lambda: comm.all_gather(block, out=rows_out),
        "gather": lambda: comm.gather(block, out=rows_out if is_root else None),
        "scatter": lambda: comm.scatter(rows if is_root else None, out=block),
        "reduce_scatter": lambda: comm.reduce_scatter(rows, out=block),
        "all_to_all": lambda: comm.all_to_all(rows, out=rows_out),
        "scan": lambda: comm.scan(x, out=out),
    }


if __name__ == "__main__":
    main()
