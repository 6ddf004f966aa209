"""Latency and bandwidth of every backend: two ranks on this host, the same program on each.

    python bench/backends.py [backend ...]

Prints the rows of the table in docs/backends.md: half a round trip of 8 bytes, all_reduce of 8 bytes, and the
rate of messages and of all_reduce of 16 MiB; medians of several runs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni

RUNS = 5
LARGE = 16 << 20


def measured(call: Callable[[], Any], world: uni.Communicator, count: int) -> float:
    """Seconds per call: the median of the runs."""
    times = []
    for _ in range(RUNS + 1):
        world.barrier()
        started = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - started) / count)
    return statistics.median(times[1:])


def rank() -> None:
    with uni.init() as world:
        peer = 1 - world.rank
        small, large = np.zeros(1), np.zeros(LARGE // 4, np.float32)

        def ping(x: Any) -> None:
            if world.rank == 0:
                world.send(x, peer)
                world.recv(x, peer)
            else:
                world.recv(x, peer)
                world.send(x, peer)

        figures = [
            f"{measured(lambda: ping(small), world, 50) / 2 * 1e6:.1f} us",
            f"{measured(lambda: world.all_reduce(small), world, 50) * 1e6:.1f} us",
            f"{LARGE / (measured(lambda: ping(large), world, 2) / 2) / 1e9:.2f} GB/s",
            f"{LARGE / measured(lambda: world.all_reduce(large), world, 2) / 1e9:.2f} GB/s",
        ]
        if world.rank == 0:
            print(f"| {world.backend.capabilities.name} | {' | '.join(figures)} |", flush=True)


def main() -> None:
    if sys.argv[1:] == ["--rank"]:
        rank()
        return
    print("| backend | 8 B one way | all_reduce 8 B | 16 MiB one way | all_reduce 16 MiB |")
    print("|---|---|---|---|---|")
    for name in sys.argv[1:] or ("native", "gloo", "mpi"):
        command = [sys.executable, "-m", "unisono", "run", "--backend", name, "-n", "2", __file__, "--rank"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        rows = [line.partition("| ") for line in ended.stdout.splitlines() if "| " in line]
        failure = f"| {name} | {ended.stderr.strip()[-200:]} |"
        print("\n".join(bar + rest for _, bar, rest in rows) or failure)


if __name__ == "__main__":
    main()
