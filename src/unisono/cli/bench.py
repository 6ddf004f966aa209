"""`unisono bench`: how fast every verb and way of calling is on this machine, beside Open MPI and Gloo.

Command line and tables; `unisono.bench` measures.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.bench import Case, Options, Ratio, Results, Summary, contest
from unisono.bench.chart import draw
from unisono.bench.machine import PRESSURE_MAX, pressure
from unisono.bench.running_system import SystemFailed
from unisono.bench.systems import OURS, PEERS
from unisono.cli.amounts import bytes_of
from unisono.cli.screen import Screen
from unisono.errors import UsageError
from unisono.plans.units import bytes_text, seconds_text

__all__ = ["command", "print_tables"]

_QUICK_SIZES = "8,64Ki,16Mi"
_ALL_SIZES = "8,64,1Ki,8Ki,64Ki,512Ki,1Mi,4Mi,16Mi,64Mi,128Mi"


@click.command("bench")
@click.option("-n", "ranks", default="2,4", show_default=True, metavar="N,N", help="Numbers of ranks.")
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Cases whose label contains this, as in all_reduce/started/float32/8 B; * is anything. Repeatable.",
)
@click.option(
    "--sizes", metavar="B,B", help=f"Bytes of plain calls, as in 8,64Ki,128Mi; by default {_ALL_SIZES}."
)
@click.option(
    "--links", default=",".join(OURS), show_default=True, metavar="LINK,LINK", help="Ours: shm, tcp."
)
@click.option(
    "--peers",
    default=",".join(PEERS),
    show_default=True,
    metavar="NAME,NAME",
    help="Systems to compare with; none: only ours.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Turns of each system at each case [5].")
@click.option(
    "--quick", is_flag=True, help="Fewer sizes and combinations, three short rounds: a few minutes."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all times.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw a chart.")
def command(
    ranks: str,
    only: tuple[str, ...],
    sizes: str | None,
    links: str,
    peers: str,
    rounds: int | None,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure every verb, way of calling and size, beside the peers that are installed.

    All systems take turns at each case, one at a time. The table shows medians, and the peer's time divided
    by ours (above 1 ours is faster) with the lowest and highest of single rounds. Bytes and bus bandwidth are
    those of nccl-tests. At the end: the geometric mean of all ratios, and the cases where a peer is faster.
    """
    options = Options(
        ranks=[_number(text) for text in _listed(ranks)],
        only=only,
        sizes=[bytes_of(text) for text in _listed(sizes or (_QUICK_SIZES if quick else _ALL_SIZES))],
        links=_listed(links),
        peers=[] if peers == "none" else _listed(peers),
        rounds=rounds or (3 if quick else 5),
        turn_s=0.01 if quick else 0.05,
        way_sizes=(8,) if quick else (8, 64 << 10),
        quick=quick,
    )
    for path in (json_path, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"the folder of {path} does not exist", next_step="make the folder first")
    console = Screen()
    if (share := pressure()) is not None and share > PRESSURE_MAX:
        warning = (
            f"other programs use this machine: threads waited for a core in {share:.0f} % of the last 10 s"
        )
        Console(stderr=True).print(f"{warning}; the figures will vary", markup=False, style="yellow")
    try:
        # rich shows the status on a terminal only.
        with Console(stderr=True).status("starting") as status:
            results = contest(options, progress=status.update)
    except SystemFailed as error:
        raise click.ClickException(str(error)) from error
    print_tables(console, results)
    if json_path is not None:
        json_path.write_text(results.as_json())
        console.print(f"wrote all times to {json_path}", markup=False)
    if plot_path is not None:
        draw(results, plot_path)
        console.print(f"wrote the chart to {plot_path}", markup=False)


def print_tables(console: Console, results: Results) -> None:
    """One table for each link, operation and number of ranks."""
    console.print(", ".join(f"{name} {text}" for name, text in results.machine.items()), markup=False)
    for name, why in results.absent.items():
        console.print(f"{name}: {why}", markup=False, style="yellow")
    for ours, peers, cases in results.tables():
        console.print(_table(results, cases, ours, peers))
    summaries = list(results.summaries())
    if summaries:
        console.print(_summary_table(summaries))
    for summary in summaries:
        if summary.below:
            console.print(_below_table(summary))


def _table(results: Results, cases: list[Case], ours: str, peers: list[str]) -> Table:
    first = cases[0]
    table = _new_table(f"{first.operation}, {first.ranks} ranks, {ours}", "way", "data", "bytes")
    for name in (ours, "busbw GB/s", *peers, *(f"{peer} / ours" for peer in peers)):
        table.add_column(name, justify="right")
    for case in cases:
        seconds = results.seconds(case, ours)
        if seconds is None:
            continue
        bandwidth = case.bus_bandwidth(seconds) if case.nbytes else None
        table.add_row(
            case.way,
            case.data,
            bytes_text(case.nbytes) if case.nbytes else "",
            seconds_text(seconds),
            "" if bandwidth is None else f"{bandwidth / 1e9:.2f}",
            *(_time_text(results.seconds(case, peer)) for peer in peers),
            *(_ratio_text(results.ratio(case, ours, peer)) for peer in peers),
        )
    return table


def _summary_table(summaries: list[Summary]) -> Table:
    table = _new_table("peer / ours, all cases", "ours", "peer", "ranks")
    for name in ("cases", "geometric mean", "below 1.0"):
        table.add_column(name, justify="right")
    for each in summaries:
        counts = str(each.ranks), str(each.cases), f"{each.geometric_mean:.2f}", str(len(each.below))
        table.add_row(each.ours, each.peer, *counts)
    return table


def _below_table(summary: Summary) -> Table:
    title = f"below 1.0: {summary.ours} beside {summary.peer}, {summary.ranks} ranks"
    table = _new_table(title, "case")
    table.add_column(f"{summary.peer} / ours", justify="right")
    for case, ratio in summary.below:
        table.add_row(Text(case.label), _ratio_text(ratio))
    return table


def _new_table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=Text(title, "bold"), title_justify="left")
    for name in columns:
        table.add_column(name)
    return table


def _time_text(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


def _ratio_text(ratio: Ratio | None) -> Text:
    if ratio is None:
        return Text("")
    colour = "green" if ratio.median >= 1 else "red"
    median, ends = ratio.texts()
    return Text.assemble((median, colour), f" {ends}")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"-n {text!r}; allowed: numbers of ranks, as in 2,4")
    return int(text)
