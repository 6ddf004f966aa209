"""Chain: ranks in a row, and everything passes through it once.

Every rank sends and receives each byte once. The executor's pieces follow each other through the chain, so
after the first has passed, all links are busy: for large broadcasts and reductions to one rank.
"""

from __future__ import annotations

from unisono.plans.layout import finish, whole
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Send, Shape, Step

__all__ = ["broadcast", "reduce"]


def broadcast(shape: Shape, rank: int) -> Plan:
    """Forward the vector from the root through the ranks after it."""
    size = shape.size
    distance = (rank - shape.root) % size
    data = whole(Buf.OUT, shape.counts[0])
    rounds: list[list[Step]] = [[] for _ in range(size - 1)]
    if distance > 0:
        rounds[distance - 1].append(Recv((rank - 1) % size, data))
    if distance + 1 < size:
        rounds[distance].append(Send((rank + 1) % size, data))
    return finish(shape, rank, "chain", rounds, [(0, size - 1)])


def reduce(shape: Shape, rank: int) -> Plan:
    """Add up the vector from the rank before the root backwards round to the root."""
    size, count = shape.size, shape.counts[0]
    distance = (rank - shape.root) % size
    mine = whole(Buf.IN, count)
    sum_ = whole(Buf.OUT if distance == 0 else Buf.TMP, count)
    is_end = distance == size - 1
    rounds: list[list[Step]] = [[] for _ in range(size - 1)]
    # The far end sends in the first round; each rank before it one round later.
    received = size - 2 - distance
    if not is_end:
        rounds[received] += [Copy(sum_, mine)] if distance > 0 else []
        rounds[received].append(RecvReduce((rank + 1) % size, sum_))
    if distance > 0:
        rounds[received + 1].append(Send((rank - 1) % size, mine if is_end else sum_))
    return finish(shape, rank, "chain", rounds, [(0, size - 1)])
