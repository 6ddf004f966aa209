"""Hierarchical: inside each host first, then between hosts, then inside again.

Knows which ranks share a host; the parts are other families' plans. Hosts may have different numbers of
ranks, in any arrangement. Each has a leader: the root in its own host, elsewhere the lowest rank. Large
all_reduces on hosts of equal size do without: the k-th rank of every host cares for the k-th shard, so all
of them use the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise as neighbours
from typing import Final, TypeAlias

from unisono.plans import chain, dissemination, doubling, pairwise, ring, tree
from unisono.plans.compose import embed, padded
from unisono.plans.layout import Rounds, even_bounds, finish, whole, with_first
from unisono.plans.steps import Buf, Copy, Plan, Problem, Step

__all__ = ["all_reduce", "barrier", "broadcast", "reduce"]

Group: TypeAlias = tuple[int, ...]
Places: TypeAlias = Mapping[Buf, tuple[Buf, int]]

# From 32 Ki elements (128 KiB of float32) on, parts that move fewer bytes win over those with fewer rounds.
_LARGE_COUNT: Final = 32 * 1024


def all_reduce(problem: Problem, rank: int) -> Plan:
    """Reduce inside hosts, all_reduce between them, spread inside."""
    count = problem.counts[0]
    groups = _groups(problem)
    is_large = count >= _LARGE_COUNT
    equal = len({len(group) for group in groups}) == 1
    if is_large and equal and len(groups[0]) > 1:
        return _sharded_all_reduce(problem, rank, groups)
    to_leader, between, from_leader = (
        (chain.reduce, ring.all_reduce, chain.broadcast)
        if is_large
        else (tree.reduce, doubling.doubling_all_reduce, tree.broadcast)
    )
    everywhere = _everything_in(Buf.OUT)
    phases = [
        _phase(rank, groups, to_leader, lambda group: Problem("reduce", len(group), (count,)), everywhere),
        _phase(
            rank,
            [_leaders(groups)],
            between,
            lambda group: Problem("all_reduce", len(group), (count,)),
            everywhere,
        ),
        _phase(
            rank, groups, from_leader, lambda group: Problem("broadcast", len(group), (count,)), everywhere
        ),
    ]
    return _joined(problem, rank, phases)


def _sharded_all_reduce(problem: Problem, rank: int, groups: Sequence[Group]) -> Plan:
    """Reduce-scatter inside hosts, all_reduce each shard between them, gather inside; all in place."""
    group = _group_of(rank, groups)
    assert group is not None
    bounds = even_bounds(problem.counts[0], len(group))
    shards = tuple(stop - start for start, stop in neighbours(bounds))
    member = group.index(rank)
    shard = (Buf.OUT, bounds[member])
    vector = (Buf.OUT, 0)
    scratch = (Buf.TMP, 0)
    across = list(zip(*groups, strict=True))
    phases = [
        _phase(
            rank,
            groups,
            pairwise.reduce_scatter,
            lambda group: Problem("reduce_scatter", len(group), shards),
            {Buf.IN: vector, Buf.OUT: shard, Buf.TMP: scratch},
        ),
        _phase(
            rank,
            across,
            ring.all_reduce,
            lambda group: Problem("all_reduce", len(group), (shards[member],)),
            {Buf.OUT: shard, Buf.TMP: scratch},
        ),
        _phase(
            rank,
            groups,
            ring.all_gather,
            lambda group: Problem("all_gather", len(group), shards),
            {Buf.IN: shard, Buf.OUT: vector, Buf.TMP: scratch},
        ),
    ]
    return _joined(problem, rank, phases)


def reduce(problem: Problem, rank: int) -> Plan:
    """Reduce to the leader of each host, then from the leaders to the root."""
    count, root = problem.counts[0], problem.root
    groups = _groups(problem)
    leaders = _leaders(groups, root)
    group = _group_of(rank, groups)
    assert group is not None
    part = chain.reduce if count >= _LARGE_COUNT else tree.reduce

    # A leader other than the root sums up in `tmp`; a host of one rank has nothing to sum up.
    keeps_sum = rank in leaders and rank != root and len(group) > 1
    sum_ = (Buf.TMP, 0) if keeps_sum else (Buf.OUT, 0) if rank == root else (Buf.IN, 0)
    scratch = (Buf.TMP, count if keeps_sum else 0)
    inside = _phase(
        rank,
        groups,
        part,
        lambda group: Problem("reduce", len(group), (count,), group.index(_leader(group, root))),
        {Buf.IN: (Buf.IN, 0), Buf.OUT: sum_, Buf.TMP: scratch},
    )
    between = _phase(
        rank,
        [leaders],
        part,
        lambda group: Problem("reduce", len(group), (count,), group.index(root)),
        {Buf.IN: sum_, Buf.OUT: (Buf.OUT, 0), Buf.TMP: scratch},
    )
    first = [Copy(whole(Buf.TMP, count), whole(Buf.IN, count))] if keeps_sum else []
    return _joined(problem, rank, [inside, between], first, tmp_start=scratch[1])


def broadcast(problem: Problem, rank: int) -> Plan:
    """Broadcast from the root to the leaders, then inside hosts."""
    count, root = problem.counts[0], problem.root
    groups = _groups(problem)
    part = chain.broadcast if count >= _LARGE_COUNT else tree.broadcast
    everywhere = _everything_in(Buf.OUT)
    phases = [
        _phase(
            rank,
            [_leaders(groups, root)],
            part,
            lambda group: Problem("broadcast", len(group), (count,), group.index(root)),
            everywhere,
        ),
        _phase(
            rank,
            groups,
            part,
            lambda group: Problem("broadcast", len(group), (count,), group.index(_leader(group, root))),
            everywhere,
        ),
    ]
    return _joined(problem, rank, phases)


def barrier(problem: Problem, rank: int) -> Plan:
    """Tell the leader, let the leaders meet, and let them tell."""
    groups = _groups(problem)

    def up(part: Problem, member: int) -> Plan:
        return finish(part, member, "tree", tree.token_up(part.size, member), tmp_count=1)

    def down(part: Problem, member: int) -> Plan:
        return finish(part, member, "tree", tree.token_down(part.size, member), tmp_count=1)

    def meeting(group: Group) -> Problem:
        return Problem("barrier", len(group))

    everywhere = _everything_in(Buf.TMP)
    phases = [
        _phase(rank, groups, up, meeting, everywhere),
        _phase(rank, [_leaders(groups)], dissemination.barrier, meeting, everywhere),
        _phase(rank, groups, down, meeting, everywhere),
    ]
    return _joined(problem, rank, phases)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank does in one phase."""

    rounds: Rounds
    tmp_count: int = 0


def _phase(
    rank: int,
    groups: Sequence[Group],
    builder: Callable[[Problem, int], Plan],
    problem_of: Callable[[Group], Problem],
    places: Places,
) -> _Part:
    """Solve a problem in each group at once; return this rank's part, idle if it is in none of them."""
    # Parts of equal size take equally many rounds.
    by_size = {len(group): group for group in groups}
    length = max(len(builder(problem_of(group), 0).rounds) for group in by_size.values())
    group = _group_of(rank, groups)
    if group is None:
        return _Part(padded([], length))
    plan = builder(problem_of(group), group.index(rank))
    return _Part(padded(embed(plan.rounds, group, places), length), plan.tmp_count)


def _joined(
    problem: Problem, rank: int, parts: Sequence[_Part], first: Sequence[Step] = (), tmp_start: int = 0
) -> Plan:
    rounds = [steps for part in parts for steps in part.rounds]
    tmp_count = tmp_start + max(part.tmp_count for part in parts)
    return finish(problem, rank, "hierarchical", with_first(first, rounds), tmp_count=tmp_count)


def _everything_in(buf: Buf) -> Places:
    return {Buf.IN: (buf, 0), Buf.OUT: (buf, 0), Buf.TMP: (Buf.TMP, 0)}


def _groups(problem: Problem) -> list[Group]:
    """Return the ranks of each host, ascending; hosts in the order of their first rank."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(problem.hosts or (0,) * problem.size):
        by_host.setdefault(host, []).append(rank)
    return [tuple(ranks) for ranks in by_host.values()]


def _group_of(rank: int, groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if rank in group), None)


def _leader(group: Group, root: int) -> int:
    return root if root in group else group[0]


def _leaders(groups: Sequence[Group], root: int | None = None) -> Group:
    return tuple(group[0] if root is None else _leader(group, root) for group in groups)
