"""Started operations: waiting, awaiting, cancelling, dropping, and many of them at once."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.oracle import Notes, differs, operand, operands, prefix, reduced, result
from tests.support.ranks import PATIENCE_S, run_each, run_ranks

import unisono as uni

SHORT = uni.Config(segment_bytes=64)

# Every verb with its arguments and the expected result: `verbs(comm)` -> name, arguments, expectation.
Case = tuple[str, tuple[Any, ...], Any]


def cases(rank: int, size: int, turn: int = 0) -> list[Case]:
    """One call of every collective; each turn has different data of the same shape."""

    def xs(shape: Any, op: str = "sum") -> list[Any]:
        return operands("int32", op, shape, size, turn)

    root = turn % size
    one, rows = xs(23), xs((size, 7))
    uneven = [operand("int32", "sum", r + 1, r, size, turn) for r in range(size)]
    parts = [
        [operand("int32", "sum", s + t, s * size + t, size, turn) for t in range(size)] for s in range(size)
    ]
    rooted, both = rank == root, (one, rows)
    return [
        ("all_reduce", (one[rank].copy(),), reduced("sum", one)),
        ("reduce", (one[rank].copy(), root), reduced("sum", one) if rooted else None),
        ("broadcast", (one[rank].copy(), root), one[root]),
        ("all_gather", (one[rank],), np.stack(one)),
        ("gather", (one[rank], root), np.stack(one) if rooted else None),
        ("scatter", (rows[root] if rooted else None, root), rows[root][rank]),
        ("reduce_scatter", (rows[rank],), reduced("sum", rows)[rank]),
        ("all_to_all", (rows[rank],), np.stack([row[rank] for row in rows])),
        ("scan", (one[rank],), prefix("sum", one, rank, "int32", exclusive=False)),
        ("exscan", (one[rank],), prefix("sum", one, rank, "int32", exclusive=True)),
        ("barrier", (), None),
        ("all_gather_v", (uneven[rank],), uneven),
        ("gather_v", (uneven[rank], root), uneven if rooted else None),
        ("scatter_v", (uneven if rooted else None, root), uneven[rank]),
        ("all_to_all_v", (parts[rank],), [parts[s][rank] for s in range(size)]),
        ("all_reduce_many", ([x[rank].copy() for x in both],), [reduced("sum", x) for x in both]),
        ("reduce_scatter_v", (one[rank][:size], [1] * size), reduced("sum", one)[rank : rank + 1]),
    ]  # fmt: skip


VERBS = [
    *(name for name, _, _ in cases(0, 1)),
    *("send", "recv", "recv_bytes", "sendrecv", "probe", "split"),
    *("broadcast_object", "gather_object", "all_gather_object", "scatter_object"),
    *("all_to_all_object", "all_reduce_object"),
]


# -- every verb -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_started_verb_has_the_same_parameters(verb: str) -> None:
    (comm,) = uni.local(1)
    with comm:
        started = [str(p) for p in inspect.signature(getattr(comm.start, verb)).parameters.values()]
        blocking = [str(p) for p in inspect.signature(getattr(comm, verb)).parameters.values()]
    assert [p for p in blocking if p != "self"] == started
    assert started[-1].startswith(("timeout", "algorithm"))


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_verb_gives_the_same_started_and_waited_for(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for turn in range(3):
            for verb, args, want in cases(comm.rank, size, turn):
                work = getattr(comm.start, verb)(*args)
                notes.expect(work.wait(), want, verb, "turn", turn)
                notes.check(work.done(), verb, "is not done after wait")
                notes.expect(work.wait(timeout=0), want, verb, "waited for again")
        objects = [{"rank": r, "x": (r, None)} for r in range(size)]
        me = comm.rank
        notes.check(comm.start.all_gather_object(objects[me]).wait() == objects, "all_gather_object")
        got = comm.start.broadcast_object(objects[0] if me == 0 else None).wait()
        notes.check(got == objects[0], "broadcast_object")
        got = comm.start.gather_object(objects[me], size - 1).wait()
        notes.check(got == (objects if me == size - 1 else None), "gather_object")
        got = comm.start.scatter_object(objects if me == 0 else None).wait()
        notes.check(got == objects[me], "scatter_object")
        got = comm.start.all_to_all_object([(me, r) for r in range(size)]).wait()
        notes.check(got == [(r, me) for r in range(size)], "all_to_all_object")
        got = comm.start.all_reduce_object([objects[me]], lambda a, b: a + b).wait()
        notes.check(got == objects, "all_reduce_object")
        child = comm.start.split(0, -me).wait()
        notes.check(child is not None and child.rank == size - 1 - me, "split")
        return notes

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


@pytest.mark.on_every_link
def test_a_generous_timeout_changes_nothing() -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for timeout in (30, 1e9, float("inf")):
            for verb, args, want in cases(comm.rank, 3):
                notes.expect(getattr(comm, verb)(*args, timeout=timeout), want, verb, timeout)
        return notes

    assert run_ranks(program, 3).values() == [[]] * 3


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [2, 3])
def test_messages_started_and_waited_for(size: int) -> None:
    def program(comm: uni.Communicator) -> Any:
        me, after, before = comm.rank, (comm.rank + 1) % size, (comm.rank - 1) % size
        buf, swapped = np.zeros(5), np.zeros(2)
        receive = comm.start.recv(buf, before, 1)
        uni.wait_all([comm.start.send(np.arange(5.0) + me, after, 1), receive])
        swap = comm.start.sendrecv(np.array([me, -me], float), after, swapped, before, 2)
        probe = comm.start.probe(before, 3)
        comm.send(bytes([me, me]), after, 3)
        raw = comm.start.recv_bytes(before, 3)
        return [tuple(receive.wait()), buf.tolist(), tuple(swap.wait()), swapped.tolist(),
                tuple(probe.wait()), raw.wait()]  # fmt: skip

    for me, got in enumerate(run_ranks(program, size).values()):
        b = (me - 1) % size
        want = [(b, 1, 40), [b, b + 1, b + 2, b + 3, b + 4], (b, 2, 16), [b, -b], (b, 3, 2), bytes([b, b])]
        assert got == want


# -- many at once -----------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_two_started_all_reduces_of_equal_size_do_not_mix() -> None:
    def program(comm: uni.Communicator) -> Any:
        tens, hundreds = np.full(1021, 10.0 * comm.rank), np.full(1021, 100.0 * comm.rank)
        first = comm.start.all_reduce(tens)
        second = comm.start.all_reduce(hundreds)
        second.wait()
        first.wait()
        return set(tens.tolist()), set(hundreds.tolist())

    assert run_ranks(program, 4, config=SHORT).values() == [({60.0}, {600.0})] * 4


@pytest.mark.on_every_link
@pytest.mark.parametrize("settings", [{"segment_bytes": 64}, {"segment_bytes": 64, "eager_bytes": 0}])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_started_collectives_of_all_kinds_waited_for_in_another_order_on_every_rank(
    size: int, settings: dict[str, int]
) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        started = []
        for turn in range(4):
            for verb, args, want in cases(comm.rank, size, turn):
                started.append((f"{verb} turn {turn}", getattr(comm.start, verb)(*args), want))
        random.Random(comm.rank).shuffle(started)
        for label, work, want in started:
            notes.expect(work.wait(), want, label)
        return notes

    assert run_ranks(program, size, config=uni.Config(**settings)).values() == [[]] * size


@pytest.mark.on_every_link
def test_messages_pass_while_collectives_are_under_way() -> None:
    def program(comm: uni.Communicator) -> Any:
        size, me = comm.size, comm.rank
        x = operand("float64", "sum", 5000, me, size).copy()
        works = [comm.start.all_reduce(x.copy()) for _ in range(3)]
        buf = np.zeros(5000)
        comm.sendrecv(x, (me + 1) % size, buf, (me - 1) % size)
        sums = uni.wait_all(works)
        want = result("float64", "sum", 5000, size)
        return [differs(s, want) for s in sums], differs(
            buf, operand("float64", "sum", 5000, (me - 1) % size, size)
        )

    assert run_ranks(program, 3, config=SHORT).values() == [([None] * 3, None)] * 3


@pytest.mark.on_every_link
def test_threads_of_one_rank_may_wait_for_one_work() -> None:
    def program(comm: uni.Communicator) -> Any:
        work = comm.start.all_reduce(np.arange(300) * (comm.rank + 1))
        seen: list[int] = []
        threads = [threading.Thread(target=lambda: seen.append(int(work.wait()[299]))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    assert run_ranks(program, 3, config=SHORT).values() == [[299 * 6] * 4] * 3


# -- done and wait ----------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_done_answers_without_waiting() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            work = comm.start.barrier()
            before = work.done()  # the others have not made the call yet
            for other in range(1, comm.size):
                comm.send(np.zeros(0), other)
            work.wait()
            return before, work.done()
        comm.recv(np.zeros(0), 0)
        return comm.barrier()

    assert run_ranks(program, 4).values()[0] == (False, True)


@pytest.mark.on_every_link
def test_a_wait_that_times_out_leaves_the_work_under_way() -> None:
    def program(comm: uni.Communicator) -> Any:
        x = np.arange(4.0) + comm.rank
        if comm.rank == 0:
            work = comm.start.all_reduce(x)
            with pytest.raises(uni.DeadlineExceeded, match="the work goes on") as caught:
                work.wait(timeout=0.01)
            comm.send(np.zeros(0), 1)
            return caught.value.waiting_on, work.wait(timeout=30).tolist()
        comm.recv(np.zeros(0), 0)
        return comm.all_reduce(x).tolist()

    assert run_ranks(program, 2).values() == [((1,), [1, 3, 5, 7]), [1, 3, 5, 7]]


def test_a_started_operation_keeps_its_deadline_though_no_thread_waits() -> None:
    world = uni.local(2)
    ended = threading.Event()
    work = world[0].start.recv(np.zeros(1), 1, timeout=0.02)

    async def watch() -> None:
        with pytest.raises(uni.DeadlineExceeded, match=r"within 0\.02 s"):
            await work
        ended.set()

    asyncio.run(watch())
    assert ended.is_set()
    assert work.done()
    for comm in world:
        comm.close()


# -- wait_all ---------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_wait_all_gives_the_results_in_order() -> None:
    def program(comm: uni.Communicator) -> Any:
        works = [comm.start.all_reduce(comm.rank + k) for k in range(5)]
        return uni.wait_all(works), uni.wait_all([])

    assert run_ranks(program, 3).values() == [([3, 6, 9, 12, 15], [])] * 3


@pytest.mark.on_every_link
def test_wait_all_reports_the_first_error_after_all_ended() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv(np.zeros(0), 1, 9)
            comm.send(np.arange(4), 1, 1)
            comm.send(np.arange(2), 1, 2)
            comm.recv(np.zeros(0), 1, 9)
            return comm.send(np.array([7]), 1, 3)
        bufs = [np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(1, np.int64)]
        works = [comm.start.recv(buf, 0, tag) for tag, buf in enumerate(bufs, 1)]
        comm.send(np.zeros(0), 0, 9)
        with pytest.raises(uni.UsageError, match="32 bytes"):
            works[0].wait()
        comm.send(np.zeros(0), 0, 9)
        with pytest.raises(uni.UsageError, match="32 bytes"):
            uni.wait_all(works)
        return [work.done() for work in works], bufs[1].tolist(), bufs[2].tolist()

    assert run_ranks(program, 2).values()[1] == ([True] * 3, [0, 1], [7])


def test_wait_all_has_one_deadline_for_all() -> None:
    world = uni.local(2)
    works = [world[0].start.recv(np.zeros(1), 1, tag) for tag in range(3)]
    with pytest.raises(uni.DeadlineExceeded):
        uni.wait_all(works, timeout=0.02)
    assert [work.done() for work in works] == [False] * 3
    for tag in range(3):
        world[1].send(np.ones(1), 0, tag)
    assert [status.tag for status in uni.wait_all(works, timeout=30)] == [0, 1, 2]
    for comm in world:
        comm.close()


# -- await ------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_on_threads_await_in_a_loop_of_their_own(size: int) -> None:
    def program(comm: uni.Communicator) -> Notes:
        async def main() -> Notes:
            notes = Notes()
            for verb, args, want in cases(comm.rank, size):
                notes.expect(await getattr(comm.start, verb)(*args), want, verb)
            together = cases(comm.rank, size, 1)
            works = [getattr(comm.start, verb)(*args) for verb, args, _ in together]
            for (verb, _, want), got in zip(together, await asyncio.gather(*works), strict=True):
                notes.expect(got, want, verb, "gathered")
            return notes

        return asyncio.run(main())

    assert run_ranks(program, size, config=SHORT).values() == [[]] * size


def test_all_ranks_may_live_in_one_event_loop() -> None:
    async def one(comm: uni.Communicator) -> list[Any]:
        total = await comm.start.all_reduce(np.arange(200) + comm.rank)
        child = await comm.start.split(comm.rank % 2)
        assert child is not None
        mine = await child.start.all_gather(comm.rank)
        await comm.start.barrier()
        return [int(total[199]), mine.tolist()]

    async def main() -> list[list[Any]]:
        return await asyncio.gather(*(one(comm) for comm in world))

    world = uni.local(5, SHORT)
    assert asyncio.run(main()) == [[199 * 5 + 10, [0, 2, 4] if r % 2 == 0 else [1, 3]] for r in range(5)]
    for comm in world:
        comm.close()


def test_an_await_given_up_leaves_the_work_under_way() -> None:
    async def main() -> list[float]:
        buf = np.zeros(2)
        work = world[0].start.recv(buf, 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(work), 0.01)
        assert not work.done()
        await world[1].start.send(np.array([3.0, 4.0]), 0)
        await work
        return buf.tolist()

    world = uni.local(2)
    assert asyncio.run(main()) == [3.0, 4.0]
    for comm in world:
        comm.close()


async def _awaited(work: uni.Work[Any]) -> Any:
    return await work


def test_an_awaited_work_raises_what_ended_it() -> None:
    async def main() -> int:
        work = world[0].start.all_reduce(np.ones(3))
        world[1].abort("no more")
        with pytest.raises(uni.PeerAborted, match="no more") as caught:
            await work
        return caught.value.rank

    world = uni.local(2)
    assert asyncio.run(main()) == 1
    for comm in world:
        comm.close()


# -- cancel -----------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_a_cancelled_receive_leaves_its_message_to_the_next() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv(np.zeros(0), 1)
            comm.send(np.array([5]), 1, 6)
            return comm.barrier()
        mine, other = np.zeros(1, np.int64), np.zeros(1, np.int64)
        work, later = comm.start.recv(mine, 0, 6), comm.start.recv(other, 0, 6)
        was_cancelled = work.cancel()
        comm.send(np.zeros(0), 0)
        later.wait()
        with pytest.raises(uni.UnisonoError, match="cancelled recv"):
            work.wait()
        comm.barrier()  # the communicator still works
        return was_cancelled, work.done(), mine.tolist(), other.tolist(), later.cancel()

    assert run_ranks(program, 2).values()[1] == (True, True, [0], [5], False)


@pytest.mark.on_every_link
def test_a_cancelled_send_is_never_received() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            work = comm.start.send(np.full(50_000, 1.0), 1, 4)
            was_cancelled = work.cancel()
            comm.send(np.zeros(0), 1, 5)
            comm.send(np.full(50_000, 2.0), 1, 4)
            with pytest.raises(uni.UnisonoError, match="cancelled send"):
                work.wait()
            comm.barrier()
            return was_cancelled
        comm.recv(np.zeros(0), 0, 5)
        buf = np.zeros(50_000)
        comm.recv(buf, 0, 4)
        left = comm.probe(0, 4, timeout=0)
        comm.barrier()
        return set(buf.tolist()), left

    assert run_ranks(program, 2).values() == [True, ({2.0}, None)]


@pytest.mark.on_every_link
@pytest.mark.parametrize("verb", ["all_reduce", "barrier", "all_gather_v", "split"])
def test_a_cancelled_collective_ends_on_every_rank_and_its_communicator_is_unusable(verb: str) -> None:
    """A rank with all it needs may complete the cancelled collective before the cancellation arrives.

    Collectives and control messages use different lanes, between processes and inside one. The messages that
    rank 0 sent before it cancelled suffice for the barrier of the others, if rank 1 makes its call before the
    control message arrives. Then their next call fails.
    """

    def start(comm: uni.Communicator) -> uni.Work[Any]:
        args = {"all_reduce": (np.ones(300),), "barrier": (), "all_gather_v": (np.ones(3),), "split": (0,)}[
            verb
        ]
        work: uni.Work[Any] = getattr(comm.start, verb)(*args)
        return work

    def program(comm: uni.Communicator) -> Any:
        group = comm.sub(range(comm.size))
        # Rank 2 is in the collective when rank 0 cancels it; rank 1 makes its call later.
        if comm.rank == 1:
            comm.recv(np.zeros(0), 0)
        work = start(group) if comm.rank != 1 else None
        if comm.rank == 2:
            comm.send(np.zeros(0), 0)
        if comm.rank == 0:
            comm.recv(np.zeros(0), 2)
            assert work is not None
            assert work.cancel()
            comm.send(np.zeros(0), 1)

        def wait_for_the_end() -> None:
            (work or start(group)).wait()
            if comm.rank != 0:
                group.barrier()

        with pytest.raises(uni.PeerAborted, match=f"rank 0 cancelled {verb}") as caught:
            wait_for_the_end()
        assert caught.value.rank == 0
        with pytest.raises(uni.PeerAborted, match="cancelled"):
            group.barrier()
        if comm.rank < 2:  # messages between two ranks still pass
            buf = np.zeros(1)
            group.sendrecv(np.array([comm.rank + 0.5]), 1 - comm.rank, buf, 1 - comm.rank)
            assert buf[0] == 1.5 - comm.rank
        return comm.all_reduce(comm.rank)  # and other communicators still work

    assert run_ranks(program, 3).values() == [3, 3, 3]


@pytest.mark.on_every_link
def test_an_operation_timeout_on_a_collective_makes_its_communicator_unusable() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.sub(range(comm.size))
        if comm.rank != 2:
            with pytest.raises(uni.DeadlineExceeded) as caught:
                group.all_reduce(np.ones(3), timeout=1.0)
            assert caught.value.waiting_on == (2,)
        comm.barrier()
        with pytest.raises(uni.DeadlineExceeded):
            group.all_reduce(np.ones(3))
        return comm.all_reduce(comm.rank)

    assert run_ranks(program, 3).values() == [3, 3, 3]


# -- dropped ----------------------------------------------------------------------------------------------


def test_a_dropped_unfinished_work_warns_and_names_itself() -> None:
    world = uni.local(2)
    buf = np.zeros(1)
    work = world[0].start.recv(buf, 1)
    with pytest.warns(ResourceWarning, match=r'recv on "world" was dropped'):
        del work
    world[1].send(np.array([2.5]), 0)
    end = time.monotonic() + PATIENCE_S
    while buf[0] != 2.5 and time.monotonic() < end:
        time.sleep(0.001)
    assert buf[0] == 2.5  # the operation went on: it owns the memory until its end
    for comm in world:
        comm.close()


def test_a_dropped_finished_work_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    (comm,) = uni.local(1)
    with comm:
        work = comm.start.all_reduce(np.ones(3))
        assert work.done()
        del work
        gc.collect()
    assert [str(w.message) for w in recwarn] == []


# -- progress without a wait ------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather_v", "broadcast_object"])
def test_a_started_collective_of_a_rank_that_never_waits_ends_by_itself(verb: str) -> None:
    args: dict[str, Callable[[int], tuple[Any, ...]]] = {
        "all_reduce": lambda rank: (np.arange(1000.0) + rank,),
        "all_gather_v": lambda rank: (np.arange(rank + 1),),
        "broadcast_object": lambda rank: ({"from": 2} if rank == 2 else None, 2),
    }
    world = uni.local(3, SHORT)
    idle = getattr(world[0].start, verb)(*args[verb](0))

    def one(comm: uni.Communicator) -> Any:
        got = getattr(comm, verb)(*args[verb](comm.rank))
        comm.send(np.zeros(0), 0)  # this rank has already sent what rank 0 needs
        return got

    others = run_each(one, world[1:]).values()
    for comm in world[1:]:
        world[0].recv(np.zeros(0), comm.rank)
    got = idle.wait(timeout=30)
    if verb == "broadcast_object":
        assert got == {"from": 2}
    else:
        assert differs(got, others[0]) is None
    for comm in world:
        comm.close()
