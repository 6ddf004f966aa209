"""What ranks print: whole lines with the rank before them, and the last words of one that failed.

Knows bytes and lines. Does not know processes or terminals beyond colour.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

from unisono.launch.failure import VICTIM_TYPES

__all__ = ["Prefixer", "Tail", "is_victim", "last_words"]

# A line longer than this is shown in parts, so that no rank can hold memory by never ending a line.
_LINE_BYTES_MAX: Final = 64 * 1024
_TAIL_LINES: Final = 200
_TAIL_LINE_BYTES: Final = 2000
_WORDS_WITHOUT_TRACEBACK: Final = 20

# Readable on dark and light ground.
_COLOURS: Final = (36, 33, 32, 35, 34, 31)

_TRACEBACK: Final = b"Traceback (most recent call last):"
_CHAINS: Final = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_VICTIM: Final = re.compile(rb"^(?:[\w.]+\.)?(?:%s)\b" % "|".join(VICTIM_TYPES).encode())


class Prefixer:
    """Puts the rank before every line."""

    def __init__(self, rank: int, size: int, *, colour: bool) -> None:
        name = f"[{rank}]".rjust(len(str(size - 1)) + 2)
        shown = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m" if colour else name
        self._prefix = f"{shown} ".encode()
        self._rest = b""

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


class Tail:
    """The last lines of a stream."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def add(self, line: bytes) -> None:
        """Remember a line."""
        self.lines.append(line[:_TAIL_LINE_BYTES])


def last_words(lines: list[bytes]) -> list[bytes]:
    """The last traceback with the ones it is chained to, or else the last lines."""
    starts = [i for i, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return lines[-_WORDS_WITHOUT_TRACEBACK:]
    start = starts.pop()
    while starts and any(line.strip() in _CHAINS for line in lines[start - 3 : start]):
        start = starts.pop()
    return lines[start:]


def is_victim(lines: list[bytes]) -> bool:
    """Whether a rank ended because it heard of another's end."""
    return any(_VICTIM.match(line) for line in last_words(lines))
