"""Every verb in every way of calling it, 8 bytes: cases that are much slower than the plain call.

    python bench/cliffs.py [--worlds "2 shm" "4 tcp"] [--times 100] [--factor 5] [--only all_reduce] [--all]

The plain call of a verb takes an array and nothing else. All its other cases are divided by it: another kind
of data, dtype, operation or argument, `timeout=`, started, in a subgroup, on a second thread. A case above
`factor` is a *cliff*: it takes another path than the plain call, or does work that it need not do. The plain
call of each verb is divided by that of all_reduce, and, in a world whose settings are not the usual ones, by
that of the same verb in the usual one: a setting may be a cliff, too.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from typing import Final

import numpy as np
from cliff_cases import ELSEWHERE, Step, cases

import unisono as uni

TURNS: Final = 5
# Ranks, settings, and the world whose plain calls cost as much.
WORLDS: Final[dict[str, tuple[int, dict[str, object], str]]] = {
    "2 shm": (2, {}, ""),
    "4 shm": (4, {}, ""),
    "2 tcp": (2, {"shm": False}, ""),
    "4 tcp": (4, {"shm": False}, ""),
    "2 deadline_s": (2, {"deadline_s": 60.0}, "2 shm"),
    "2 reproducible": (2, {"reproducible": True}, "2 shm"),
}

# (verb, way, microseconds)
Found = list[tuple[str, str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS), metavar="WORLD")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--factor", type=float, default=5)
    parser.add_argument("--only", default="", help="verbs, separated by commas")
    parser.add_argument("--all", action="store_true", help="print every case")
    args = parser.parse_args()
    usual: dict[str, dict[str, float]] = {}
    for world in args.worlds:
        ranks, settings, like = WORLDS[world]
        config = uni.Config(**settings)  # type: ignore[arg-type]
        found = uni.spawn(measured, ranks, args.times, args.only, timeout=1800, config=config)[0]
        usual[world] = {verb: us for verb, way, us in found if way == "plain"}
        show(world, found, usual[world], usual.get(like, {}), 0 if args.all else args.factor)


def show(
    world: str, found: Found, plain: dict[str, float], elsewhere: dict[str, float], factor: float
) -> None:
    first = plain.get("all_reduce", min(plain.values()))
    print(f"{world}: plain all_reduce {first:.2f} us; above {factor:g}x, of {len(found)} cases:", flush=True)
    for verb, way, us in found:
        like = elsewhere.get(verb, first) if way == "plain" else plain[verb]
        if us > factor * like:
            print(f"{verb:>18} {us:>9.2f} us {us / like:>7.1f}x of {like:>6.2f}  {way}")


def measured(comm: uni.Communicator, times: int, only: str) -> Found:
    """Every case in the order of the cases; what is refused is shown."""
    logging.getLogger("unisono").setLevel(logging.ERROR)  # of works that are dropped
    wanted = only.split(",") if only else None
    found = []
    for verb, way, step in cases(comm):
        if wanted is not None and verb not in wanted:
            continue
        try:
            found.append((verb, way, time_of(comm, step, times, way == ELSEWHERE)))
        except uni.UsageError as error:
            if comm.rank == 0:
                print(f"{verb}, {way}: {error}", file=sys.stderr)
    return found


def time_of(comm: uni.Communicator, step: Step, times: int, is_elsewhere: bool) -> float:
    """Microseconds of one call: the shortest of some turns, after a call that may decide something.

    What other programs do makes a turn longer; a call that takes another path is slow in every turn. A turn
    is as long as on the slowest rank: of some verbs one rank finds all messages there.
    """
    step()
    calls = getattr(step, "calls", 1)
    rounds = max(1, times // calls)
    turns: list[float] = []

    def run() -> None:
        for _ in range(TURNS):
            comm.barrier()
            begun = time.perf_counter()
            for _ in range(rounds):
                step()
            turns.append((time.perf_counter() - begun) / (rounds * calls) * 1e6)

    if is_elsewhere:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    return float(comm.all_reduce(np.array(turns), "max").min())


if __name__ == "__main__":
    main()
