"""Hierarchical, for blocks: every block crosses from host to host once; all ranks share that work.

The block of the q-th rank of a host is carried, on each other host, by its q-th rank (modulo its number of
ranks). So all ranks use the network, whatever the numbers of ranks, and no rank holds everything.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.algorithms.compose import padded
from unisono.plans.algorithms.hierarchical import group_of, groups_of
from unisono.plans.amounts import blocks, slots
from unisono.plans.layout import Region, Rounds, chunks, finish, whole, with_first, with_last
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Send, Shape, Slice, Step

__all__ = ["all_gather", "all_to_all", "reduce_scatter"]


def all_gather(shape: Shape, rank: int) -> Plan:
    """Send the own block once to each other host, then forward received blocks inside the host."""
    hosts = _Hosts(shape, rank)
    block = chunks(Buf.OUT, blocks(shape.counts))
    own = whole(Buf.IN, shape.counts[rank])
    between: list[Step] = [Send(carrier, own) for carrier in hosts.carriers()]
    between += [Recv(source, block[source]) for source in hosts.carried_for(rank)]

    def held(member: int) -> list[int]:
        return [member, *hosts.carried_for(member)]

    inside: list[list[Step]] = [
        [
            *(Send(after, block[source]) for source in held(rank)),
            *(Recv(before, block[source]) for source in held(before)),
        ]
        for before, after in hosts.turns()
    ]
    rounds = with_first([Copy(block[rank], own)], [between, *hosts.padded(inside)])
    return finish(shape, rank, "hierarchical", rounds)


def reduce_scatter(shape: Shape, rank: int) -> Plan:
    """Reduce inside the host for the ranks of other hosts, then send the sums to their owners."""
    hosts = _Hosts(shape, rank)
    mine = chunks(Buf.IN, blocks(shape.counts))
    result = whole(Buf.OUT, shape.counts[rank])
    cared = hosts.carried_for(rank)
    if len(hosts.own) > 1:
        sums = dict(zip(cared, chunks(Buf.TMP, blocks(shape.counts[d] for d in cared)), strict=True))
    else:
        sums = {destination: mine[destination] for destination in cared}  # nothing to add
    sums[rank] = result
    copies = [Copy(sums[d], mine[d]) for d in (rank, *cared) if sums[d] != mine[d]]
    inside: list[list[Step]] = [
        [
            *(Send(after, mine[destination]) for destination in (after, *hosts.carried_for(after))),
            *(RecvReduce(before, sums[destination]) for destination in (rank, *cared)),
        ]
        for before, after in hosts.turns()
    ]
    # One host per round: later sums are added to the same slice.
    between: list[list[Step]] = [
        [
            *(Send(destination, sums[destination]) for destination in cared if destination in there),
            RecvReduce(carrier, result),
        ]
        for there, carrier in zip(hosts.others, reversed(hosts.carriers()), strict=True)
    ]
    return finish(shape, rank, "hierarchical", with_first(copies, [*hosts.padded(inside), *between]))


def all_to_all(shape: Shape, rank: int) -> Plan:
    """Collect inside the host what goes to one remote rank, then send it in one message; equal blocks."""
    hosts = _Hosts(shape, rank)
    size, count = shape.size, shape.counts[0]
    row, column = (chunks(buf, slots(size, count)) for buf in (Buf.IN, Buf.OUT))
    cared = hosts.carried_for(rank)
    # For each destination that we carry for, the blocks of our host's ranks side by side.
    members = len(hosts.own)
    bundles = dict(zip(cared, chunks(Buf.TMP, slots(len(cared), count * members)), strict=True))

    def part(destination: int, member: int) -> Region:
        start = bundles[destination].start + count * hosts.own.index(member)
        return Slice(Buf.TMP, start, start + count)

    copies = [Copy(column[rank], row[rank]), *(Copy(part(d, rank), row[d]) for d in cared)]
    inside: list[list[Step]] = [
        [
            *(Send(after, row[destination]) for destination in (after, *hosts.carried_for(after))),
            Recv(before, column[before]),
            *(Recv(before, part(destination, before)) for destination in cared),
        ]
        for before, after in hosts.turns()
    ]
    between: list[Step] = [Send(destination, bundle) for destination, bundle in bundles.items()]
    last: list[Step] = []
    end = count * (len(cared) * members)
    for carrier in hosts.carriers():
        group = group_of(carrier, hosts.groups)
        if group[-1] - group[0] + 1 == len(group):
            # Blocks of consecutive ranks are adjacent in `out`.
            between.append(Recv(carrier, Slice(Buf.OUT, column[group[0]].start, column[group[-1]].stop)))
            continue
        arrived = Slice(Buf.TMP, end, end := end + count * len(group))
        between.append(Recv(carrier, arrived))
        parts = chunks(Buf.TMP, slots(len(group), count, start=arrived.start))
        last += [Copy(column[source], part_) for source, part_ in zip(group, parts, strict=True)]
    rounds = with_last(with_first(copies, [*hosts.padded(inside), between]), last)
    return finish(shape, rank, "hierarchical", rounds)


class _Hosts:
    """Which rank carries whose blocks, seen from one rank."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.rank = rank
        self.groups = groups_of(shape)
        self.own = group_of(rank, self.groups)
        number = self.groups.index(self.own)
        self.others = [*self.groups[number + 1 :], *self.groups[:number]]  # starting with the next rank

    def carriers(self) -> list[int]:
        """The ranks of other hosts that carry this rank's blocks."""
        index = self.own.index(self.rank)
        return [group[index % len(group)] for group in self.others]

    def carried_for(self, member: int) -> list[int]:
        """The ranks of other hosts whose blocks a given rank carries."""
        own = group_of(member, self.groups)
        index = own.index(member)
        return [rank for group in self.groups if group is not own for rank in group[index :: len(own)]]

    def turns(self) -> Iterator[tuple[int, int]]:
        """The ranks of the own host at growing distance: before and after."""
        index, length = self.own.index(self.rank), len(self.own)
        for turn in range(1, length):
            yield self.own[index - turn], self.own[(index + turn) % length]

    def padded(self, inside: Rounds) -> Rounds:
        """Padded to the number of rounds that the largest host needs inside."""
        return padded(inside, max(len(group) for group in self.groups) - 1)
