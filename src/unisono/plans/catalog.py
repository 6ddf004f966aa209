"""The catalog: every algorithm of every collective, by name.

This table is what `unisono plan --list` prints and what `algorithm=` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeAlias

from unisono.errors import UsageError
from unisono.plans.algorithms import (
    chain,
    dissemination,
    doubling,
    flat,
    hierarchical,
    hierarchical_blocks,
    hillis_steele,
    ordered,
    pairwise,
    ring,
    tree,
)
from unisono.plans.amounts import Counts
from unisono.plans.steps import Plan, Problem, Shape

__all__ = [
    "ALGORITHM_NAMES",
    "CATALOG",
    "Entry",
    "Order",
    "algorithms",
    "build",
    "check",
    "counts_held",
    "entry_of",
    "is_even",
    "reduces",
    "synchronizes",
]

Builder: TypeAlias = Callable[[Shape, int], Plan]


class Order(Enum):
    """What a reduction promises about the order of its operands."""

    ANY = "any"  # each operand once, the same bits on every rank
    RANK = "rank"  # also in rank order, with any bracketing
    CANONICAL = "canonical"  # also bracketed as the canonical tree (scan, exscan: as the left fold)


@dataclass(frozen=True, slots=True)
class Entry:
    """An algorithm: its builder, what it promises and what it needs."""

    builder: Builder
    order: Order = Order.ANY
    takes_uneven: bool = True
    needs_hosts: bool = False
    # Every byte goes straight from its owner to its destination: no rank reduces or forwards it.
    is_direct: bool = False
    # Every rank does the same, turned by its number: on one host, what one rank costs they all cost.
    is_symmetric: bool = False
    # Some rank sends or receives at least size - 1 messages, or waits for size - 1 messages in sequence.
    is_linear: bool = False

    @property
    def ordered(self) -> bool:
        """Whether results are reproducible; then it is also right for operations that do not commute."""
        return self.order is Order.CANONICAL

    @property
    def keeps_rank_order(self) -> bool:
        """Whether it is right for operations that do not commute."""
        return self.order is not Order.ANY


def _canonical(builder: Builder, *, is_linear: bool = False) -> Entry:
    return Entry(builder, Order.CANONICAL, is_linear=is_linear)


def _by_hosts(builder: Builder) -> Entry:
    return Entry(builder, needs_hosts=True)


def _direct(builder: Builder, *, is_symmetric: bool = False) -> Entry:
    return Entry(builder, is_direct=True, is_symmetric=is_symmetric, is_linear=True)


def _turned(builder: Builder) -> Entry:
    """Every rank exchanges something with each other rank, or passes it on around a ring."""
    return Entry(builder, is_symmetric=True, is_linear=True)


CATALOG: Final[Mapping[str, Mapping[str, Entry]]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": _turned(ring.all_reduce),
            "pairwise": _turned(pairwise.all_reduce),
            "doubling": _canonical(doubling.doubling_all_reduce),
            "halving_doubling": _canonical(doubling.halving_doubling_all_reduce),
            "tree": _canonical(tree.all_reduce),
            "flat": _canonical(flat.all_reduce, is_linear=True),
            "ordered": _canonical(ordered.all_reduce, is_linear=True),
            "hierarchical": _by_hosts(hierarchical.all_reduce),
            "hierarchical_long": _by_hosts(hierarchical.long_all_reduce),
        },
        "reduce": {
            "tree": _canonical(tree.reduce),
            "chain": Entry(chain.reduce, is_linear=True),
            "pairwise": Entry(pairwise.reduce, is_linear=True),
            "flat": _canonical(flat.reduce, is_linear=True),
            "ordered": _canonical(ordered.reduce, is_linear=True),
            "hierarchical": _by_hosts(hierarchical.reduce),
            "hierarchical_long": _by_hosts(hierarchical.long_reduce),
        },
        "broadcast": {
            "tree": Entry(tree.broadcast),
            "chain": Entry(chain.broadcast, is_linear=True),
            "flat": _direct(flat.broadcast),
            "hierarchical": _by_hosts(hierarchical.broadcast),
            "hierarchical_long": _by_hosts(hierarchical.long_broadcast),
        },
        "all_gather": {
            "ring": _turned(ring.all_gather),
            "dissemination": Entry(dissemination.all_gather),
            "flat": _direct(flat.all_gather, is_symmetric=True),
            "hierarchical": _by_hosts(hierarchical_blocks.all_gather),
        },
        "gather": {
            "tree": Entry(tree.gather),
            "flat": _direct(flat.gather),
        },
        "scatter": {
            "tree": Entry(tree.scatter),
            "flat": _direct(flat.scatter),
        },
        "reduce_scatter": {
            "pairwise": _turned(pairwise.reduce_scatter),
            "ring": _turned(ring.reduce_scatter),
            "halving": _canonical(doubling.halving_reduce_scatter),
            "ordered": _canonical(ordered.reduce_scatter, is_linear=True),
            "hierarchical": _by_hosts(hierarchical_blocks.reduce_scatter),
        },
        "all_to_all": {
            "pairwise": _direct(pairwise.all_to_all, is_symmetric=True),
            "flat": _direct(flat.all_to_all, is_symmetric=True),
            "dissemination": Entry(dissemination.all_to_all, takes_uneven=False, is_symmetric=True),
            "hierarchical": Entry(hierarchical_blocks.all_to_all, takes_uneven=False, needs_hosts=True),
        },
        "scan": {
            "hillis_steele": Entry(hillis_steele.scan, Order.RANK),
            "flat": _canonical(flat.scan, is_linear=True),
            "ordered": _canonical(ordered.scan, is_linear=True),
        },
        "exscan": {
            "hillis_steele": Entry(hillis_steele.exscan, Order.RANK),
            "flat": _canonical(flat.exscan, is_linear=True),
            "ordered": _canonical(ordered.exscan, is_linear=True),
        },
        "barrier": {
            "dissemination": Entry(dissemination.barrier, is_symmetric=True),
            "tree": Entry(tree.barrier),
            "flat": _direct(flat.barrier, is_symmetric=True),
            "hierarchical": _by_hosts(hierarchical.barrier),
        },
    }
)

# Every name by its number in fingerprints. With "auto" a library may take an algorithm of its own.
ALGORITHM_NAMES: Final = ("auto", *dict.fromkeys(name for entries in CATALOG.values() for name in entries))

_COUNTS_HELD: Final[Mapping[str, Callable[[int], int]]] = {
    **dict.fromkeys(CATALOG, lambda size: size),
    **dict.fromkeys(("all_reduce", "reduce", "broadcast", "scan", "exscan"), lambda size: 1),
    "barrier": lambda size: 0,
    "all_to_all": lambda size: size * size,
}

_SYNCHRONIZING: Final = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))


def counts_held(collective: str, size: int) -> int:
    """The length of `Problem.counts` for this number of ranks."""
    return _COUNTS_HELD[collective](size)


def algorithms(collective: str) -> tuple[str, ...]:
    """Return the names that `algorithm=` accepts for a collective."""
    return tuple(_entries(collective))


def entry_of(collective: str, algorithm: str) -> Entry:
    """Look an algorithm up.

    Raises:
        UsageError: the name is unknown; the text lists the known ones.
    """
    entries = _entries(collective)
    if algorithm not in entries:
        raise UsageError(
            f"algorithm {algorithm!r} is unknown for {collective}; allowed: {', '.join(entries)}"
        )
    return entries[algorithm]


def build(problem: Problem, rank: int, algorithm: str) -> Plan:
    """Build one rank's plan by a named algorithm; it serves all problems that differ in their counts only.

    Raises:
        UsageError: algorithm, problem and rank do not fit together.
    """
    entry = entry_of(problem.collective, algorithm)
    check(problem)
    if not 0 <= rank < problem.size:
        raise UsageError(
            f"rank {rank} is outside 0..{problem.size - 1}", next_step="give a rank of the problem"
        )
    if not entry.takes_uneven and not is_even(problem):
        fit = [name for name, other in _entries(problem.collective).items() if other.takes_uneven]
        raise UsageError(
            f"{problem.collective} by {algorithm!r} needs equal counts; for uneven ones: {', '.join(fit)}",
            next_step="take one of these, or algorithm='auto'",
        )
    return _built(problem.collective, algorithm, problem.size, rank, problem.root, problem.hosts)


# 1,024 plans: enough for the groups and roots of a large program, at some kilobytes each.
@lru_cache(maxsize=1024)
def _built(collective: str, algorithm: str, size: int, rank: int, root: int, hosts: tuple[int, ...]) -> Plan:
    entry = entry_of(collective, algorithm)
    counts = Counts(counts_held(collective, size), are_equal=not entry.takes_uneven)
    return entry.builder(Shape(collective, size, counts, root, hosts), rank)


def check(problem: Problem) -> None:
    """Refuse a malformed problem before any plan is built.

    Raises:
        UsageError: size, counts, root or hosts contradict each other.
    """
    _entries(problem.collective)
    size, counts, hosts = problem.size, problem.counts, problem.hosts
    if size < 1:
        raise UsageError(
            f"{problem.collective} needs at least one rank, not {size}", next_step="give a size of 1 or more"
        )
    held = counts_held(problem.collective, size)
    if len(counts) != held:
        raise UsageError(
            f"{problem.collective} on {size} ranks needs {held} counts, not {len(counts)}",
            next_step="give as many counts",
        )
    if any(count < 0 for count in counts):
        raise UsageError(
            f"{problem.collective} has a negative count: {min(counts)}", next_step="give counts of 0 or more"
        )
    if not 0 <= problem.root < size:
        raise UsageError(
            f"root {problem.root} is outside 0..{size - 1}", next_step="give a rank of the problem"
        )
    if hosts and len(hosts) != size:
        raise UsageError(f"hosts names {len(hosts)} ranks of {size}", next_step="name a host for each rank")


def reduces(collective: str) -> bool:
    """Whether a collective combines operands, so that their order may matter."""
    return any(entry.keeps_rank_order for entry in _entries(collective).values())


def synchronizes(collective: str) -> bool:
    """Whether a rank that ends it has had something from every other, if no block is empty."""
    return collective in _SYNCHRONIZING


def is_even(problem: Problem) -> bool:
    """Whether all blocks have the same length."""
    return len(set(problem.counts)) <= 1


def _entries(collective: str) -> Mapping[str, Entry]:
    if collective not in CATALOG:
        raise UsageError(f"collective {collective!r} is unknown; allowed: {', '.join(CATALOG)}")
    return CATALOG[collective]
