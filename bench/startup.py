"""How long 32 ranks on one host take to start, and how much memory each of them needs.

    python bench/startup.py [-n 32] [--rounds 3]

Three measurements in turns: n interpreters that import NumPy and end; `uni.spawn` of n ranks that call a
barrier; the same under `unisono run`. What counts is the time beyond the bare processes, from the first
process to the finished barrier, and the memory of a rank beyond an interpreter with NumPy. Memory is Pss:
shared memory is divided among the processes that share it; private memory is shown, too. Goals: below 5 s and
60 MiB.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import unisono as uni

GOAL_S, GOAL_MIB = 5.0, 60.0
MEMORY = """
import re
def mib():
    text = open("/proc/self/smaps_rollup").read()
    pss = int(re.search(r"^Pss: +(\\d+)", text, re.M)[1])
    own = sum(int(kib) for kib in re.findall(r"^Private_\\w+: +(\\d+)", text, re.M))
    return pss / 1024, own / 1024
"""
BARE = MEMORY + "import numpy, sys; print(*mib()); sys.stdout.flush(); sys.stdin.read()"
RANK = (
    MEMORY
    + """
import time, numpy, unisono as uni
with uni.init(timeout=120) as world:
    world.barrier()
    at = time.monotonic()
    print("rank", *mib(), at, flush=True)
    world.barrier()
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    how = {"interpreters with NumPy": bare, "uni.spawn": spawned, "unisono run": launched}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in how}
    for _ in range(args.rounds):
        for name, measure in how.items():
            before = processor_s()
            row = measure(args.n)
            found[name].append((*row, processor_s() - before))
    medians = {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for name, rows in found.items()
    }
    print(f"{args.n} processes, median of {args.rounds} rounds (each: seconds)")
    print(f"{'':<26} {'s':>7} {'CPU s':>7} {'Pss MiB':>8} {'own MiB':>8}")
    for name, (seconds, pss, own, processor) in medians.items():
        each = " ".join(f"{row[0]:.2f}" for row in found[name])
        print(f"{name:<26} {seconds:>7.2f} {processor:>7.2f} {pss:>8.1f} {own:>8.1f}   ({each})")
    base = medians["interpreters with NumPy"]
    for name in ("uni.spawn", "unisono run"):
        more_s = medians[name][0] - base[0]
        more_mib = max(medians[name][1] - base[1], medians[name][2] - base[2])
        reached = "reached" if more_s < GOAL_S and more_mib < GOAL_MIB else "MISSED"
        print(
            f"{name}: {more_s:.2f} s and {more_mib:.1f} MiB a rank beyond; "
            f"goal: {GOAL_S:.0f} s, {GOAL_MIB:.0f} MiB: {reached}"
        )


def processor_s() -> float:
    """Processor time of all ended children; unlike wall time it hardly depends on other load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bare(n: int) -> tuple[float, float, float]:
    """The time until the last interpreter has imported NumPy, and the memory while all of them run."""
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(n)
    ]
    rows = [[float(word) for word in process.stdout.readline().split()] for process in processes]  # type: ignore[union-attr]
    seconds = time.monotonic() - began
    for process in processes:
        process.communicate()
    return seconds, *(statistics.mean(column) for column in zip(*rows, strict=True))


def spawned(n: int) -> tuple[float, float, float]:
    began = time.monotonic()
    rows = uni.spawn(rank, n, timeout=180)
    return max(row[2] for row in rows) - began, *(statistics.mean(row[i] for row in rows) for i in (0, 1))


def rank(comm: uni.Communicator) -> list[float]:
    import numpy  # noqa: F401

    names: dict[str, object] = {}
    exec(MEMORY, names)
    comm.barrier()
    at = time.monotonic()
    found = [*names["mib"](), at]  # type: ignore[operator]
    comm.barrier()
    return found


def launched(n: int) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(RANK)
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "unisono", "run", "-n", str(n), str(program)],
            capture_output=True,
            text=True,
            check=True,
        )
    rows = [[float(word) for word in line.split("rank ")[1].split()] for line in done.stdout.splitlines()]
    assert len(rows) == n, done.stdout
    return max(row[2] for row in rows) - began, *(statistics.mean(row[i] for row in rows) for i in (0, 1))


if __name__ == "__main__":
    main()
