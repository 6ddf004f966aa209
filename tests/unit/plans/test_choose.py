"""The choice of an algorithm: sensible by size, the same on every rank, fast, and with its reason."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from unisono.plans import CATALOG, BoundPlan, Links, Problem, algorithms, bound, build, choose, cost, entry_of
from unisono.plans.amounts import Weights
from unisono.plans.choose import _cheapest, fitting, least_s, predict_s, reach

LINKS = Links()
MEASURED = {kind: Links(kind=kind) for kind in ("", "shm", "tcp")}
VECTORS = ("all_reduce", "reduce", "broadcast", "scan", "exscan")
TWO_HOSTS = tuple(rank // 8 for rank in range(16))


def problem_of(collective: str, size: int, count: int, hosts: tuple[int, ...] = ()) -> Problem:
    if collective == "barrier":
        return Problem(collective, size, (), hosts=hosts)
    length = 1 if collective in VECTORS else size * size if collective == "all_to_all" else size
    return Problem(collective, size, (count,) * length, hosts=hosts)


@pytest.mark.parametrize(
    ("size", "small", "large"),
    [(2, "doubling", "ring"), (8, "doubling", "halving_doubling"), (5, "flat", "ring")],
)
def test_small_all_reduces_save_rounds_and_large_ones_bytes(size: int, small: str, large: str) -> None:
    assert choose(Problem("all_reduce", size, (2,)), 4, LINKS)[0] == small
    assert choose(Problem("all_reduce", size, (1 << 24,)), 4, LINKS)[0] == large


@pytest.mark.parametrize(
    ("collective", "small", "large"),
    [
        ("broadcast", "tree", "chain"),
        ("reduce", "tree", "pairwise"),
        ("all_gather", "dissemination", "ring"),
        ("reduce_scatter", "halving", "pairwise"),
        ("all_to_all", "dissemination", "pairwise"),
        ("scan", "hillis_steele", "ordered"),
    ],
)
def test_small_and_large_sizes_have_different_algorithms(collective: str, small: str, large: str) -> None:
    assert choose(problem_of(collective, 32, 1), 4, LINKS)[0] == small
    assert choose(problem_of(collective, 32, 1 << 20), 4, LINKS)[0] == large


@pytest.mark.parametrize("collective", CATALOG)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_the_choice_can_be_built_on_every_rank(collective: str, size: int) -> None:
    for count in (0, 1, 1000):
        for hosts in ((), tuple(rank % 2 for rank in range(size))):
            problem = problem_of(collective, size, count, hosts)
            for ordered in (False, True):
                name, reason = choose(problem, 4, LINKS, ordered=ordered)
                assert reason
                assert name in algorithms(collective)
                for rank in range(size):
                    build(problem, rank, name)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"])
def test_ordered_choices_are_ordered(collective: str) -> None:
    for size in (2, 5, 8, 33):
        for count in (0, 1, 100, 10_000, 1_000_000):
            name, reason = choose(problem_of(collective, size, count), 4, LINKS, ordered=True)
            assert entry_of(collective, name).ordered
            assert reason.endswith("ordered algorithms only")


def test_collectives_that_only_move_data_may_be_ordered() -> None:
    assert choose(problem_of("broadcast", 8, 10), 4, LINKS, ordered=True)[0] == "tree"


def test_for_one_rank_there_is_no_choice() -> None:
    assert choose(Problem("all_reduce", 1, (5,)), 4, LINKS)[1] == "one rank: nothing to exchange"


def test_the_reason_names_the_time_the_size_and_the_next_best() -> None:
    name, reason = choose(Problem("all_reduce", 8, (1 << 18,)), 4, LINKS)
    assert name == "halving_doubling"
    assert reason == "238 us predicted for up to 1 MiB on 8 ranks; next ring, 250 us or more"


def test_hosts_count_only_where_they_differ() -> None:
    one_host = Problem("all_reduce", 16, (100_000,), hosts=(3,) * 16)
    assert choose(one_host, 4, LINKS) == choose(Problem("all_reduce", 16, (100_000,)), 4, LINKS)
    assert "hierarchical" not in fitting(one_host)
    assert "hierarchical" not in fitting(Problem("all_reduce", 4, (100_000,), hosts=(0, 1, 2, 3)))
    assert "hierarchical" in fitting(Problem("all_reduce", 16, (100_000,), hosts=TWO_HOSTS))


@pytest.mark.parametrize("count", [256, 1 << 14, 1 << 22])
def test_between_hosts_the_hierarchy_wins_when_ranks_alternate(count: int) -> None:
    hosts = tuple(rank % 3 for rank in range(24))
    for collective in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
        assert choose(problem_of(collective, 24, count, hosts), 4, LINKS)[0].startswith("hierarchical")


def test_similar_counts_share_a_decision() -> None:
    _cheapest.cache_clear()
    reasons = {choose(Problem("all_reduce", 8, (count,)), 4, LINKS) for count in range(513, 1025)}
    assert len(reasons) == 1
    assert _cheapest.cache_info().misses == 1


@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
@pytest.mark.parametrize("kind", MEASURED)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_within_reach_longer_counts_are_decided_alike(size: int, kind: str, ordered: bool) -> None:
    links, found = MEASURED[kind], 0
    for collective in CATALOG:
        for count in (1, 2, 3, 64, 1000, 1 << 20):
            problem = problem_of(collective, size, count)
            doublings = reach(problem, 4, links, ordered=ordered)
            found += doublings
            name = choose(problem, 4, links, ordered=ordered)[0]
            for step in range(1, doublings + 1):
                # The longest and the shortest count of the class.
                top = 1 << (count - 1).bit_length() << step
                for longer in (top, top // 2 + 1):
                    likewise = problem_of(collective, size, longer)
                    assert choose(likewise, 4, links, ordered=ordered)[0] == name, (collective, count, longer)
    assert (found > 0) == (kind != "" and size in (2, 3, 4))


def test_uneven_and_empty_counts_reach_no_others() -> None:
    for counts in ((3, 4), (0, 0), (0, 5)):
        assert reach(Problem("all_gather", 2, counts), 8, MEASURED["shm"]) == 0
    assert reach(Problem("barrier", 2, ()), 1, MEASURED["shm"]) == 0


def test_roots_share_a_decision() -> None:
    assert len({choose(Problem("broadcast", 9, (5000,), root=root), 4, LINKS) for root in range(9)}) == 1


def test_uneven_counts_choose_what_takes_them() -> None:
    for counts in [(0, 5, 1, 3), (0, 0, 0, 9)]:
        name, reason = choose(Problem("all_gather", 4, counts), 4, LINKS)
        assert entry_of("all_gather", name).takes_uneven
        assert "uneven" in reason


def test_an_uneven_all_to_all_is_chosen_alike_by_ranks_that_know_different_parts() -> None:
    for size in (2, 3, 16, 40):
        full = tuple((i * 7) % 11 for i in range(size * size))
        lonely = tuple(int(i == size * size - 1) for i in range(size * size))
        for counts in (full, lonely):
            choices = set()
            for rank in range(size):
                known = tuple(n if rank in (i // size, i % size) else 0 for i, n in enumerate(counts))
                choices.add(choose(Problem("all_to_all", size, known), 4, LINKS))
            assert len(choices) == 1


def test_another_process_decides_the_same() -> None:
    """With another hash seed and another order of calls the decisions are the same."""
    script = """
from unisono.plans import *
for n in (3, 8, 13):
    for c in (1 << 20, 1, 5000):
        print(choose(Problem("all_reduce", n, (c,), hosts=tuple(r % 2 for r in range(n))), 4, Links()))
"""
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    here = [
        str(choose(Problem("all_reduce", n, (c,), hosts=tuple(r % 2 for r in range(n))), 4, LINKS))
        for n in (3, 8, 13)
        for c in (1 << 20, 1, 5000)
    ]
    assert runs[0].stdout.splitlines() == here


def test_the_slowest_rank_is_among_those_of_the_prediction() -> None:
    """The prediction considers only a few ranks; none of the others may be much slower."""
    for collective in CATALOG:
        for size in (5, 8, 13, 24):
            for count in (1, 100_000):
                problem = problem_of(collective, size, count)
                for name in fitting(problem):
                    slowest = max(cost(bound(problem, rank, name), LINKS, 4).time_s for rank in range(size))
                    assert predict_s(problem, name, 4, LINKS) >= 0.8 * slowest, (
                        collective,
                        name,
                        size,
                        count,
                    )


def test_the_first_decision_is_quick_and_the_next_immediate() -> None:
    # CPU time, so that a busy machine does not matter; the best of three, because one may contain a garbage
    # collection.
    hosts = tuple(rank // 8 for rank in range(64))
    firsts, nexts = [], []
    for attempt in range(3):
        problem = Problem("all_reduce", 64, (1 << (20 + attempt),), hosts=hosts)
        links = Links(latency_s=1e-6 * (attempt + 2))
        start = time.process_time()
        choose(problem, 4, links)
        firsts.append(time.process_time() - start)
        start = time.process_time()
        choose(problem, 4, links)
        nexts.append(time.process_time() - start)
    assert min(firsts) < 0.3
    assert min(nexts) < 0.001


def _problems(size: int, count: int) -> list[Problem]:
    hosts = tuple(rank // 2 for rank in range(size))
    return [problem_of(collective, size, count, where) for collective in CATALOG for where in ((), hosts)]


@pytest.mark.parametrize(
    "size", [2, 3, 5, pytest.param(8, marks=pytest.mark.more), pytest.param(13, marks=pytest.mark.more)]
)
@pytest.mark.parametrize("count", [1, 1024, 1 << 20])
def test_an_algorithm_that_is_left_out_could_not_have_won(size: int, count: int) -> None:
    for problem in _problems(size, count):
        for links in (Links(), Links(message_s=20e-6), Links(inter_latency_s=1e-7, inter_message_s=1e-8)):
            for ordered in (False, True):
                names = fitting(problem, ordered=ordered)
                times = {name: predict_s(problem, name, 4, links) for name in names}
                best = min(names, key=lambda name: (times[name], names.index(name)))
                assert choose(problem, 4, links, ordered=ordered)[0] == best, (problem, times)
                for name, time_s in times.items():
                    assert least_s(problem, name, links) <= time_s, (problem, name)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_a_symmetric_algorithm_costs_every_rank_the_same(size: int) -> None:
    for problem in _problems(size, 4 * size):
        for name, entry in CATALOG[problem.collective].items():
            if entry.is_symmetric and not problem.hosts:
                every = {
                    round(cost(bound(problem, rank, name), Links(), 4).time_s, 12) for rank in range(size)
                }
                assert len(every) == 1, (problem, name)


def test_a_thousand_ranks_build_few_long_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, int]] = []

    def counted(problem: Problem, rank: int, algorithm: str) -> BoundPlan:
        plan = bound(problem, rank, algorithm)
        built.append((algorithm, sum(1 for _ in plan.steps)))
        return plan

    monkeypatch.setattr(sys.modules["unisono.plans.choose"], "bound", counted)
    # A count that no other test chooses for: decisions are kept.
    assert choose(Problem("all_reduce", 1000, (3,)), 4, Links())[0] == "doubling"
    assert sum(steps for _, steps in built) < 1000, "a ring alone has 4,000 steps"


def test_long_sums_are_evaluated_as_short_ones_are() -> None:
    atoms = [(index * 7919) % 1013 for index in range(200)]
    chosen = {index: (index * 31) % 17 for index in range(3, 200, 2)}
    terms = sum(times << 32 * atom for atom, times in chosen.items())
    for scale in (1, 1 << 20, 1 << 50):  # also beyond 64 bits
        want = sum(atoms[atom] * scale * times for atom, times in chosen.items())
        assert Weights([scale * each for each in atoms]).sum(terms) == want
    assert Weights(atoms).sum(0) == 0
    assert Weights(atoms).sum(5 << 32 * 199) == 5 * atoms[199]
