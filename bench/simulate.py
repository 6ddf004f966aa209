"""How long the simulator takes in real time: `python bench/simulate.py`.

The goal: 64 ranks with 50 all_reduces of 1 KiB each in less than 60 s. The table shows the median and range
of several runs; every run of a row has the same trace, so only the machine differs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni
from unisono.simulation import Network

GOAL_S = 60


def all_reduces(world: uni.Communicator, count: int, rounds: int) -> float:
    x = np.full(count, world.rank, np.float32)
    for _ in range(rounds):
        world.all_reduce(x, op="max")
    return float(x[0])


def ping_pong(world: uni.Communicator, count: int, rounds: int) -> None:
    x = np.zeros(count, np.float32)
    for _ in range(rounds):
        if world.rank == 0:
            world.send(x, 1)
            world.recv(x, 1)
        else:
            world.recv(x, 0)
            world.send(x, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"{'what':<46} {'median':>8} {'range':>15} {'messages/s':>11} {'virtual':>9}")
    median = row("64 ranks x 50 all_reduce of 1 KiB", repeats, all_reduces, 64, 256, 50)
    jitter = Network(jitter_s=20e-6)
    row("the same with jitter: ranks out of step", repeats, all_reduces, 64, 256, 50, network=jitter)
    row("8 ranks x 50 all_reduce of 1 MiB", repeats, all_reduces, 8, 1 << 18, 50)
    row("2 ranks, 5,000 times there and back", repeats, ping_pong, 2, 1, 5_000)
    print(f"goal: the first in less than {GOAL_S} s: {'reached' if median < GOAL_S else 'MISSED'}")


def row(name: str, repeats: int, fn: Callable[..., Any], n: int, *args: Any, **how: Any) -> float:
    seconds = []
    hashes = set()
    for _ in range(repeats):
        start = time.perf_counter()
        result = uni.simulate(fn, n, *args, **how).raise_first()
        seconds.append(time.perf_counter() - start)
        hashes.add(result.trace_hash)
    assert len(hashes) == 1, "a seed must repeat its trace"
    median = statistics.median(seconds)
    messages = sum(event.kind == "send" for event in result.trace)
    spread = f"{min(seconds):.2f}-{max(seconds):.2f} s"
    print(f"{name:<46} {median:>6.2f} s {spread:>15} {messages / median:>11,.0f} {result.time_s:>7.3f} s")
    return median


if __name__ == "__main__":
    main()
