"""`unisono backends`: which backends can run here, and what is missing for the others."""

from __future__ import annotations

import click
from rich import box
from rich.table import Table

from unisono.cli.screen import Screen
from unisono.comm.world import list_backends

__all__ = ["command"]


@click.command("backends")
def command() -> None:
    """List the backends: which can run here, why the others cannot, and how to install them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("backend", style="bold", no_wrap=True)
    table.add_column("here")
    table.add_column("what it is, or why it cannot run here")
    table.add_column("how to get it")
    for status in list_backends():
        here = "[green]yes[/green]" if status.available else "[yellow]no[/yellow]"
        what = status.summary if status.available else status.reason
        table.add_row(status.name, here, _plain(what), _plain(status.install))
    Screen().print(table)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
