"""The formation of a world, which is pure: which ranks are admitted, and which are waited for."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from unisono.bootstrap.rendezvous import Formation, Join
from unisono.errors import rank_numbers


def a_join(rank: int, size: int = 3, **changes: Any) -> Join:
    given: dict[str, Any] = {
        "version": "1.0",
        "config_digest": "d0",
        "card": b"card %d" % rank,
        "host": f"h{rank}",
        "pid": 100 + rank,
        "address": f"10.0.0.{rank}",
        **changes,
    }
    return Join(rank, size, **given)


def test_a_world_forms_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        formation = Formation(3, "1.0")
        for key, rank in enumerate(order):
            assert formation.membership()[0] is None
            assert formation.offer(key, a_join(rank)) is None
        membership, reason = formation.membership()
        assert membership is not None
        assert reason == "all 3 ranks joined"
        assert [(m.rank, m.card, m.host, m.incarnation) for m in membership.members] == [
            (rank, b"card %d" % rank, f"h{rank}", 0) for rank in range(3)
        ]


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (a_join(1, version="0.9"), "unisono 0.9 cannot join a world of unisono 1.0"),
        (a_join(1, size=4), "it was started with size 4, this world has 3 ranks"),
        (a_join(3), "rank 3; allowed: 0 to 2"),
        (a_join(-1), "rank -1; allowed"),
        (a_join(1, card=bytes(20000)), "card has 20000 bytes"),
        (a_join(0, pid=7), r"rank 0 is taken by rank 0 \(host h0, pid 100, from 10.0.0.0\)"),
        (a_join(1, config_digest="d1"), "settings differ from rank 0's: digest d1"),
    ],
)
def test_a_bad_join_is_named_and_does_not_end_the_formation(join: Join, reason: str) -> None:
    formation = Formation(3, "1.0")
    formation.offer(0, a_join(0))
    refusal = formation.offer(1, join)
    assert refusal is not None
    assert re.search(reason, refusal)
    assert "1 of 3 ranks joined (0); missing: 1-2; refused: rank" in formation.report()
    assert formation.offer(2, a_join(1)) is None
    assert formation.offer(3, a_join(2)) is None
    assert formation.membership()[0] is not None


def test_rank_0_decides_the_settings_even_when_it_comes_last() -> None:
    formation = Formation(3, "1.0")
    formation.offer(1, a_join(1, settings={"eager_bytes": "1"}, config_digest="odd"))
    formation.offer(2, a_join(2, settings={"eager_bytes": "2"}))
    assert formation.misfits() == []
    formation.offer(3, a_join(0, settings={"eager_bytes": "2"}))
    assert formation.misfits() == [
        (1, "its settings differ from rank 0's: eager_bytes=1 (rank 0: 2)"),
    ]
    assert formation.ranks_missing() == [1]


def test_a_rank_that_left_may_come_again_as_another_incarnation() -> None:
    formation = Formation(2, "1.0")
    formation.offer(1, a_join(1, 2))
    formation.leave(1)
    assert formation.ranks_missing() == [0, 1]
    formation.offer(2, a_join(1, 2))
    assert formation.incarnation(1) == 1


def test_a_process_whose_connection_broke_takes_its_own_rank_again() -> None:
    formation = Formation(2, "1.0")
    formation.offer(1, a_join(1, 2, instance="same"))
    assert formation.offer(2, a_join(1, 2, instance="other")) is not None
    assert formation.offer(3, a_join(1, 2, instance="same")) is None
    formation.leave(1)  # the end of the old connection is noticed only later
    assert formation.ranks_joined() == [1]


def test_no_rank_joins_or_leaves_a_complete_world() -> None:
    formation = Formation(1, "1.0")
    formation.offer(0, a_join(0, 1))
    assert formation.membership()[0] is not None
    assert "is complete, and rank 0 (host h0" in str(formation.offer(1, a_join(0, 1)))
    formation.leave(0)
    assert formation.ranks_joined() == [0]


def test_a_world_without_a_rank_that_has_ended_cannot_form() -> None:
    formation = Formation(3, "1.0")
    formation.offer(0, a_join(0))
    assert (
        formation.on_rank_ended(1, "exit code 0")
        == "rank 1 has ended (exit code 0) before this world had formed"
    )
    late = a_join(2)
    assert formation.offer(2, late) == "rank 1 has ended (exit code 0) before this world had formed"
    assert formation.refusal(late) == "over"
    assert "rank 1 has ended" in str(formation.on_rank_ended(0, "exit code 1"))  # because of rank 1
    assert "missing: 1-2; rank 1 has ended (exit code 0)" in formation.report()
    assert formation.on_rank_ended(7, "exit code 0") is None


def test_a_rank_that_ends_after_the_world_has_formed_does_not_concern_the_formation() -> None:
    formation = Formation(1, "1.0")
    formation.offer(0, a_join(0, 1))
    formation.membership()
    assert formation.on_rank_ended(0, "exit code 0") is None
    assert formation.report() == "1 of 1 ranks joined (0)"


def test_a_refusal_says_whether_another_process_has_the_rank() -> None:
    formation = Formation(2, "1.0")
    formation.offer(0, a_join(1, 2))
    assert formation.refusal(a_join(1, 2, pid=7)) == "taken"
    assert formation.refusal(a_join(1, 2, config_digest="odd")) == "misfit"
    formation.offer(1, a_join(0, 2))
    formation.membership()
    assert formation.refusal(a_join(1, 2, pid=7)) == "taken late"
    assert formation.refusal(a_join(1, 2)) == "own late"


def test_a_flood_of_refusals_stays_one_readable_line() -> None:
    formation = Formation(2, "1.0")
    for key in range(1000):
        formation.offer(key, a_join(1, 2, version="\n\x1b[2J" * 99, host="\u202e" * 999))
    assert formation.report().isprintable()
    assert "and 992 more" in formation.report()
    assert len(formation.report()) < 3000


def test_ranks_are_written_as_spans() -> None:
    assert rank_numbers([3, 1, 0, 2, 7, 9, 8]) == "0-3, 7-9"
    assert rank_numbers(range(0, 1000, 2)).endswith("62, ...")
