"""Every algorithm of the catalog, proven over sizes, counts, roots and hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono.plans import CATALOG, Copy, Plan, Problem, Reduce, Send, build, entry_of, verify
from unisono.plans.draw import messages

# Small worlds show almost every mistake; the others take a hundred times as long.
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
    plans = [build.__wrapped__(problem, rank, algorithm) for rank in range(problem.size)]
    verify(plans, ordered=entry.keeps_rank_order, canonical=entry.ordered)
    return plans


def counts_of(collective: str, size: int, count: int) -> tuple[int, ...]:
    if collective == "barrier":
        return ()
    if collective in VECTORS:
        return (count,)
    return (count,) * (size * size if collective == "all_to_all" else size)


def uneven_counts_of(collective: str, size: int) -> tuple[int, ...]:
    """Lengths 0 to 4 that follow no pattern of the ranks; about one in five is zero."""
    number = size * size if collective == "all_to_all" else size
    return tuple((i * i + 3 * i + size) % 5 for i in range(number))


def host_layouts(size: int) -> list[tuple[int, ...]]:
    return [
        (),
        tuple(rank * 3 // size for rank in range(size)),  # hosts of about equal length, one after the other
        tuple(rank % 3 for rank in range(size)),  # ranks dealt round
        tuple(rank * rank % 5 for rank in range(size)),  # different lengths, mixed
        tuple(range(size)),  # one rank each
    ]


def hosts_for(algorithm: str, size: int, salt: int) -> tuple[int, ...]:
    layouts = host_layouts(size)
    return layouts[(size + salt) % len(layouts)] if algorithm == "hierarchical" else ()


def counts_to_try(collective: str, size: int) -> list[int]:
    # Blocks are never cut, so lengths near the number of ranks mean nothing to them: small sizes suffice.
    around_size = {size - 1, size, size + 1} if collective in VECTORS or size <= 16 else {size + 1}
    # A thousand elements from each to each add no new shape to an all_to_all.
    large = 41 if collective == "all_to_all" else 1009
    return sorted({0, 1, 7, large} | around_size)


def problems(collective: str, algorithm: str, sizes: range) -> Iterator[Problem]:
    for size in sizes:
        for count in counts_to_try(collective, size):
            root = (size * 2 + count) % size if collective in ROOTED else 0
            hosts = hosts_for(algorithm, size, count)
            yield Problem(collective, size, counts_of(collective, size, count), root, hosts)
            if collective == "barrier":
                break


@every_size
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_every_size_and_count_is_right(collective: str, algorithm: str, sizes: range) -> None:
    for problem in problems(collective, algorithm, sizes):
        proven(problem, algorithm)


@every_size
@pytest.mark.parametrize(("collective", "algorithm"), [pair for pair in EVERY_ALGORITHM if pair[0] in ROOTED])
def test_every_root_is_right(collective: str, algorithm: str, sizes: range) -> None:
    for size in sizes:
        counts = (
            counts_of(collective, size, 3) if collective in VECTORS else uneven_counts_of(collective, size)
        )
        for root in range(size):
            proven(Problem(collective, size, counts, root, hosts_for(algorithm, size, root)), algorithm)


@every_size
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        (collective, name)
        for collective, name in EVERY_ALGORITHM
        if collective not in (*VECTORS, "barrier") and CATALOG[collective][name].takes_uneven
    ],
)
def test_uneven_blocks_and_empty_ones_are_right(collective: str, algorithm: str, sizes: range) -> None:
    for size in sizes:
        proven(Problem(collective, size, uneven_counts_of(collective, size)), algorithm)
        only_one = tuple(5 if i == size // 2 else 0 for i in range(len(counts_of(collective, size, 0))))
        proven(Problem(collective, size, only_one, size - 1), algorithm)


@pytest.mark.parametrize("algorithm", ["pairwise", "flat"])
def test_all_to_all_needs_no_more_than_the_own_row_and_column(algorithm: str) -> None:
    size = 7
    full = uneven_counts_of("all_to_all", size)
    plans = []
    for rank in range(size):
        known = tuple(n if rank in (i // size, i % size) else 0 for i, n in enumerate(full))
        plans.append(build(Problem("all_to_all", size, known), rank, algorithm))
    verify(plans)
    whole = Problem("all_to_all", size, full)
    assert [plan.rounds for plan in plans] == [build(whole, rank, algorithm).rounds for rank in range(size)]


@pytest.mark.more
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", "barrier"])
@pytest.mark.parametrize("size", [1, 2, 5, 12, 16])
def test_hierarchies_are_right_for_every_layout_small_and_large(collective: str, size: int) -> None:
    for hosts in host_layouts(size):
        # Both sides of the threshold between short and long parts, and a count that no host divides.
        for count in (0, 1, 101, 32 * 1024 - 1, 32 * 1024 + 5):
            for root in {0, size // 2, size - 1} if collective in ROOTED else {0}:
                proven(
                    Problem(collective, size, counts_of(collective, size, count), root, hosts), "hierarchical"
                )


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("size", [1, 2, 5, 12, 16])
def test_hierarchies_of_blocks_are_right_for_every_layout(collective: str, size: int) -> None:
    for hosts in host_layouts(size):
        for count in (0, 1, 13):
            proven(Problem(collective, size, counts_of(collective, size, count), 0, hosts), "hierarchical")
        if collective != "all_to_all":
            proven(Problem(collective, size, uneven_counts_of(collective, size), 0, hosts), "hierarchical")


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_block_crosses_to_each_other_host_once(collective: str) -> None:
    hosts = (0, 1, 2, 0, 1, 0, 2, 0, 0)  # five, two and two ranks
    problem = Problem(collective, 9, counts_of(collective, 9, 10), 0, hosts)
    plans = proven(problem, "hierarchical")
    crossing = [
        step
        for plan in plans
        for step in plan.steps
        if isinstance(step, Send) and hosts[step.peer] != hosts[plan.rank]
    ]
    assert len(crossing) == 9 * 2  # one message for each rank and each host that is not its own
    bundled = sum(hosts.count(host) * (9 - hosts.count(host)) for host in range(3))
    assert sum(step.src.count for step in crossing) == 10 * (bundled if collective == "all_to_all" else 18)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("broadcast", "chain"), ("reduce", "chain"), ("scan", "ordered"), ("exscan", "ordered")],
)
def test_pipelines_are_right_with_one_segment_and_with_many(collective: str, algorithm: str) -> None:
    for size in (1, 2, 3, 6):
        for count in (16 * 1024, 2 * 16 * 1024 - 1, 5 * 16 * 1024 + 3):
            plans = proven(
                Problem(collective, size, (count,), size - 1 if collective in ROOTED else 0), algorithm
            )
            assert plans[0].notes == f"{count // (16 * 1024)} segments"


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_one_rank_talks_to_nobody(collective: str, algorithm: str) -> None:
    (plan,) = proven(Problem(collective, 1, counts_of(collective, 1, 9)), algorithm)
    assert all(isinstance(step, Copy | Reduce) for step in plan.steps)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_both_ends_of_a_message_stand_in_the_same_round(collective: str, algorithm: str) -> None:
    for size in (2, 3, 7, 8, 13):
        problem = Problem(collective, size, counts_of(collective, size, 10), 0, hosts_for(algorithm, size, 3))
        plans = [build(problem, rank, algorithm) for rank in range(size)]
        assert len({len(plan.rounds) for plan in plans}) == 1
        found = messages(plans)
        assert found
        assert all(message.sent_in == message.received_in for message in found)


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_no_scratch_is_asked_for_in_vain(collective: str, algorithm: str) -> None:
    for size in (1, 2, 5, 8):
        hosts = hosts_for(algorithm, size, 3)
        problem = Problem(collective, size, counts_of(collective, size, 10), 0, hosts)
        for rank in range(size):
            plan = build(problem, rank, algorithm)
            stops = [
                slice_.stop
                for step in plan.steps
                for slice_ in (getattr(step, "src", None), getattr(step, "dst", None))
                if slice_ is not None and slice_.buf.value == "tmp"
            ]
            assert plan.tmp_count == max(stops, default=0), (size, rank)
