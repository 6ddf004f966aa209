"""Buffers of a plan: their lengths, how they are cut into slices, and the final step of every builder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

from unisono.plans.amounts import ONE, ZERO, Amount, blocks
from unisono.plans.steps import (
    BoundStep,
    Buf,
    Copy,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Shape,
    Slice,
    Step,
)

__all__ = [
    "TOKEN",
    "Region",
    "Rounds",
    "buffer_counts",
    "chunks",
    "finish",
    "is_local",
    "mapped",
    "slice_of",
    "touched",
    "whole",
    "with_first",
    "with_last",
]

Region: TypeAlias = Slice[Amount]
Rounds: TypeAlias = Sequence[Sequence[Step]]
_Number = TypeVar("_Number", Amount, int)
_Other = TypeVar("_Other", Amount, int)

# The slice that a barrier's messages carry. Its steps overlap, so each waits for the ones before.
TOKEN: Final = Slice(Buf.TMP, ZERO, ONE)


def finish(
    shape: Shape, rank: int, algorithm: str, rounds: Rounds, pipelines: Sequence[tuple[int, int]] = ()
) -> Plan:
    """Make the plan. Empty rounds stay, so that round i is the same time on all ranks."""
    in_count, out_count = buffer_counts(shape, rank)
    return Plan(shape, algorithm, rank, tuple(map(tuple, rounds)), in_count, out_count, tuple(pipelines))


def buffer_counts(shape: Shape, rank: int) -> tuple[Amount, Amount]:
    """Return the lengths of the rank's `in` and `out`."""
    size, counts, is_root = shape.size, shape.counts, rank == shape.root

    def total(some: Sequence[Amount]) -> Amount:
        return blocks(some)[-1]

    match shape.collective:
        case "all_reduce" | "broadcast":
            return ZERO, counts[0]
        case "reduce":
            return (ZERO, counts[0]) if is_root else (counts[0], ZERO)
        case "scan" | "exscan":
            return counts[0], counts[0]
        case "all_gather":
            return counts[rank], total(counts)
        case "gather":
            return counts[rank], total(counts) if is_root else ZERO
        case "scatter":
            return total(counts) if is_root else ZERO, counts[rank]
        case "reduce_scatter":
            return total(counts), counts[rank]
        case "all_to_all":
            return total(counts[rank * size : (rank + 1) * size]), total(counts[rank::size])
        case _:
            return ZERO, ZERO


def chunks(buf: Buf, points: Sequence[Amount]) -> list[Region]:
    """Return the slices between neighbouring points."""
    return [Slice(buf, start, stop) for start, stop in pairwise(points)]


def whole(buf: Buf, count: Amount) -> Region:
    """Return a buffer's first `count` elements."""
    return Slice(buf, ZERO, count)


def slice_of(step: BoundStep) -> Slice[int]:
    """Return the slice that has the step's length."""
    return step.src if isinstance(step, Send) else step.dst


_AnyStep: TypeAlias = Send[_Number] | Recv[_Number] | RecvReduce[_Number] | Copy[_Number] | Reduce[_Number]


def touched(step: _AnyStep[_Number]) -> Iterator[tuple[Slice[_Number], bool]]:
    """Yield the slices of a step, each with whether the step writes it."""
    if not isinstance(step, Send):
        yield step.dst, True
    if not isinstance(step, Recv | RecvReduce):
        yield step.src, False


def mapped(
    step: _AnyStep[_Number],
    place: Callable[[Slice[_Number]], Slice[_Other]],
    peer: Callable[[int], int] = int,
) -> _AnyStep[_Other]:
    """The same step on other slices, and with another peer."""
    match step:
        case Send(to, src):
            return Send(peer(to), place(src))
        case Recv(source, dst):
            return Recv(peer(source), place(dst))
        case RecvReduce(source, dst, left):
            return RecvReduce(peer(source), place(dst), left)
        case Copy(dst, src):
            return Copy(place(dst), place(src))
        case Reduce(dst, src, left):
            return Reduce(place(dst), place(src), left)


def is_local(step: Step | BoundStep) -> bool:
    """Whether the step needs no peer."""
    return isinstance(step, Copy | Reduce)


def with_first(steps: Sequence[Step], rounds: Rounds) -> Rounds:
    """Put local steps at the beginning of the first round."""
    return [[*steps, *rounds[0]], *rounds[1:]] if rounds else [steps]


def with_last(rounds: Rounds, steps: Sequence[Step]) -> Rounds:
    """Put local steps at the end of the last round."""
    return [*rounds[:-1], [*rounds[-1], *steps]] if rounds else [steps]
