"""Every algorithm of the catalog, proven for all counts, over sizes, roots and hosts; and run on numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.plan_numbers import Numbers, contributions, expected

from unisono.plans import CATALOG, Copy, Plan, Problem, Reduce, Send, bound, build, entry_of, verify
from unisono.plans.draw import messages

# Small worlds reveal almost every mistake; the larger ones take a hundred times as long.
every_size = pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(range(1, 10), id="1-9"),
        pytest.param(range(10, 34), id="10-33", marks=pytest.mark.more),
    ],
)
ROOTED = ("reduce", "broadcast", "gather", "scatter")
VECTORS = ("all_reduce", "reduce", "broadcast", "scan", "exscan")
EVERY_ALGORITHM = [(collective, name) for collective, entries in CATALOG.items() for name in entries]


def proven(problem: Problem, algorithm: str) -> list[Plan]:
    """Build and verify the plans of all ranks, holding the algorithm to what the catalog says of it."""
    entry = entry_of(problem.collective, algorithm)
    plans = [build(problem, rank, algorithm) for rank in range(problem.size)]
    verify(plans, ordered=entry.keeps_rank_order, canonical=entry.ordered)
    return plans


def check_numbers(problem: Problem, algorithm: str) -> None:
    """Run the bound plans on numbers and compare with NumPy, without the verifier."""
    given = contributions(problem)
    plans = [bound(problem, rank, algorithm) for rank in range(problem.size)]
    results = Numbers(plans, given).run()
    for rank, want in enumerate(expected(problem, given)):
        if want is not None:
            np.testing.assert_array_equal(results[rank], want, f"{problem} by {algorithm}, rank {rank}")


def counts_of(collective: str, size: int, count: int) -> tuple[int, ...]:
    if collective == "barrier":
        return ()
    if collective in VECTORS:
        return (count,)
    return (count,) * (size * size if collective == "all_to_all" else size)


def uneven_counts_of(collective: str, size: int) -> tuple[int, ...]:
    """Lengths from 0 to 4 without a pattern over the ranks; about one in five is zero."""
    number = size * size if collective == "all_to_all" else size
    return tuple((i * i + 3 * i + size) % 5 for i in range(number))


def host_layouts(size: int) -> list[tuple[int, ...]]:
    return [
        (),
        tuple(rank * 3 // size for rank in range(size)),  # hosts with about equal numbers of ranks, in a row
        tuple(rank % 3 for rank in range(size)),  # ranks in round-robin order
        tuple(rank * rank % 5 for rank in range(size)),  # different numbers, mixed
        tuple(range(size)),  # one rank per host
    ]


def hosts_for(algorithm: str, size: int, salt: int) -> tuple[int, ...]:
    layouts = host_layouts(size)
    return layouts[(size + salt) % len(layouts)] if algorithm.startswith("hierarchical") else ()


def counts_to_try(collective: str, size: int) -> list[int]:
    # For an all_to_all a thousand elements between each pair add no new shape.
    large = 41 if collective == "all_to_all" else 1000
    return sorted({0, 1, 2, 3, size - 1, size, size + 1, 17, large})


def problems(collective: str, algorithm: str, sizes: range) -> Iterator[Problem]:
    for size in sizes:
        for count in counts_to_try(collective, size):
            root = (size * 2 + count) % size if collective in ROOTED else 0
            hosts = hosts_for(algorithm, size, count)
            yield Problem(collective, size, counts_of(collective, size, count), root, hosts)
            if collective == "barrier":
                break
        if collective not in (*VECTORS, "barrier") and CATALOG[collective][algorithm].takes_uneven:
            hosts = hosts_for(algorithm, size, 1)
            yield Problem(collective, size, uneven_counts_of(collective, size), size // 2, hosts)
            only_one = tuple(5 if i == size // 2 else 0 for i in range(len(counts_of(collective, size, 0))))
            yield Problem(collective, size, only_one, size - 1, hosts)
            long_short_long = tuple(50 if i % 3 else 2 for i in range(len(only_one)))
            yield Problem(collective, size, long_short_long, 0, hosts)


@every_size
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_every_size_root_and_layout_is_proven_for_all_counts(
    collective: str, algorithm: str, sizes: range
) -> None:
    is_small = sizes.start == 1
    for size in sizes:
        roots = range(size) if is_small else {0, size // 2, size - 1}
        layouts = host_layouts(size) if CATALOG[collective][algorithm].needs_hosts else [()]
        for root in roots if collective in ROOTED else (0,):
            for hosts in layouts if is_small else layouts[(size + root) % len(layouts) :][:1]:
                proven(Problem(collective, size, counts_of(collective, size, 1), root, hosts), algorithm)


@every_size
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_bound_plans_give_what_numpy_says(collective: str, algorithm: str, sizes: range) -> None:
    """A check of the verifier: counts below and around the number of ranks, uneven and empty ones."""
    for problem in problems(collective, algorithm, sizes):
        check_numbers(problem, algorithm)


@pytest.mark.parametrize("algorithm", ["pairwise", "flat"])
def test_all_to_all_needs_no_more_than_the_own_row_and_column(algorithm: str) -> None:
    size = 7
    full = uneven_counts_of("all_to_all", size)
    whole = Problem("all_to_all", size, full)
    for rank in range(size):
        known = tuple(n if rank in (i // size, i % size) else 0 for i, n in enumerate(full))
        plan = bound(Problem("all_to_all", size, known), rank, algorithm)
        assert plan.rounds == bound(whole, rank, algorithm).rounds


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_block_crosses_to_each_other_host_once(collective: str) -> None:
    hosts = (0, 1, 2, 0, 1, 0, 2, 0, 0)  # five, two and two ranks
    problem = Problem(collective, 9, counts_of(collective, 9, 10), 0, hosts)
    proven(problem, "hierarchical")
    plans = [bound(problem, rank, "hierarchical") for rank in range(9)]
    crossing = [
        step
        for plan in plans
        for step in plan.steps
        if isinstance(step, Send) and hosts[step.peer] != hosts[plan.rank]
    ]
    assert len(crossing) == 9 * 2  # one message for each rank and each other host
    bundled = sum(hosts.count(host) * (9 - hosts.count(host)) for host in range(3))
    assert sum(step.src.count for step in crossing) == 10 * (bundled if collective == "all_to_all" else 18)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_a_plan_for_one_rank_sends_nothing(collective: str, algorithm: str) -> None:
    (plan,) = proven(Problem(collective, 1, counts_of(collective, 1, 9)), algorithm)
    assert all(isinstance(step, Copy | Reduce) for step in plan.steps)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_both_ends_of_a_message_stand_in_the_same_round(collective: str, algorithm: str) -> None:
    for size in (2, 3, 7, 8, 13):
        problem = Problem(collective, size, counts_of(collective, size, 10), 0, hosts_for(algorithm, size, 3))
        plans = [bound(problem, rank, algorithm) for rank in range(size)]
        assert len({len(plan.rounds) for plan in plans}) == 1
        found = messages(plans)
        assert found
        assert all(message.sent_in == message.received_in for message in found)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_no_plan_asks_for_scratch_that_it_does_not_use(collective: str, algorithm: str) -> None:
    for size in (1, 2, 5, 8):
        hosts = hosts_for(algorithm, size, 3)
        problem = Problem(collective, size, counts_of(collective, size, 10), 0, hosts)
        for rank in range(size):
            plan = bound(problem, rank, algorithm)
            stops = [
                slice_.stop
                for step in plan.steps
                for slice_ in (getattr(step, "src", None), getattr(step, "dst", None))
                if slice_ is not None and slice_.buf.value == "tmp"
            ]
            assert plan.tmp_count == max(stops, default=0), (size, rank)
