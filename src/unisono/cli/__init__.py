"""The `unisono` command. Only this folder prints.

The module of a subcommand is imported when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import click

from unisono.errors import UsageError

__all__ = ["main"]

# Name: module. Each module has a click command `command`.
_SUBCOMMANDS: Final = {
    "backends": "unisono.cli.backends",
    "bench": "unisono.cli.bench",
    "plan": "unisono.cli.plan",
    "run": "unisono.cli.run",
}


class _LazyGroup(click.Group):
    """A group that imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _SUBCOMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the whole first sentence of each subcommand; click would cut it to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=1000))
            for name, command in commands
            if command is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; a UsageError ends it with one line and exit code 2."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.ctx = None  # without it, click leaves out the usage lines above the error
            raise
        except UsageError as error:
            raise click.UsageError(str(error)) from error


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="unisono", message="unisono %(version)s")
def main() -> None:
    """Ranks that work together: messages, collectives and groups."""
