"""Choosing an algorithm: the cheapest by prediction, decided alike on every rank.

Knows the catalog and the cost model. Does not know which rank asks, clocks or measurements: the same problem,
element size and links give the same answer everywhere, which is what makes it safe to decide apart.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from unisono.errors import UsageError
from unisono.plans.canonical import blocks
from unisono.plans.catalog import CATALOG, Entry, check, entry_of, is_even
from unisono.plans.cost import Links, cost
from unisono.plans.steps import Problem

__all__ = ["choose", "predict_s"]

# What an uneven all_to_all is taken for: a rank knows its own row and column only, so counts must not decide.
_NOMINAL_BLOCK_BYTES = 4096


@lru_cache(maxsize=4096)
def choose(problem: Problem, itemsize: int, links: Links, *, ordered: bool = False) -> tuple[str, str]:
    """Return the algorithm to use and the reason.

    `ordered` asks for one that follows the canonical order: for reproducible results and for operations
    that do not commute. All of these give the same bits, so any of them may be returned.
    """
    check(problem)
    return _cheapest(_bucket(problem, itemsize), is_even(problem), itemsize, links, ordered)


def predict_s(problem: Problem, algorithm: str, itemsize: int, links: Links) -> float:
    """Predict how long an algorithm takes: as long as the slowest of a few telling ranks."""
    builder = entry_of(problem.collective, algorithm).builder
    return max(cost(builder(problem, rank), links, itemsize).time_s for rank in _telling_ranks(problem))


@lru_cache(maxsize=4096)
def _cheapest(problem: Problem, even: bool, itemsize: int, links: Links, ordered: bool) -> tuple[str, str]:
    fits = {
        name: entry
        for name, entry in CATALOG[problem.collective].items()
        if _is_fit(entry, problem, even, ordered)
    }
    if not fits:
        raise UsageError(f"{problem.collective} has no algorithm that keeps an order: it reduces nothing")
    if problem.size == 1:
        return next(iter(fits)), "one rank: nothing to exchange"
    times = sorted(
        (predict_s(problem, name, itemsize, links), place, name) for place, name in enumerate(fits)
    )
    (best_s, _, best), *rest = times
    reason = f"{_seconds(best_s)} predicted for {_described(problem, even, itemsize)}"
    if rest:
        reason += f"; next {rest[0][2]}, {_seconds(rest[0][0])}"
    return best, reason + ("; ordered ones only" if ordered else "")


def _is_fit(entry: Entry, problem: Problem, even: bool, ordered: bool) -> bool:
    if ordered and not entry.ordered:
        return False
    if not even and not entry.takes_uneven:
        return False
    # With one host, or one rank on each, there is no inside and outside.
    return not entry.needs_hosts or 1 < len(set(problem.hosts)) < problem.size


def _bucket(problem: Problem, itemsize: int) -> Problem:
    """Return the problem that stands for all similar ones, so that a decision is made once for many."""
    counts = problem.counts
    if not is_even(problem):
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
    return sorted({0, size // 2, size - 1, problem.root, *starts, *leaders[:2], *leaders[-1:]})


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
    return f"up to {_bytes(problem.counts[0] * itemsize)}{each} on {where}"


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
