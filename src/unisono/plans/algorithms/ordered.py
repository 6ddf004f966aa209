"""Ordered: reductions whose owner has all contributions side by side and combines them in the fixed order.

Each rank sends chunk c straight to its owner, which follows the canonical tree; every byte crosses one link,
in one round. Prefixes run through a pipelined chain, which is a left fold.
"""

from __future__ import annotations

from unisono.plans.algorithms.canonical import fold
from unisono.plans.algorithms.flat import others, slots
from unisono.plans.layout import chunks, even_bounds, finish, offsets, segment_bounds, whole
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, RecvReduce, Reduce, Send, Slice, Step

__all__ = ["all_reduce", "exscan", "reduce", "reduce_scatter", "scan"]


def all_reduce(problem: Problem, rank: int) -> Plan:
    """Let each rank own and reduce one chunk, in place, and send it to all others."""
    size = problem.size
    part = chunks(Buf.OUT, even_bounds(problem.counts[0], size))
    peers = others(rank, size)
    spread: list[Step] = [Send(peer, part[rank]) for peer in peers]
    spread += [Recv(peer, part[peer]) for peer in peers]
    rounds = [_owner_reduces(part, part[rank], rank, size), spread]
    return finish(problem, rank, "ordered", rounds)


def reduce(problem: Problem, rank: int) -> Plan:
    """Let each rank own and reduce one chunk, and send it to the root."""
    size, root = problem.size, problem.root
    bounds = even_bounds(problem.counts[0], size)
    is_root = rank == root
    mine = chunks(Buf.OUT if is_root else Buf.IN, bounds)
    used = (size - 1) * mine[rank].count
    # Only the root may overwrite its contribution.
    result = mine[rank] if is_root else Slice(Buf.TMP, used, used + mine[rank].count)
    collect: list[Step]
    collect = [Recv(peer, mine[peer]) for peer in others(rank, size)] if is_root else [Send(root, result)]
    rounds = [_owner_reduces(mine, result, rank, size), collect]
    return finish(problem, rank, "ordered", rounds)


def reduce_scatter(problem: Problem, rank: int) -> Plan:
    """Send each chunk to its owner, which reduces it."""
    mine = chunks(Buf.IN, offsets(problem.counts))
    result = whole(Buf.OUT, problem.counts[rank])
    steps = _owner_reduces(mine, result, rank, problem.size)
    return finish(problem, rank, "ordered", [steps])


def _owner_reduces(mine: list[Slice], result: Slice, rank: int, size: int) -> list[Step]:
    """Exchange contributions and reduce the own chunk into `result`, in the canonical order."""
    slot = slots(rank, size, result)
    peers = others(rank, size)
    return [
        *([Copy(result, mine[rank])] if result != mine[rank] else []),
        *(Send(peer, mine[peer]) for peer in peers),
        *(Recv(peer, slot[peer]) for peer in peers),
        *fold(slot, keep=rank),
    ]


def scan(problem: Problem, rank: int) -> Plan:
    """Add the own contribution to each segment of the prefix, and forward it."""
    size, bounds = problem.size, segment_bounds(problem.counts[0])
    mine, prefix = chunks(Buf.IN, bounds), chunks(Buf.OUT, bounds)
    rounds: list[list[Step]] = [[] for _ in range(len(mine) + max(0, size - 2))]
    for number in range(len(mine)):
        # Rank r has the prefix of segment i after round i + r - 1.
        received = number + max(0, rank - 1)
        rounds[received].insert(0, Copy(prefix[number], mine[number]))
        if rank > 0:
            rounds[received].append(RecvReduce(rank - 1, prefix[number], left=True))
        if rank + 1 < size:
            rounds[number + rank].append(Send(rank + 1, prefix[number]))
    return finish(problem, rank, "ordered", rounds, notes=f"{len(mine)} segments")


def exscan(problem: Problem, rank: int) -> Plan:
    """Keep the prefix that arrives, and forward it with the own contribution added."""
    size, bounds = problem.size, segment_bounds(problem.counts[0])
    mine, prefix = chunks(Buf.IN, bounds), chunks(Buf.OUT, bounds)
    passed_on = chunks(Buf.IN if rank == 0 else Buf.TMP, bounds)
    is_middle = 0 < rank < size - 1
    rounds: list[list[Step]] = [[] for _ in range(len(mine) + size - 2 if size > 1 else 0)]
    for number in range(len(mine)):
        if rank + 1 < size:
            steps = rounds[number + rank]
            if is_middle:
                steps[:0] = [Copy(passed_on[number], prefix[number]), Reduce(passed_on[number], mine[number])]
            steps.append(Send(rank + 1, passed_on[number]))
        if rank > 0:
            rounds[number + rank - 1].append(Recv(rank - 1, prefix[number]))
    return finish(problem, rank, "ordered", rounds, notes=f"{len(mine)} segments")
