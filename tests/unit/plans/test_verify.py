"""The verifier catches every way in which a plan can be wrong, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from unisono.plans import (
    Buf,
    Copy,
    Plan,
    PlanError,
    Problem,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Slice,
    Step,
    build,
    verify,
)

OUT = Slice(Buf.OUT, 0, 4)
TMP = Slice(Buf.TMP, 0, 4)


def plans_of(problem: Problem, algorithm: str) -> list[Plan]:
    return [build(problem, rank, algorithm) for rank in range(problem.size)]


def by_hand(problem: Problem, *rounds: list[list[Step]], tmp_count: int = 0) -> list[Plan]:
    """Make plans from the rounds of each rank."""
    template = plans_of(problem, "flat")
    return [
        replace(plan, rounds=tuple(map(tuple, own)), tmp_count=tmp_count)
        for plan, own in zip(template, rounds, strict=True)
    ]


def altered(plans: list[Plan], rank: int, kind: type, change: Callable[[Step], list[Step]]) -> list[Plan]:
    """Change the first step of a kind on one rank."""
    plan = plans[rank]
    for number, steps in enumerate(plan.rounds):
        for place, step in enumerate(steps):
            if isinstance(step, kind):
                changed = (*steps[:place], *change(step), *steps[place + 1 :])
                rounds = (*plan.rounds[:number], changed, *plan.rounds[number + 1 :])
                return [*plans[:rank], replace(plan, rounds=rounds), *plans[rank + 1 :]]
    raise AssertionError(f"rank {rank} has no {kind.__name__}")


def shifted(slice_: Slice, by: int) -> Slice:
    return Slice(slice_.buf, slice_.start + by, slice_.stop + by)


def longer(slice_: Slice) -> Slice:
    return Slice(slice_.buf, slice_.start, slice_.stop + 1)


MUTATIONS: dict[str, tuple[type, Callable[[Step], list[Step]]]] = {
    "another chunk is sent": (Send, lambda s: [replace(s, src=shifted(s.src, -5))]),
    "another chunk is received": (Recv, lambda s: [replace(s, dst=shifted(s.dst, -5))]),
    "another chunk is reduced": (RecvReduce, lambda s: [replace(s, dst=shifted(s.dst, -5))]),
    "a send is dropped": (Send, lambda s: []),
    "a receive is dropped": (Recv, lambda s: []),
    "a reduce is dropped": (RecvReduce, lambda s: []),
    "a send goes to another rank": (Send, lambda s: [replace(s, peer=(s.peer + 1) % 4)]),
    "a receive waits for another rank": (Recv, lambda s: [replace(s, peer=(s.peer + 2) % 4)]),
    "a reduce waits for another rank": (RecvReduce, lambda s: [replace(s, peer=(s.peer + 2) % 4)]),
    "a send is one element too long": (Send, lambda s: [replace(s, src=longer(s.src))]),
    "a receive is one element too long": (Recv, lambda s: [replace(s, dst=longer(s.dst))]),
    "a send is one element off": (Send, lambda s: [replace(s, src=shifted(s.src, -1))]),
    "a receive is one element off": (Recv, lambda s: [replace(s, dst=shifted(s.dst, 1))]),
    "a step is sent twice": (Send, lambda s: [s, s]),
    "a reduce becomes a receive": (RecvReduce, lambda s: [Recv(s.peer, s.dst)]),
    "a receive becomes a reduce": (Recv, lambda s: [RecvReduce(s.peer, s.dst)]),
}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_ring_is_caught_and_the_place_is_named(name: str, rank: int) -> None:
    plans = plans_of(Problem("all_reduce", 4, (20,)), "ring")
    verify(plans)
    with pytest.raises(PlanError, match=r"^all_reduce by ring: rank \d, round \d+"):
        verify(altered(plans, rank, *MUTATIONS[name]))


@pytest.mark.parametrize("algorithm", ["doubling", "halving_doubling", "tree", "flat", "ordered"])
def test_swapped_operands_are_caught(algorithm: str) -> None:
    plans = plans_of(Problem("all_reduce", 6, (30,)), algorithm)
    verify(plans, canonical=True)
    kind = Reduce if algorithm in ("doubling", "flat", "ordered") else RecvReduce
    swapped = altered(plans, 0, kind, lambda step: [replace(step, left=not step.left)])
    with pytest.raises(PlanError, match=r"not in rank order|differently than on rank 0"):
        verify(swapped, ordered=True)


def test_another_bracketing_is_caught_only_when_it_matters() -> None:
    plans = plans_of(Problem("scan", 4, (3,)), "hillis_steele")
    verify(plans, ordered=True)
    with pytest.raises(PlanError, match=r"rank 2.*out holds \(0 \(1 2\)\), not bracketed canonically"):
        verify(plans, canonical=True)


def test_a_ring_is_not_in_rank_order() -> None:
    plans = plans_of(Problem("all_reduce", 3, (6,)), "ring")
    with pytest.raises(PlanError, match=r"not in rank order"):
        verify(plans, ordered=True)


def test_different_bits_on_different_ranks_are_caught() -> None:
    exchange = [
        [[Send(1, OUT), Recv(1, TMP), Reduce(OUT, TMP)]],
        [[Send(0, OUT), Recv(0, TMP), Reduce(OUT, TMP)]],
    ]
    with pytest.raises(PlanError, match=r"rank 1.*bracketed differently than on rank 0"):
        verify(by_hand(Problem("all_reduce", 2, (4,)), *exchange, tmp_count=4))


def test_two_blocking_sends_are_a_deadlock() -> None:
    rounds = [
        [[Send(1 - rank, OUT)], [Recv(1 - rank, TMP), Reduce(OUT, TMP, left=rank == 1)]] for rank in (0, 1)
    ]
    with pytest.raises(PlanError, match=r"deadlock: 2 ranks.*rank 0, round 0: send out\[0:4\] to 1"):
        verify(by_hand(Problem("all_reduce", 2, (4,)), *rounds, tmp_count=4))


def test_a_cycle_of_three_is_a_deadlock() -> None:
    half, rest = Slice(Buf.OUT, 0, 2), Slice(Buf.OUT, 2, 4)
    rounds = [[[Recv((r - 1) % 3, half)], [Send((r + 1) % 3, rest)]] for r in range(3)]
    with pytest.raises(PlanError, match="deadlock: 3 ranks"):
        verify(by_hand(Problem("all_reduce", 3, (4,)), *rounds))


CONFLICTS: dict[str, list[Step]] = {
    "two receives fill the same elements": [Recv(1, OUT), Recv(1, OUT)],
    "a receive overwrites what is being sent": [Send(1, OUT), RecvReduce(1, OUT)],
    "one element is common": [Send(1, Slice(Buf.OUT, 0, 3)), Recv(1, Slice(Buf.OUT, 2, 4))],
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_a_conflict_in_a_round_is_caught(name: str) -> None:
    with pytest.raises(PlanError, match=r"rank 0, round 0.*conflict"):
        verify(by_hand(Problem("all_reduce", 2, (4,)), [CONFLICTS[name]], []))


WRONG_STEPS: dict[str, tuple[Step, str]] = {
    "a write to in": (Recv(1, Slice(Buf.IN, 0, 4)), "writes `in`"),
    "beyond the end": (Send(1, Slice(Buf.OUT, 2, 9)), "outside a buffer of 8"),
    "a negative start": (Send(1, Slice(Buf.OUT, -1, 3)), "outside"),
    "a reversed slice": (Send(1, Slice(Buf.OUT, 3, 1)), "outside"),
    "an unset element": (Copy(Slice(Buf.OUT, 0, 4), TMP), r"reads tmp\[0\], which nothing has set"),
    "lengths that differ": (Copy(Slice(Buf.OUT, 0, 3), Slice(Buf.IN, 0, 4)), "4 elements into 3"),
    "an overlap of its own": (Copy(Slice(Buf.TMP, 0, 3), Slice(Buf.TMP, 1, 4)), "overlap"),
    "a message to itself": (Send(0, Slice(Buf.IN, 0, 4)), "a message to itself"),
    "a message to nobody": (Send(2, Slice(Buf.IN, 0, 4)), "no such rank"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_step_that_is_wrong_by_itself_is_caught(name: str) -> None:
    step, says = WRONG_STEPS[name]
    with pytest.raises(PlanError, match=f"rank 0, round 0, step .*{says}"):
        verify(by_hand(Problem("all_gather", 2, (4, 4)), [[step]], [], tmp_count=4))


def test_a_local_step_between_messages_is_caught() -> None:
    steps: list[Step] = [Recv(1, TMP), Copy(OUT, TMP), Send(1, OUT)]
    with pytest.raises(PlanError, match="between messages"):
        verify(by_hand(Problem("all_reduce", 2, (4,)), [steps], [], tmp_count=4))


def test_an_element_that_nobody_sets_is_caught() -> None:
    plans = plans_of(Problem("all_gather", 3, (2, 2, 2)), "ring")
    with pytest.raises(PlanError, match=r"rank 1.*out\[2\] is never set"):
        verify(altered(plans, 1, Copy, lambda step: []))


def test_a_contribution_counted_twice_is_caught() -> None:
    rounds = [[[Recv(1, TMP), Reduce(OUT, TMP), Reduce(OUT, TMP)]], [[Send(0, OUT)]]]
    with pytest.raises(PlanError, match=r"\(0 1\) and 1 have a contribution in common"):
        verify(by_hand(Problem("all_reduce", 2, (4,)), *rounds, tmp_count=4))


def test_rank_0_of_an_exscan_must_stay_untouched() -> None:
    plans = plans_of(Problem("exscan", 3, (4,)), "flat")
    changed = replace(plans[0], rounds=(*plans[0].rounds, (Copy(OUT, Slice(Buf.IN, 0, 4)),)))
    with pytest.raises(PlanError, match=r"rank 0 of an exscan"):
        verify([changed, *plans[1:]])


def test_a_barrier_whose_messages_do_not_wait_for_each_other_is_caught() -> None:
    plans = plans_of(Problem("barrier", 4), "dissemination")
    hasty = [
        replace(
            plan, rounds=tuple(tuple(s for s in steps if not isinstance(s, Copy)) for steps in plan.rounds)
        )
        for plan in plans
    ]
    verify(plans)
    with pytest.raises(PlanError, match=r"rank 0.*passes the barrier before ranks \[1\] have arrived"):
        verify(hasty)


def test_plans_of_different_problems_are_refused() -> None:
    one, other = (
        plans_of(Problem("all_reduce", 2, (4,)), "flat"),
        plans_of(Problem("all_reduce", 2, (5,)), "flat"),
    )
    with pytest.raises(PlanError, match=r"ranks 0 and 1 solve different problems"):
        verify([one[0], other[1]])
    with pytest.raises(PlanError, match="not one plan per rank"):
        verify(one[:1])
    with pytest.raises(PlanError, match="in and out hold 0 and 3 elements"):
        verify([one[0], replace(one[1], out_count=3)])


def test_an_all_to_all_whose_ranks_disagree_is_caught() -> None:
    plans = [
        build(Problem("all_to_all", 2, (1, count, 1, 1)), rank, "flat") for rank, count in enumerate((2, 3))
    ]
    with pytest.raises(PlanError, match=r"2 elements|disagree"):
        verify(plans)
