"""The table of verbs agrees with the signatures of the verbs, and its facts with each other."""

from __future__ import annotations

import inspect

import pytest

from unisono.comm.verb_table import COLLECTIVES, VERBS, Fact, verbs_with
from unisono.comm.verbs import ReferenceVerbs
from unisono.plans import CATALOG

PARAMETERS = {name: set(inspect.signature(getattr(ReferenceVerbs, name)).parameters) for name in VERBS}


@pytest.mark.parametrize(
    ("fact", "parameters"),
    [
        (Fact.ROOTED, {"root"}),
        (Fact.SENDS, {"dst"}),
        (Fact.RECEIVES, {"src"}),
        (Fact.REDUCES, {"op"}),
        (Fact.FUSED, {"xs"}),
        (Fact.CUT, {"counts"}),
        (Fact.FOLDS, {"fn"}),
        (Fact.GROUPS, {"color"}),
        (Fact.PER_RANK, {"parts", "values", "objects"}),
    ],
)
def test_a_fact_is_true_of_the_verbs_with_its_parameter(fact: Fact, parameters: set[str]) -> None:
    assert verbs_with(fact) == {name for name, taken in PARAMETERS.items() if taken & parameters}


def test_every_collective_is_moved_by_one_that_has_plans() -> None:
    assert {VERBS[name].collective for name in COLLECTIVES} == set(CATALOG)
    assert {name for name in VERBS if name in CATALOG} == set(CATALOG)
    assert all(VERBS[name].collective == name for name in CATALOG)


def test_a_verb_is_a_message_or_a_collective() -> None:
    messages = verbs_with(Fact.SENDS | Fact.RECEIVES)
    assert messages.isdisjoint(COLLECTIVES)
    assert messages | set(COLLECTIVES) == set(VERBS)


def test_rows_are_announced_in_one_way() -> None:
    exchanged, gathered, rooted = map(verbs_with, (Fact.EXCHANGED, Fact.GATHERED, Fact.ROOTED))
    assert exchanged.isdisjoint(gathered | rooted)
    assert gathered <= rooted
    assert verbs_with(Fact.ANNOUNCED) == exchanged | gathered | (verbs_with(Fact.ANNOUNCED) & rooted)


def test_only_verbs_with_a_root_have_a_result_there_alone() -> None:
    assert verbs_with(Fact.ROOT_ONLY) == {"reduce", "gather", "gather_v", "gather_object"}
    assert verbs_with(Fact.ROOT_ONLY) <= verbs_with(Fact.ROOTED)


def test_verbs_of_which_every_rank_gets_what_root_gives_are_broadcasts() -> None:
    """`VerbSpec::broadcasts` of the engine."""
    whole = verbs_with(Fact.ROOTED) - verbs_with(Fact.ROOT_ONLY | Fact.PER_RANK | Fact.BY_RANK)
    assert whole == {name for name, verb in VERBS.items() if verb.collective == "broadcast"}


def test_names_say_what_travels() -> None:
    assert verbs_with(Fact.OBJECTS) == {name for name in VERBS if name.endswith("_object")}
    assert verbs_with(Fact.ANNOUNCED) >= {name for name in COLLECTIVES if name.endswith("_object")}
