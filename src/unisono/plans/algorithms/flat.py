"""Flat: every rank exchanges messages with every rank concerned, at once.

One round, as many messages as there are pairs: for few ranks and few bytes. Contributions are kept apart
until all have arrived, so reductions follow the canonical tree, and prefixes the left fold.
"""

from __future__ import annotations

from unisono.plans.algorithms.canonical import fold
from unisono.plans.layout import TOKEN, chunks, finish, offsets, whole
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, Reduce, Send, Slice, Step

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "reduce",
    "scan",
    "scatter",
]


def others(rank: int, size: int) -> list[int]:
    """Return the other ranks, starting with the next one: no two ranks start with the same peer."""
    return [(rank + turn) % size for turn in range(1, size)]


def slots(rank: int, size: int, own: Slice) -> list[Slice]:
    """Return a slot for each rank's contribution: `own`, and one in `tmp` for each of the others."""
    count = own.count
    apart = [Slice(Buf.TMP, i * count, (i + 1) * count) for i in range(size - 1)]
    return [*apart[:rank], own, *apart[rank:]]


def all_reduce(problem: Problem, rank: int) -> Plan:
    """Send the whole vector to all; each reduces all of them."""
    size, count = problem.size, problem.counts[0]
    data = whole(Buf.OUT, count)
    slot = slots(rank, size, data)
    sends = [Send(peer, data) for peer in others(rank, size)]
    receives = [Recv(peer, slot[peer]) for peer in others(rank, size)]
    steps: list[Step] = [*sends, *receives, *fold(slot, keep=rank)]
    return finish(problem, rank, "flat", [steps])


def reduce(problem: Problem, rank: int) -> Plan:
    """Send the whole vector to the root, which reduces all of them."""
    size, count, root = problem.size, problem.counts[0], problem.root
    if rank != root:
        return finish(problem, rank, "flat", [[Send(root, whole(Buf.IN, count))]])
    slot = slots(rank, size, whole(Buf.OUT, count))
    receives = [Recv(peer, slot[peer]) for peer in others(rank, size)]
    return finish(problem, rank, "flat", [[*receives, *fold(slot, keep=rank)]])


def broadcast(problem: Problem, rank: int) -> Plan:
    """Send from the root to every rank."""
    data = whole(Buf.OUT, problem.counts[0])
    if rank != problem.root:
        return finish(problem, rank, "flat", [[Recv(problem.root, data)]])
    return finish(problem, rank, "flat", [[Send(peer, data) for peer in others(rank, problem.size)]])


def all_gather(problem: Problem, rank: int) -> Plan:
    """Send the own block to every rank."""
    block = chunks(Buf.OUT, offsets(problem.counts))
    own = whole(Buf.IN, problem.counts[rank])
    sends = [Send(peer, own) for peer in others(rank, problem.size)]
    receives = [Recv(peer, block[peer]) for peer in others(rank, problem.size)]
    return finish(problem, rank, "flat", [[Copy(block[rank], own), *sends, *receives]])


def gather(problem: Problem, rank: int) -> Plan:
    """Send the own block to the root."""
    own = whole(Buf.IN, problem.counts[rank])
    if rank != problem.root:
        return finish(problem, rank, "flat", [[Send(problem.root, own)]])
    block = chunks(Buf.OUT, offsets(problem.counts))
    receives = [Recv(peer, block[peer]) for peer in others(rank, problem.size)]
    return finish(problem, rank, "flat", [[Copy(block[rank], own), *receives]])


def scatter(problem: Problem, rank: int) -> Plan:
    """Send every rank its block from the root."""
    own = whole(Buf.OUT, problem.counts[rank])
    if rank != problem.root:
        return finish(problem, rank, "flat", [[Recv(problem.root, own)]])
    block = chunks(Buf.IN, offsets(problem.counts))
    sends = [Send(peer, block[peer]) for peer in others(rank, problem.size)]
    return finish(problem, rank, "flat", [[Copy(own, block[rank]), *sends]])


def all_to_all(problem: Problem, rank: int) -> Plan:
    """Exchange all blocks at once."""
    size, counts = problem.size, problem.counts
    row = chunks(Buf.IN, offsets(counts[rank * size : (rank + 1) * size]))
    column = chunks(Buf.OUT, offsets(counts[rank::size]))
    sends = [Send(peer, row[peer]) for peer in others(rank, size)]
    receives = [Recv(peer, column[peer]) for peer in others(rank, size)]
    return finish(problem, rank, "flat", [[Copy(column[rank], row[rank]), *sends, *receives]])


def scan(problem: Problem, rank: int) -> Plan:
    """Send the own contribution to all higher ranks; each folds from the left."""
    return _prefix(problem, rank, inclusive=True)


def exscan(problem: Problem, rank: int) -> Plan:
    """The same without the own contribution; rank 0 gets nothing."""
    return _prefix(problem, rank, inclusive=False)


def _prefix(problem: Problem, rank: int, inclusive: bool) -> Plan:
    count = problem.counts[0]
    own, result = whole(Buf.IN, count), whole(Buf.OUT, count)
    arrived = [result, *(Slice(Buf.TMP, i * count, (i + 1) * count) for i in range(rank - 1))]
    sends = [Send(peer, own) for peer in range(rank + 1, problem.size)]
    receives = [Recv(peer, arrived[peer]) for peer in range(rank)]
    folds: list[Step] = [Reduce(result, slot) for slot in arrived[1:]]
    if inclusive:
        folds.append(Reduce(result, own) if rank else Copy(result, own))
    return finish(problem, rank, "flat", [[*sends, *receives, *folds]])


def barrier(problem: Problem, rank: int) -> Plan:
    """Send a token to every rank and receive one from each."""
    peers = others(rank, problem.size)
    arrived = {peer: Slice(Buf.TMP, turn, turn + 1) for turn, peer in enumerate(peers, 1)}
    sends: list[Step] = [Send(peer, TOKEN) for peer in peers]
    receives: list[Step] = [Recv(peer, arrived[peer]) for peer in peers]
    return finish(problem, rank, "flat", [[*sends, *receives]])
