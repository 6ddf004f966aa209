"""Log lines about refused connections: the first few by name, then a count per interval.

Pure: callers and the time in, lines out. Any host that can reach a port can be refused there without end, and
must not be able to fill a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["INTERVAL_S", "NAMED_MAX", "Refusals"]

# Callers that are named in the life of a port: a misconfigured job shows in the first few.
NAMED_MAX: Final = 8
# After that, one line per interval with a count.
INTERVAL_S: Final = 60.0


class Refusals:
    """The refused callers of one port."""

    def __init__(self) -> None:
        self._named = 0
        self._counted = 0
        self._last = ""
        self._due_at: float | None = None

    def lines(self, callers: Sequence[str], total: int, now: float, *, is_last: bool = False) -> list[str]:
        """The lines to log now.

        Args:
            callers: some of the callers that were refused since the last call.
            total: all callers that were refused so far.
            now: the time in seconds.
            is_last: this is the last call, so a count that is not due yet is logged too.
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
