"""Binding: a plan for all counts becomes a plan for given ones."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.plans.amounts import Amount, Weights, contains
from unisono.plans.catalog import build
from unisono.plans.layout import mapped, slice_of, touched
from unisono.plans.steps import (
    BoundPlan,
    BoundStep,
    Buf,
    Plan,
    Problem,
    Slice,
    Step,
)

__all__ = ["Values", "bind", "bound"]


def bound(problem: Problem, rank: int, algorithm: str) -> BoundPlan:
    """Build one rank's plan by a named algorithm, and bind it to the problem's counts.

    Raises:
        UsageError: algorithm, problem and rank do not fit together.
    """
    return bind(build(problem, rank, algorithm), problem.counts)


def bind(plan: Plan, counts: Sequence[int]) -> BoundPlan:
    """Give a plan its counts. Both ends of an empty message drop it, since both know its length."""
    values = Values(plan, counts)
    rounds = tuple(
        tuple(step for step in map(values.step, steps) if slice_of(step).count) for steps in plan.rounds
    )
    shape = plan.shape
    problem = Problem(shape.collective, shape.size, tuple(counts), shape.root, shape.hosts)
    slices = (slice_ for steps in rounds for step in steps for slice_, _ in touched(step))
    tmp_count = max((slice_.stop for slice_ in slices if slice_.buf is Buf.TMP), default=0)
    return BoundPlan(
        problem,
        plan.algorithm,
        plan.rank,
        rounds,
        values.number(plan.in_count),
        values.number(plan.out_count),
        tmp_count,
        plan.pipelines,
    )


class Values:
    """The numbers of elements that a plan's amounts have for given counts."""

    def __init__(self, plan: Plan, counts: Sequence[int]) -> None:
        self._weights = Weights(plan.atoms.values(counts) if plan.atoms is not None else [1])
        self._known: dict[int, int] = {0: 0}
        self._last = 0
        # By identity, with the amount that it is of: neighbouring slices share their points, and the sum of a
        # point of 1,000 ranks has 4 KB to hash.
        self._seen: dict[int, tuple[Amount, int]] = {}

    def number(self, amount: Amount) -> int:
        """The number of elements of an amount."""
        seen = self._seen.get(id(amount))
        if seen is None:
            seen = self._seen[id(amount)] = (amount, self._evaluated(amount.terms))
        return seen[1]

    def _evaluated(self, terms: int) -> int:
        last = self._last
        known = self._known.get(terms)
        if known is None:
            # Slices follow each other, so most points are next to one whose number is known.
            if contains(terms, last):
                known = self._known[last] + self._weights.sum(terms - last)
            elif contains(last, terms):
                known = self._known[last] - self._weights.sum(last - terms)
            else:
                known = self._weights.sum(terms)
            self._known[terms] = known
        self._last = terms
        return known

    def slice(self, slice_: Slice[Amount]) -> Slice[int]:
        """The elements of a slice."""
        return Slice(slice_.buf, self.number(slice_.start), self.number(slice_.stop))

    def step(self, step: Step) -> BoundStep:
        """The step on these elements."""
        return mapped(step, self.slice)
