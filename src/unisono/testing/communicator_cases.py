"""Cases with a communicator on the backend: every verb against NumPy, groups, mismatches, failures.

The first line of each docstring is the promise that the case checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.core.envelope import ANY, Status
from unisono.core.ops import op
from unisono.core.waits import wait_all
from unisono.errors import ClosedError, CollectiveMismatch, PeerAborted, PeerLost, UsageError
from unisono.plans import CATALOG
from unisono.testing.case import Suite
from unisono.testing.case_rank import CaseRank

__all__ = ["SUITE"]

SUITE = Suite()

Array = np.ndarray[Any, Any]


def ramp(count: int, rank: int, dtype: str = "float32") -> Array:
    """Small integers that differ by rank and position: sums of them are exact in every type."""
    return ((np.arange(count) * 3 + rank * 7) % 11 + 1).astype(dtype)


def _all(count: int, size: int, dtype: str = "float32") -> list[Array]:
    return [ramp(count, rank, dtype) for rank in range(size)]


@SUITE.case(size=1)
def every_verb_works_alone(me: CaseRank) -> None:
    """In a world of one rank every collective returns its input."""
    with me.world() as world:
        _check_collectives(me, world, counts=(0, 5))
        _check_uneven(me, world)
        _check_objects(me, world)


@SUITE.case(size=4)
def collectives_match_numpy(me: CaseRank) -> None:
    """Every even collective returns what NumPy computes, for empty, odd and long arrays and every root."""
    segment = me.backend.config.segment_bytes // 4
    with me.world() as world:
        _check_collectives(me, world, counts=(0, 1, 3, 4, 5, 1021, min(segment, 1 << 18) + 3))


@SUITE.case(size=3)
def collectives_match_numpy_on_three(me: CaseRank) -> None:
    """Every even collective returns what NumPy computes for a size that is not a power of two."""
    with me.world() as world:
        _check_collectives(me, world, counts=(2, 3, 17, 2050))


@SUITE.case(size=3)
def uneven_collectives_match_numpy(me: CaseRank) -> None:
    """Uneven and fused collectives return what NumPy computes, also with empty parts."""
    with me.world() as world:
        _check_uneven(me, world)


@SUITE.case(size=3)
def objects_travel(me: CaseRank) -> None:
    """Plain data, bytes and arrays arrive as equal objects."""
    with me.world() as world:
        _check_objects(me, world)


@SUITE.case(size=4)
def every_algorithm_agrees(me: CaseRank) -> None:
    """Every algorithm of every collective returns the same result."""
    count, size, rank = 1027, me.size, me.rank
    rows = np.stack(_all(count * size, size)).reshape(size, size, count)
    x, total = rows[rank], rows.sum(0)
    with me.world() as world:
        calls: dict[str, tuple[Callable[[str], Any], Any]] = {
            "all_reduce": (lambda name: world.all_reduce(x.copy(), algorithm=name), total),
            "reduce": (lambda name: world.reduce(x.copy(), 1, algorithm=name), total if rank == 1 else None),
            "broadcast": (lambda name: world.broadcast(x.copy(), 2, algorithm=name), rows[2]),
            "all_gather": (lambda name: world.all_gather(x, algorithm=name), rows),
            "gather": (lambda name: world.gather(x, 3, algorithm=name), rows if rank == 3 else None),
            "scatter": (
                lambda name: world.scatter(x if rank == 1 else None, 1, algorithm=name),
                rows[1, rank],
            ),
            "reduce_scatter": (lambda name: world.reduce_scatter(x, algorithm=name), total[rank]),
            "all_to_all": (lambda name: world.all_to_all(x, algorithm=name), rows[:, rank]),
            "scan": (lambda name: world.scan(x, algorithm=name), rows[: rank + 1].sum(0)),
            "exscan": (lambda name: world.exscan(x, algorithm=name), rows[:rank].sum(0)),
            "barrier": (lambda name: world.barrier(algorithm=name), None),
        }
        me.check_equal(set(calls), set(CATALOG), "the collectives that are checked")
        for collective, (call, expected) in calls.items():
            for name, entry in CATALOG[collective].items():
                if entry.needs_hosts and not me.backend.hosts():
                    continue
                got, what = call(name), f"{collective} by {name}"
                if expected is None:
                    me.check(got is None, f"{what} gives None here", repr(got))
                else:
                    me.check_array(got, expected.astype(np.float32), what)


@SUITE.case(size=3)
def messages_pass_between_users(me: CaseRank) -> None:
    """Every verb between two ranks works; a message that a receive refused stays queued."""
    size, rank = me.size, me.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    with me.world() as world:
        got = np.empty(2051, np.float64)
        status = world.sendrecv(ramp(2051, rank, "float64"), right, got, left, 5)
        me.check_equal(status, Status(left, 5, 2051 * 8), "the status of sendrecv")
        me.check_array(got, ramp(2051, left, "float64"), "what sendrecv received")
        work = world.start.send(ramp(100, rank), right, 6)
        me.check_equal(world.probe(left, 6), Status(left, 6, 400), "the status of a probe")
        short = np.empty(99, np.float32)
        me.check_raises(UsageError, "a recv into too little", world.recv, short, left, 6)
        longer = np.zeros(101, np.float32)
        if me.backend.capabilities.wildcards:
            me.check_equal(world.recv(longer, ANY, 6).source, left, "the source that ANY matched")
        else:
            world.recv(longer, left, 6)
        me.check_array(longer[:100], ramp(100, left), "what recv got")
        work.wait(me.time_left_s)
        words = world.start.send(b"of unknown length", left, 7)
        me.check_equal(world.recv_bytes(right, 7), b"of unknown length", "what recv_bytes got")
        words.wait(me.time_left_s)
        me.check_equal(world.probe(left, 8, timeout=0), None, "a probe for nothing with timeout=0")
        for count in (3, 20_011):
            thing = world.start.send_object({"from": rank, "x": ramp(count, rank), "none": (None,)}, right, 9)
            got_thing = world.recv_object(left, 9)
            me.check_array(got_thing.pop("x"), ramp(count, left), "an array in an object")
            me.check_equal(got_thing, {"from": left, "none": (None,)}, "the rest of the object")
            thing.wait(me.time_left_s)
        world.barrier()


@SUITE.case(size=4)
def started_works_overlap(me: CaseRank) -> None:
    """Started collectives that run at the same time do not mix, whatever the order of the waits."""
    with me.world() as world:
        counts = [1, 1000, 7, 20_000, 0, 333]
        works = [world.start.all_reduce(ramp(n, me.rank + i)) for i, n in enumerate(counts)]
        message = world.start.sendrecv(
            np.array([me.rank]), (me.rank + 1) % 4, np.empty(1, np.int64), (me.rank - 1) % 4
        )
        for i, work in reversed(list(enumerate(works))):
            expected = sum(ramp(counts[i], rank + i) for rank in range(4))
            me.check_array(work.wait(me.time_left_s), expected, f"the sum of started all_reduce {i}")
        wait_all([message], me.time_left_s)


@SUITE.case(size=4)
def groups_are_worlds_of_their_own(me: CaseRank) -> None:
    """Collectives on groups from split, sub and mesh involve only their members, also at the same time."""
    rank = me.rank
    with me.world() as world:
        half = world.split(color=rank % 2, key=-rank)
        assert half is not None
        members = [3, 1] if rank % 2 else [2, 0]
        me.check_equal((half.size, half.rank), (2, members.index(rank)), "size and rank in a split by parity")
        works = [
            world.start.all_reduce(ramp(50, rank)),
            half.start.all_reduce(ramp(50, rank)),
            half.start.all_gather(np.array([rank])),
        ]
        everyone, pair, order = wait_all(works, me.time_left_s)
        me.check_array(everyone, sum(_all(50, 4)), "the sum over the world, beside that of a group")
        me.check_array(
            pair, sum(ramp(50, r) for r in members), "the sum over a group, beside that of the world"
        )
        me.check_array(order, np.array(members)[:, None], "the order of ranks in a split with keys")
        none = world.split(None if rank == 2 else 0)
        me.check_equal(none is None, rank == 2, "whether rank 2, which opted out, got no group")
        if rank in (1, 3):
            with world.sub([3, 1, 3]) as sub:
                me.check_array(sub.all_reduce(ramp(5, rank)), ramp(5, 1) + ramp(5, 3), "the sum over a sub")
                again = sub.split(0, key=-sub.rank)
                assert again is not None
                me.check_equal(again.rank, 1 - sub.rank, "the rank in a group of a group")
                buffer = np.empty(3, np.int64)
                again.sendrecv(np.arange(3) + rank, 1 - again.rank, buffer, 1 - again.rank)
                me.check_array(buffer, np.arange(3) + (4 - rank), "a message inside a group of a group")
        grid = world.mesh((2, 2), ("dp", "tp"))
        me.check_array(
            grid["dp"].all_gather(np.array([rank])).ravel(), np.array([rank % 2, rank % 2 + 2]), "dp"
        )
        me.check_array(
            grid["tp"].all_gather(np.array([rank])).ravel(),
            np.array([0, 1]) + rank // 2 * 2,
            "the ranks along tp",
        )
        world.barrier()


_MISMATCHES: dict[str, Callable[[Communicator, bool], Any]] = {
    "another verb": lambda c, odd: c.barrier() if odd else c.all_reduce(ramp(4, 0)),
    "another type": lambda c, odd: c.all_reduce(ramp(4, 0, "float64" if odd else "float32")),
    "another length": lambda c, odd: c.all_reduce(ramp(5 if odd else 4, 0)),
    "another operation": lambda c, odd: c.all_reduce(ramp(4, 0), "max" if odd else "sum"),
    "another root": lambda c, odd: c.broadcast(ramp(4, 0), 1 if odd else 0),
    "another algorithm": lambda c, odd: c.all_reduce(ramp(4, 0), algorithm="ring" if odd else "tree"),
    "another shape": lambda c, odd: c.all_gather(ramp(4, 0).reshape((2, 2) if odd else (4,))),
    "another uneven type": lambda c, odd: c.all_gather_v(ramp(4, 0, "int16" if odd else "int32")),
}


@SUITE.case(size=4)
def different_calls_are_a_mismatch(me: CaseRank) -> None:
    """When ranks make different calls, every rank gets CollectiveMismatch, which shows both calls."""
    with me.world() as world:
        for i, (what, call) in enumerate(_MISMATCHES.items()):
            group = world.split(0)
            assert group is not None
            odd = i % me.size
            is_odd = me.rank == odd
            error = me.check_raises(CollectiveMismatch, what, call, group, is_odd)
            lines = error.report.splitlines()
            me.check(len(lines) == 2, f"the report of {what} shows two calls", error.report)
            me.check(lines[0] != lines[1], f"the report of {what} shows different calls", error.report)
            # No rank is blamed if a busy machine kept most ranks from reporting their calls in time.
            me.check(error.culprits in ((odd,), ()), f"the rank of {what} is to blame", str(error))
            me.check_raises(CollectiveMismatch, f"a collective after {what}", group.barrier)
        me.check_array(world.all_reduce(ramp(9, me.rank)), sum(_all(9, 4)), "a sum on the sound parent")


@SUITE.case(size=3)
def an_exception_reaches_the_others(me: CaseRank) -> None:
    """An exception that leaves a rank's `with` block ends operations of the others with PeerAborted."""

    class Mishap(Exception):
        pass

    world = me.world()
    if me.rank == 1:
        try:
            with world:
                for peer in (0, 2):
                    world.recv_bytes(peer, 1)
                raise Mishap("spilled coffee")
        except Mishap:
            return
    world.send(b"about to wait", 1, 1)
    calls: list[Callable[[], Any]] = [lambda: world.recv_bytes(1, 3), lambda: world.all_reduce(ramp(5, 0))]
    for call in calls if me.rank else reversed(calls):
        error = me.check_raises(PeerAborted, "an operation beside a rank that failed", call)
        me.check_equal(error.rank, 1, "the rank to look at")
        me.check(
            "Mishap: spilled coffee" in str(error), "the error carries the text of the exception", str(error)
        )
    world.close()


@SUITE.case(size=3)
def leaving_is_not_silent(me: CaseRank) -> None:
    """A collective with a rank that has closed raises PeerLost; messages that it sent can be received."""
    world, last = me.world(), me.eager_lengths(8)
    if me.rank == 2:
        for n in last:
            world.send(bytes(n), 0, 4)
        world.close()
        me.check_raises(ClosedError, "a collective on a closed communicator", world.barrier)
        return
    error = me.check_raises(PeerLost, "a collective with a rank that left", world.all_reduce, ramp(5, 0))
    me.check_equal(error.ranks, (2,), "the lost ranks")
    if me.rank == 0:
        for n in last:
            me.check_equal(world.recv_bytes(2, 4), bytes(n), "the message of a rank that left")
        world.send(b"still here", 1, 5)
    else:
        me.check_equal(world.recv_bytes(0, 5), b"still here", "a message between the remaining ranks")
    world.close()


# -- what several cases check -----------------------------------------------------------------------------


def _check_collectives(me: CaseRank, world: Communicator, counts: tuple[int, ...]) -> None:
    size, rank = world.size, world.rank
    for i, count in enumerate(counts):
        root = i % size
        every = _all(count, size)
        x, total = every[rank], _summed(every)
        rows = [ramp(count * size, 3 * r).reshape(size, count) for r in range(size)]
        at = f"of {count} elements on {size} ranks"

        mine = x.copy()
        me.check(world.all_reduce(mine) is mine, "all_reduce returns what it was given")
        me.check_array(mine, total, f"all_reduce {at}")
        me.check_array(world.all_reduce(x, "max", out=np.empty_like(x)), np.max(every, axis=0), f"max {at}")
        me.check_array(
            world.all_reduce(x.astype(np.int16), "bxor"), _folded(every, np.bitwise_xor), f"bxor {at}"
        )
        me.check_array(world.all_reduce(x.copy(), "mean"), total / np.float32(size), f"mean {at}")
        mine = x.copy()
        got = world.reduce(mine, root)
        me.check((got is mine) == (rank == root), "reduce gives x on root only")
        me.check_array(mine, total if rank == root else x, f"x after reduce {at}")
        me.check_array(world.broadcast(x.copy(), root), every[root], f"broadcast {at}")
        me.check_array(world.all_gather(x), np.stack(every), f"all_gather {at}")
        got = world.gather(x, root)
        me.check((got is not None) == (rank == root), "gather gives something on root only")
        if got is not None:
            me.check_array(got, np.stack(every), f"gather {at}")
        me.check_array(
            world.scatter(rows[root] if rank == root else None, root), rows[root][rank], f"scatter {at}"
        )
        _check_own_slots(me, world, root, every, rows[root])
        summed = _summed(rows)
        me.check_array(world.reduce_scatter(rows[rank]), summed[rank], f"reduce_scatter {at}")
        me.check_array(world.all_to_all(rows[rank]), np.stack([r[rank] for r in rows]), f"all_to_all {at}")
        me.check_array(world.scan(x), _summed(every[: rank + 1]), f"scan {at}")
        before = _summed(every[:rank]) if rank else np.zeros(count, np.float32)
        me.check_array(world.exscan(x), before, f"exscan {at}")
        world.barrier()
    me.check_equal(world.all_reduce(rank + 1), size * (size + 1) // 2, "the sum of Python numbers")
    me.check_equal(world.broadcast(rank + 0.5, size - 1), size - 0.5, "a broadcast Python number")
    first = op(lambda left, right: left, commutative=False, name="first")
    me.check_array(world.all_reduce(ramp(7, rank), first), ramp(7, 0), "an operation that does not commute")


def _check_own_slots(me: CaseRank, world: Communicator, root: int, every: list[Array], given: Array) -> None:
    """`x` may be the rank's own slot of `out=`, and for scatter the other way round."""
    rank, at = world.rank, f"of {len(every[0])} elements in place"
    whole = np.full((world.size, len(every[0])), -1, np.float32)
    whole[rank] = every[rank]
    me.check_array(world.all_gather(whole[rank], out=whole), np.stack(every), f"all_gather {at}")
    whole.fill(-1)
    whole[rank] = every[rank]
    world.gather(whole[rank], root, out=whole if rank == root else None)
    if rank == root:
        me.check_array(whole, np.stack(every), f"gather {at}")
    whole[:] = given
    part = whole[rank] if rank == root else np.empty_like(whole[rank])
    got = world.scatter(whole if rank == root else None, root, out=part)
    me.check_array(got, given[rank], f"scatter {at}")
    if rank == root:
        me.check_array(whole, given, f"x after scatter {at}")


def _summed(arrays: list[Array]) -> Array:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def _folded(every: list[Array], combine: Any) -> Array:
    result = every[0].astype(np.int16)
    for other in every[1:]:
        result = combine(result, other.astype(np.int16))
    return result


def _check_uneven(me: CaseRank, world: Communicator) -> None:
    size, rank = world.size, world.rank
    parts = [[ramp(2 * ((s + d) % 3), s * size + d).reshape(-1, 2) for d in range(size)] for s in range(size)]
    mine = [part[0] for part in parts]
    for got, expected in zip(world.all_gather_v(mine[rank]), mine, strict=True):
        me.check_array(got, expected, "a part of all_gather_v")
    gathered = world.gather_v(mine[rank], size - 1)
    me.check((gathered is not None) == (rank == size - 1), "gather_v gives something on root only")
    for got, expected in zip(gathered or mine, mine, strict=True):
        me.check_array(got, expected, "a part of gather_v")
    root = size // 2
    scattered = world.scatter_v(parts[root] if rank == root else None, root)
    me.check_array(scattered, parts[root][rank], "scatter_v")
    for s, got in enumerate(world.all_to_all_v(parts[rank])):
        me.check_array(got, parts[s][rank], f"what all_to_all_v got from rank {s}")
    counts = [(r * 2 + 1) % 4 for r in range(size)]
    starts = np.cumsum([0, *counts])
    rows = [ramp(3 * sum(counts), r).reshape(-1, 3) for r in range(size)]
    part = _summed(rows)[starts[rank] : starts[rank + 1]]
    me.check_array(world.reduce_scatter_v(rows[rank], counts), part, "reduce_scatter_v")
    arrays = [ramp(5, rank), ramp(0, rank), ramp(3, rank, "int64"), ramp(1030, rank)]
    sums = [_summed([ramp(a.size, r, a.dtype.name) for r in range(size)]) for a in arrays]
    for got, expected in zip(world.all_reduce_many(arrays), sums, strict=True):
        me.check_array(got, expected, "an array of all_reduce_many")


def _check_objects(me: CaseRank, world: Communicator) -> None:
    size, rank = world.size, world.rank

    def thing(r: int) -> dict[str, Any]:
        return {"rank": r, "pair": (r, -r), "text": "ä" * r, "raw": bytes(range(r)), "none": None}

    me.check_equal(world.broadcast_object(thing(rank), size - 1), thing(size - 1), "a broadcast object")
    me.check_equal(world.all_gather_object(thing(rank)), [thing(r) for r in range(size)], "gathered objects")
    expected = [thing(r) for r in range(size)] if rank == 0 else None
    me.check_equal(world.gather_object(thing(rank), 0), expected, "objects gathered on root")
    things = [thing(r) for r in range(size)] if rank == 0 else None
    me.check_equal(world.scatter_object(things, 0), thing(rank), "a scattered object")
    mine = [thing(rank + other) for other in range(size)]
    got = world.all_to_all_object(mine)
    me.check_equal(got, [thing(r + rank) for r in range(size)], "exchanged objects")
    folded = world.all_reduce_object([rank], lambda a, b: [a, *b])
    expected_fold: list[Any] = [0]
    for r in range(1, size):
        expected_fold = [expected_fold, r]
    me.check_equal(folded, expected_fold, "objects folded in the order of ranks")
    array = world.broadcast_object({"x": ramp(100, 5)} if rank == 0 else None, 0)["x"]
    me.check_array(array, ramp(100, 5), "an array inside an object")
