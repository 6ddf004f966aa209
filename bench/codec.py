"""How fast the codec is beside pickle: `python bench/codec.py`.

Ours and pickle (protocol 5) take turns in one run on the same value, packing it into one bytes object and
unpacking that. Times are processor times of the thread, so that other programs count little. The ratio is
pickle's time / our time (above 1 we are faster), per pair of neighbouring rounds; the table shows its median
and quartiles. Goal: never below 1.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from unisono.core import codec
from unisono.core.envelope import Status

# Long enough for the clock, short enough that the load of the machine does not change within a round.
ROUND_S = 2e-3


def cases() -> dict[str, Any]:
    """Values by name."""
    record = {
        "step": 1017,
        "loss": 0.25,
        "name": "worker-3",
        "shape": (3, 224, 224),
        "done": False,
        "next": None,
    }
    return {
        "None": None,
        "int": 7,
        "Status": Status(1, 2, 3),
        "dict, 100 B": record,
        "200 small dicts": [{"id": i, "name": f"item {i}", "score": i / 7} for i in range(200)],
        "1,000 ints": list(range(0, 70_000, 70)),
        "1,000 floats": [i / 7 for i in range(1000)],
        "1,000 texts": [f"text number {i}" for i in range(1000)],
        "1,000 texts, not ASCII": [f"größe {i}" for i in range(1000)],
        "nested lists": [[[i, [j, [k]]] for j in range(5) for k in range(4)] for i in range(10)],
        "dict of 1,000 ints": {i: -i for i in range(1000)},
        **{f"bytes, {n:,} B": bytes(n) for n in (16, 1024, 4095, 4096, 65_536, 1 << 20, 16 << 20)},
        **{f"text, {n:,} B": "x" * n for n in (16, 1024, 4095, 4096, 65_536, 1 << 20)},
        "text, 64 Ki letters, not ASCII": "größe " * 11_000,
        **{f"bytearray, {n:,} B": bytearray(n) for n in (16, 1024, 65_536, 1 << 20)},
        **{f"array, {n:,} B": np.arange(n // 8) for n in (8, 1024, 4096, 65_536, 1 << 20, 16 << 20)},
        "20 arrays of 800 B": {f"w{i}": np.arange(100.0) for i in range(20)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    args = parser.parse_args()
    print(
        f"pack + unpack; numpy {np.__version__}, {args.rounds} rounds; a ratio above 1: the codec is faster"
    )
    print(f"{'value':<32} {'codec us':>9} {'pickle us':>9} {'ratio':>6}  quartiles      pack  unpack")
    _ = bytearray(
        31 << 20
    )  # freed at once: from now on glibc keeps memory of up to this size for the next call
    del _
    for name, value in cases().items():
        print(row(name, value, args.rounds))


def row(name: str, value: Any, rounds: int) -> str:
    packed, pickled = codec.pack(value), pickle.dumps(value, 5)
    if len(packed) > 1 << 12:
        packed = bytearray(packed)  # as it arrives: in memory that the receiver owns
    whole = [
        ratios(lambda: codec.unpack(codec.pack(value)), lambda: pickle.loads(pickle.dumps(value, 5)), rounds),
        ratios(partial(codec.pack, value), partial(pickle.dumps, value, 5), rounds),
        ratios(partial(codec.unpack, packed), partial(pickle.loads, pickled), rounds),
    ]
    (ours, theirs, ratio, low, high), *halves = whole
    return (
        f"{name:<32} {ours * 1e6:9.2f} {theirs * 1e6:9.2f} {ratio:6.2f}  [{low:.2f}, {high:.2f}]  "
        + "  ".join(f"{half[2]:5.2f}" for half in halves)
    )


def ratios(
    ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int
) -> tuple[float, float, float, float, float]:
    """Median times, then median and quartiles of the ratio."""
    repeat = max(1, int(ROUND_S / max(timed(ours, 1), timed(theirs, 1), 1e-7)))
    pairs = [(timed(ours, repeat), timed(theirs, repeat)) for _ in range(rounds)]
    low, middle, high = statistics.quantiles((b / a for a, b in pairs), n=4)
    return (statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), middle, low, high)


def timed(call: Callable[[], Any], repeat: int) -> float:
    start = time.thread_time()
    for _ in range(repeat):
        call()
    return (time.thread_time() - start) / repeat


if __name__ == "__main__":
    main()
