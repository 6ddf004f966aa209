"""The console that commands print to: a terminal, a file, or a pipe whose reader may close it."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from rich.console import Console

__all__ = ["Screen"]

# Columns where there is no terminal.
_FILE_WIDTH: Final = 140


class Screen(Console):
    """A console on standard output. When its reader closes the pipe, as `head` does, only printing ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        if not self.is_terminal:
            self.width = _FILE_WIDTH

    def on_broken_pipe(self) -> None:
        """Print nothing more; the command continues and writes its files."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # the interpreter flushes it once more when it exits
        os.close(nowhere)
