"""Which refused callers a log names: the first few, then a count per interval.

Pure: callers and the time in, lines out. Anybody who can reach a port can be refused at it without end, and
must not be able to fill a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["INTERVAL_S", "NAMED_MAX", "Refusals"]

# So many callers are named in the life of a port. A misconfigured job shows in the first.
NAMED_MAX: Final = 8
# Then one line says how many there were in this time.
INTERVAL_S: Final = 60.0


class Refusals:
    """The refused callers of one port."""

    def __init__(self) -> None:
        self._named = 0
        self._counted = 0
        self._last = ""
        self._due_at: float | None = None

    def lines(self, callers: Sequence[str], total: int, now: float, *, is_last: bool = False) -> list[str]:
        """What to log. `callers` are some of those that are new, `total` counts all so far.

        `is_last`: nobody will ask again, so a count that is not due yet is told now.
        """
        named = list(callers[: NAMED_MAX - self._named])
        self._named += len(named)
        self._counted += len(named)
        if len(callers) > len(named):
            self._last = callers[-1]
        more = total - self._counted
        if more <= 0:
            return named
        if self._due_at is None:
            self._due_at = now + INTERVAL_S
        if now < self._due_at and not is_last:
            return named
        self._due_at = now + INTERVAL_S
        self._counted = total
        last = f"; the last: {self._last}" if self._last else ""
        return [*named, f"{more} more since the last line, {total} in all{last}"]
