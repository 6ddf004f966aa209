"""Flat: every rank exchanges messages with every rank concerned, at once.

One round, as many messages as there are pairs: for few ranks and few bytes. Contributions are kept apart
until all have arrived, so reductions follow the canonical tree, and prefixes the left fold.
"""

from __future__ import annotations

from unisono.plans.algorithms.canonical import fold
from unisono.plans.amounts import ONE, blocks, slots
from unisono.plans.layout import TOKEN, Region, chunks, finish, whole
from unisono.plans.steps import Buf, Copy, Plan, Recv, Reduce, Send, Shape, Step

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


def side_by_side(rank: int, size: int, own: Region) -> list[Region]:
    """Return a slot for each rank's contribution: `own`, and one in `tmp` for each of the others."""
    apart = chunks(Buf.TMP, slots(size - 1, own.count))
    return [*apart[:rank], own, *apart[rank:]]


def all_reduce(shape: Shape, rank: int) -> Plan:
    """Send the whole vector to all; each reduces all of them."""
    size, count = shape.size, shape.counts[0]
    data = whole(Buf.OUT, count)
    slot = side_by_side(rank, size, data)
    sends = [Send(peer, data) for peer in others(rank, size)]
    receives = [Recv(peer, slot[peer]) for peer in others(rank, size)]
    steps: list[Step] = [*sends, *receives, *fold(slot, keep=rank)]
    return finish(shape, rank, "flat", [steps])


def reduce(shape: Shape, rank: int) -> Plan:
    """Send the whole vector to the root, which reduces all of them."""
    size, count, root = shape.size, shape.counts[0], shape.root
    if rank != root:
        return finish(shape, rank, "flat", [[Send(root, whole(Buf.IN, count))]])
    slot = side_by_side(rank, size, whole(Buf.OUT, count))
    receives = [Recv(peer, slot[peer]) for peer in others(rank, size)]
    return finish(shape, rank, "flat", [[*receives, *fold(slot, keep=rank)]])


def broadcast(shape: Shape, rank: int) -> Plan:
    """Send from the root to every rank."""
    data = whole(Buf.OUT, shape.counts[0])
    if rank != shape.root:
        return finish(shape, rank, "flat", [[Recv(shape.root, data)]])
    return finish(shape, rank, "flat", [[Send(peer, data) for peer in others(rank, shape.size)]])


def all_gather(shape: Shape, rank: int) -> Plan:
    """Send the own block to every rank."""
    block = chunks(Buf.OUT, blocks(shape.counts))
    own = whole(Buf.IN, shape.counts[rank])
    sends = [Send(peer, own) for peer in others(rank, shape.size)]
    receives = [Recv(peer, block[peer]) for peer in others(rank, shape.size)]
    return finish(shape, rank, "flat", [[Copy(block[rank], own), *sends, *receives]])


def gather(shape: Shape, rank: int) -> Plan:
    """Send the own block to the root."""
    own = whole(Buf.IN, shape.counts[rank])
    if rank != shape.root:
        return finish(shape, rank, "flat", [[Send(shape.root, own)]])
    block = chunks(Buf.OUT, blocks(shape.counts))
    receives = [Recv(peer, block[peer]) for peer in others(rank, shape.size)]
    return finish(shape, rank, "flat", [[Copy(block[rank], own), *receives]])


def scatter(shape: Shape, rank: int) -> Plan:
    """Send every rank its block from the root."""
    own = whole(Buf.OUT, shape.counts[rank])
    if rank != shape.root:
        return finish(shape, rank, "flat", [[Recv(shape.root, own)]])
    block = chunks(Buf.IN, blocks(shape.counts))
    sends = [Send(peer, block[peer]) for peer in others(rank, shape.size)]
    return finish(shape, rank, "flat", [[Copy(own, block[rank]), *sends]])


def all_to_all(shape: Shape, rank: int) -> Plan:
    """Exchange all blocks at once."""
    size, counts = shape.size, shape.counts
    row = chunks(Buf.IN, blocks(counts[rank * size : (rank + 1) * size]))
    column = chunks(Buf.OUT, blocks(counts[rank::size]))
    sends = [Send(peer, row[peer]) for peer in others(rank, size)]
    receives = [Recv(peer, column[peer]) for peer in others(rank, size)]
    return finish(shape, rank, "flat", [[Copy(column[rank], row[rank]), *sends, *receives]])


def scan(shape: Shape, rank: int) -> Plan:
    """Send the own contribution to all higher ranks; each folds from the left."""
    return _prefix(shape, rank, inclusive=True)


def exscan(shape: Shape, rank: int) -> Plan:
    """The same without the own contribution; rank 0 gets nothing."""
    return _prefix(shape, rank, inclusive=False)


def _prefix(shape: Shape, rank: int, inclusive: bool) -> Plan:
    count = shape.counts[0]
    own, result = whole(Buf.IN, count), whole(Buf.OUT, count)
    arrived = [result, *chunks(Buf.TMP, slots(max(0, rank - 1), count))]
    sends = [Send(peer, own) for peer in range(rank + 1, shape.size)]
    receives = [Recv(peer, arrived[peer]) for peer in range(rank)]
    folds: list[Step] = [Reduce(result, slot) for slot in arrived[1:]]
    if inclusive:
        folds.append(Reduce(result, own) if rank else Copy(result, own))
    return finish(shape, rank, "flat", [[*sends, *receives, *folds]])


def barrier(shape: Shape, rank: int) -> Plan:
    """Send a token to every rank and receive one from each."""
    peers = others(rank, shape.size)
    arrived = dict(zip(peers, chunks(Buf.TMP, slots(len(peers), ONE, start=ONE)), strict=True))
    sends: list[Step] = [Send(peer, TOKEN) for peer in peers]
    receives: list[Step] = [Recv(peer, arrived[peer]) for peer in peers]
    return finish(shape, rank, "flat", [[*sends, *receives]])
