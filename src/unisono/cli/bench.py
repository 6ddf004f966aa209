"""`unisono bench`: how fast collectives are on this machine, beside Open MPI and Gloo.

Command line and tables; `unisono.bench` measures.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.bench import OPERATIONS, Case, Options, Results, contest
from unisono.bench.chart import draw
from unisono.bench.running_system import SystemFailed
from unisono.bench.systems import OURS, PEERS
from unisono.cli.amounts import bytes_of
from unisono.cli.screen import Screen
from unisono.errors import UsageError
from unisono.plans.units import bytes_text, seconds_text

__all__ = ["command", "print_tables"]

_QUICK_SIZES = "8,1Ki,64Ki,1Mi,16Mi,128Mi"
_ALL_SIZES = "8,64,1Ki,8Ki,64Ki,512Ki,1Mi,4Mi,16Mi,64Mi,128Mi"


@click.command("bench")
@click.option("-n", "ranks", default="2,4", show_default=True, metavar="N,N", help="Numbers of ranks.")
@click.option(
    "--ops",
    "operations",
    default=",".join(OPERATIONS),
    metavar="NAME,NAME",
    help=f"Of {', '.join(OPERATIONS)}; all by default.",
)
@click.option("--sizes", metavar="B,B", help=f"Bytes, as in 8,64Ki,128Mi; by default {_ALL_SIZES}.")
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
@click.option("--quick", is_flag=True, help="Six sizes and three short rounds: a few minutes.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all times.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw a chart.")
def command(
    ranks: str,
    operations: str,
    sizes: str | None,
    links: str,
    peers: str,
    rounds: int | None,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure latency and bandwidth of every operation and size, beside the peers that are installed.

    All systems take turns at each case, one at a time. The table shows medians, and the peer's time divided
    by ours (above 1 ours is faster) with the lowest and highest of single rounds. Bytes and bus bandwidth are
    those of nccl-tests.
    """
    options = Options(
        ranks=[_number(text) for text in _listed(ranks)],
        operations=_listed(operations),
        sizes=[bytes_of(text) for text in _listed(sizes or (_QUICK_SIZES if quick else _ALL_SIZES))],
        links=_listed(links),
        peers=[] if peers == "none" else _listed(peers),
        rounds=rounds or (3 if quick else 5),
        turn_s=0.02 if quick else 0.05,
    )
    for path in (json_path, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"the folder of {path} does not exist", next_step="make the folder first")
    console = Screen()
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


def _table(results: Results, cases: list[Case], ours: str, peers: list[str]) -> Table:
    first = cases[0]
    title = Text(f"{first.operation}, {first.ranks} ranks, {ours}", "bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in ("bytes", ours, "algbw GB/s", "busbw GB/s", *peers):
        table.add_column(name, justify="right")
    for peer in peers:
        table.add_column(f"{peer} / ours", justify="right")
    for case in cases:
        seconds = results.seconds(case, ours)
        if seconds is None:
            continue
        table.add_row(
            bytes_text(case.nbytes) if case.nbytes else "",
            seconds_text(seconds),
            *(
                f"{each / 1e9:.2f}" if case.nbytes else ""
                for each in (case.algorithm_bandwidth(seconds), case.bus_bandwidth(seconds))
            ),
            *(_time_text(results.seconds(case, peer)) for peer in peers),
            *(_ratio_text(results, case, ours, peer) for peer in peers),
        )
    return table


def _time_text(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


def _ratio_text(results: Results, case: Case, ours: str, peer: str) -> Text:
    ratio = results.ratio(case, ours, peer)
    if ratio is None:
        return Text("")
    colour = "green" if ratio.median >= 1 else "red"
    return Text.assemble((f"{ratio.median:.2f}", colour), f" ({ratio.low:.2f}-{ratio.high:.2f})")


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"-n {text!r}; allowed: numbers of ranks, as in 2,4")
    return int(text)
