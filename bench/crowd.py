"""More ranks than cores: 8 and 16 ranks still finish, and no rank starves the others by spinning.

    python bench/crowd.py [-n 2,8,16] [--calls 200]

Each rank makes the same calls: an all_reduce of 8 bytes, one of 1 MiB and a barrier. Then rank 0 sleeps for a
second while the others wait. The table shows the time from the first call to the last and the processor
time of all ranks, and the same for the wait, which should cost next to nothing.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

import unisono as uni


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", default="2,8,16")
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{args.calls} rounds of all_reduce 8 B, all_reduce 1 MiB, barrier; one slow rank; {cores} cores")
    print(
        f"{'link':<5} {'ranks':>5} {'calls s':>8} {'CPU s':>7} {'waiting s':>10} {'CPU s while waiting':>20}"
    )
    for kind, shm in (("shm", "1"), ("tcp", "0")):
        for n in map(int, args.n.split(",")):
            rows = uni.spawn(rank, n, args.calls, env={"UNISONO_SHM": shm}, timeout=600)
            took, processor, waited, processor_waiting = zip(*rows, strict=True)
            print(
                f"{kind:<5} {n:>5} {max(took):>8.2f} {sum(processor):>7.2f} {max(waited):>10.2f} "
                f"{sum(processor_waiting):>20.2f}"
            )


def rank(comm: uni.Communicator, calls: int) -> tuple[float, float, float, float]:
    small, large = np.zeros(1, np.float64), np.zeros(1 << 18, np.float32)
    comm.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        small[0] = comm.rank
        comm.all_reduce(small)
        assert small[0] == comm.size * (comm.size - 1) / 2
        comm.all_reduce(large)
        comm.barrier()
    took, processor = time.perf_counter() - began, time.process_time() - used
    # One rank is late: how much processor time do the others use while they wait?
    began, used = time.perf_counter(), time.process_time()
    if comm.rank == 0:
        time.sleep(1.0)
    comm.barrier()
    return took, processor, time.perf_counter() - began, time.process_time() - used


if __name__ == "__main__":
    main()
