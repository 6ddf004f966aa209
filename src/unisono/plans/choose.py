"""Choosing an algorithm: the fastest that was measured, else the cheapest by prediction.

Knows the catalog, the table of measurements and the cost model. Does not know which rank asks, nor clocks:
the same problem, element size and links give the same answer everywhere, which is what makes it safe to
decide apart. Measurements are of ranks on one host; between hosts the model decides, hierarchies included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from unisono.plans.algorithms.canonical import blocks
from unisono.plans.catalog import CATALOG, check, entry_of, is_even, reduces
from unisono.plans.cost import Links, cost, crossings
from unisono.plans.measured import fastest
from unisono.plans.steps import Problem
from unisono.plans.units import bytes_text, seconds_text

__all__ = ["choose", "fitting", "predict_s"]

# What an uneven all_to_all is taken for: a rank knows its own row and column only, so counts must not decide.
_NOMINAL_BLOCK_BYTES = 4096


@lru_cache(maxsize=4096)
def choose(problem: Problem, itemsize: int, links: Links, *, ordered: bool = False) -> tuple[str, str]:
    """Return the algorithm to use and the reason.

    `ordered` asks for one that follows the canonical order: for reproducible results and for operations
    that do not commute. All of these give the same bits, so any of them may be returned.
    """
    check(problem)
    even = _is_known_even(problem)
    return _cheapest(_bucket(problem, even, itemsize), even, itemsize, links, ordered)


def predict_s(problem: Problem, algorithm: str, itemsize: int, links: Links) -> float:
    """Predict how long an algorithm takes: as long as the slowest of a few telling ranks."""
    builder = entry_of(problem.collective, algorithm).builder
    crossing: list[int] = []
    if problem.hosts:
        # One host stands for all: what its ranks send to others at the same time shares a link.
        together = [rank for rank, host in enumerate(problem.hosts) if host == problem.hosts[problem.root]]
        crossing = crossings([builder(problem, rank) for rank in together])
    plans = (builder(problem, rank) for rank in _telling_ranks(problem))
    return max(cost(plan, links, itemsize, crossing).time_s for plan in plans)


def fitting(problem: Problem, *, ordered: bool = False) -> tuple[str, ...]:
    """Name the algorithms that can solve a problem, among those of the canonical order if asked for."""
    return _fitting(problem, _is_known_even(problem), ordered)


def _fitting(problem: Problem, even: bool, ordered: bool) -> tuple[str, ...]:
    entries = CATALOG[problem.collective]
    # With one host, or one rank on each, there is no inside and outside.
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
            return found, reason + ("; ordered ones only" if ordered else "")
    times = sorted(
        (predict_s(problem, name, itemsize, links), place, name) for place, name in enumerate(names)
    )
    (best_s, _, best), *rest = times
    reason = f"{seconds_text(best_s)} predicted for {_described(problem, even, itemsize)}"
    if rest:
        reason += f"; next {rest[0][2]}, {seconds_text(rest[0][0])}"
    return best, reason + ("; ordered ones only" if ordered else "")


def _is_known_even(problem: Problem) -> bool:
    """Whether every rank knows that all blocks have one length.

    In an all_to_all a rank may leave out what does not concern it, so a zero says nothing.
    """
    return is_even(problem) and not (problem.collective == "all_to_all" and problem.counts[0] == 0)


def _bucket(problem: Problem, even: bool, itemsize: int) -> Problem:
    """Return the problem that stands for all similar ones, so that a decision is made once for many."""
    counts = problem.counts
    if not even:
        if problem.collective == "all_to_all":
            counts = (max(1, _NOMINAL_BLOCK_BYTES // itemsize),) * len(counts)
        else:
            # One rank with the largest block, the others with their mean.
            largest = max(counts)
            counts = (largest, *((sum(counts) - largest) // (len(counts) - 1),) * (len(counts) - 1))
    hosts = problem.hosts if len(set(problem.hosts)) > 1 else ()
    rounded = tuple(1 << (count - 1).bit_length() if count else 0 for count in counts)
    return replace(problem, counts=rounded, hosts=hosts, root=0)


def _telling_ranks(problem: Problem) -> list[int]:
    """Return ranks among which the slowest is found: ends, middle, root, blocks, hosts' leaders."""
    size = problem.size
    leaders = sorted({problem.hosts.index(host) for host in problem.hosts})
    starts = [start for start, _ in blocks(size)]
    after_root = (problem.root + 1) % size
    return sorted({0, size // 2, size - 1, problem.root, after_root, *starts, *leaders[:2], *leaders[-1:]})


def _described(problem: Problem, even: bool, itemsize: int) -> str:
    """Say what was decided for: "up to 64 KiB on 8 ranks of 2 hosts"."""
    where = f"{problem.size} ranks"
    if problem.hosts:
        where += f" of {len(set(problem.hosts))} hosts"
    if problem.collective == "barrier":
        return where
    if not even:
        return f"uneven blocks on {where}"
    each = " a block" if len(problem.counts) > 1 else ""
    return f"up to {bytes_text(problem.counts[0] * itemsize)}{each} on {where}"
