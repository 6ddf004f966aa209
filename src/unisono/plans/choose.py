"""Choosing an algorithm: the fastest one that was measured, otherwise the cheapest by prediction.

The choice must not depend on the rank or on a clock: every rank decides alone, and all must decide alike for
the same problem, element size and links. Measurements are of ranks on one host; between hosts the cost model
decides, hierarchical algorithms included.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from unisono.plans.algorithms.canonical import blocks
from unisono.plans.bind import bound
from unisono.plans.catalog import CATALOG, check, entry_of, is_even, reduces
from unisono.plans.cost import Links, cost, crossings
from unisono.plans.measured import fastest
from unisono.plans.steps import Problem
from unisono.plans.units import bytes_text, seconds_text

__all__ = ["choose", "fitting", "least_s", "predict_s", "reach"]

# The block assumed for an uneven all_to_all: a rank knows only its own row and column of the counts.
_NOMINAL_BLOCK_BYTES = 4096


def choose(problem: Problem, itemsize: int, links: Links, *, ordered: bool = False) -> tuple[str, str]:
    """Return the algorithm to use and the reason; one decision serves all counts of a class (`_bucket`).

    `ordered` restricts the choice to algorithms in canonical order, for reproducible results and for
    operations that do not commute. All of these give the same bits.
    """
    check(problem)
    even = _is_known_even(problem)
    return _cheapest(_bucket(problem, even, itemsize), even, itemsize, links, ordered)


def reach(problem: Problem, itemsize: int, links: Links, *, ordered: bool = False) -> int:
    """How often the counts, which are equal, may double before `choose` may name another algorithm.

    As far as that was measured: predictions are made for each class.
    """
    even = _is_known_even(problem)
    like = _bucket(problem, even, itemsize)
    if not even or not links.kind or like.hosts or not like.counts or problem.size == 1:
        return 0
    is_ordered = ordered and reduces(problem.collective)

    def measured(nbytes: int) -> str | None:
        return fastest(links.kind, problem.collective, problem.size, nbytes, ordered=is_ordered)

    nbytes = itemsize * like.counts[0]
    found = measured(nbytes)
    if nbytes == 0 or found not in _fitting(like, even, ordered):
        return 0
    doublings = 0
    while measured(nbytes << (doublings + 1)) == found:
        doublings += 1
    return doublings


def predict_s(
    problem: Problem, algorithm: str, itemsize: int, links: Links, enough_s: float = math.inf
) -> float:
    """Predict how long an algorithm takes: the time of the slowest among a few representative ranks.

    Above `enough_s` any time will do: no other rank is looked at.
    """
    crossing: list[int] = []
    if problem.hosts:
        # The root's host represents all hosts: its ranks share the link to other hosts.
        together = [rank for rank, host in enumerate(problem.hosts) if host == problem.hosts[problem.root]]
        crossing = crossings([bound(problem, rank, algorithm) for rank in together])
    slowest_s = 0.0
    for rank in _ranks_to_look_at(problem, algorithm):
        plan = bound(problem, rank, algorithm)
        slowest_s = max(slowest_s, cost(plan, links, itemsize, crossing).time_s)
        if slowest_s > enough_s:
            break
    return slowest_s


def least_s(problem: Problem, algorithm: str, links: Links) -> float:
    """What an algorithm takes at least, without a look at its steps."""
    is_linear = entry_of(problem.collective, algorithm).is_linear
    return (problem.size - 1) * min(links.message_s, links.inter_message_s) if is_linear else 0.0


def fitting(problem: Problem, *, ordered: bool = False) -> tuple[str, ...]:
    """The names of algorithms that can solve a problem; with `ordered`, those in canonical order."""
    return _fitting(problem, _is_known_even(problem), ordered)


def _fitting(problem: Problem, even: bool, ordered: bool) -> tuple[str, ...]:
    entries = CATALOG[problem.collective]
    # With one host, or one rank per host, there is no hierarchy.
    has_levels = 1 < len(set(problem.hosts)) < problem.size
    ordered = ordered and reduces(problem.collective)
    return tuple(
        name
        for name, entry in entries.items()
        if (entry.ordered or not ordered)
        and (entry.takes_uneven or even)
        and (has_levels or not entry.needs_hosts)
    )


@lru_cache(maxsize=4096)
def _cheapest(problem: Problem, even: bool, itemsize: int, links: Links, ordered: bool) -> tuple[str, str]:
    names = _fitting(problem, even, ordered)
    if problem.size == 1:
        return names[0], "one rank: nothing to exchange"
    if links.kind and not problem.hosts:
        nbytes = itemsize * sum(problem.counts) // max(1, len(problem.counts))
        is_ordered = ordered and reduces(problem.collective)
        found = fastest(links.kind, problem.collective, problem.size, nbytes, ordered=is_ordered)
        if found in names:
            reason = f"measured over {links.kind} for {_described(problem, even, itemsize)}"
            return found, reason + ("; ordered algorithms only" if ordered else "")
    times: list[tuple[float, int, str]] = []
    # The plans of linear algorithms are long: these come last, and are not built if they cannot win.
    for least, index, name in sorted((least_s(problem, n, links), i, n) for i, n in enumerate(names)):
        best_s = times[0][0] if times else math.inf
        time_s = least if least > best_s else predict_s(problem, name, itemsize, links, best_s)
        times = sorted([*times, (time_s, index, name)])
    (best_s, _, best), *rest = times
    reason = f"{seconds_text(best_s)} predicted for {_described(problem, even, itemsize)}"
    if rest:
        reason += f"; next {rest[0][2]}, {seconds_text(rest[0][0])} or more"
    return best, reason + ("; ordered algorithms only" if ordered else "")


def _is_known_even(problem: Problem) -> bool:
    """Whether every rank knows that all blocks have the same length.

    In an all_to_all a rank writes 0 for blocks that it neither sends nor receives, so zeros prove nothing.
    """
    return is_even(problem) and not (problem.collective == "all_to_all" and problem.counts[0] == 0)


def _bucket(problem: Problem, even: bool, itemsize: int) -> Problem:
    """Return the problem that represents all similar ones, so that one decision serves many."""
    counts = problem.counts
    if not even:
        if problem.collective == "all_to_all":
            counts = (max(1, _NOMINAL_BLOCK_BYTES // itemsize),) * len(counts)
        else:
            # One rank with the largest block, the others with their mean.
            largest = max(counts)
            counts = (largest, *((sum(counts) - largest) // (len(counts) - 1),) * (len(counts) - 1))
    hosts = problem.hosts if len(set(problem.hosts)) > 1 else ()
    # The class of a count is (count - 1).bit_length(); the longest of the class stands for it.
    size_of = {count: 1 << (count - 1).bit_length() if count else 0 for count in set(counts)}
    rounded = (size_of[counts[0]],) * len(counts) if len(size_of) == 1 else tuple(size_of[n] for n in counts)
    return replace(problem, counts=rounded, hosts=hosts, root=0)


def _ranks_to_look_at(problem: Problem, algorithm: str) -> list[int]:
    """Return the representative ranks, or two of ranks that do the same: even parts differ by an element."""
    has_parts = len(problem.counts) != 1 or problem.counts[0] >= problem.size
    is_symmetric = entry_of(problem.collective, algorithm).is_symmetric and is_even(problem) and has_parts
    return [0, problem.size - 1] if is_symmetric and not problem.hosts else _representative_ranks(problem)


def _representative_ranks(problem: Problem) -> list[int]:
    """Return the ranks among which the slowest is searched: ends, middle, root, blocks, hosts' leaders."""
    size = problem.size
    leaders = sorted({problem.hosts.index(host) for host in problem.hosts})
    starts = [start for start, _ in blocks(size)]
    after_root = (problem.root + 1) % size
    return sorted({0, size // 2, size - 1, problem.root, after_root, *starts, *leaders[:2], *leaders[-1:]})


def _described(problem: Problem, even: bool, itemsize: int) -> str:
    """Describe the bucket of a decision: "up to 64 KiB on 8 ranks of 2 hosts"."""
    where = f"{problem.size} ranks"
    if problem.hosts:
        where += f" of {len(set(problem.hosts))} hosts"
    if problem.collective == "barrier":
        return where
    if not even:
        return f"uneven blocks on {where}"
    each = " a block" if len(problem.counts) > 1 else ""
    return f"up to {bytes_text(problem.counts[0] * itemsize)}{each} on {where}"
