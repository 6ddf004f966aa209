"""Writes docs/torch_benchmarks.md and its charts from what torch_collectives.py and torch_ddp.py have kept.

    python bench/torch_collectives.py --keep torch.json
    python bench/torch_ddp.py --keep torch.json
    python bench/torch_page.py torch.json docs

Nothing on the page is written by hand: a measurement on another machine gives another page.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch_figures import ALONE, Call, Figures, Model
from torch_groups import GLOO, OURS

from unisono.plans.units import bytes_text, seconds_text

STYLES = {GLOO: {"color": "#b0413e", "marker": "^"}, OURS: {"color": "#0b6e4f", "marker": "o"}}
# The goals: the least ratio of Gloo's time to ours, up to a size and above it; and for exposed communication.
SMALL_BYTES, SMALL_GOAL, LARGE_GOAL, EXPOSED_GOAL = 64 << 10, 5.0, 2.0, 2.5
OF_THE_MACHINE = ("processor", "cores", "memory", "system", "Python", "unisono", "torch")
STEP_TITLES = (
    "model",
    "million parameters",
    "ranks",
    "no_sync",
    "Gloo",
    "ours",
    "step, Gloo / ours",
    "exposed: Gloo",
    "ours",
    "Gloo / ours",
)
# A form that measures no bytes.
BARRIER = "barrier"


def main() -> None:
    figures, folder = Figures.read(Path(sys.argv[1])), Path(sys.argv[2])
    (folder / "torch_benchmarks.md").write_text("\n".join(page(figures)))
    draw_calls(figures, folder / "torch_calls.png")
    draw_steps(figures, folder / "torch_ddp.png")


def page(figures: Figures) -> list[str]:
    return [
        "# torch on Gloo and on unisono",
        "",
        "Made by `bench/torch_page.py` from what `bench/torch_collectives.py` and `bench/torch_ddp.py`",
        "measured. Both backends are groups of the same processes, which take turns. Times are medians of",
        "the rounds, of the slowest rank, per call. A ratio is Gloo's time over ours, round by round: the",
        "median, and in brackets the least and the most; above 1 we are faster. Tensors are float32 and",
        "reductions are sums. The bytes are those of the tensor that a rank gives, or of all that it gets.",
        "",
        "*async* is `async_op=True` and `wait()`, *future* waits by `get_future()`; *row* has a list of",
        "chunks of one tensor where the plain form has tensors of their own; *uneven* gives and gets one",
        "element more for each rank that follows; *coalesced* are eight tensors in a `_coalescing_manager`.",
        "",
        *machine(figures),
        *goals(figures),
        *steps(figures),
        *overview(figures),
        *calls(figures),
    ]


def machine(figures: Figures) -> list[str]:
    """The machine, and what else ran on it: the load at the start of each slice."""
    last = figures.slices[-1]
    lines = ["| machine | |", "|---|---|"]
    lines += [f"| {name} | {last[name]} |" for name in OF_THE_MACHINE if name in last]
    loads = [float(each["load at the start"]) for each in figures.slices]
    shares = [
        float(each["CPU pressure"].split()[0]) for each in figures.slices if "%" in each["CPU pressure"]
    ]
    dates = [each["date"] for each in figures.slices]
    lines += [
        f"| measured | in {len(dates)} slices, {min(dates)} to {max(dates)} |",
        f"| load when one began | {min(loads):.1f} to {max(loads):.1f}, median {median(loads):.1f} |",
    ]
    if shares:
        span = f"{min(shares):.0f} to {max(shares):.0f} %, median {median(shares):.0f} %"
        lines.append(f"| CPU pressure then | {span} |")
    if median(loads) > float(last["cores"]):
        lines += [
            "",
            "**The machine was not quiet**: other programs ran beside the measurement. The spread of the",
            "ratios shows it.",
        ]
    return [*lines, ""]


def goals(figures: Figures) -> list[str]:
    """How many cases reach the goals, and those that do not."""
    lines = ["## Goals", "", "| ranks | bytes | cases | geometric mean | goal | reach it | below 1.0 |"]
    lines += ["|---|---|---:|---:|---|---:|---:|"]
    missed: list[Call] = []
    for ranks in ranks_of(figures.calls):
        for is_small in (True, False):
            cases = [c for c in figures.calls if c.ranks == ranks and (c.nbytes <= SMALL_BYTES) == is_small]
            if not cases:
                continue
            ratios = {case: median(figures.ratio(case)) for case in cases}
            goal = SMALL_GOAL if is_small else LARGE_GOAL
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            reach = sum(ratio >= goal for ratio in ratios.values())
            below = sum(ratio < 1 for ratio in ratios.values())
            size = f"{'up to' if is_small else 'above'} {bytes_text(SMALL_BYTES)}"
            lines.append(f"| {ranks} | {size} | {len(cases)} | {mean:.1f} | {goal:g}x | {reach} | {below} |")
            missed += [case for case, ratio in ratios.items() if ratio < goal]
    lines.append("")
    if missed:
        lines += [
            "Cases that do not reach their goal:",
            "",
            "| call | ranks | bytes | Gloo | ours | Gloo / ours |",
        ]
        lines += ["|---|---|---:|---:|---:|---:|"]
        lines += [f"| {case.form} | {case.ranks} | {cells(figures, case)} |" for case in sorted(missed)]
        lines.append("")
    return lines


def steps(figures: Figures) -> list[str]:
    """The steps of models."""
    if not figures.steps:
        return []
    lines = [
        "## Steps of DistributedDataParallel",
        "",
        "A step is forward and backward; *exposed* is its time less that of a step inside `no_sync`, by",
        f"round, in milliseconds (Gloo / ours of the medians; goal {EXPOSED_GOAL:g}). With as many ranks as",
        "cores nothing computes while ranks communicate, so nearly all communication is exposed.",
        "",
        f"| {' | '.join(STEP_TITLES)} |",
        f"|---|---:|---|{'---:|' * (len(STEP_TITLES) - 3)}",
    ]
    for case, seconds in figures.steps.items():
        times = [f"{median(seconds[each]) * 1e3:.1f}" for each in (ALONE, GLOO, OURS)]
        waits = [spread([s * 1e3 for s in each], 1) for each in figures.exposed(case).values()]
        row = [case.name, f"{case.millions:g}", str(case.ranks), *times, spread(figures.ratio(case))]
        lines.append(f"| {' | '.join([*row, *waits, f'{figures.exposed_ratio(case):.2f}'])} |")
    return [*lines, "", "![Milliseconds of a step, computing and communication](torch_ddp.png)", ""]


def overview(figures: Figures) -> list[str]:
    """Ratios alone, a row for each form."""
    lines = []
    for ranks in ranks_of(figures.calls):
        sizes = sorted(
            {case.nbytes for case in figures.calls if case.ranks == ranks and case.form != BARRIER}
        )
        lines += [f"## Gloo's time over ours, {ranks} ranks", ""]
        lines += [f"| call | {' | '.join(map(bytes_text, sizes))} |", f"|---|{'---:|' * len(sizes)}"]
        for form in forms_of(figures.calls):
            cases = [Call(ranks, form, nbytes) for nbytes in sizes]
            texts = [f"{median(figures.ratio(c)):.1f}" if c in figures.calls else "" for c in cases]
            lines.append(f"| {form} | {' | '.join(texts)} |")
        lines.append("")
    return [*lines, "![Microseconds of each call by size](torch_calls.png)", ""] if lines else []


def calls(figures: Figures) -> list[str]:
    """Every case."""
    lines = []
    for ranks in ranks_of(figures.calls):
        lines += [f"## Every call, {ranks} ranks", "", "| call | bytes | Gloo | ours | Gloo / ours |"]
        lines += ["|---|---:|---:|---:|---:|"]
        for form in forms_of(figures.calls):
            cases = [case for case in figures.calls if (case.ranks, case.form) == (ranks, form)]
            lines += [f"| {form} | {cells(figures, case)} |" for case in sorted(cases)]
        lines.append("")
    return lines


def cells(figures: Figures, case: Call) -> str:
    """Bytes, both times and their ratio."""
    seconds = figures.calls[case]
    times = [seconds_text(median(seconds[each])) for each in (GLOO, OURS)]
    nbytes = "" if case.form == BARRIER else bytes_text(case.nbytes)
    return " | ".join([nbytes, *times, spread(figures.ratio(case))])


def spread(values: list[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def ranks_of(cases: Iterable[Call | Model]) -> list[int]:
    return sorted({case.ranks for case in cases})


def forms_of(cases: Iterable[Call]) -> list[str]:
    return list(dict.fromkeys(case.form for case in sorted(cases)))


def draw_calls(figures: Figures, path: Path) -> None:
    forms = [form for form in forms_of(figures.calls) if form != BARRIER]
    numbers, columns = ranks_of(figures.calls), 5
    rows = -(-len(forms) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.4 * rows * len(numbers)), layout="constrained")
    panels = figure.subplots(rows * len(numbers), columns, squeeze=False)
    for panel in panels.flat:
        panel.set_visible(False)
    for block, ranks in enumerate(numbers):
        for index, form in enumerate(forms):
            panel = panels[block * rows + index // columns][index % columns]
            panel.set_visible(True)
            panel.set_title(f"{form}, {ranks} ranks", fontsize=9)
            cases = sorted(case for case in figures.calls if (case.ranks, case.form) == (ranks, form))
            for backend, style in STYLES.items():
                times = [median(figures.calls[case][backend]) * 1e6 for case in cases]
                panel.plot([case.nbytes for case in cases], times, label=backend, markersize=4, **style)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("bytes", fontsize=8)
            panel.set_ylabel("us per call", fontsize=8)
    save(figure, path)


def draw_steps(figures: Figures, path: Path) -> None:
    if not figures.steps:
        return
    columns = len(figures.steps)
    figure = Figure(figsize=(2.0 * columns, 3.2), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for panel, (case, seconds) in zip(panels, figures.steps.items(), strict=True):
        bare = median(seconds[ALONE]) * 1e3
        panel.set_title(f"{case.name}, {case.ranks} ranks", fontsize=9)
        panel.bar([GLOO, OURS], [bare, bare], color="#cccccc", label="computing")
        for each, waits in figures.exposed(case).items():
            wait = max(0.0, median(waits)) * 1e3
            color = STYLES[each]["color"]
            panel.bar([each], [wait], bottom=bare, color=color, label=f"exposed communication, {each}")
        panel.set_ylabel("ms per step", fontsize=8)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    for panel in figure.axes:
        panel.tick_params(labelsize=8)
        panel.grid(True, axis="y", linewidth=0.4, alpha=0.5)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    handles = {}
    for panel in figure.axes:
        handles.update((label, each) for each, label in zip(*panel.get_legend_handles_labels(), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
