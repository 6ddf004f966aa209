"""Buffers of a plan: their lengths, how they are cut into slices, and the final step of every builder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, TypeAlias

from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, RecvReduce, Reduce, Send, Slice, Step

__all__ = [
    "TOKEN",
    "Rounds",
    "buffer_counts",
    "chunks",
    "even_bounds",
    "finish",
    "is_local",
    "offsets",
    "segment_bounds",
    "slice_of",
    "touched",
    "whole",
    "with_first",
    "with_last",
]

Rounds: TypeAlias = Sequence[Sequence[Step]]

# The slice that a barrier's messages carry. Its steps overlap, so each waits for the ones before.
TOKEN: Final = Slice(Buf.TMP, 0, 1)

# 16 Ki elements (64 KiB of float32): long enough to hide a message's latency, short enough that a chain of
# eight ranks is busy after half a megabyte.
_SEGMENT_COUNT: Final = 16 * 1024
# More segments save less than a percent of the time and make the plan long.
_SEGMENTS_MAX: Final = 64


def finish(problem: Problem, rank: int, algorithm: str, rounds: Rounds, notes: str = "") -> Plan:
    """Make the plan: drop empty steps and determine the buffers' lengths.

    Both ends of an empty message drop it, since both know its length. Empty rounds stay, so that round i is
    the same time on all ranks.
    """
    kept = tuple(tuple(step for step in steps if slice_of(step).count) for steps in rounds)
    in_count, out_count = buffer_counts(problem, rank)
    slices = (slice_ for steps in kept for step in steps for slice_, _ in touched(step))
    tmp_count = max((slice_.stop for slice_ in slices if slice_.buf is Buf.TMP), default=0)
    return Plan(problem, algorithm, rank, kept, in_count, out_count, tmp_count, notes)


def buffer_counts(problem: Problem, rank: int) -> tuple[int, int]:
    """Return the lengths of the rank's `in` and `out`, in elements."""
    size, counts, is_root = problem.size, problem.counts, rank == problem.root
    match problem.collective:
        case "all_reduce" | "broadcast":
            return 0, counts[0]
        case "reduce":
            return (0, counts[0]) if is_root else (counts[0], 0)
        case "scan" | "exscan":
            return counts[0], counts[0]
        case "all_gather":
            return counts[rank], sum(counts)
        case "gather":
            return counts[rank], sum(counts) if is_root else 0
        case "scatter":
            return sum(counts) if is_root else 0, counts[rank]
        case "reduce_scatter":
            return sum(counts), counts[rank]
        case "all_to_all":
            return sum(counts[rank * size : (rank + 1) * size]), sum(counts[rank::size])
        case _:
            return 0, 0


def offsets(counts: Iterable[int]) -> tuple[int, ...]:
    """Return where each block starts, and the end of the last: one number more than there are blocks."""
    return (0, *accumulate(counts))


def even_bounds(count: int, parts: int) -> tuple[int, ...]:
    """Cut `count` elements into parts whose lengths differ by at most one; return their bounds."""
    return tuple(count * part // parts for part in range(parts + 1))


def segment_bounds(count: int) -> tuple[int, ...]:
    """Cut a buffer into the segments of a pipeline; return their bounds."""
    return even_bounds(count, max(1, min(_SEGMENTS_MAX, count // _SEGMENT_COUNT)))


def chunks(buf: Buf, bounds: Sequence[int]) -> list[Slice]:
    """Return the slices between neighbouring bounds."""
    return [Slice(buf, start, stop) for start, stop in pairwise(bounds)]


def whole(buf: Buf, count: int) -> Slice:
    """Return a buffer's first `count` elements."""
    return Slice(buf, 0, count)


def slice_of(step: Step) -> Slice:
    """Return the slice that has the step's length."""
    return step.src if isinstance(step, Send) else step.dst


def touched(step: Step) -> Iterator[tuple[Slice, bool]]:
    """Yield the slices of a step, each with whether the step writes it."""
    if not isinstance(step, Recv | RecvReduce):
        yield step.src, False
    if not isinstance(step, Send):
        yield step.dst, True


def is_local(step: Step) -> bool:
    """Whether the step needs no peer."""
    return isinstance(step, Copy | Reduce)


def with_first(steps: Sequence[Step], rounds: Rounds) -> Rounds:
    """Put local steps at the beginning of the first round."""
    return [[*steps, *rounds[0]], *rounds[1:]] if rounds else [steps]


def with_last(rounds: Rounds, steps: Sequence[Step]) -> Rounds:
    """Put local steps at the end of the last round."""
    return [*rounds[:-1], [*rounds[-1], *steps]] if rounds else [steps]
