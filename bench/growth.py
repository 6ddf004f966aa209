"""Does memory grow? 100,000 small collectives and 10,000 tagged messages, and the memory of every rank.

    python bench/growth.py [-n 2] [--collectives 100000] [--messages 10000]

The growth of resident memory is measured after the first tenth of the calls, when plans, links and caches
have been made, for both kinds of link.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import unisono as uni


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--messages", type=int, default=10_000)
    args = parser.parse_args()
    print(f"{args.n} ranks: resident memory in KiB, after the first tenth and at the end")
    for kind, shm in (("shm", "1"), ("tcp", "0")):
        for name, work, count in (
            ("collectives", collectives, args.collectives),
            ("tagged messages", messages, args.messages),
        ):
            began = time.perf_counter()
            rows = uni.spawn(work, args.n, count, env={"UNISONO_SHM": shm}, timeout=900)
            shown = ", ".join(f"rank {r}: {a:,} to {b:,} ({b - a:+,})" for r, (a, b) in enumerate(rows))
            print(f"{kind}, {count:,} {name}: {shown}; {time.perf_counter() - began:.1f} s")


def collectives(comm: uni.Communicator, count: int) -> tuple[int, int]:
    """Four collectives in turn; the results are checked."""
    x = np.full(16, comm.rank, np.float32)
    before = 0
    for i in range(count):
        if i == count // 10:
            before = resident_kib()
        match i % 4:
            case 0:
                x[:] = comm.rank
                comm.all_reduce(x)
                assert x[3] == comm.size * (comm.size - 1) / 2
            case 1:
                comm.barrier()
            case 2:
                assert comm.all_gather(x).shape == (comm.size, 16)
            case _:
                comm.broadcast(x, root=i // 4 % comm.size)
    return before, resident_kib()


def messages(comm: uni.Communicator, count: int) -> tuple[int, int]:
    """Messages around a ring, each with its own tag, received in another order."""
    to, from_ = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out, in_ = np.zeros(64, np.int64), np.zeros(64, np.int64)
    before = 0
    for first in range(0, count, 20):
        if before == 0 and first >= count // 10:
            before = resident_kib()
        works = []
        for tag in range(first, first + 20):
            out = np.full(64, tag, np.int64)
            works.append(comm.start.send(out, to, tag))
        for tag in reversed(range(first, first + 20)):
            comm.recv(in_, from_, tag)
            assert in_[5] == tag
        uni.wait_all(works)
    return before, resident_kib()


def resident_kib() -> int:
    line = next(t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith("VmRSS"))
    return int(line.split()[1])


if __name__ == "__main__":
    main()
