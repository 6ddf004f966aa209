"""Reports of a mismatch on a busy machine.

A report names the ranks whose calls have arrived within a quarter of a second. If the machine leaves a rank
without a core for longer, the ranks make the different calls again; a report that is wrong in every turn
fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.metronome import Metronome

__all__ = ["reported_in_time"]

_TURNS = 3
# A turn in which the machine did not run this process for 50 ms or more does not count; this many turns at
# most.
_TURNS_MAX = 10
_STARVED_S = 0.05


def reported_in_time(outcomes_of: Callable[[], list[Any]], check: Callable[[Any], object]) -> None:
    """Repeat the mismatch until `check` accepts every rank's outcome: it neither raises nor returns False."""
    counted = 0
    metronome = Metronome()
    try:
        for turn in range(1, _TURNS_MAX + 1):
            begun = metronome.beats[-1]
            outcomes = outcomes_of()
            ended = metronome.beats[-1]
            counted += ended - begun - metronome.fair_s(begun, ended) < _STARVED_S
            try:
                for outcome in outcomes:
                    assert check(outcome) is not False, "\n".join(map(str, outcomes))
            except AssertionError:
                if counted == _TURNS or turn == _TURNS_MAX:
                    raise
            else:
                return
    finally:
        metronome.is_over = True
        metronome.join()
