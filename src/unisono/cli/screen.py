"""Where a command prints: a terminal, a file, or a pipe whose reader may leave.

Knows widths and closed pipes. Does not know what is printed.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from rich.console import Console

__all__ = ["Screen"]

# What a line may hold where no terminal says so.
_FILE_WIDTH: Final = 140


class Screen(Console):
    """A console on standard output. A reader who leaves early, as `head` does, ends the printing only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        if not self.is_terminal:
            self.width = _FILE_WIDTH

    def on_broken_pipe(self) -> None:
        """Print nothing more; the command goes on, and writes its files."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # the interpreter flushes it once more at its end
        os.close(nowhere)
