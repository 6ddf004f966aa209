"""The language of plans: a collective as data, for one rank.

A *problem* is a collective as every rank sees it. A *plan* is one rank's part in solving it: rounds of steps
over three flat buffers, counted in elements:

    in    the rank's contribution; a plan never writes it
    out   the rank's result; all_reduce and broadcast work on `out` alone, in place
    tmp   scratch of `tmp_count` elements

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

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

__all__ = ["Buf", "Copy", "Plan", "Problem", "Recv", "RecvReduce", "Reduce", "Send", "Slice", "Step"]


class Buf(Enum):
    """One of the three buffers a plan works on."""

    IN = "in"
    OUT = "out"
    TMP = "tmp"

    # Members are unique objects, and Enum's own hash runs Python code for every dict lookup.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of one buffer."""

    buf: Buf
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    def overlaps(self, other: Slice) -> bool:
        """Whether both have an element in common."""
        return self.buf is other.buf and self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.buf.value}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a slice to a peer."""

    peer: int
    src: Slice

    def __str__(self) -> str:
        return f"send {self.src} to {self.peer}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Fill a slice from a peer."""

    peer: int
    dst: Slice

    def __str__(self) -> str:
        return f"recv {self.dst} from {self.peer}"


@dataclass(frozen=True, slots=True)
class RecvReduce:
    """Combine data from a peer into a slice.

    `left`: the arriving operand is the left one, op(arriving, dst); otherwise op(dst, arriving). It matters
    for operations that do not commute and for the bits of a reproducible sum.
    """

    peer: int
    dst: Slice
    left: bool = False

    def __str__(self) -> str:
        return f"recv+reduce {self.dst} from {self.peer}{' (arriving left)' if self.left else ''}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a slice to another of the same length."""

    dst: Slice
    src: Slice

    def __str__(self) -> str:
        return f"copy {self.src} to {self.dst}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine `src` into `dst`: op(src, dst) if `left`, else op(dst, src)."""

    dst: Slice
    src: Slice
    left: bool = False

    def __str__(self) -> str:
        return f"reduce {self.src} into {self.dst}{' (from the left)' if self.left else ''}"


Step: TypeAlias = Send | Recv | RecvReduce | Copy | Reduce


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
class Plan:
    """One rank's part in a collective."""

    problem: Problem
    algorithm: str
    rank: int
    rounds: tuple[tuple[Step, ...], ...]
    in_count: int = 0
    out_count: int = 0
    tmp_count: int = 0
    notes: str = field(default="", compare=False)

    @property
    def steps(self) -> Iterator[Step]:
        """All steps in their written order."""
        for round_ in self.rounds:
            yield from round_
