"""Hierarchical: inside each host first, then between hosts, then inside again.

The parts are plans of other families. Hosts may have different numbers of ranks, in any arrangement. Each
host has a leader: the root on its own host, elsewhere the lowest rank. Large all_reduces on hosts of equal
size have no leaders: the k-th rank of every host reduces the k-th shard, so all ranks use the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from unisono.plans.algorithms import (
    chain,
    dissemination,
    doubling,
    pairwise,
    ring,
    tree,
)
from unisono.plans.algorithms.compose import embed, padded
from unisono.plans.amounts import ZERO, Amount, even
from unisono.plans.layout import Rounds, chunks, finish, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Shape, Step

__all__ = [
    "all_reduce",
    "barrier",
    "broadcast",
    "group_of",
    "groups_of",
    "long_all_reduce",
    "long_broadcast",
    "long_reduce",
    "reduce",
]

Group: TypeAlias = tuple[int, ...]
Starts: TypeAlias = Mapping[Buf, tuple[Buf, Amount]]
Builder: TypeAlias = Callable[[Shape, int], Plan]


def all_reduce(shape: Shape, rank: int) -> Plan:
    """Reduce inside hosts, all_reduce between them, broadcast inside; few rounds, for short vectors."""
    return _led_all_reduce(
        shape, rank, "hierarchical", tree.reduce, doubling.doubling_all_reduce, tree.broadcast
    )


def long_all_reduce(shape: Shape, rank: int) -> Plan:
    """The same with fewer bytes, for long ones: by shards if hosts have as many ranks, else by chains."""
    groups = groups_of(shape)
    if len({len(group) for group in groups}) == 1 and len(groups[0]) > 1:
        return _sharded_all_reduce(shape, rank, groups)
    return _led_all_reduce(shape, rank, "hierarchical_long", chain.reduce, ring.all_reduce, chain.broadcast)


def _led_all_reduce(
    shape: Shape, rank: int, algorithm: str, to_leader: Builder, between: Builder, from_leader: Builder
) -> Plan:
    """Reduce to the leader of each host, all_reduce between leaders, broadcast from them; in place."""
    count, groups = shape.counts[0], groups_of(shape)
    starts = _everything_in(Buf.OUT)
    phases = [
        _phase(rank, groups, to_leader, _vector("reduce", count), starts),
        _phase(rank, [_leaders(groups)], between, _vector("all_reduce", count), starts),
        _phase(rank, groups, from_leader, _vector("broadcast", count), starts),
    ]
    return _joined(shape, rank, algorithm, phases)


def _sharded_all_reduce(shape: Shape, rank: int, groups: Sequence[Group]) -> Plan:
    """Reduce-scatter inside hosts, all_reduce each shard between them, gather inside; all in place."""
    members = len(groups[0])
    shards = chunks(Buf.OUT, even(shape.counts[0], members))
    counts = tuple(shard.count for shard in shards)
    member = group_of(rank, groups).index(rank)
    vector, shard, scratch = (Buf.OUT, ZERO), (Buf.OUT, shards[member].start), (Buf.TMP, ZERO)
    across = list(zip(*groups, strict=True))
    phases = [
        _phase(
            rank,
            groups,
            pairwise.reduce_scatter,
            lambda group: Shape("reduce_scatter", members, counts),
            {Buf.IN: vector, Buf.OUT: shard, Buf.TMP: scratch},
        ),
        _phase(rank, across, ring.all_reduce, _vector("all_reduce", counts[member]), {Buf.OUT: shard}),
        _phase(
            rank,
            groups,
            ring.all_gather,
            lambda group: Shape("all_gather", members, counts),
            {Buf.IN: shard, Buf.OUT: vector, Buf.TMP: scratch},
        ),
    ]
    return _joined(shape, rank, "hierarchical_long", phases)


def reduce(shape: Shape, rank: int) -> Plan:
    """Reduce to the leader of each host, then from the leaders to the root; few rounds."""
    return _reduce(shape, rank, "hierarchical", tree.reduce)


def long_reduce(shape: Shape, rank: int) -> Plan:
    """The same through chains, for long vectors."""
    return _reduce(shape, rank, "hierarchical_long", chain.reduce)


def _reduce(shape: Shape, rank: int, algorithm: str, part: Builder) -> Plan:
    count, root = shape.counts[0], shape.root
    groups = groups_of(shape)
    leaders = _leaders(groups, root)

    # A leader other than the root reduces into `tmp`; a host with one rank has nothing to reduce.
    keeps_sum = rank in leaders and rank != root and len(group_of(rank, groups)) > 1
    sum_ = (Buf.TMP, ZERO) if keeps_sum else (Buf.OUT, ZERO) if rank == root else (Buf.IN, ZERO)
    scratch = (Buf.TMP, count if keeps_sum else ZERO)
    inside = {Buf.IN: (Buf.IN, ZERO), Buf.OUT: sum_, Buf.TMP: scratch}
    between = {Buf.IN: sum_, Buf.OUT: (Buf.OUT, ZERO), Buf.TMP: scratch}
    phases = [
        _phase(rank, groups, part, _vector("reduce", count, root), inside),
        _phase(rank, [leaders], part, _vector("reduce", count, root), between),
    ]
    first = [Copy(whole(Buf.TMP, count), whole(Buf.IN, count))] if keeps_sum else []
    return _joined(shape, rank, algorithm, phases, first)


def broadcast(shape: Shape, rank: int) -> Plan:
    """Broadcast from the root to the leaders, then inside hosts; few rounds."""
    return _broadcast(shape, rank, "hierarchical", tree.broadcast)


def long_broadcast(shape: Shape, rank: int) -> Plan:
    """The same through chains, for long vectors."""
    return _broadcast(shape, rank, "hierarchical_long", chain.broadcast)


def _broadcast(shape: Shape, rank: int, algorithm: str, part: Builder) -> Plan:
    count, root = shape.counts[0], shape.root
    groups = groups_of(shape)
    starts = _everything_in(Buf.OUT)
    phases = [
        _phase(rank, [_leaders(groups, root)], part, _vector("broadcast", count, root), starts),
        _phase(rank, groups, part, _vector("broadcast", count, root), starts),
    ]
    return _joined(shape, rank, algorithm, phases)


def barrier(shape: Shape, rank: int) -> Plan:
    """A token to the leader, a barrier of the leaders, a token from the leader."""
    groups = groups_of(shape)

    def up(part: Shape, member: int) -> Plan:
        return finish(part, member, "tree", tree.token_up(part.size, member))

    def down(part: Shape, member: int) -> Plan:
        return finish(part, member, "tree", tree.token_down(part.size, member))

    def barrier_of(group: Group) -> Shape:
        return Shape("barrier", len(group))

    starts = _everything_in(Buf.TMP)
    phases = [
        _phase(rank, groups, up, barrier_of, starts),
        _phase(rank, [_leaders(groups)], dissemination.barrier, barrier_of, starts),
        _phase(rank, groups, down, barrier_of, starts),
    ]
    return _joined(shape, rank, "hierarchical", phases)


class _Phase(NamedTuple):
    """A part of a plan: this rank's rounds, and which of them are pipelines."""

    rounds: Rounds
    pipelines: Sequence[tuple[int, int]]


def _phase(
    rank: int,
    groups: Sequence[Group],
    builder: Builder,
    shape_of: Callable[[Group], Shape],
    starts: Starts,
) -> _Phase:
    """Solve a problem in all groups at once; the rounds are empty if this rank is in no group."""
    # Parts of equal size have the same number of rounds, and the longest one sets the pace.
    by_size = {len(group): group for group in groups}
    pace = max((builder(shape_of(group), 0) for group in by_size.values()), key=lambda plan: len(plan.rounds))
    length = len(pace.rounds)
    if not any(rank in group for group in groups):
        return _Phase(padded([], length), pace.pipelines)
    group = group_of(rank, groups)
    plan = builder(shape_of(group), group.index(rank))
    return _Phase(padded(embed(plan.rounds, group, starts), length), pace.pipelines)


def _joined(
    shape: Shape, rank: int, algorithm: str, phases: Sequence[_Phase], first: Sequence[Step] = ()
) -> Plan:
    """Put phases one after the other, with local steps before all."""
    rounds: list[Sequence[Step]] = []
    pipelines: list[tuple[int, int]] = []
    for phase in phases:
        pipelines += [(len(rounds) + start, len(rounds) + stop) for start, stop in phase.pipelines]
        rounds += phase.rounds
    return finish(shape, rank, algorithm, with_first(first, rounds), pipelines)


def _vector(collective: str, count: Amount, root: int = 0) -> Callable[[Group], Shape]:
    """Return the shape of a group: a vector from or to its leader."""
    return lambda group: Shape(collective, len(group), (count,), group.index(_leader(group, root)))


def _everything_in(buf: Buf) -> Starts:
    return {Buf.IN: (buf, ZERO), Buf.OUT: (buf, ZERO), Buf.TMP: (Buf.TMP, ZERO)}


def groups_of(shape: Shape) -> list[Group]:
    """Return the ranks of each host, ascending; hosts in the order of their first rank."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(shape.hosts or (0,) * shape.size):
        by_host.setdefault(host, []).append(rank)
    return [tuple(ranks) for ranks in by_host.values()]


def group_of(rank: int, groups: Sequence[Group]) -> Group:
    """Return the ranks of the host of a rank."""
    return next(group for group in groups if rank in group)


def _leader(group: Group, root: int) -> int:
    return root if root in group else group[0]


def _leaders(groups: Sequence[Group], root: int = 0) -> Group:
    return tuple(_leader(group, root) for group in groups)
