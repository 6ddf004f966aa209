"""Reports of a mismatch on a busy machine.

A report names the ranks whose calls have come within a quarter of a second. A machine that leaves a rank
without a core for longer gets further turns; a report that is wrong in every turn fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["reported_in_time"]

_TURNS = 10


def reported_in_time(outcomes_of: Callable[[], list[Any]], check: Callable[[Any], object]) -> None:
    """Let the ranks collide until `check`, which raises or returns False, holds for what each of them got."""
    for turn in range(1, _TURNS + 1):
        outcomes = outcomes_of()
        try:
            for outcome in outcomes:
                assert check(outcome) is not False, "\n".join(map(str, outcomes))
        except AssertionError:
            if turn == _TURNS:
                raise
        else:
            return
