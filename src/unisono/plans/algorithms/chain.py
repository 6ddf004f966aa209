"""Pipelined chain: ranks in a row, segments following each other through it.

Every rank sends and receives each byte once, and after the first segment has passed, all links are busy: for
large broadcasts and reductions to one rank.
"""

from __future__ import annotations

from unisono.plans.layout import chunks, finish, segment_bounds
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, RecvReduce, Send, Step

__all__ = ["broadcast", "reduce"]


def broadcast(problem: Problem, rank: int) -> Plan:
    """Forward segments from the root through the ranks after it."""
    size = problem.size
    distance = (rank - problem.root) % size
    segments = chunks(Buf.OUT, segment_bounds(problem.counts[0]))
    rounds: list[list[Step]] = [[] for _ in range(len(segments) + size - 2 if size > 1 else 0)]
    for number, segment in enumerate(segments):
        if distance > 0:
            rounds[number + distance - 1].append(Recv((rank - 1) % size, segment))
        if distance + 1 < size:
            rounds[number + distance].append(Send((rank + 1) % size, segment))
    return finish(problem, rank, "chain", rounds, notes=f"{len(segments)} segments")


def reduce(problem: Problem, rank: int) -> Plan:
    """Add up segments from the rank before the root backwards round to the root."""
    size = problem.size
    distance = (rank - problem.root) % size
    bounds = segment_bounds(problem.counts[0])
    mine = chunks(Buf.IN, bounds)
    sums = chunks(Buf.OUT if distance == 0 else Buf.TMP, bounds)
    is_end = distance == size - 1
    rounds: list[list[Step]] = [[] for _ in range(len(mine) + size - 2 if size > 1 else 0)]
    for number, sum_ in enumerate(sums):
        # The far end sends segment i in round i; each rank before it one round later.
        received = number + size - 2 - distance
        if not is_end:
            own: list[Step] = [Copy(sum_, mine[number])] if distance > 0 else []
            rounds[received][:0] = own
            rounds[received].append(RecvReduce((rank + 1) % size, sum_))
        if distance > 0:
            rounds[received + 1].append(Send((rank - 1) % size, mine[number] if is_end else sum_))
    return finish(problem, rank, "chain", rounds, notes=f"{len(mine)} segments")
