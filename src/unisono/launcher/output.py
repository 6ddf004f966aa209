"""The output of ranks: whole lines with the rank before them, and a rank's last words in one piece.

"Last words": the traceback or crash report with which a rank ended, or else its last lines.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from typing import Final

__all__ = ["ErrorStream", "Prefixer", "beginnings", "is_beginning", "last_words"]

# A longer line is shown in parts, so that a rank that never ends a line cannot fill our memory.
_LINE_BYTES_MAX: Final = 64 * 1024
_TAIL_LINES: Final = 200
# Longer than real tracebacks; what follows is shown at once.
_HELD_LINES_MAX: Final = 400
_TAIL_LINE_BYTES: Final = 2000
_WORDS_WITHOUT_TRACEBACK: Final = 20

# ANSI colours that are readable on dark and light backgrounds.
_COLOURS: Final = (36, 33, 32, 35, 34, 31)

_TRACEBACKS: Final = (
    b"Traceback (most recent call last):",
    b"Exception Group Traceback (most recent call last):",
)
# First lines of what a process without a traceback leaves: crashes, and a program that Python cannot start.
_CRASHES: Final = (b"Fatal Python error: ", b"terminate called ", sys.executable.encode() + b": ")
_SYNTAX: Final = re.compile(rb'  File "[^"]+", line \d+$')
# A line that belongs to the traceback that follows it.
_THREAD: Final = b"Exception in thread "
_CHAINS: Final = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


class Prefixer:
    """Puts the rank before every line; without a rank, lines stay as they are."""

    def __init__(self, rank: int | None, size: int, *, colour: bool) -> None:
        self._prefix = b"" if rank is None else self._shown(rank, size, colour)
        self._rest = b""

    @staticmethod
    def _shown(rank: int, size: int, colour: bool) -> bytes:
        name = f"[{rank}]".rjust(len(str(size - 1)) + 2)
        shown = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m" if colour else name
        return f"{shown} ".encode()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete, without their prefix; `show` adds it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def finish(self) -> list[bytes]:
        """The last line, if it was not ended."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def show(self, line: bytes) -> bytes:
        """A line as it is printed. A progress bar that returns to the start of its line keeps its prefix."""
        return self._prefix + line.rstrip(b"\r").replace(b"\r", b"\r" + self._prefix) + b"\n"


class ErrorStream:
    """What a rank writes to its standard error. From the first line of a traceback on it is held back.

    If the rank ends, the held lines belong to the summary of the job; if it lives on, they are shown.
    """

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.held_since: float | None = None
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def add(self, line: bytes, now: float) -> list[bytes]:
        """Add a line; the lines to show now."""
        self._tail.append(line[:_TAIL_LINE_BYTES])
        if self.held_since is None:
            if not (is_beginning(line) or line.startswith(_THREAD) or _SYNTAX.match(line)):
                return [line]
            self.held_since = now
        self.held.append(line)
        return self.release() if len(self.held) > _HELD_LINES_MAX else []

    def release(self) -> list[bytes]:
        """The rank lives on: the held lines, to be shown."""
        held, self.held, self.held_since = self.held, [], None
        return held

    @property
    def has_traceback(self) -> bool:
        """Whether its last words hold a traceback or a crash report."""
        return bool(beginnings(list(self._tail)))

    def split(self) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """The rank has ended: lines before its last words, its last words, and lines after them.

        The last words may have been shown already; the lines before and after have not.
        """
        tail = list(self._tail)
        start, end = _span(tail)
        held = self.release()
        before = held[: max(0, len(held) - len(tail) + start)]
        after = held[len(before) :][-len(tail[end:]) :] if end < len(tail) else []
        return before, tail[start:end], after


def is_beginning(line: bytes) -> bool:
    """Whether a traceback or a crash report begins with this line."""
    return line.strip(b" |+") in _TRACEBACKS or line.startswith(_CRASHES)


def beginnings(lines: list[bytes]) -> list[int]:
    """Where tracebacks begin. A file with a syntax error has none, only the line of the error."""
    starts = [i for i, line in enumerate(lines) if is_beginning(line)]
    return starts or [i for i, line in enumerate(lines) if _SYNTAX.match(line)]


def last_words(lines: list[bytes]) -> list[bytes]:
    """The last traceback with the ones it is chained to, or a crash report; otherwise the last lines."""
    start, end = _span(lines)
    return lines[start:end]


def _span(lines: list[bytes]) -> tuple[int, int]:
    """Where the last words begin and end. They end with the text of the exception."""
    starts = beginnings(lines)
    if not starts:
        return max(0, len(lines) - _WORDS_WITHOUT_TRACEBACK), len(lines)
    start = starts.pop()
    end = _end(lines, start)
    while starts and (
        lines[start][:1] in b" |+" or any(line.strip() in _CHAINS for line in lines[start - 3 : start])
    ):
        start = starts.pop()
    return start, end


def _end(lines: list[bytes], start: int) -> int:
    """Where the traceback that begins at `start` ends: after the first line that is not indented.

    That line is the exception. Further lines of its message look like lines that the process wrote later.
    """
    if lines[start].startswith(_CRASHES):
        return len(lines)
    if lines[start][:1] == b" " and not _SYNTAX.match(lines[start]):  # of an exception group
        return max(i for i, line in enumerate(lines) if line.lstrip().startswith((b"|", b"+"))) + 1
    texts = (i for i in range(start + 1, len(lines)) if lines[i] and lines[i][:1] != b" ")
    return next(texts, len(lines) - 1) + 1
