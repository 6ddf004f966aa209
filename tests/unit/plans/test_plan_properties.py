"""For random sizes, counts, roots and hosts: every algorithm that fits is correct."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plan_numbers import Numbers, contributions, expected

from unisono.plans import CATALOG, Links, Problem, bound, build, choose, entry_of, verify
from unisono.plans.amounts import Amount, Counts, blocks, digits, even, even_bounds, longest, slots
from unisono.plans.catalog import is_even
from unisono.plans.choose import fitting

VECTORS = ("all_reduce", "reduce", "broadcast", "scan", "exscan")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    collective = draw(st.sampled_from(list(CATALOG)))
    size = draw(st.integers(1, 24))
    root = draw(st.integers(0, size - 1))
    hosts = tuple(draw(st.one_of(st.just([]), st.lists(st.integers(0, 4), min_size=size, max_size=size))))
    count = st.integers(0, 40)
    if collective == "barrier":
        counts: tuple[int, ...] = ()
    elif collective in VECTORS:
        counts = (draw(st.integers(0, 500)),)
    else:
        # One drawn number seeds a whole matrix: hundreds of draws would take most of the time.
        length = size * size if collective == "all_to_all" else size
        some = draw(st.lists(count, min_size=1, max_size=7))
        counts = tuple(some[i * (i + 1) % len(some)] for i in range(length))
    return Problem(collective, size, counts, root, hosts)


@settings(max_examples=150, deadline=None)
@given(problems(), st.data())
def test_every_algorithm_solves_every_problem(problem: Problem, data: st.DataObject) -> None:
    # A hierarchy is never chosen on one host, but must be correct there too.
    names = [
        name
        for name, entry in CATALOG[problem.collective].items()
        if name in fitting(problem) or (entry.needs_hosts and (entry.takes_uneven or is_even(problem)))
    ]
    name = data.draw(st.sampled_from(names))
    entry = entry_of(problem.collective, name)
    verify(
        [build(problem, rank, name) for rank in range(problem.size)],
        ordered=entry.keeps_rank_order,
        canonical=entry.ordered,
    )
    given_ = contributions(problem)
    results = Numbers([bound(problem, rank, name) for rank in range(problem.size)], given_).run()
    for result, want in zip(results, expected(problem, given_), strict=True):
        assert want is None or np.array_equal(result, want)


@settings(max_examples=100, deadline=None)
@given(problems(), st.booleans(), st.sampled_from([1, 2, 4, 8, 16]))
def test_every_choice_fits(problem: Problem, ordered: bool, itemsize: int) -> None:
    name, reason = choose(problem, itemsize, Links(), ordered=ordered)
    assert name in fitting(problem, ordered=ordered)
    assert reason


@given(st.integers(0, 10**6), st.integers(1, 100))
def test_even_parts_cover_all_and_differ_by_one(count: int, parts: int) -> None:
    bounds = even_bounds(count, parts)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, count, parts)
    assert max(lengths) - min(lengths) <= 1


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=6), st.integers(2, 40))
def test_amounts_are_what_their_counts_make_of_them(counts: list[int], parts: int) -> None:
    symbols, vector = Counts(len(counts)), Counts(1)
    points, longest_ = blocks(symbols[:]), longest(symbols[:])
    cut = even(vector[0], parts)

    def number(amount: Amount) -> int:
        values = (amount.atoms or vector.atoms).values(counts)
        return sum(values[atom] * times for atom, times in digits(amount.terms))

    assert [number(point) for point in points] == [0, *accumulate(counts)]
    assert tuple(number(point) for point in cut) == even_bounds(counts[0], parts)
    assert number(longest_) == max(counts)
    assert [number(point) for point in slots(3, symbols[1])] == [i * counts[1] for i in range(4)]
    # Equal for all counts, and at most for all counts.
    assert cut[-1] == vector[0]
    assert cut[1] != cut[2] - cut[1]
    assert cut[1] <= vector[0]
    assert not vector[0] <= cut[-2]
    assert all(count <= longest_ for count in symbols)
    assert not longest_ <= symbols[0]
    assert symbols[0] + symbols[1] <= longest_ * 2
    assert not symbols[0] * 2 <= symbols[0] + symbols[1]


@given(problems())
def test_no_element_is_lost_between_in_and_out(problem: Problem) -> None:
    """The total lengths of all inputs and all outputs fit each other."""
    plans = [
        bound(problem, rank, "flat" if problem.collective != "reduce_scatter" else "ring")
        for rank in range(problem.size)
    ]
    counts = [(plan.in_count, plan.out_count) for plan in plans]
    given_, got = (sum(each[way] for each in counts) for way in (0, 1))
    if problem.collective in ("gather", "scatter", "all_to_all"):
        assert given_ == got
    if problem.collective == "all_gather":
        assert got == given_ * problem.size
    if problem.collective == "reduce_scatter":
        assert given_ == got * problem.size
