"""Groups by split and sub, nested to any depth: each is a full communicator, independent of the others."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tests.conformance.test_acceptance_started import cases
from tests.support.oracle import Notes, moved, operand, operands, prefix, reduced
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.backends.sub import SubBackend

SHORT = uni.Config(segment_bytes=64)


def everything_works(comm: uni.Communicator, label: object) -> Notes:
    """Check that a communicator runs every collective, a ring of messages and an object."""
    notes = Notes()
    size, me = comm.size, comm.rank
    for verb, args, want in cases(me, size):
        notes.expect(getattr(comm, verb)(*args), want, label, verb)
    buf = np.zeros(3, np.int64)
    status = comm.sendrecv(np.arange(3) + 10 * me, (me + 1) % size, buf, (me - 1) % size, 7)
    notes.expect(buf, np.arange(3) + 10 * ((me - 1) % size), label, "sendrecv")
    notes.check(status.source == (me - 1) % size, label, "status", status)
    notes.check(comm.all_gather_object((me, "x")) == [(r, "x") for r in range(size)], label, "objects")
    return notes


# -- split ------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_the_published_split_comes_out_as_published() -> None:
    """Nexar split_two_groups: 4 ranks, 2 groups of 2; the sums of rank + 1 are 3 and 7."""

    def program(comm: uni.Communicator) -> Any:
        row = comm.split(color=comm.rank // 2, key=comm.rank)
        assert row is not None
        return row.all_reduce(comm.rank + 1), row.rank, row.size

    assert run_ranks(program, 4).values() == [(3, 0, 2), (3, 1, 2), (7, 0, 2), (7, 1, 2)]


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_ranks_are_ordered_by_key_then_by_old_rank(size: int) -> None:
    keys = [0, -5, 7, 7, -(2**63), 2**63 - 1, -5, 0]
    colors = [3, 3, -1, 3, -1, 3, 3, -1]

    def program(comm: uni.Communicator) -> Any:
        me = comm.rank
        child = comm.split(colors[me], keys[me])
        assert child is not None
        return child.rank, child.all_gather(me).tolist(), everything_works(child, "child")

    for me, (rank, members, notes) in enumerate(run_ranks(program, size, config=SHORT).values()):
        want = sorted((r for r in range(size) if colors[r] == colors[me]), key=lambda r: (keys[r], r))
        assert (members, rank, notes) == (want, want.index(me), [])


@pytest.mark.on_every_link
def test_color_none_opts_out_and_gives_none() -> None:
    def program(comm: uni.Communicator) -> Any:
        child = comm.split(None if comm.rank in (0, 3) else comm.rank % 2, -comm.rank)
        left_out = comm.split(None)
        got = None if child is None else child.all_gather(comm.rank).tolist()
        return got, left_out, comm.all_reduce(1)

    want = [None, [5, 1], [4, 2], None, [4, 2], [5, 1]]
    assert run_ranks(program, 6).values() == [(members, None, 6) for members in want]


@pytest.mark.on_every_link
@pytest.mark.parametrize("colors", [(0, 2**63), (True, 0), (0.5, 0), ("a", 0), (0, -(2**63) - 1)])
def test_a_color_or_key_that_is_no_64_bit_integer_is_refused(colors: tuple[Any, Any]) -> None:
    def program(comm: uni.Communicator) -> int:
        wrong = next(c for c in colors if c != 0 or isinstance(c, bool))
        for args in ((wrong,), (0, wrong), (0, None)):
            with pytest.raises(uni.UsageError, match="64-bit"):
                comm.split(*args)
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]


@pytest.mark.on_every_link
def test_groups_within_groups_within_groups_are_full_communicators() -> None:
    def program(comm: uni.Communicator) -> Any:
        notes = Notes()
        me = comm.rank
        half = comm.split(me % 2, -me)  # reversed
        assert half is not None
        quarter = half.split(half.rank // 2)
        assert quarter is not None
        single = quarter.split(quarter.rank)
        assert single is not None
        # The world ranks, computed from the inside out.
        halves = [r for r in reversed(range(8)) if r % 2 == me % 2]
        quarters = halves[half.rank // 2 * 2 :][:2]
        notes.check(half.all_gather(me).tolist() == halves, "half")
        notes.check(quarter.all_gather(me).tolist() == quarters, "quarter")
        notes.check(single.all_gather(me).tolist() == [me], "single")
        # Interleaved: calls on all of them in turn.
        for turn in range(2):
            for name, group in (("half", half), ("world", comm), ("quarter", quarter), ("single", single)):
                notes.extend(everything_works(group, f"{name} turn {turn}"))
        return notes

    assert run_ranks(program, 8, config=SHORT).values() == [[]] * 8


@pytest.mark.on_every_link
def test_a_group_can_be_split_again_and_again_and_every_child_is_another() -> None:
    def program(comm: uni.Communicator) -> Any:
        groups = [comm.split(0, key) for key in (0, 0, -comm.rank)]
        works = [
            g.start.all_reduce(np.full(99, 10.0**k * (comm.rank + 1))) for k, g in enumerate(groups) if g
        ]
        sums = [float(x[98]) for x in reversed(uni.wait_all(reversed(works)))]
        return sums, [g.rank for g in groups if g], len({g.name for g in groups if g})

    for r, got in enumerate(run_ranks(program, 3, config=SHORT).values()):
        assert got == ([6.0, 60.0, 600.0], [r, r, 2 - r], 3)


# -- sub --------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_a_sub_is_made_by_its_members_only_sorted_and_without_duplicates() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank not in (0, 2, 3):
            return None
        group = comm.sub([3, 2, 0, 2, 3])
        notes = everything_works(group, "sub")
        return group.rank, group.size, group.backend.members, notes

    members = (0, 2, 3)
    got = run_ranks(program, 5, config=SHORT).values()
    assert got == [(members.index(r), 3, members, []) if r in members else None for r in range(5)]


def test_local_and_world_ranks_translate_both_ways() -> None:
    """Ferrotorch BK06, BK11, CF26, CF27."""
    backends = LocalBackend.create(4)
    sub = SubBackend(backends[2], [0, 2])
    assert (sub.rank, sub.size, sub.members) == (1, 2, (0, 2))
    assert [sub.to_global(rank) for rank in range(2)] == [0, 2]
    assert [sub.to_local(rank) for rank in range(4)] == [0, None, 1, None]
    with pytest.raises(uni.UsageError, match="ranks 0 to 1"):
        sub.to_global(2)
    deeper = SubBackend(sub, [1])
    assert (deeper.members, deeper.to_global(0)) == ((2,), 2)
    for backend in backends:
        backend.close()


@pytest.mark.on_every_link
@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "empty"), ([1, 3], "not among"), ([0, 4], "ranks 0 to 3"), ([0, -1], "ranks 0 to 3"), (3, "list")],
)
def test_a_sub_that_cannot_be_is_refused(ranks: Any, text: str) -> None:
    def program(comm: uni.Communicator) -> int:
        if comm.rank == 0:
            with pytest.raises(uni.UsageError, match=text):
                comm.sub(ranks)
        return comm.all_reduce(comm.rank)

    assert run_ranks(program, 4).values() == [6] * 4


@pytest.mark.on_every_link
def test_messages_of_a_sub_go_through_the_parent_and_arrive_under_its_own_ranks() -> None:
    """Ferrotorch BK09: local 0 sends 9, 8, 7 to local 1, which is global 2."""

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            return None
        group = comm.sub([0, 2])
        if group.rank == 0:
            return group.send(bytes([9, 8, 7]), 1, 3)
        status = group.probe()
        return comm.rank, tuple(status), group.recv_bytes()

    assert run_ranks(program, 3).values()[2] == (2, (0, 3, 3), b"\x09\x08\x07")


# Not on_every_link: all look at one list.
def test_a_barrier_of_a_sub_needs_its_members_only() -> None:
    """Ferrotorch BK10: {0, 2, 4} of 6; the other ranks make no call."""
    entered: list[int] = []

    def program(comm: uni.Communicator) -> Any:
        if comm.rank % 2:
            return None
        group = comm.sub([0, 2, 4])
        entered.append(comm.rank)
        group.barrier()
        return len(entered)

    assert run_ranks(program, 6).values() == [3, None, 3, None, 3, None]


@pytest.mark.on_every_link
def test_the_same_set_made_twice_is_two_groups() -> None:
    def program(comm: uni.Communicator) -> Any:
        first, second = comm.sub([0, 1]), comm.sub([1, 0])
        other = 1 - comm.rank
        bufs = [np.zeros(2), np.zeros(2)]
        works = [second.start.recv(bufs[1], other, 5), first.start.recv(bufs[0], other, 5)]
        first.send(np.array([1.0, comm.rank]), other, 5)
        second.send(np.array([2.0, comm.rank]), other, 5)
        uni.wait_all(works)
        sums = uni.wait_all([second.start.all_reduce(20 + comm.rank), first.start.all_reduce(10 + comm.rank)])
        return [buf.tolist() for buf in bufs], sums, first.name != second.name

    got = run_ranks(program, 2).values()
    assert got == [([[1, 1 - r], [2, 1 - r]], [41, 21], True) for r in range(2)]


@pytest.mark.on_every_link
def test_subs_overlap_and_nest_without_meeting() -> None:
    def program(comm: uni.Communicator) -> Any:
        notes = Notes()
        me = comm.rank
        sets = [[0, 1, 2], [1, 2, 3], [0, 3], [0, 1, 2, 3]]
        groups = [comm.sub(ranks) if me in ranks else None for ranks in sets]
        for ranks, group in zip(sets, groups, strict=True):
            if group is not None:
                notes.extend(everything_works(group, ranks))
        inner = groups[0].sub([1, 2]) if me in (1, 2) and groups[0] is not None else None
        if inner is not None:
            notes.check(inner.all_gather(me).tolist() == [1, 2], "nested sub")
            innermost = inner.split(0, -inner.rank)
            notes.check(innermost is not None and innermost.all_gather(me).tolist() == [2, 1], "split of sub")
        return notes

    assert run_ranks(program, 4, config=SHORT).values() == [[]] * 4


# -- nothing crosses --------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_messages_with_the_same_tag_on_two_communicators_never_meet() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 0:
            comm.send(np.array([1]), 1, 5)
            return group.send(np.array([2]), 1, 5)
        buf = np.zeros(1, np.int64)
        seen = []
        for where in (group, comm):  # in the reverse order of sending
            where.recv(buf, uni.ANY, uni.ANY)
            seen.append(int(buf[0]))
        return seen

    assert run_ranks(program, 2).values()[1] == [2, 1]


@pytest.mark.on_every_link
@pytest.mark.parametrize("settings", [{"segment_bytes": 64}, {"segment_bytes": 64, "eager_bytes": 0}])
def test_collectives_of_equal_size_on_crossing_groups_do_not_mix(settings: dict[str, int]) -> None:
    """A row, a column and the world share pairs of ranks: started together, waited for in any order."""

    def program(comm: uni.Communicator) -> Any:
        me = comm.rank
        row, column = comm.split(me // 3), comm.split(me % 3)
        assert row is not None
        assert column is not None
        notes = Notes()
        members = {
            "world": list(range(6)),
            "row": [r for r in range(6) if r // 3 == me // 3],
            "column": [r for r in range(6) if r % 3 == me % 3],
        }
        groups = {"world": comm, "row": row, "column": column}
        works = {}
        for turn in range(3):
            for name in ("row", "world", "column"):
                x = operand("int64", "sum", 201, me, 6, name, turn).copy()
                works[name, turn] = groups[name].start.all_reduce(x)
        for (name, turn), work in reversed(works.items()):
            xs = [operand("int64", "sum", 201, r, 6, name, turn) for r in members[name]]
            notes.expect(work.wait(), reduced("sum", xs), name, turn)
        return notes

    assert run_ranks(program, 6, config=uni.Config(**settings)).values() == [[]] * 6


@pytest.mark.on_every_link
def test_a_prefix_on_a_reordered_group_follows_the_groups_order() -> None:
    def program(comm: uni.Communicator) -> Any:
        notes = Notes()
        group = comm.split(0, -comm.rank)
        assert group is not None
        xs = operands("int32", "sum", 11, comm.size)
        by_place = list(reversed(xs))
        for verb in ("scan", "exscan"):
            want = prefix("sum", by_place, group.rank, "int32", exclusive=verb == "exscan")
            notes.expect(getattr(group, verb)(xs[comm.rank]), want, verb)
        rows = [moved("int16", (comm.size, 2), r) for r in range(comm.size)]
        want = np.stack([rows[comm.size - 1 - s][group.rank] for s in range(comm.size)])
        notes.expect(group.all_to_all(rows[comm.rank]), want, "all_to_all")
        return notes

    assert run_ranks(program, 5).values() == [[]] * 5


# -- their ends -------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_a_closed_group_leaves_its_parent_and_its_siblings_as_they_were() -> None:
    def program(comm: uni.Communicator) -> Any:
        first, second = comm.split(0), comm.split(0)
        assert first is not None
        assert second is not None
        inner = first.split(0)
        assert inner is not None
        first.close()
        for closed in (first, inner):
            with pytest.raises(uni.ClosedError):
                closed.barrier()
            with pytest.raises(uni.ClosedError):
                closed.send(np.ones(1), 0)
        return second.all_reduce(comm.rank), comm.all_reduce(comm.rank)

    assert run_ranks(program, 3).values() == [(3, 3)] * 3


@pytest.mark.on_every_link
def test_a_rank_that_closes_a_group_is_lost_to_that_group_only() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0, -comm.rank)  # world rank 0 is rank 2 there
        assert group is not None
        if comm.rank == 0:
            group.close()
        else:
            with pytest.raises(uni.PeerLost, match="left") as caught:
                group.all_reduce(np.ones(3))
            assert caught.value.ranks == (0,), "errors name world ranks"
            assert caught.value.communicator == group.name
        return comm.all_reduce(comm.rank)

    assert run_ranks(program, 3).values() == [3] * 3


@pytest.mark.on_every_link
def test_closing_the_world_closes_everything_within() -> None:
    def program(comm: uni.Communicator) -> Any:
        child = comm.split(0)
        assert child is not None
        grandchild = child.split(0)
        assert grandchild is not None
        comm.close()
        errors = []
        for closed in (comm, child, grandchild):
            with pytest.raises(uni.ClosedError) as caught:
                closed.all_reduce(np.ones(1))
            errors.append(caught.value.communicator)
        return errors == [comm.name, child.name, grandchild.name], comm.close()

    assert run_ranks(program, 2).values() == [(True, None)] * 2


@pytest.mark.on_every_link
def test_a_group_that_is_dropped_is_left() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(0, -comm.rank)  # world rank 0 is rank 2 there
        assert group is not None
        name = group.name
        group.barrier()
        if comm.rank == 0:
            del group
            gc.collect()
        else:
            with pytest.raises(uni.PeerLost, match="left") as caught:
                group.recv(np.zeros(1), 2)
            assert (caught.value.ranks, caught.value.communicator) == ((0,), name)
        return comm.all_reduce(comm.rank)

    assert run_ranks(program, 3).values() == [3] * 3


@pytest.mark.on_every_link
def test_what_is_under_way_on_a_group_and_its_agent_keep_it() -> None:
    def program(comm: uni.Communicator) -> Any:
        group, buf = comm.sub([0, 1]), np.zeros(2, np.int64)
        agent = uni.rpc.Agent(comm.sub([0, 1]))
        agent.register("double", lambda number: 2 * number)
        if comm.rank == 0:
            work = group.start.recv(buf, 1, 3)
            del group
            gc.collect()
            comm.barrier()
            assert work.wait(timeout=60) == (1, 3, 16)
        else:
            gc.collect()
            comm.barrier()
            group.send(np.array([4, 5]), 0, 3)
        answer = agent.call(1 - comm.rank, "double", 21 + comm.rank)
        comm.barrier()
        return buf.tolist(), answer

    assert run_ranks(program, 2).values() == [([4, 5], 42), ([0, 0], 44)]


@pytest.mark.on_every_link
def test_a_group_of_one_exchanges_no_message() -> None:
    def program(comm: uni.Communicator) -> Any:
        alone = comm.sub([comm.rank])
        notes = everything_works(alone, "alone")
        x = moved("float32", 9, comm.rank).copy()
        notes.expect(alone.all_reduce(x, "mean"), moved("float32", 9, comm.rank), "a single contribution")
        return notes

    assert run_ranks(program, 3).values() == [[]] * 3


@pytest.mark.on_every_link
def test_a_rank_that_splits_once_more_than_the_others_is_found_out_everywhere() -> None:
    def program(comm: uni.Communicator) -> Any:
        comm.split(0)
        return comm.split(1) if comm.rank == 1 else comm.all_reduce(comm.rank)

    ended = run_ranks(program, 3, config=uni.Config(stall_query_s=0.02))
    assert [type(error) for error in ended] == [uni.CollectiveMismatch] * 3
    assert all("rank 1: split" in error.report and "all_reduce" in error.report for error in ended)
