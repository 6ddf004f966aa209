"""How ranks ended: the rank that is blamed, its exception and last words, and jobs that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.launcher.failure import End, culprit, describe, rebuild
from unisono.launcher.job import Job
from unisono.launcher.output import Prefixer, last_words
from unisono.launcher.summary import Ended, end_of


def victim(rank: int, *blames: int) -> End:
    return End(rank, is_victim=True, blames=blames)


def test_the_culprit_is_the_rank_that_the_victims_name_or_the_first_that_is_no_victim() -> None:
    assert culprit([victim(3), victim(1), End(2), End(0)]) == 2
    assert culprit([victim(3), victim(1)]) == 3
    assert culprit([victim(3, 0), End(2), End(0)]) == 0
    assert culprit([victim(3, 1), victim(0, 1), victim(2, 3)]) == 1, "it left, and most name it"


class Odd(Exception):
    """An exception that the user has defined."""


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a", 3),
        ValueError("x"),
        FileNotFoundError(2, "no such file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "r"),
    ],
)
def test_a_built_in_exception_is_rebuilt(error: Exception) -> None:
    again = rebuild(describe(error), 3)
    assert type(again) is type(error)
    assert again.args == error.args
    assert "On rank 3:" in again.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [
        Odd("hm"),
        ValueError(object()),
        SystemExit(3),
        KeyboardInterrupt(),
        ExceptionGroup("g", [ValueError()]),
    ],
)
def test_any_other_exception_is_a_remote_error(error: BaseException) -> None:
    again = rebuild(describe(error), 3)
    assert type(again).__name__ == "RemoteError"
    assert again.rank == 3  # type: ignore[attr-defined]
    assert again.type_name == type(error).__name__  # type: ignore[attr-defined]
    assert type(error).__name__ in again.traceback_text  # type: ignore[attr-defined]


def test_an_error_of_ours_keeps_its_fields() -> None:
    from unisono.errors import DeadlineExceeded, Location, PeerLost

    lost = PeerLost(
        "gone",
        ranks=(2, 3),
        where=Location("all_reduce", "world", 0, 7, 1.5),
        cause="silent",
        next_step="shrink",
    )
    again = rebuild(describe(lost), 1)
    assert isinstance(again, PeerLost)
    assert again.ranks == (2, 3)
    assert str(again) == str(lost)
    late = rebuild(describe(DeadlineExceeded("late", waiting_on=(5,))), 1)
    assert isinstance(late, DeadlineExceeded)
    assert late.waiting_on == (5,)


TRACEBACK = [
    b"noise",
    b"Traceback (most recent call last):",
    b"  old",
    b"KeyError: 1",
    b"noise",
    b"Traceback (most recent call last):",
    b"  a",
    b"ZeroDivisionError: x",
    b"",
    b"During handling of the above exception, another exception occurred:",
    b"",
    b"Traceback (most recent call last):",
    b"  b",
    b"ValueError: y",
]


def test_the_last_traceback_is_kept_with_its_causes() -> None:
    assert last_words(TRACEBACK) == TRACEBACK[5:]
    assert last_words([b"%d" % i for i in range(99)]) == [b"%d" % i for i in range(79, 99)]
    assert end_of(Ended(0, 1, TRACEBACK)) == End(0)
    lines = [*TRACEBACK[:-1], b"unisono.errors.PeerLost: rank 3 is gone"]
    assert end_of(Ended(0, 1, lines)) == End(0, is_victim=True, blames=(3,))


def test_every_line_gets_its_rank_once_it_is_whole() -> None:
    prefixer = Prefixer(3, 16, colour=False)
    assert prefixer.feed(b"a\nb") == [b"a"]
    assert prefixer.feed(b"c\n\nd") == [b"bc", b""]
    assert prefixer.finish() == [b"d"]
    assert prefixer.show(b"x") == b" [3] x\n"
    assert prefixer.show(b"10%\r20%\r") == b" [3] 10%\r [3] 20%\n"
    assert [len(line) for line in prefixer.feed(bytes(200_000))] == [200_000]
    assert b"\x1b[" in Prefixer(3, 16, colour=True).show(b"x")


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        ({"ranks_here": 0}, "at least 1"),
        ({"nodes": 2, "node_rank": 2}, "--node-rank 2"),
        ({"nodes": 2}, "--join FILE"),
        ({"nodes": 2, "join": "/f"}, "--address"),
        ({"nodes": 2, "join": "unisono1://h:1/x/y", "address": "lo"}, "not a ticket"),
        ({"grace_s": -1.0}, "--grace"),
        ({"env": {"UNISONO_JOIN": "x"}}, "command line"),
    ],
)
def test_a_job_that_cannot_work_is_refused(job: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Job(**{"command": ["true"], "ranks_here": 2, **job}).check()
