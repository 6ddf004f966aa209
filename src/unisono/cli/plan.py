"""`unisono plan`: how a collective would run, and why.

Only output: choosing, costing and drawing are in `plans/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.cli.amounts import bytes_of
from unisono.cli.screen import Screen
from unisono.core.dtypes import DTYPES
from unisono.plans import (
    CATALOG,
    LINKS,
    BoundPlan,
    BoundStep,
    Links,
    Problem,
    Recv,
    RecvReduce,
    Send,
    bound,
    choose,
    cost,
    counts_held,
    entry_of,
)
from unisono.plans.choose import fitting, predict_s
from unisono.plans.draw import as_svg, as_text, messages, rank_text
from unisono.plans.units import bytes_text, seconds_text

__all__ = ["command"]

# Longer tables do not fit a screen: then the first and last rounds are shown.
_ROUND_LINES_MAX: Final = 24
# Plans of larger worlds take seconds to build and show nothing new.
_RANKS_MAX: Final = 256


def _parsed_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    return bytes_of(value)


@click.command("plan")
@click.argument("collective", required=False, type=click.Choice(list(CATALOG)), metavar="[COLLECTIVE]")
@click.option("-n", "size", type=click.IntRange(1, _RANKS_MAX), default=8, show_default=True, help="Ranks.")
@click.option(
    "--bytes",
    "nbytes",
    default="1Mi",
    show_default=True,
    callback=_parsed_bytes,
    help="The whole vector: 4096, 64Ki, 1Mi, 10M. Collectives of blocks cut it into one block per rank.",
)
@click.option("--algorithm", default="auto", show_default=True, help="A name that --list shows.")
@click.option(
    "--dtype",
    "dtype_name",
    type=click.Choice(list(DTYPES)),
    default="float32",
    show_default=True,
    metavar="NAME",
)
@click.option(
    "--root", type=int, default=0, show_default=True, help="For broadcast, reduce, gather, scatter."
)
@click.option(
    "--hosts", "host_count", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts."
)
@click.option(
    "--link",
    "kind",
    type=click.Choice([kind for kind in LINKS if kind]),
    default="shm",
    show_default=True,
    help="The link between ranks of one host.",
)
@click.option("--ordered", is_flag=True, help="Only algorithms with reproducible bits.")
@click.option("--steps", "is_whole", is_flag=True, help="Show all steps of all ranks.")
@click.option("--rank", type=int, help="Show all steps of this rank.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw the plan to this file.")
@click.option("--list", "is_list", is_flag=True, help="List the algorithms of the collective, or of all.")
def command(
    collective: str | None,
    size: int,
    nbytes: int,
    algorithm: str,
    dtype_name: str,
    root: int,
    host_count: int,
    kind: str,
    ordered: bool,
    is_whole: bool,
    rank: int | None,
    svg: Path | None,
    is_list: bool,
) -> None:
    """Show how a collective would run: the algorithm and why, rounds, steps, bytes and predicted time."""
    console = Screen(soft_wrap=True)
    if is_list:
        _print_list(console, [collective] if collective else list(CATALOG))
        return
    if collective is None:
        raise click.UsageError(f"name a collective: {', '.join(CATALOG)}")
    if rank is not None and not 0 <= rank < size:
        raise click.BadParameter(f"{rank} is outside 0..{size - 1}", param_hint="--rank")
    # A barrier's token has no type; it is one byte.
    itemsize = 1 if collective == "barrier" else DTYPES[dtype_name].itemsize
    problem = _problem(collective, size, nbytes, itemsize, root, host_count)
    links = LINKS[kind]
    if algorithm == "auto":
        algorithm, reason = choose(problem, itemsize, links, ordered=ordered)
    else:
        best, why = choose(problem, itemsize, links, ordered=ordered)
        reason = f"as requested; auto would take {best}: {why}"
        if ordered and not entry_of(collective, algorithm).ordered:
            raise click.UsageError(f"{collective} by {algorithm} is not reproducible, as --ordered requires")
    plans = [bound(problem, member, algorithm) for member in range(size)]

    what = f"{collective} on {size} rank{'s' * (size > 1)}" + (
        f" of {host_count} hosts" if host_count > 1 else ""
    )
    if collective != "barrier":
        what += f", {bytes_text(nbytes)} of {dtype_name}"
    if len(problem.counts) > 1:
        what += f", {bytes_text(problem.counts[0] * itemsize)} a block"
    if svg is not None:
        _write(svg, as_svg(plans, itemsize, f"{what}; {_predicted(plans[0], links, itemsize)} predicted"))
    others = _others_text(problem, algorithm, links, itemsize, ordered)
    _print_summary(console, what, reason, plans, links, itemsize, others)
    _print_steps(console, plans, itemsize, rank, is_whole=is_whole)
    if svg is not None:
        console.print(f"wrote {svg}", markup=False)


def _problem(collective: str, size: int, nbytes: int, itemsize: int, root: int, host_count: int) -> Problem:
    if host_count > size:
        raise click.BadParameter(f"{host_count} hosts for {size} ranks", param_hint="--hosts")
    if nbytes % itemsize:
        raise click.BadParameter(
            f"{nbytes} bytes are no whole number of {itemsize}-byte elements", param_hint="--bytes"
        )
    count = nbytes // itemsize
    block = -(-count // size)
    held = counts_held(collective, size)
    counts = (count if held == 1 else block,) * held
    hosts = tuple(rank * host_count // size for rank in range(size)) if host_count > 1 else ()
    return Problem(collective, size, counts, root, hosts)


def _predicted(plan: BoundPlan, links: Links, itemsize: int) -> str:
    return seconds_text(predict_s(plan.problem, plan.algorithm, itemsize, links))


def _print_list(console: Console, collectives: Sequence[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("collective", style="bold")
    table.add_column("algorithms")
    for collective in collectives:
        names = [name + ("*" if entry.ordered else "") for name, entry in CATALOG[collective].items()]
        table.add_row(collective, ", ".join(names))
    console.print(table)
    console.print("* ordered: the same bits whatever the transport or size, operands in rank order")


def _print_summary(
    console: Console,
    what: str,
    reason: str,
    plans: Sequence[BoundPlan],
    links: Links,
    itemsize: int,
    others: str,
) -> None:
    costs = [cost(plan, links, itemsize) for plan in plans]
    busiest = max(costs, key=lambda each: (each.bytes_sent, each.messages))
    table = Table(box=None, show_header=False, pad_edge=False, title=Text(what, "bold"), title_justify="left")
    table.add_column(style="cyan")
    table.add_column()
    table.add_row("algorithm", Text.assemble((plans[0].algorithm, "bold green"), f": {reason}"))
    table.add_row("rounds", f"{len({message.sent_in for message in messages(plans)})}")
    table.add_row("steps", f"{sum(len(list(plan.steps)) for plan in plans):,} on all ranks")
    moved, number = sum(each.bytes_sent for each in costs), sum(each.messages for each in costs)
    most = f"the busiest rank sends {bytes_text(busiest.bytes_sent)} in {busiest.messages}"
    table.add_row("on the wire", f"{bytes_text(moved)} in {number:,} messages; {most}")
    table.add_row("reduced", f"{bytes_text(max(each.bytes_reduced for each in costs))} at most on one rank")
    table.add_row(
        "scratch", f"{bytes_text(max(plan.tmp_count for plan in plans) * itemsize)} at most on one rank"
    )
    table.add_row("predicted", _predicted(plans[0], links, itemsize))
    if others:
        table.add_row("others", others)
    console.print(table)


def _others_text(problem: Problem, chosen: str, links: Links, itemsize: int, ordered: bool) -> str:
    """The predicted times of the algorithms that were not chosen, the fastest first."""
    names = [name for name in fitting(problem, ordered=ordered) if name != chosen]
    times = sorted((predict_s(problem, name, itemsize, links), name) for name in names)
    return ", ".join(f"{name} {seconds_text(time_s)}" for time_s, name in times)


def _print_steps(
    console: Console, plans: Sequence[BoundPlan], itemsize: int, rank: int | None, *, is_whole: bool
) -> None:
    console.print()
    if rank is not None:
        console.print(f"rank {rank}: round, step", style="bold")
        console.print(rank_text(plans[rank]) or "nothing to do", markup=False)
        return
    if is_whole:
        console.print(as_text(plans, itemsize) or "nothing to do", markup=False)
    elif any(each.rounds for each in plans):
        console.print(_rounds_table(plans, itemsize))
        console.print("[dim]--steps shows all steps, --rank R those of a rank, --svg FILE draws them[/dim]")
    else:
        console.print("nothing to do")


def _rounds_table(plans: Sequence[BoundPlan], itemsize: int) -> Table:
    """One line for each run of equal rounds; the middle of a long plan is left out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rounds", "messages", "of these reduced", "bytes", "rank 0"):
        table.add_column(name, justify="left" if name == "rank 0" else "right")
    lines = [
        (str(first) if first == last else f"{first}-{last}", *cells)
        for cells, first, last in _equal_rounds(plans, itemsize)
    ]
    half = _ROUND_LINES_MAX // 2
    if len(lines) > _ROUND_LINES_MAX:
        lines[half:-half] = [("...", "", "", "", f"{len(lines) - 2 * half} more")]
    for cells in lines:
        table.add_row(*cells)
    return table


def _equal_rounds(plans: Sequence[BoundPlan], itemsize: int) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yield the cells of a line, and the first and last of the equal rounds that it is for."""
    rounds = range(len(plans[0].rounds))
    for cells, run in groupby(rounds, key=lambda number: _round_cells(plans, number, itemsize)):
        numbers = list(run)
        yield cells, numbers[0], numbers[-1]


def _round_cells(plans: Sequence[BoundPlan], number: int, itemsize: int) -> tuple[str, ...]:
    steps = [step for plan in plans for step in plan.rounds[number]]
    sends = [step for step in steps if isinstance(step, Send)]
    reduced = sum(isinstance(step, RecvReduce) for step in steps)
    moved = bytes_text(itemsize * sum(step.src.count for step in sends))
    return f"{len(sends):,}", f"{reduced:,}", moved, _peers_text(plans[0].rounds[number])


def _peers_text(steps: Sequence[BoundStep]) -> str:
    """The peers of a rank: "to 1, from 7"."""
    to = [str(step.peer) for step in steps if isinstance(step, Send)]
    from_ = [str(step.peer) for step in steps if isinstance(step, Recv | RecvReduce)]
    words = [f"{word} {_few(peers)}" for word, peers in (("to", to), ("from", from_)) if peers]
    return ", ".join(words) or ("local" if steps else "idle")


def _few(peers: Sequence[str]) -> str:
    return " ".join(peers) if len(peers) <= 4 else f"{' '.join(peers[:3])} and {len(peers) - 3} more"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from error
