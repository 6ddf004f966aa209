"""Ranks in one process: barrier and all_reduce of `uni.local`, beside `threading.Barrier` in turns.

    python bench/local_ranks.py [-n 2,4] [--rounds 7] [--mib 64]

Every rank is a thread. A ratio is our time over that of threading.Barrier in the same round: the median, and
the least and the most. The large all_reduce stands beside one NumPy addition of as many bytes on each thread.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni

TURN_S = 0.1
# What a thread repeats, by rank.
Call = Callable[[int], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", default="2,4", help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=64, help="of the large all_reduce")
    args = parser.parse_args()
    print("us per call, median; beside: the time over that of the first of its group, median (least to most)")
    for n in map(int, args.n.split(",")):
        print(f"\n{n} threads")
        for calls in groups(n, args.mib):
            show(compete(calls, n, args.rounds))


def groups(n: int, mib: int) -> list[dict[str, Call]]:
    """What is compared; the first of each is the measure."""
    world, small, large = uni.local(n), np.zeros((n, 2), np.float32), mib << 20
    xs, ys = (np.zeros((n, large // 4), np.float32) for _ in range(2))
    barrier = threading.Barrier(n)
    return [
        {
            "threading.Barrier": lambda rank: barrier.wait(),
            "barrier": lambda rank: world[rank].barrier(),
            "all_reduce 8 B": lambda rank: world[rank].all_reduce(small[rank]),
        },
        {
            f"NumPy add {mib} MiB": lambda rank: np.add(xs[rank], ys[rank], out=ys[rank]),
            f"all_reduce {mib} MiB": lambda rank: world[rank].all_reduce(xs[rank]),
        },
    ]


def compete(calls: dict[str, Call], n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per call, one figure per round."""
    repeats = {name: max(2, min(2000, int(TURN_S / timed(call, n, 3)))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, n, repeats[name]))
    return times


def timed(call: Call, n: int, repeats: int) -> float:
    """Seconds per call on the slowest thread. All threads begin together."""
    together, elapsed, errors = threading.Barrier(n), [0.0] * n, []

    def work(rank: int) -> None:
        try:
            call(rank)
            together.wait()
            began = time.perf_counter()
            for _ in range(repeats):
                call(rank)
            elapsed[rank] = time.perf_counter() - began
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return max(elapsed) / repeats


def show(times: dict[str, list[float]]) -> None:
    measure = next(iter(times.values()))
    for name, own in times.items():
        ratios = [mine / first for mine, first in zip(own, measure, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{name:>20} {statistics.median(own) * 1e6:>12.1f}  {spread}", flush=True)


if __name__ == "__main__":
    main()
