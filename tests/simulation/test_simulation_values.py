"""The arguments of a simulation, and values that are refused before it runs."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.simulation import Drop, Kill, Link, Network, Partition, Pause, Resume, Slow, run
from unisono.simulation.faults import channels_cut
from unisono.simulation.verdicts import Silence


@pytest.mark.parametrize(
    "make",
    [
        lambda: Kill(-1, 0),
        lambda: Kill(True, 0),
        lambda: Kill("0", 0),
        lambda: Kill(0, -1e-9),
        lambda: Kill(0, math.nan),
        lambda: Kill(0, math.inf),
        lambda: Kill(0),
        lambda: Kill(0, 1.0, at_step=1),
        lambda: Kill(0, at_step=0),
        lambda: Kill(0, at_step=1.5),
        lambda: Pause(0, 1.0, -1.0),
        lambda: Pause(0, "soon"),
        lambda: Resume(0),
        lambda: Partition([[0, 1]], 0),
        lambda: Partition([[0], []], 0),
        lambda: Partition([[0, 1], [1, 2]], 0),
        lambda: Partition([0, 1], 0),
        lambda: Partition([[0], [1]], 0, -1),
        lambda: Drop(1, 1, 0),
        lambda: Drop(0, 1),
        lambda: Slow(0, 1, 0, 0),
        lambda: Slow(0, 1, -2, 0),
        lambda: Network(latency_s=-1),
        lambda: Network(bytes_per_s=0),
        lambda: Network(jitter_s=math.nan),
        lambda: Network(links={(0, 0): Link()}),
        lambda: Network(links={0: Link()}),
        lambda: Network(links={(0, 1): 5}),
        lambda: Network(links=[(0, 1)]),
        lambda: Link(latency_s=-1),
    ],
)
def test_an_invalid_fault_or_network_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 0},
        {"n": True},
        {"n": 2.0},
        {"seed": 1.5},
        {"seed": True},
        {"network": "fast"},
        {"config": {"silence_s": 1.0}},
        {"network": Network(links={(0, 2): Link()})},
        {"faults": [Kill(2, 0)]},
        {"faults": [Drop(0, 5, 0)]},
        {"faults": [Partition([[0], [1, 7]], 0)]},
        {"faults": ["kill rank 0"]},
    ],
)
def test_arguments_that_do_not_fit_the_world_are_refused_before_it_runs(arguments: dict[str, Any]) -> None:
    ran = []
    with pytest.raises(UsageError):
        run(ran.append, **{"n": 2, **arguments})
    assert not ran


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"faults": [Kill(2, 0)]}, "Kill(rank=2, at_s=0, at_step=None): rank=2; allowed: ranks 0 to 1"),
        ({"network": Network(links={(0, 2): Link()})}, "links[(0, 2)]: rank=2; allowed: ranks 0 to 1"),
    ],
)
def test_a_rank_that_does_not_exist_is_named_with_its_fault_or_link(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        run(print, 2, **arguments)


def test_a_partition_cuts_both_ways_between_all_groups() -> None:
    groups = Partition([{2, 1}, (0,), [3]], 0)
    assert groups.groups == ((1, 2), (0,), (3,))
    cut = channels_cut(groups)
    assert len(cut) == 10
    assert {(src, dst) for src, dst in cut} == {(dst, src) for src, dst in cut}
    assert (1, 2) not in cut


def test_a_link_is_like_the_network_except_where_it_says_so() -> None:
    network = Network(1e-3, 1e6, 1e-4, links={(0, 1): Link(latency_s=0.5)})
    assert network.pace(0, 1) == network.pace(0, 1).__class__(0.5, 1e6, 1e-4)
    assert network.pace(1, 0).latency_s == 1e-3


def test_a_rank_is_silent_until_every_cause_has_ended() -> None:
    silence = Silence()
    assert silence.begin(1.0)
    assert not silence.begin(2.0)
    silence.end()
    assert not silence.is_fatal(3.4, 2.5)
    assert silence.is_fatal(3.5, 2.5)
    silence.end()
    assert not silence.is_fatal(9.0, 2.5)
