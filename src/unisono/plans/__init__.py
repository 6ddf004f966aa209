"""Collectives as data: built, verified, costed, chosen and drawn before a byte moves.

Everything here but the executor is pure: it imports no backend and no communicator.

    problem = Problem("all_reduce", size=4, counts=(1_000_003,))
    algorithm, reason = choose(problem, itemsize=4, links=Links())
    plan = build(problem, rank=0, algorithm=algorithm)  # for all counts
    steps = bind(plan, problem.counts).rounds           # for these
"""

from unisono.plans.bind import bind, bound
from unisono.plans.catalog import CATALOG, Entry, Order, algorithms, build, check, counts_held, entry_of
from unisono.plans.choose import choose
from unisono.plans.cost import LINKS, Cost, Links, cost
from unisono.plans.steps import (
    BoundPlan,
    BoundStep,
    Buf,
    Copy,
    Plan,
    Problem,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Shape,
    Slice,
    Step,
)
from unisono.plans.verify import PlanError, verify

__all__ = [
    "CATALOG",
    "LINKS",
    "BoundPlan",
    "BoundStep",
    "Buf",
    "Copy",
    "Cost",
    "Entry",
    "Links",
    "Order",
    "Plan",
    "PlanError",
    "Problem",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Send",
    "Shape",
    "Slice",
    "Step",
    "algorithms",
    "bind",
    "bound",
    "build",
    "check",
    "choose",
    "cost",
    "counts_held",
    "entry_of",
    "verify",
]
