"""What ranks print: whole lines with the rank before them, tracebacks whole, and the last words of a rank.

Knows bytes and lines. Does not know processes or terminals beyond colour.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from typing import Final

__all__ = ["Errors", "Prefixer", "beginnings", "is_beginning", "last_words"]

# A line longer than this is shown in parts, so that no rank can hold memory by never ending a line.
_LINE_BYTES_MAX: Final = 64 * 1024
_TAIL_LINES: Final = 200
# More than any honest traceback has.
_HELD_LINES_MAX: Final = 400
_TAIL_LINE_BYTES: Final = 2000
_WORDS_WITHOUT_TRACEBACK: Final = 20

# Readable on dark and light ground.
_COLOURS: Final = (36, 33, 32, 35, 34, 31)

_TRACEBACKS: Final = (
    b"Traceback (most recent call last):",
    b"Exception Group Traceback (most recent call last):",
)
# What ends a process without a traceback: crashes, and Python that cannot begin the program.
_CRASHES: Final = (b"Fatal Python error: ", b"terminate called ", sys.executable.encode() + b": ")
_SYNTAX: Final = re.compile(rb'  File "[^"]+", line \d+$')
# A line that belongs to the traceback below it.
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


class Errors:
    """What a rank writes to its standard error. From a traceback on it is kept back, whole.

    If the rank ends by it, it belongs to the summary of the job; if the rank lives on, it is shown.
    """

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.held_since: float | None = None
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def add(self, line: bytes, now: float) -> list[bytes]:
        """Take a line; those to show now."""
        self._tail.append(line[:_TAIL_LINE_BYTES])
        if self.held_since is None:
            if not (is_beginning(line) or line.startswith(_THREAD) or _SYNTAX.match(line)):
                return [line]
            self.held_since = now
        self.held.append(line)
        return self.release() if len(self.held) > _HELD_LINES_MAX else []

    def release(self) -> list[bytes]:
        """The rank goes on: what was kept back is to be shown."""
        held, self.held, self.held_since = self.held, [], None
        return held

    @property
    def has_traceback(self) -> bool:
        """Whether its last words begin with a traceback or a crash."""
        return bool(beginnings(list(self._tail)))

    def split(self) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """The rank has ended: what is to be shown before its last words; these; and what it wrote after them.

        The words may have been shown already; what comes before and after has not.
        """
        tail = list(self._tail)
        start, end = _span(tail)
        held = self.release()
        before = held[: max(0, len(held) - len(tail) + start)]
        after = held[len(before) :][-len(tail[end:]) :] if end < len(tail) else []
        return before, tail[start:end], after


def is_beginning(line: bytes) -> bool:
    """Whether a traceback, or what a crash leaves, begins here."""
    return line.strip(b" |+") in _TRACEBACKS or line.startswith(_CRASHES)


def beginnings(lines: list[bytes]) -> list[int]:
    """Where tracebacks begin. A file that Python cannot even read has none but the place of its error."""
    starts = [i for i, line in enumerate(lines) if is_beginning(line)]
    return starts or [i for i, line in enumerate(lines) if _SYNTAX.match(line)]


def last_words(lines: list[bytes]) -> list[bytes]:
    """The last traceback with the ones it is chained to, or what a crash left; else the last lines."""
    start, end = _span(lines)
    return lines[start:end]


def _span(lines: list[bytes]) -> tuple[int, int]:
    """Where the last words begin, and where they end: with the text of the exception."""
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
    """Where a traceback ends that begins at `start`: after the first line that is not indented.

    That line is the exception. Further lines of its message cannot be told from what the process wrote later.
    """
    if lines[start].startswith(_CRASHES):
        return len(lines)
    if lines[start][:1] == b" " and not _SYNTAX.match(lines[start]):  # of a group
        return max(i for i, line in enumerate(lines) if line.lstrip().startswith((b"|", b"+"))) + 1
    texts = (i for i in range(start + 1, len(lines)) if lines[i] and lines[i][:1] != b" ")
    return next(texts, len(lines) - 1) + 1
