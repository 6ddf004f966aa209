"""Ordered: reductions whose owner has all contributions side by side and combines them in the fixed order.

Each rank sends chunk c straight to its owner, which follows the canonical tree; every byte crosses one link,
in one round. Prefixes run through a chain, piece by piece, which is a left fold.
"""

from __future__ import annotations

from unisono.plans.algorithms.canonical import fold
from unisono.plans.algorithms.flat import others, side_by_side
from unisono.plans.amounts import blocks, even
from unisono.plans.layout import Region, chunks, finish, whole
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Reduce, Send, Shape, Slice, Step

__all__ = ["all_reduce", "exscan", "reduce", "reduce_scatter", "scan"]


def all_reduce(shape: Shape, rank: int) -> Plan:
    """Let each rank own and reduce one chunk, in place, and send it to all others."""
    size = shape.size
    part = chunks(Buf.OUT, even(shape.counts[0], size))
    peers = others(rank, size)
    spread: list[Step] = [Send(peer, part[rank]) for peer in peers]
    spread += [Recv(peer, part[peer]) for peer in peers]
    rounds = [_owner_reduces(part, part[rank], rank, size), spread]
    return finish(shape, rank, "ordered", rounds)


def reduce(shape: Shape, rank: int) -> Plan:
    """Let each rank own and reduce one chunk, and send it to the root."""
    size, root = shape.size, shape.root
    points = even(shape.counts[0], size)
    is_root = rank == root
    mine = chunks(Buf.OUT if is_root else Buf.IN, points)
    used = mine[rank].count * (size - 1)
    # Only the root may overwrite its contribution.
    result = mine[rank] if is_root else Slice(Buf.TMP, used, used + mine[rank].count)
    collect: list[Step]
    collect = [Recv(peer, mine[peer]) for peer in others(rank, size)] if is_root else [Send(root, result)]
    rounds = [_owner_reduces(mine, result, rank, size), collect]
    return finish(shape, rank, "ordered", rounds)


def reduce_scatter(shape: Shape, rank: int) -> Plan:
    """Send each chunk to its owner, which reduces it."""
    mine = chunks(Buf.IN, blocks(shape.counts))
    result = whole(Buf.OUT, shape.counts[rank])
    steps = _owner_reduces(mine, result, rank, shape.size)
    return finish(shape, rank, "ordered", [steps])


def _owner_reduces(mine: list[Region], result: Region, rank: int, size: int) -> list[Step]:
    """Exchange contributions and reduce the own chunk into `result`, in the canonical order."""
    slot = side_by_side(rank, size, result)
    peers = others(rank, size)
    return [
        *([Copy(result, mine[rank])] if result != mine[rank] else []),
        *(Send(peer, mine[peer]) for peer in peers),
        *(Recv(peer, slot[peer]) for peer in peers),
        *fold(slot, keep=rank),
    ]


def scan(shape: Shape, rank: int) -> Plan:
    """Add the own contribution to the prefix, and forward it."""
    size, count = shape.size, shape.counts[0]
    mine, prefix = whole(Buf.IN, count), whole(Buf.OUT, count)
    rounds: list[list[Step]] = [[] for _ in range(max(1, size - 1))]
    # Rank r has its prefix after round r - 1.
    received = rounds[max(0, rank - 1)]
    received.append(Copy(prefix, mine))
    if rank > 0:
        received.append(RecvReduce(rank - 1, prefix, left=True))
    if rank + 1 < size:
        rounds[rank].append(Send(rank + 1, prefix))
    return finish(shape, rank, "ordered", rounds, [(0, len(rounds))])


def exscan(shape: Shape, rank: int) -> Plan:
    """Keep the prefix that arrives, and forward it with the own contribution added."""
    size, count = shape.size, shape.counts[0]
    mine, prefix = whole(Buf.IN, count), whole(Buf.OUT, count)
    passed_on = whole(Buf.IN if rank == 0 else Buf.TMP, count)
    rounds: list[list[Step]] = [[] for _ in range(size - 1)]
    if rank > 0:
        rounds[rank - 1].append(Recv(rank - 1, prefix))
    if rank + 1 < size:
        if rank > 0:
            rounds[rank] += [Copy(passed_on, prefix), Reduce(passed_on, mine)]
        rounds[rank].append(Send(rank + 1, passed_on))
    return finish(shape, rank, "ordered", rounds, [(0, len(rounds))])
