"""The verifier catches every way in which a plan can be wrong, and says where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Shape,
    Slice,
    Step,
    build,
    verify,
)
from unisono.plans.amounts import ZERO, Amount, Counts, blocks, even, longest, slots
from unisono.plans.layout import chunks, finish, whole

Region = Slice[Amount]
Rounds = list[list[Step]]


def plans_of(problem: Problem, algorithm: str) -> list[Plan]:
    return [build(problem, rank, algorithm) for rank in range(problem.size)]


def by_hand(collective: str, *builders: Callable[[Counts], Rounds], counts: int = 1) -> list[Plan]:
    """Make plans from a function that gives the rounds of a rank for the counts."""
    size, plans = len(builders), []
    for rank, rounds_of in enumerate(builders):
        shape = Shape(collective, size, Counts(counts))
        plans.append(finish(shape, rank, "hand", rounds_of(shape.counts)))
    return plans


def out(counts: Counts) -> Region:
    return whole(Buf.OUT, counts[0])


def tmp(counts: Counts) -> Region:
    return whole(Buf.TMP, counts[0])


def nothing(counts: Counts) -> Rounds:
    return [[]]


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


def ring_part(slice_: Region, by: int) -> Region:
    """Another of the four parts of a vector: it has the same number of cells, and mostly of elements."""
    atoms = slice_.start.atoms or slice_.stop.atoms
    assert atoms is not None
    parts = chunks(slice_.buf, even(atoms.count(0), 4))
    return parts[(parts.index(slice_) + by) % 4]


def longer(slice_: Region) -> Region:
    return replace(slice_, stop=slice_.stop + slice_.count)


def resized(slice_: Region) -> Region:
    """A slice with the same start, and the length of another part."""
    return replace(slice_, stop=slice_.start + ring_part(slice_, 1).count)


MUTATIONS: dict[str, tuple[type, Callable[[Step], list[Step]]]] = {
    "another part is sent": (Send, lambda s: [replace(s, src=ring_part(s.src, 1))]),
    "another part is received": (Recv, lambda s: [replace(s, dst=ring_part(s.dst, 1))]),
    "another part is reduced": (RecvReduce, lambda s: [replace(s, dst=ring_part(s.dst, 1))]),
    "a send is dropped": (Send, lambda s: []),
    "a receive is dropped": (Recv, lambda s: []),
    "a reduce is dropped": (RecvReduce, lambda s: []),
    "a send goes to another rank": (Send, lambda s: [replace(s, peer=(s.peer + 1) % 4)]),
    "a receive waits for another rank": (Recv, lambda s: [replace(s, peer=(s.peer + 2) % 4)]),
    "a reduce waits for another rank": (RecvReduce, lambda s: [replace(s, peer=(s.peer + 2) % 4)]),
    "a send is too long": (Send, lambda s: [replace(s, src=longer(s.src))]),
    "a receive is too long": (Recv, lambda s: [replace(s, dst=longer(s.dst))]),
    "a send has the length of another part": (Send, lambda s: [replace(s, src=resized(s.src))]),
    "a receive has the length of another part": (Recv, lambda s: [replace(s, dst=resized(s.dst))]),
    "a reduce has the length of another part": (RecvReduce, lambda s: [replace(s, dst=resized(s.dst))]),
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


def exchange(peer: int, left: bool) -> Callable[[Counts], Rounds]:
    return lambda counts: [
        [Send(peer, out(counts)), Recv(peer, tmp(counts)), Reduce(out(counts), tmp(counts), left)]
    ]


def test_different_bits_on_different_ranks_are_caught() -> None:
    verify(by_hand("all_reduce", exchange(1, False), exchange(0, True)))
    with pytest.raises(PlanError, match=r"rank 1.*bracketed differently than on rank 0"):
        verify(by_hand("all_reduce", exchange(1, False), exchange(0, False)))


def test_two_blocking_sends_are_a_deadlock() -> None:
    def rounds(rank: int) -> Callable[[Counts], Rounds]:
        return lambda counts: [
            [Send(1 - rank, out(counts))],
            [Recv(1 - rank, tmp(counts)), Reduce(out(counts), tmp(counts), left=rank == 1)],
        ]

    with pytest.raises(PlanError, match=r"deadlock: 2 ranks.*rank 0, round 0: send out\[0:count\[0\]\] to 1"):
        verify(by_hand("all_reduce", rounds(0), rounds(1)))


def test_a_cycle_of_three_is_a_deadlock() -> None:
    def rounds(rank: int) -> Callable[[Counts], Rounds]:
        def of(counts: Counts) -> Rounds:
            first, second = chunks(Buf.OUT, even(counts[0], 2))
            return [[Recv((rank - 1) % 3, first)], [Send((rank + 1) % 3, second)]]

        return of

    with pytest.raises(PlanError, match="deadlock: 3 ranks"):
        verify(by_hand("all_reduce", rounds(0), rounds(1), rounds(2)))


def test_a_message_that_is_missing_is_caught() -> None:
    silent: Callable[[Counts], Rounds] = lambda counts: [[Recv(0, tmp(counts))]]  # noqa: E731
    with pytest.raises(PlanError, match=r"deadlock: 1 ranks wait forever: rank 1, round 0: recv tmp"):
        verify(by_hand("all_reduce", nothing, silent))


def parts(counts: Counts) -> list[Region]:
    return chunks(Buf.OUT, even(counts[0], 4))


CONFLICTS: dict[str, Callable[[Counts], list[Step]]] = {
    "two receives fill the same elements": lambda c: [Recv(1, out(c)), Recv(1, out(c))],
    "a receive overwrites what is being sent": lambda c: [Send(1, out(c)), RecvReduce(1, out(c))],
    "one part is common": lambda c: [
        Send(1, replace(parts(c)[0], stop=parts(c)[2].stop)),
        Recv(1, replace(parts(c)[2], stop=parts(c)[3].stop)),
    ],
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_a_conflict_in_a_round_is_caught(name: str) -> None:
    with pytest.raises(PlanError, match=r"rank 0, round 0.*conflict"):
        verify(by_hand("all_reduce", lambda counts: [CONFLICTS[name](counts)], nothing))


def block(buf: Buf, counts: Counts, number: int) -> Region:
    return chunks(buf, blocks(counts))[number]


WRONG_STEPS: dict[str, tuple[Callable[[Counts], Step], str]] = {
    "a write to in": (lambda c: Recv(1, whole(Buf.IN, c[0])), "writes `in`"),
    "beyond the end": (lambda c: Send(1, Slice(Buf.OUT, c[0], c[0] + c[1] * 2)), "outside a buffer of"),
    "beyond the end for some counts": (
        lambda c: Send(1, Slice(Buf.OUT, ZERO, c[0] * 2)),
        "outside a buffer of",
    ),
    "a reversed slice": (lambda c: Send(1, Slice(Buf.OUT, c[0], ZERO)), "may end before it starts"),
    "always empty": (lambda c: Send(1, Slice(Buf.OUT, c[0], c[0])), "always empty"),
    "an unset cell": (lambda c: Copy(block(Buf.OUT, c, 0), tmp(c)), "cell 0 was never set"),
    "another block of the same number": (
        lambda c: Copy(block(Buf.OUT, c, 1), whole(Buf.IN, c[0])),
        r"count\[0\] elements into count\[1\]",
    ),
    "lengths that differ": (
        lambda c: Copy(whole(Buf.OUT, c[0] + c[1]), whole(Buf.IN, c[0])),
        r"count\[0\] elements into count\[0\] \+ count\[1\]",
    ),
    "an overlap of its own": (
        lambda c: Copy(Slice(Buf.TMP, ZERO, c[0] * 2), Slice(Buf.TMP, c[0], c[0] * 3)),
        "overlap",
    ),
    "a message to itself": (lambda c: Send(0, whole(Buf.IN, c[0])), "a message to itself"),
    "a message to no rank": (lambda c: Send(2, whole(Buf.IN, c[0])), "no such rank"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_step_that_is_wrong_by_itself_is_caught(name: str) -> None:
    step, says = WRONG_STEPS[name]
    with pytest.raises(PlanError, match=f"rank 0, round 0, step .*{says}"):
        verify(by_hand("all_gather", lambda counts: [[step(counts)]], nothing, counts=2))


def test_a_local_step_between_messages_is_caught() -> None:
    def steps(counts: Counts) -> Rounds:
        return [[Recv(1, tmp(counts)), Copy(out(counts), tmp(counts)), Send(1, out(counts))]]

    with pytest.raises(PlanError, match="between messages"):
        verify(by_hand("all_reduce", steps, nothing))


# -- lengths that are equal by chance ---------------------------------------------------------------------


def gathered(place: Callable[[Counts], Sequence[Region]]) -> list[Plan]:
    """An all_gather of three ranks; rank 0 first receives the blocks of the others in slots of `tmp`."""

    def at_0(counts: Counts) -> Rounds:
        own, *others = chunks(Buf.OUT, blocks(counts))
        one, other = place(counts)
        return [
            [
                Copy(own, whole(Buf.IN, counts[0])),
                Send(1, whole(Buf.IN, counts[0])),
                Send(2, whole(Buf.IN, counts[0])),
            ],
            [Recv(1, one)],
            [Recv(2, other)],
            [Copy(others[0], one), Copy(others[1], other)],
        ]

    def at(rank: int) -> Callable[[Counts], Rounds]:
        def of(counts: Counts) -> Rounds:
            block = chunks(Buf.OUT, blocks(counts))
            own = whole(Buf.IN, counts[rank])
            between: list[Step] = [Send(3 - rank, own), Recv(3 - rank, block[3 - rank])]
            first: list[list[Step]] = [[Copy(block[rank], own), Recv(0, block[0])], [], [], []]
            first[rank].append(Send(0, own))
            first[3] += between
            return first

        return of

    return by_hand("all_gather", at_0, at(1), at(2), counts=3)


def test_slots_of_one_width_are_apart_for_all_counts() -> None:
    verify(
        gathered(lambda c: [Slice(Buf.TMP, at, at + c[i]) for i, at in enumerate(slots(1, longest(c)), 1)])
    )
    verify(gathered(lambda c: chunks(Buf.TMP, blocks(c[1:]))))


def test_slots_that_are_apart_only_if_all_blocks_are_equal_are_caught() -> None:
    """The second slot starts where a block of another rank would end."""
    with pytest.raises(PlanError, match=r"count\[1\] may lie beyond count\[0\]"):
        verify(gathered(lambda c: [Slice(Buf.TMP, at, at + c[i]) for i, at in enumerate(slots(1, c[0]), 1)]))


def test_a_slot_that_was_filled_again_does_not_hold_its_first_value() -> None:
    """Long, short, long: the third block has the length of the first, and the second comes between them."""

    def at_0(counts: Counts) -> Rounds:
        slot = [whole(Buf.TMP, count) for count in counts]
        return [
            [Copy(slot[0], whole(Buf.IN, counts[0])), Recv(1, slot[1])],
            [Send(1, slot[0])],
        ]

    def at_1(counts: Counts) -> Rounds:
        return [[Send(0, whole(Buf.IN, counts[1]))], [Recv(0, block(Buf.OUT, counts, 0))]]

    with pytest.raises(PlanError, match=r"rank 0, round 1.*reads tmp.*: count\[1\] is there"):
        verify(by_hand("all_gather", at_0, at_1, counts=2))


def test_an_atom_that_is_cut_in_two_ways_is_caught() -> None:
    def half(counts: Counts) -> Rounds:
        return [[Send(1, chunks(Buf.OUT, even(counts[0], 2))[0])]]

    def third(counts: Counts) -> Rounds:
        return [[Recv(0, chunks(Buf.OUT, even(counts[0], 3))[0])]]

    with pytest.raises(PlanError, match="is cut into 2 parts and into 3"):
        verify(by_hand("all_reduce", half, third))


def test_an_element_that_is_never_set_is_caught() -> None:
    plans = plans_of(Problem("all_gather", 3, (2, 2, 2)), "ring")
    with pytest.raises(PlanError, match=r"rank 1.*cell 1 of out is never set"):
        verify(altered(plans, 1, Copy, lambda step: []))


def test_a_contribution_counted_twice_is_caught() -> None:
    def twice(counts: Counts) -> Rounds:
        return [[Recv(1, tmp(counts)), Reduce(out(counts), tmp(counts)), Reduce(out(counts), tmp(counts))]]

    with pytest.raises(PlanError, match=r"\(0 1\) and 1 have a contribution in common"):
        verify(by_hand("all_reduce", twice, lambda counts: [[Send(0, out(counts))]]))


def test_rank_0_of_an_exscan_must_stay_untouched() -> None:
    plans = plans_of(Problem("exscan", 3, (4,)), "flat")
    counts = plans[0].shape.counts
    changed = replace(plans[0], rounds=(*plans[0].rounds, (Copy(out(counts), whole(Buf.IN, counts[0])),)))
    with pytest.raises(PlanError, match=r"rank 0 of an exscan"):
        verify([changed, *plans[1:]])


def test_a_barrier_whose_messages_do_not_wait_for_each_other_is_caught() -> None:
    plans = plans_of(Problem("barrier", 4), "dissemination")
    early = [
        replace(
            plan, rounds=tuple(tuple(s for s in steps if not isinstance(s, Copy)) for steps in plan.rounds)
        )
        for plan in plans
    ]
    verify(plans)
    with pytest.raises(PlanError, match=r"rank 0.*passes the barrier before ranks \[1\] have arrived"):
        verify(early)


def test_plans_of_different_problems_are_refused() -> None:
    one, other = plans_of(Problem("all_reduce", 2, (4,)), "flat"), plans_of(Problem("scan", 2, (4,)), "flat")
    with pytest.raises(PlanError, match=r"ranks 0 and 1 solve different problems"):
        verify([one[0], other[1]])
    with pytest.raises(PlanError, match="not one plan per rank"):
        verify(one[:1])
    with pytest.raises(PlanError, match=r"in and out hold 0 and 2 count\[0\] elements"):
        verify([one[0], replace(one[1], out_count=one[1].out_count * 2)])
