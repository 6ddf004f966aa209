"""Hillis-Steele: prefixes over ranks in log2(n) rounds, each rank reaching twice as far back as before.

It keeps the rank order, but its bracketing differs from a left fold.
"""

from __future__ import annotations

from unisono.plans.algorithms.canonical import levels
from unisono.plans.layout import finish, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Recv, Reduce, Send, Shape, Step

__all__ = ["exscan", "scan"]


def scan(shape: Shape, rank: int) -> Plan:
    """Add the partial prefix of the rank 2^k before; it covers 2^k ranks."""
    count = shape.counts[0]
    rounds = with_first([Copy(whole(Buf.OUT, count), whole(Buf.IN, count))], _rounds(shape, rank, first=0))
    return finish(shape, rank, "hillis_steele", rounds)


def exscan(shape: Shape, rank: int) -> Plan:
    """Send every contribution to the next rank, then scan there; rank 0 only sends."""
    count = shape.counts[0]
    shift: list[Step] = []
    if rank + 1 < shape.size:
        shift.append(Send(rank + 1, whole(Buf.IN, count)))
    if rank > 0:
        shift.append(Recv(rank - 1, whole(Buf.OUT, count)))
    rounds = [shift, *_rounds(shape, rank, first=1)]
    return finish(shape, rank, "hillis_steele", rounds)


def _rounds(shape: Shape, rank: int, first: int) -> list[list[Step]]:
    """Scan `out` in place over the ranks from `first` on."""
    count = shape.counts[0]
    result, arrived = whole(Buf.OUT, count), whole(Buf.TMP, count)
    rounds: list[list[Step]] = []
    for level in range(levels(shape.size - first) if shape.size > first else 0):
        distance = 1 << level
        steps: list[Step] = []
        if rank >= first and rank + distance < shape.size:
            steps.append(Send(rank + distance, result))
        if rank - distance >= first:
            steps += [Recv(rank - distance, arrived), Reduce(result, arrived, left=True)]
        rounds.append(steps)
    return rounds
