"""Writes docs/benchmarks.md from what `unisono bench --json` has measured; `make bench-page` does both.

    unisono bench --json out.json --plot docs/benchmarks.png
    python bench/page.py out.json > docs/benchmarks.md

Nothing on the page is written by hand: a measurement on another machine gives another page.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

from unisono.bench import Case, Ratio, Results
from unisono.plans.units import bytes_text, seconds_text

# The goals: the least ratio of a peer's time to ours.
GOALS = {
    ("unisono", "mpi"): 1.0,
    ("unisono", "gloo"): 5.0,
    ("unisono-tcp", "mpi-tcp"): 1.0,
    ("unisono-tcp", "gloo"): 2.0,
}
# A way of calling beside another: at most this many times as long, or this much longer. New sizes are longer
# than the plain call's: they stand beside calls of the same sizes.
WAY_GOALS = {
    "timeout": ("blocking", 1.05, 0.1e-6),
    "started": ("blocking", 1.5, 0.5e-6),
    "new size": ("seen size", 1.2, 0.3e-6),
    "1000 lines": ("blocking", 1.0, 0.0),
}


def main() -> None:
    results = Results.from_json(Path(sys.argv[1]).read_text())
    print("\n".join(page(results)))


def page(results: Results) -> list[str]:
    lines = [
        "# Benchmarks",
        "",
        "Made by `bench/page.py` from one run of `unisono bench --json`. All systems took turns at each",
        "case, one at a time, in processes of their own; every system is called from Python, the peers as",
        "pip installs them, with their defaults. Times are medians of the rounds, of the slowest rank, per",
        "call. A ratio is the peer's time over ours, round by round: the median, and in brackets the least",
        "and the most; above 1 we are faster. Bytes and bus bandwidth are those of nccl-tests. Arrays are",
        "float32, reductions are sums.",
        "",
        "Ways of calling: *timeout* is the call with `timeout=60`, beside the peer's plain one; *started*",
        "is started and waited for, *polled* asks until it is done (where the peer has no started form, its",
        "blocking one); *new size*, *new view* and *new array* have operands that no call has had before,",
        "*seen size* has the same sizes as *new size* a second time; *1000 lines* calls from a thousand",
        "lines of the program in turn. Where the receiver does not know the lengths, MPI's side exchanges",
        "them first.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in results.machine.items()),
        "",
    ]
    lines += [f"{name}: {why}\n" for name, why in results.absent.items()]
    lines += summary(results)
    lines += ways(results)
    lines += ["![Time per call of every operation and size](benchmarks.png)", ""]
    for ours, peers, cases in results.tables():
        lines += table(results, cases, ours, peers)
    return lines


def summary(results: Results) -> list[str]:
    """The geometric mean of each pair of systems, how many cases reach the goal, and those below 1."""
    titles = ["ours", "peer", "ranks", "cases", "geometric mean", "goal", "cases that reach it", "below 1.0"]
    lines = ["## Summary", "", f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    listed: list[str] = []
    for each in results.summaries():
        goal = GOALS[each.ours, each.peer]
        ratios = [
            ratio.median
            for case in results.times
            if case.ranks == each.ranks and (ratio := results.ratio(case, each.ours, each.peer)) is not None
        ]
        cells = [
            each.ours,
            each.peer,
            str(each.ranks),
            str(each.cases),
            f"{each.geometric_mean:.2f}",
            f"{goal:g}x",
            str(sum(ratio >= goal for ratio in ratios)),
            str(len(each.below)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if each.below:
            listed += [f"### Below 1.0: {each.ours} beside {each.peer}, {each.ranks} ranks", ""]
            listed += ["| case | ratio |", "|---|---:|"]
            listed += [f"| {case.label} | {ratio_cell(ratio)} |" for case, ratio in each.below]
            listed += [""]
    return [*lines, "", *listed] if len(lines) > 4 else []


def ways(results: Results) -> list[str]:
    """What other ways of calling cost beside the plain call of the same system, or of the same sizes."""
    titles = ["system", "ranks", "way", "beside", "goal", "cases", "within it", "median", "most"]
    lines = ["## Ways of calling, beside the plain call", "", f"| {' | '.join(titles)} |"]
    lines += [f"|{'---|' * len(titles)}"]
    systems = dict.fromkeys(ours for ours, _ in GOALS)
    for ours, ranks, way in product(systems, sorted({case.ranks for case in results.times}), WAY_GOALS):
        beside, factor, extra_s = WAY_GOALS[way]
        pairs = [
            (plain, seconds)
            for case in results.times
            if (case.ranks, case.way) == (ranks, way)
            and (seconds := results.seconds(case, ours)) is not None
            and (plain := results.seconds(replace(case, way=beside), ours)) is not None
        ]
        if not pairs:
            continue
        ratios = [seconds / plain for plain, seconds in pairs]
        within = sum(seconds <= max(plain * factor, plain + extra_s) for plain, seconds in pairs)
        goal = f"{factor:g}x" + (f" or +{seconds_text(extra_s)}" if extra_s else "")
        shown = [f"{statistics.median(ratios):.2f}x", f"{max(ratios):.2f}x"]
        cells = [ours, str(ranks), way, beside, goal, str(len(pairs)), str(within), *shown]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 4 else []


def table(results: Results, cases: list[Case], ours: str, peers: list[str]) -> list[str]:
    if not cases:
        return []
    titles = ["way", "data", "bytes", ours, "busbw GB/s", *peers, *(f"{peer} / ours" for peer in peers)]
    lines = [
        f"## {cases[0].operation}, {cases[0].ranks} ranks, {ours}",
        "",
        f"| {' | '.join(titles)} |",
        f"|---|---|{'---:|' * (len(titles) - 2)}",
    ]
    for case in cases:
        seconds = results.seconds(case, ours)
        if seconds is None:
            continue
        bandwidth = case.bus_bandwidth(seconds) if case.nbytes else None
        cells = [
            case.way,
            case.data,
            bytes_text(case.nbytes) if case.nbytes else "",
            seconds_text(seconds),
            "" if bandwidth is None else f"{bandwidth / 1e9:.2f}",
            *(seconds_text(t) if (t := results.seconds(case, peer)) is not None else "" for peer in peers),
            *(ratio_cell(results.ratio(case, ours, peer)) for peer in peers),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def ratio_cell(ratio: Ratio | None) -> str:
    return "" if ratio is None else " ".join(ratio.texts())


if __name__ == "__main__":
    main()
