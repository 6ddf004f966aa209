"""The log of a rank's port names the first refused callers, then counts."""

from __future__ import annotations

from unisono.backends.native.refusals import INTERVAL_S, NAMED_MAX, Refusals


def test_the_first_callers_are_named_and_the_others_counted_once_per_interval() -> None:
    log, callers = Refusals(), [f"caller {i}" for i in range(100)]
    assert log.lines(callers[:3], 3, now=0.0) == callers[:3]
    assert log.lines(callers[3:9], 9, now=1.0) == callers[3:NAMED_MAX]
    for second in range(2, 61):
        assert log.lines([callers[second]], 9 + second, now=float(second)) == []
    assert log.lines([], 80, now=1.0 + INTERVAL_S) == [
        "72 more since the last line, 80 in all; the last: caller 60"
    ]
    assert log.lines([], 80, now=10 * INTERVAL_S) == []
    assert log.lines(["caller x"], 81, now=11 * INTERVAL_S) == [
        "1 more since the last line, 81 in all; the last: caller x"
    ]


def test_a_flood_of_a_day_is_a_line_per_minute() -> None:
    log, total, lines = Refusals(), 0, []
    for second in range(24 * 3600):
        total += 1000
        lines += log.lines(["a caller from 192.0.2.1: no hello"] * 8, total, now=float(second))
    assert len(lines) <= NAMED_MAX + 24 * 60


def test_callers_that_were_not_counted_yet_are_logged_at_the_end() -> None:
    log = Refusals()
    assert log.lines(["a"], 5, now=0.0) == ["a"]
    assert log.lines([], 5, now=1.0, is_last=True) == ["4 more since the last line, 5 in all"]
    assert log.lines([], 5, now=2.0, is_last=True) == []
