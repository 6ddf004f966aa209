"""Writes docs/benchmarks.md from what `unisono bench --json` has measured.

    unisono bench --json out.json --plot docs/benchmarks.png
    python bench/page.py out.json > docs/benchmarks.md

Nothing on the page is written by hand: a measurement on another machine gives another page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.bench import Case, Results
from unisono.plans.units import bytes_text, seconds_text

# The goals: the least ratio of a peer's time to ours.
GOALS = {
    ("unisono", "mpi"): 1.0,
    ("unisono", "gloo"): 5.0,
    ("unisono-tcp", "mpi-tcp"): 1.0,
    ("unisono-tcp", "gloo"): 2.0,
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
        "and the most; above 1 we are faster.",
        "Bytes and bus bandwidth are those of nccl-tests. float32, sums.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in results.machine.items()),
        "",
    ]
    lines += [f"{name}: {why}\n" for name, why in results.absent.items()]
    lines += summary(results)
    lines += ["![Time per call of every operation and size](benchmarks.png)", ""]
    for ours, peers, cases in results.tables():
        lines += table(results, cases, ours, peers)
    return lines


def summary(results: Results) -> list[str]:
    """How many cases reach the goal, and the worst ratio of each pair of systems."""
    lines = [
        "## Goals",
        "",
        "| ours | peer | goal | cases that reach it | the worst |",
        "|---|---|---|---|---|",
    ]
    for (ours, peer), goal in GOALS.items():
        ratios = [
            (ratio.median, case)
            for case in results.times
            if case.operation != "ping" and (ratio := results.ratio(case, ours, peer)) is not None
        ]
        if ratios:
            reached = sum(median >= goal for median, _ in ratios)
            worst, case = min(ratios)
            what = f"{worst:.2f}: {case.operation}, {case.ranks} ranks, {bytes_text(case.nbytes)}"
            lines.append(f"| {ours} | {peer} | {goal:g}x | {reached} of {len(ratios)} | {what} |")
    return [*lines, ""] if len(lines) > 4 else []


def table(results: Results, cases: list[Case], ours: str, peers: list[str]) -> list[str]:
    if not cases:
        return []
    titles = ["bytes", ours, "busbw GB/s", *peers, *(f"{peer} / ours" for peer in peers)]
    lines = [
        f"## {cases[0].operation}, {cases[0].ranks} ranks, {ours}",
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---:|' * len(titles)}",
    ]
    for case in cases:
        seconds = results.seconds(case, ours)
        if seconds is None:
            continue
        cells = [
            bytes_text(case.nbytes) if case.nbytes else "",
            seconds_text(seconds),
            f"{case.bus_bandwidth(seconds) / 1e9:.2f}" if case.nbytes else "",
            *(seconds_text(t) if (t := results.seconds(case, peer)) is not None else "" for peer in peers),
            *(ratio_text(results, case, ours, peer) for peer in peers),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def ratio_text(results: Results, case: Case, ours: str, peer: str) -> str:
    ratio = results.ratio(case, ours, peer)
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


if __name__ == "__main__":
    main()
