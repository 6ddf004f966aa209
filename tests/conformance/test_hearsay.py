"""Hearsay: when a rank believes a report that another rank is down. One table for engine and simulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from tests.support.member import CONTROL, HEAD, Member
from tests.support.native_ranks import (
    CONTEXT,
    DOWN,
    EAGER,
    SECRET,
    Make,
    connect,
    ended,
    exchange,
    make,
)
from tests.support.simulated_ranks import LATENCY, Rank, simulated

from unisono.config import Config
from unisono.core.envelope import Lane
from unisono.messaging.peer_down import PeerDown
from unisono.simulation import Drop, Kill, Network, now, sleep
from unisono.simulation.fabric import Fabric
from unisono.simulation.scheduler import Scheduler
from unisono.simulation.verdicts import Verdicts

__all__ = ["make"]


class Case(NamedTuple):
    """Rank 0 is told that rank 2, which is alive, is down; whether it believes the report."""

    has_link: bool
    left: bool
    believed: tuple[str, bool] | None


CASES = {
    "a rank with a link ignores the report of a death": Case(True, False, None),
    "a rank with a link ignores the report of a goodbye": Case(True, True, None),
    "a rank without a link believes the report of a death": Case(False, False, ("silent for 9.9 s", False)),
    "a rank without a link believes the report of a goodbye": Case(False, True, ("silent for 9.9 s", True)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_keeps_the_rule(make: Make, name: str) -> None:
    case, reports = CASES[name], list[PeerDown]()
    first, last = make(3, (0, 2))
    connect([first, last], cards=[first.card(), first.card(), last.card()])
    first.watch(reports.append)
    if case.has_link:
        exchange(first, last)
    with Member(first.card(), SECRET, 1, 0, 3) as member:
        cause = b"silent for 9.9 s"
        member.send(HEAD.pack(DOWN, case.left, 0, len(cause), 2, 0, 0) + cause, CONTROL)
        # A later message of the same peer has arrived, so the report has, too.
        member.send(HEAD.pack(EAGER, 255, 0, 0, CONTEXT, 7, 2) + b"ok", CONTROL)
        assert bytes(ended(first, first.start_recv(1, CONTEXT, 7, None)).data or b"") == b"ok"
        believed = [(down.cause, down.left) for down in reports if down.rank == 2]
        assert believed == [] if case.believed is None else [case.believed]
        if case.has_link:
            exchange(first, last)
        else:
            error = ended(first, first.start_send(2, CONTEXT, 0, memoryview(b"x"))).error
            assert "silent for 9.9 s" in str(error)


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_keeps_the_rule(name: str) -> None:
    case, size = CASES[name], 6  # at the start 0 and 3 have no link
    scheduler = Scheduler(0, 2.0)
    for _ in range(size):
        scheduler.add_thread(lambda: None)
    fabric = Fabric(scheduler, Network(), Config(), 0)
    members = [Listener() for _ in range(size)]
    verdicts = Verdicts(fabric, members)
    if case.has_link:
        fabric.carry(3, 0, Lane.BULK, 0, lambda: None)
    verdicts._on_report(0, (PeerDown(3, "silent for 9.9 s", case.left),))
    believed = [(down.cause, down.left) for down in members[0].downs.values()]
    assert believed == ([] if case.believed is None else [case.believed])


class Listener:
    """A rank that is alive, and the ranks that it considers down."""

    is_gone = False

    def __init__(self) -> None:
        self.downs: dict[int, PeerDown] = {}

    def has_lost(self, peer: int) -> bool:
        return peer in self.downs

    def peer_down(self, down: PeerDown) -> None:
        self.downs[down.rank] = down


def downs(me: Rank) -> Any:
    sleep(8)
    return [(at, down.rank, down.cause) for at, down in me.downs if not down.left]


def test_a_cut_between_two_ranks_does_not_concern_ranks_that_reach_both() -> None:
    results = simulated(downs, 4, faults=[Drop(3, 0, 1.0)]).results
    assert results[0] == [(3.5, 3, "silent for 2.5 s")]
    assert results[1] == results[2] == []
    assert results[3] == [(3.5 + LATENCY, 0, "gave rank 3 up after 2.5 s of silence")]


def test_a_rank_without_a_link_gets_the_report_and_refuses_the_dead_rank_later() -> None:
    """Six ranks, all linked except 0 and 3, 1 and 4, 2 and 5, until one of a pair calls the other."""

    def program(me: Rank) -> Any:
        if me.rank == 4:
            sleep(6)
            request = me.start_send(1, b"hello", sync=True)
            sleep(1)
            return str(request.error)
        return downs(me)

    results = simulated(program, 6, faults=[Drop(4, 5, 1.0)]).results
    assert results[5] == [(3.5, 4, "silent for 2.5 s")]
    assert results[1] == [(3.5 + LATENCY, 4, "silent for 2.5 s")], "rank 5 has a link with it"
    assert "rank 1" in results[4]
    assert "refuses the link: it has declared rank 4 dead" in results[4]
    assert results[2] == [(3.5 + 2 * LATENCY, 5, "gave rank 4 up after 2.5 s of silence")], "by rank 4"
    assert results[0] == results[3] == [], "ranks that reach both"


def test_all_ranks_learn_of_a_death_also_those_that_call_the_dead_rank_later() -> None:
    def program(me: Rank) -> Any:
        if me.rank == 3:
            me.recv(0)
        if me.rank == 0:
            sleep(1.0 + LATENCY / 2)  # the rank is dead, and no other rank knows it yet
            request = me.start_send(3, b"hello", sync=True)
            sleep(1)
            return now() > 2, [down.rank for _, down in me.downs], str(request.error)
        sleep(3)
        return [(at, down.rank) for at, down in me.downs if not down.left]

    results = simulated(program, 6, faults=[Kill(3, 1.0)]).results
    assert results[0][:2] == (True, [3])
    assert "killed at 1 s (simulated)" in results[0][2]
    assert results[1] == results[2] == results[4] == results[5] == [(1.0 + LATENCY, 3)]
