"""The language of plans: a collective as data, for one rank.

A *problem* is a collective as every rank sees it; its *shape* is all of it but the counts. A *plan* is one
rank's part in solving the problems of one shape: rounds of steps over three flat buffers, whose slices lie
between amounts (amounts.py). A *bound plan* is the same for given counts, with numbers of elements instead of
amounts, and without the steps that are empty then. The buffers:

    in    the rank's contribution; a plan never writes it
    out   the rank's result; all_reduce and broadcast work on `out` alone, in place
    tmp   scratch

Three rules define what a plan means, whatever executes it:

1.  The k-th send from p to q matches q's k-th receive from p.
2.  Steps take effect in the order written wherever their slices overlap and one of them writes;
    otherwise they may run at the same time, also across rounds.
3.  Rounds serve drawing and cost. All messages of a round can be in progress together, so a plan does not
    deadlock even if every send waits for its receive. Local steps come before or after a round's messages,
    never between them. Round i is the same time on every rank: both ends of a message are in rounds of the
    same number, and an idle rank has an empty round.

A barrier moves no data, only order: its messages carry a token, one element of `tmp` whose value does not
matter. The token's steps overlap, so rule 2 keeps their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from unisono.plans.amounts import Amount, Atoms

__all__ = [
    "BoundPlan",
    "BoundStep",
    "Buf",
    "Copy",
    "Plan",
    "Problem",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Send",
    "Shape",
    "Slice",
    "Step",
]

# What slices lie between: amounts in a plan, numbers in a bound plan.
P = TypeVar("P", Amount, int)


class Buf(Enum):
    """One of the three buffers a plan works on."""

    IN = "in"
    OUT = "out"
    TMP = "tmp"

    # Members are unique objects, and Enum's own hash runs Python code for every dict lookup.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Slice(Generic[P]):
    """Elements [start, stop) of one buffer."""

    buf: Buf
    start: P
    stop: P

    @property
    def count(self) -> P:
        """The number of elements."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.buf.value}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Send(Generic[P]):
    """Send a slice to a peer."""

    peer: int
    src: Slice[P]

    def __str__(self) -> str:
        return f"send {self.src} to {self.peer}"


@dataclass(frozen=True, slots=True)
class Recv(Generic[P]):
    """Fill a slice from a peer."""

    peer: int
    dst: Slice[P]

    def __str__(self) -> str:
        return f"recv {self.dst} from {self.peer}"


@dataclass(frozen=True, slots=True)
class RecvReduce(Generic[P]):
    """Combine data from a peer into a slice.

    `left`: the arriving operand is the left one, op(arriving, dst); otherwise op(dst, arriving). It matters
    for operations that do not commute and for the bits of a reproducible sum.
    """

    peer: int
    dst: Slice[P]
    left: bool = False

    def __str__(self) -> str:
        return f"recv+reduce {self.dst} from {self.peer}{' (arriving left)' if self.left else ''}"


@dataclass(frozen=True, slots=True)
class Copy(Generic[P]):
    """Copy a slice to another of the same length."""

    dst: Slice[P]
    src: Slice[P]

    def __str__(self) -> str:
        return f"copy {self.src} to {self.dst}"


@dataclass(frozen=True, slots=True)
class Reduce(Generic[P]):
    """Combine `src` into `dst`: op(src, dst) if `left`, else op(dst, src)."""

    dst: Slice[P]
    src: Slice[P]
    left: bool = False

    def __str__(self) -> str:
        return f"reduce {self.src} into {self.dst}{' (from the left)' if self.left else ''}"


Step: TypeAlias = Send[Amount] | Recv[Amount] | RecvReduce[Amount] | Copy[Amount] | Reduce[Amount]
BoundStep: TypeAlias = Send[int] | Recv[int] | RecvReduce[int] | Copy[int] | Reduce[int]


@dataclass(frozen=True, slots=True)
class Problem:
    """A collective as every rank sees it; the same on all of them.

    `counts` holds elements: one number for all_reduce, reduce, broadcast, scan and exscan; none for
    barrier; one per rank for all_gather, gather, scatter, reduce_scatter (and their uneven kind: the
    even ones repeat one number). For all_to_all it is a size x size matrix by rows, `counts[s * size + d]`
    being what s sends to d; a rank may write 0 outside of its own row and column.
    `hosts[r]` names the host of rank r, for hierarchical plans; empty means one host.
    """

    collective: str
    size: int
    counts: tuple[int, ...] = ()
    root: int = 0
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """A problem for all counts: these are amounts, in the same order."""

    collective: str
    size: int
    counts: Sequence[Amount] = ()
    root: int = 0
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One rank's part in a collective, for all counts; built once, so compared by identity.

    `pipelines` are runs of rounds, [first, stop), in which every rank only passes on what it gets: the
    executor's pieces then follow each other through them.
    """

    shape: Shape
    algorithm: str
    rank: int
    rounds: tuple[tuple[Step, ...], ...]
    in_count: Amount
    out_count: Amount
    pipelines: tuple[tuple[int, int], ...] = ()

    @property
    def atoms(self) -> Atoms | None:
        """What its amounts are made of; None for a barrier, which knows single elements only."""
        return (self.in_count + self.out_count).atoms

    @property
    def steps(self) -> Iterator[Step]:
        """All steps in their written order."""
        for round_ in self.rounds:
            yield from round_


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """One rank's part in a collective, for given counts."""

    problem: Problem
    algorithm: str
    rank: int
    rounds: tuple[tuple[BoundStep, ...], ...]
    in_count: int = 0
    out_count: int = 0
    tmp_count: int = 0
    pipelines: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    @property
    def steps(self) -> Iterator[BoundStep]:
        """All steps in their written order."""
        for round_ in self.rounds:
            yield from round_
