"""Hierarchical: inside each host first, then between hosts, then inside again.

The parts are plans of other families. Hosts may have different numbers of ranks, in any arrangement. Each
host has a leader: the root on its own host, elsewhere the lowest rank. Large all_reduces on hosts of equal
size have no leaders: the k-th rank of every host reduces the k-th shard, so all ranks use the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise as neighbours
from typing import Final, TypeAlias

from unisono.plans.algorithms import (
    chain,
    dissemination,
    doubling,
    pairwise,
    ring,
    tree,
)
from unisono.plans.algorithms.compose import embed, padded
from unisono.plans.layout import Rounds, even_bounds, finish, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Problem

__all__ = ["all_reduce", "barrier", "broadcast", "group_of", "groups_of", "reduce"]

Group: TypeAlias = tuple[int, ...]
Starts: TypeAlias = Mapping[Buf, tuple[Buf, int]]

# From 32 Ki elements (128 KiB of float32) on, parts that move fewer bytes beat those with fewer rounds.
_LARGE_COUNT: Final = 32 * 1024


def all_reduce(problem: Problem, rank: int) -> Plan:
    """Reduce inside hosts, all_reduce between them, broadcast inside."""
    count = problem.counts[0]
    groups = groups_of(problem)
    is_large = count >= _LARGE_COUNT
    equal = len({len(group) for group in groups}) == 1
    if is_large and equal and len(groups[0]) > 1:
        return _sharded_all_reduce(problem, rank, groups)
    to_leader, between, from_leader = (
        (chain.reduce, ring.all_reduce, chain.broadcast)
        if is_large
        else (tree.reduce, doubling.doubling_all_reduce, tree.broadcast)
    )
    starts = _everything_in(Buf.OUT)
    rounds = [
        *_phase(rank, groups, to_leader, _vector("reduce", count), starts),
        *_phase(rank, [_leaders(groups)], between, _vector("all_reduce", count), starts),
        *_phase(rank, groups, from_leader, _vector("broadcast", count), starts),
    ]
    return finish(problem, rank, "hierarchical", rounds)


def _sharded_all_reduce(problem: Problem, rank: int, groups: Sequence[Group]) -> Plan:
    """Reduce-scatter inside hosts, all_reduce each shard between them, gather inside; all in place."""
    members = len(groups[0])
    bounds = even_bounds(problem.counts[0], members)
    counts = tuple(stop - start for start, stop in neighbours(bounds))
    member = group_of(rank, groups).index(rank)
    vector, shard, scratch = (Buf.OUT, 0), (Buf.OUT, bounds[member]), (Buf.TMP, 0)
    across = list(zip(*groups, strict=True))
    rounds = [
        *_phase(
            rank,
            groups,
            pairwise.reduce_scatter,
            lambda group: Problem("reduce_scatter", members, counts),
            {Buf.IN: vector, Buf.OUT: shard, Buf.TMP: scratch},
        ),
        *_phase(rank, across, ring.all_reduce, _vector("all_reduce", counts[member]), {Buf.OUT: shard}),
        *_phase(
            rank,
            groups,
            ring.all_gather,
            lambda group: Problem("all_gather", members, counts),
            {Buf.IN: shard, Buf.OUT: vector, Buf.TMP: scratch},
        ),
    ]
    return finish(problem, rank, "hierarchical", rounds)


def reduce(problem: Problem, rank: int) -> Plan:
    """Reduce to the leader of each host, then from the leaders to the root."""
    count, root = problem.counts[0], problem.root
    groups = groups_of(problem)
    leaders = _leaders(groups, root)
    part = chain.reduce if count >= _LARGE_COUNT else tree.reduce

    # A leader other than the root reduces into `tmp`; a host with one rank has nothing to reduce.
    keeps_sum = rank in leaders and rank != root and len(group_of(rank, groups)) > 1
    sum_ = (Buf.TMP, 0) if keeps_sum else (Buf.OUT, 0) if rank == root else (Buf.IN, 0)
    scratch = (Buf.TMP, count if keeps_sum else 0)
    inside = {Buf.IN: (Buf.IN, 0), Buf.OUT: sum_, Buf.TMP: scratch}
    between = {Buf.IN: sum_, Buf.OUT: (Buf.OUT, 0), Buf.TMP: scratch}
    rounds = [
        *_phase(rank, groups, part, _vector("reduce", count, root), inside),
        *_phase(rank, [leaders], part, _vector("reduce", count, root), between),
    ]
    first = [Copy(whole(Buf.TMP, count), whole(Buf.IN, count))] if keeps_sum else []
    return finish(problem, rank, "hierarchical", with_first(first, rounds))


def broadcast(problem: Problem, rank: int) -> Plan:
    """Broadcast from the root to the leaders, then inside hosts."""
    count, root = problem.counts[0], problem.root
    groups = groups_of(problem)
    part = chain.broadcast if count >= _LARGE_COUNT else tree.broadcast
    starts = _everything_in(Buf.OUT)
    rounds = [
        *_phase(rank, [_leaders(groups, root)], part, _vector("broadcast", count, root), starts),
        *_phase(rank, groups, part, _vector("broadcast", count, root), starts),
    ]
    return finish(problem, rank, "hierarchical", rounds)


def barrier(problem: Problem, rank: int) -> Plan:
    """A token to the leader, a barrier of the leaders, a token from the leader."""
    groups = groups_of(problem)

    def up(part: Problem, member: int) -> Plan:
        return finish(part, member, "tree", tree.token_up(part.size, member))

    def down(part: Problem, member: int) -> Plan:
        return finish(part, member, "tree", tree.token_down(part.size, member))

    def barrier_of(group: Group) -> Problem:
        return Problem("barrier", len(group))

    starts = _everything_in(Buf.TMP)
    rounds = [
        *_phase(rank, groups, up, barrier_of, starts),
        *_phase(rank, [_leaders(groups)], dissemination.barrier, barrier_of, starts),
        *_phase(rank, groups, down, barrier_of, starts),
    ]
    return finish(problem, rank, "hierarchical", rounds)


def _phase(
    rank: int,
    groups: Sequence[Group],
    builder: Callable[[Problem, int], Plan],
    problem_of: Callable[[Group], Problem],
    starts: Starts,
) -> Rounds:
    """Solve a problem in all groups at once; return this rank's rounds, empty if it is in no group."""
    # Parts of equal size have the same number of rounds.
    by_size = {len(group): group for group in groups}
    length = max(len(builder(problem_of(group), 0).rounds) for group in by_size.values())
    if not any(rank in group for group in groups):
        return padded([], length)
    group = group_of(rank, groups)
    plan = builder(problem_of(group), group.index(rank))
    return padded(embed(plan.rounds, group, starts), length)


def _vector(collective: str, count: int, root: int = 0) -> Callable[[Group], Problem]:
    """Return the problem of a group: a vector from or to its leader."""
    return lambda group: Problem(collective, len(group), (count,), group.index(_leader(group, root)))


def _everything_in(buf: Buf) -> Starts:
    return {Buf.IN: (buf, 0), Buf.OUT: (buf, 0), Buf.TMP: (Buf.TMP, 0)}


def groups_of(problem: Problem) -> list[Group]:
    """Return the ranks of each host, ascending; hosts in the order of their first rank."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(problem.hosts or (0,) * problem.size):
        by_host.setdefault(host, []).append(rank)
    return [tuple(ranks) for ranks in by_host.values()]


def group_of(rank: int, groups: Sequence[Group]) -> Group:
    """Return the ranks of the host of a rank."""
    return next(group for group in groups if rank in group)


def _leader(group: Group, root: int) -> int:
    return root if root in group else group[0]


def _leaders(groups: Sequence[Group], root: int = 0) -> Group:
    return tuple(_leader(group, root) for group in groups)
