"""From the end of an operation to its observer, in a process that is otherwise idle.

    python bench/observers.py [--times 300] [--links shm,tcp]

Rank 0 starts a receive and observes it; rank 1 waits a random few milliseconds and sends the time of the
monotonic clock, which both processes share. The figure is the time at the observer minus the one in the
message, so that it includes the journey of 8 bytes: `wait` shows what that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni

PAUSE_S = (1e-3, 5e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--links", default="shm,tcp")
    args = parser.parse_args()
    print(f"{'us':>20} {'median':>9} {'90 %':>9} {'most':>9}")
    for link in args.links.split(","):
        env = {"UNISONO_SHM": "1" if link == "shm" else "0"}
        found, _ = uni.spawn(rank, 2, args.times, env=env, timeout=600)
        for name, delays in found.items():
            show(f"{link}, {name}", delays)


def show(name: str, delays: list[int] | None) -> None:
    if delays is None:
        print(f"{name:>20} this version has none")
        return
    us = sorted(each / 1e3 for each in delays)
    print(
        f"{name:>20} {statistics.median(us):>9.1f} {us[len(us) * 9 // 10]:>9.1f} {us[-1]:>9.1f}", flush=True
    )


def rank(comm: uni.Communicator, times: int) -> dict[str, list[int] | None]:
    """Rank 0 observes, rank 1 sends."""
    return {name: observe(comm, times) for name, observe in OBSERVERS.items()}


def measured(comm: uni.Communicator, times: int, observe: Callable[[Any], int]) -> list[int]:
    """Nanoseconds of each observation; `observe` takes a work and returns the time at which it knew."""
    delays, stamp = [], np.zeros(1, np.int64)
    pauses = random.Random(7)
    for _ in range(times):
        if comm.rank == 0:
            work = comm.start.recv(stamp, 1)
            comm.send(np.zeros(1, np.int8), 1)
            delays.append(observe(work) - int(stamp[0]))
        else:
            comm.recv(np.zeros(1, np.int8), 0)
            time.sleep(pauses.uniform(*PAUSE_S))
            comm.send(np.array([time.monotonic_ns()], np.int64), 0)
    return delays


def by_wait(comm: uni.Communicator, times: int) -> list[int]:
    def observe(work: Any) -> int:
        work.wait()
        return time.monotonic_ns()

    return measured(comm, times, observe)


def by_await(comm: uni.Communicator, times: int) -> list[int]:
    loop = asyncio.new_event_loop()

    async def awaited(work: Any) -> int:
        await work
        return time.monotonic_ns()

    try:
        return measured(comm, times, lambda work: loop.run_until_complete(awaited(work)))
    finally:
        loop.close()


def by_callback(comm: uni.Communicator, times: int) -> list[int] | None:
    if not hasattr(uni.Work, "add_done_callback"):
        return None

    def observe(work: Any) -> int:
        told, at = threading.Event(), [0]

        def note(_work: Any) -> None:
            at[0] = time.monotonic_ns()
            told.set()

        work.add_done_callback(note)
        told.wait()
        work.wait()
        return at[0]

    return measured(comm, times, observe)


OBSERVERS: dict[str, Callable[[uni.Communicator, int], list[int] | None]] = {
    "wait": by_wait,
    "await": by_await,
    "callback": by_callback,
}

if __name__ == "__main__":
    main()
