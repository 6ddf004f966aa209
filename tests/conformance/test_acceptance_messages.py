"""Messages between two ranks: order, tags, lengths, types, probes, deadlines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.oracle import DTYPES, Notes, dtype_of, moved
from tests.support.ranks import run_each, run_ranks

import unisono as uni
from unisono.core.envelope import TAG_MAX

# Everything eager, nothing eager, and both sides of the default limit.
CONFIGS = [{}, {"eager_bytes": 0}, {"eager_bytes": 64, "eager_credit_bytes": 256}]
every_way = pytest.mark.parametrize("settings", CONFIGS, ids=["default", "rendezvous", "tight"])


# -- what is sent arrives ---------------------------------------------------------------------------------


@pytest.mark.on_every_link
@every_way
def test_every_type_and_length_arrives_as_it_was_sent(settings: dict[str, int]) -> None:
    counts = (0, 1, 2, 13, 63, 64, 65, 4099)

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for name in DTYPES:
            for tag, count in enumerate(counts):
                x = moved(name, count, comm.rank)
                if comm.rank == 0:
                    comm.send(x, 1, tag)
                    continue
                buf = np.zeros(count, dtype_of(name))
                status = comm.recv(buf, 0, tag)
                notes.expect(buf, moved(name, count, 0), name, count)
                notes.check(status == uni.Status(0, tag, buf.nbytes), "status", status)
        return notes

    assert run_ranks(program, 2, config=uni.Config(**settings)).values() == [[], []]


@pytest.mark.on_every_link
def test_a_matrix_keeps_its_shape_and_a_filled_buffer_is_overwritten_in_place() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.send(np.arange(6, dtype=np.float32).reshape(2, 3), 1)
            return comm.send(np.array([10.0, 20.0, 30.0]), 1, timeout=30)
        matrix = np.full((2, 3), -1, np.float32)
        comm.recv(matrix, 0)
        buf = np.full(3, -1.0)
        alias = buf[:]
        comm.recv(buf, 0, timeout=30)
        return matrix.tolist(), alias.tolist()

    assert run_ranks(program, 2).values()[1] == ([[0, 1, 2], [3, 4, 5]], [10, 20, 30])


@pytest.mark.on_every_link
def test_a_shorter_message_fills_the_front_and_the_status_says_how_much() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            return comm.send(np.array([4, 5], np.int16), 1, 9)
        buf = np.full(5, -1, np.int16)
        return tuple(comm.recv(buf, tag=9)), buf.tolist()

    assert run_ranks(program, 2).values()[1] == ((0, 9, 4), [4, 5, -1, -1, -1])


@pytest.mark.on_every_link
def test_numbers_and_anything_with_a_buffer_can_be_sent() -> None:
    given = [b"\1\2\3", bytearray(b"\4\5"), memoryview(b"abcdef")[::2], 7, 2.5, True, 1 + 2j, np.float32(1.5)]

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            for x in given:
                comm.send(x, 1)
            return None
        return [comm.recv_bytes(0) for _ in given]

    got = run_ranks(program, 2).values()[1]
    assert got[:3] == [b"\1\2\3", b"\4\5", b"ace"]
    kinds = ("i8", "f8", "?", "c16", "f4")
    numbers = [np.frombuffer(raw, kind)[0] for raw, kind in zip(got[3:], kinds, strict=True)]
    assert numbers == [7, 2.5, True, 1 + 2j, 1.5]


@pytest.mark.on_every_link
@every_way
def test_a_rank_can_send_to_itself(settings: dict[str, int]) -> None:
    def program(comm: uni.Communicator) -> list[float]:
        me = comm.rank
        big = np.full(100_000, me + 0.5)  # 800 kB: far beyond any credit
        comm.send(big, me, 1)
        comm.send(np.array([me]), me, 2)
        small, buf = np.zeros(1, np.int64), np.zeros_like(big)
        comm.recv(small, me, 2)
        comm.recv(buf, me, 1)
        swapped = np.zeros(3)
        comm.sendrecv(np.arange(3.0) + me, me, swapped, me)
        return [float(small[0]), float(buf.sum()), *swapped.tolist()]

    want = [[me, 100_000 * (me + 0.5), me, me + 1, me + 2] for me in range(2)]
    assert run_ranks(program, 2, config=uni.Config(**settings)).values() == want


@pytest.mark.on_every_link
@every_way
def test_two_ranks_swap_without_a_deadlock(settings: dict[str, int]) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        other = 1 - comm.rank
        for count in (1, 3, 100_003):
            x, buf = moved("float64", count, comm.rank), np.zeros(count)
            status = comm.sendrecv(x, other, buf, other, 5)
            notes.expect(buf, moved("float64", count, other), count)
            notes.check(status == (other, 5, 8 * count), "status", status)
        return notes

    assert run_ranks(program, 2, config=uni.Config(**settings)).values() == [[], []]


@pytest.mark.on_every_link
@every_way
@pytest.mark.parametrize("size", [3, 4, 8])
def test_everyone_passes_to_the_next_with_a_tag_of_its_own(size: int, settings: dict[str, int]) -> None:
    def program(comm: uni.Communicator) -> list[int]:
        me, before, after = comm.rank, (comm.rank - 1) % size, (comm.rank + 1) % size
        seen = []
        token = np.array([me * 100])
        for _ in range(size):
            buf = np.zeros(1, np.int64)
            work = comm.start.send(token, after, 1000 + me)
            comm.recv(buf, before, 1000 + before)
            work.wait()
            token = buf + 1
            seen.append(int(buf[0]))
        return seen

    got = run_ranks(program, size, config=uni.Config(**settings)).values()
    assert got == [[(r - 1 - k) % size * 100 + k for k in range(size)] for r in range(size)]


# -- tags -------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_tags_from_the_lowest_to_the_highest_find_their_receives_in_any_order() -> None:
    tags = [0, 1, 100, 200, 2**16, 2**30, TAG_MAX]

    def program(comm: uni.Communicator) -> list[int]:
        got = []
        if comm.rank == 0:
            uni.wait_all([comm.start.send(np.array([tag]), 1, tag) for tag in tags])
        else:
            for tag in reversed(tags):
                buf = np.zeros(1, np.int64)
                comm.recv(buf, 0, tag)
                got.append(int(buf[0]))
        return got

    assert run_ranks(program, 2).values()[1] == tags[::-1]


@pytest.mark.on_every_link
def test_ten_tags_received_by_ten_started_receives_do_not_cross() -> None:
    def program(comm: uni.Communicator) -> list[list[float]]:
        other = 1 - comm.rank
        bufs = [np.zeros(3) for _ in range(10)]
        receives = [comm.start.recv(bufs[tag], other, tag) for tag in range(10)]
        sends = [comm.start.send(np.arange(3) + 10.0 * t + comm.rank, other, t) for t in reversed(range(10))]
        uni.wait_all([*sends, *receives])
        return [buf.tolist() for buf in bufs]

    got = run_ranks(program, 2).values()
    assert got == [[[10 * t + other + i for i in range(3)] for t in range(10)] for other in (1, 0)]


@pytest.mark.on_every_link
@pytest.mark.parametrize("tag", [-1, TAG_MAX + 1, 1.0, "a", True, None])
def test_a_tag_out_of_range_is_refused_before_anything_is_sent(tag: Any) -> None:
    def program(comm: uni.Communicator) -> Any:
        buf = np.zeros(1)
        for call in (
            lambda: comm.send(np.ones(1), 0, tag),
            lambda: comm.recv(buf, 0, tag),
            lambda: comm.recv_bytes(0, tag),
            lambda: comm.probe(0, tag),
            lambda: comm.sendrecv(np.ones(1), 0, buf, 0, tag),
        ):
            with pytest.raises(uni.UsageError, match=str(TAG_MAX)):
                call()
        return comm.probe(timeout=0)

    assert run_ranks(program, 1).values() == [None]


@pytest.mark.on_every_link
def test_any_tag_takes_in_send_order_and_never_meets_a_collective() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            for tag in (3, 1, 2):
                comm.send(np.array([tag * 11]), 1, tag)
            comm.all_reduce(np.ones(5))
            return None
        buf, seen = np.zeros(1, np.int64), []
        pending = comm.start.all_reduce(np.ones(5))
        for _ in range(3):
            status = comm.recv(buf)
            seen.append((status.tag, int(buf[0])))
        pending.wait()
        return seen, comm.probe(timeout=0)

    assert run_ranks(program, 2).values()[1] == ([(3, 33), (1, 11), (2, 22)], None)


@pytest.mark.on_every_link
def test_any_source_names_the_sender() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank:
            return comm.send(np.full(4, comm.rank * 1.5), 0, comm.rank)
        seen = {}
        for _ in range(comm.size - 1):
            buf = np.zeros(4)
            status = comm.recv(buf)
            seen[status.source] = (status.tag, buf.tolist())
        return seen

    assert run_ranks(program, 5).values()[0] == {r: (r, [r * 1.5] * 4) for r in range(1, 5)}


# -- order ------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@every_way
def test_messages_of_one_pair_keep_their_order_whatever_their_lengths(settings: dict[str, int]) -> None:
    lengths = [int(n) for n in np.random.default_rng(3).integers(1, 3000, 60)]

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            sends = [comm.start.send(np.arange(n) + 7 * k, 1, k % 3) for k, n in enumerate(lengths)]
            uni.wait_all(sends)
            return notes
        for tag in (2, 0, 1):
            for k, n in [(k, n) for k, n in enumerate(lengths) if k % 3 == tag]:
                buf = np.zeros(3000, np.int64)
                status = comm.recv(buf, 0, tag)
                notes.expect(buf[: status.nbytes // 8], np.arange(n) + 7 * k, "message", k)
        return notes

    assert run_ranks(program, 2, config=uni.Config(**settings)).values() == [[], []]


@pytest.mark.on_every_link
def test_three_large_sends_received_in_another_order_of_tags_arrive() -> None:
    count = 12 * 2**20 // 8

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            parts = [np.arange(count) * (tag + 1) for tag in range(3)]
            return uni.wait_all([comm.start.send(part, 1, tag) for tag, part in enumerate(parts)])
        good = []
        for tag in (2, 0, 1):
            buf = np.zeros(count, np.int64)
            comm.recv(buf, 0, tag)
            good.append(bool((buf == np.arange(count) * (tag + 1)).all()))
        return good

    assert run_ranks(program, 2).values()[1] == [True, True, True]


@pytest.mark.on_every_link
def test_a_started_wildcard_receive_comes_before_a_later_exact_one() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv(np.zeros(0), 1, 99)
            comm.send(np.array([1]), 1, 5)
            return comm.send(np.array([2]), 1, 5)
        first, second = np.zeros(1, np.int64), np.zeros(1, np.int64)
        works = [comm.start.recv(first), comm.start.recv(second, 0, 5)]
        comm.send(np.zeros(0), 0, 99)
        uni.wait_all(works)
        return int(first[0]), int(second[0])

    assert run_ranks(program, 2).values()[1] == (1, 2)


# -- unknown lengths --------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@every_way
def test_recv_bytes_takes_whatever_length_comes(settings: dict[str, int]) -> None:
    sent = [b"", b"x", bytes(range(256)) * 300]

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            for data in sent:
                comm.send(data, 1, 3)
            return None
        return [comm.recv_bytes(0, 3) for _ in sent]

    assert run_ranks(program, 2, config=uni.Config(**settings)).values()[1] == sent


@pytest.mark.on_every_link
def test_a_probe_shows_a_message_and_leaves_it() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv(np.zeros(0), 1, 1)  # the other rank has probed without success
            comm.send(np.arange(7, dtype=np.int16), 1, 42)
            return comm.barrier()
        nothing = comm.probe(0, timeout=0)
        comm.send(np.zeros(0), 0, 1)
        shown = comm.probe()
        again = comm.probe(0, 42, timeout=0)
        other = comm.probe(0, 43, timeout=0)
        buf = np.zeros(shown.nbytes // 2, np.int16)
        comm.recv(buf, shown.source, shown.tag)
        left = comm.probe(timeout=0)
        comm.barrier()
        return nothing, tuple(shown), again == shown, other, buf.tolist(), left

    want = (None, (0, 42, 14), True, None, [0, 1, 2, 3, 4, 5, 6], None)
    assert run_ranks(program, 2).values()[1] == want


@pytest.mark.on_every_link
def test_disjoint_regions_travel_as_one_message_and_are_laid_out_again() -> None:
    """Nexar's iov: here the regions are views on one buffer, or started sends, which keep their order."""
    regions = [b"\1\2\3\4", b"\5\6", b"\7\x08\x09"], [bytes(range(16))], [b"a", bytes(1024), b"ZYXWVUTS"]

    def program(comm: uni.Communicator) -> Any:
        got = []
        for group in regions:
            if comm.rank == 0:
                uni.wait_all([comm.start.send(part, 1, 6) for part in group])
                continue
            whole = bytearray(sum(map(len, group)))
            view, start, works = memoryview(whole), 0, []
            for part in group:
                works.append(comm.start.recv(view[start : start + len(part)], 0, 6))
                start += len(part)
            uni.wait_all(works)
            got.append(bytes(whole))
        return got

    assert run_ranks(program, 2).values()[1] == [b"".join(group) for group in regions]


# -- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.on_every_link
@every_way
def test_a_message_longer_than_the_buffer_is_refused_and_stays_queued(settings: dict[str, int]) -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.send(np.arange(32, dtype=np.uint8), 1, 4)
            return comm.send(np.array([77], np.uint8), 1, 4)
        short = np.full(16, 9, np.uint8)
        with pytest.raises(
            uni.UsageError, match=r"32 bytes.*16.*stays queued.*Next: receive it into 32 bytes"
        ):
            comm.recv(short, 0, 4)
        untouched = short.tolist() == [9] * 16
        long, last = np.zeros(32, np.uint8), np.zeros(1, np.uint8)
        comm.recv(long, 0, 4)
        comm.recv(last, 0, 4)
        return untouched, long.tolist(), last.tolist()

    got = run_ranks(program, 2, config=uni.Config(**settings)).values()[1]
    assert got == (True, list(range(32)), [77])


@pytest.mark.on_every_link
def test_a_receive_that_waits_is_refused_too_and_the_next_one_gets_the_message() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv(np.zeros(0), 1)
            return comm.send(np.arange(8.0), 1)
        short, long = np.full(2, -1.0), np.zeros(8)
        works = [comm.start.recv(short, 0), comm.start.recv(long, 0)]
        comm.send(np.zeros(0), 0)
        with pytest.raises(uni.UsageError, match="64 bytes"):
            works[0].wait()
        works[1].wait()
        return short.tolist(), long.tolist()

    assert run_ranks(program, 2).values()[1] == ([-1, -1], [0, 1, 2, 3, 4, 5, 6, 7])


@pytest.mark.on_every_link
def test_two_floats_are_no_double_but_bytes_fit_anything() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            return comm.send(np.array([1.5, 2.5], np.float32), 1)
        double = np.full(1, -1.0)
        with pytest.raises(uni.UsageError, match=r"float32.*float64"):
            comm.recv(double, 0)
        raw = bytearray(8)
        comm.recv(raw, 0)
        return double.tolist(), np.frombuffer(raw, np.float32).tolist()

    assert run_ranks(program, 2).values()[1] == ([-1.0], [1.5, 2.5])


@pytest.mark.on_every_link
@pytest.mark.parametrize("rank", [-1, 2, 5, True, 0.0, None, "0"])
def test_a_rank_that_does_not_exist_is_refused_before_anything_is_sent(rank: Any) -> None:
    def program(comm: uni.Communicator) -> Any:
        x, buf = np.ones(3), np.zeros(3)
        for call in (
            lambda: comm.send(x, rank),
            lambda: comm.recv(buf, rank),
            lambda: comm.recv_bytes(rank),
            lambda: comm.probe(rank),
            lambda: comm.sendrecv(x, rank, buf, 0),
            lambda: comm.sendrecv(x, 0, buf, rank),
            lambda: comm.start.send(x, rank),
        ):
            with pytest.raises(uni.UsageError, match="ranks 0 to 1"):
                call()
        return comm.probe(timeout=0)

    assert run_ranks(program, 2).values() == [None, None]


@pytest.mark.on_every_link
def test_a_numpy_integer_is_a_rank_a_root_and_a_tag_too() -> None:
    def program(comm: uni.Communicator) -> int:
        buf = np.zeros(1, np.int64)
        other = np.arange(2)[1 - comm.rank]
        comm.sendrecv(np.array([comm.rank + 5]), other, buf, other, np.int64(3))
        assert comm.broadcast(np.array([comm.rank]), np.uint8(1))[0] == 1
        return int(buf[0])

    assert run_ranks(program, 2).values() == [6, 5]


@pytest.mark.on_every_link
def test_a_destination_is_one_rank_never_any() -> None:
    def program(comm: uni.Communicator) -> Any:
        with pytest.raises(uni.UsageError, match="dst=ANY"):
            comm.send(np.ones(1), uni.ANY)
        return comm.probe(timeout=0)

    assert run_ranks(program, 2).values() == [None, None]


@pytest.mark.on_every_link
def test_memory_that_cannot_be_received_into_is_refused() -> None:
    def program(comm: uni.Communicator) -> Any:
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        for buf, text in (
            (frozen, "read-only"),
            (b"abc", "read-only"),
            (np.zeros(8)[::2], "contiguous"),
            (5, "number"),
            (np.float32(1), "number"),
            ([0, 0], "buffer protocol"),
            (np.zeros(2, "U3"), "dtype"),
            (np.zeros(2, ">f8"), "byte order"),
        ):
            with pytest.raises(uni.UsageError, match=text):
                comm.recv(buf, 0)
        x = np.zeros(4)
        with pytest.raises(uni.UsageError, match="overlap"):
            comm.sendrecv(x[:3], 0, x[1:], 0)
        return comm.probe(timeout=0)

    assert run_ranks(program, 1).values() == [None]


# -- deadlines --------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_a_receive_that_times_out_is_withdrawn_and_the_late_message_is_still_there() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv(np.zeros(0), 1)  # the other rank has aborted
            comm.send(np.array([1.25, 2.5]), 1, 8)
            return comm.send(np.array([3.75]), 1, 8)
        first = np.full(2, -1.0)
        with pytest.raises(uni.DeadlineExceeded, match="recv did not end") as caught:
            comm.recv(first, 0, 8, timeout=0.01)
        assert isinstance(caught.value, TimeoutError)
        comm.send(np.zeros(0), 0)
        again, last = np.zeros(2), np.zeros(1)
        comm.recv(again, 0, 8)
        comm.recv(last, 0, 8)
        return caught.value.waiting_on, first.tolist(), again.tolist(), last.tolist()

    assert run_ranks(program, 2).values()[1] == ((0,), [-1, -1], [1.25, 2.5], [3.75])


@pytest.mark.on_every_link
def test_a_send_that_times_out_is_withdrawn_and_never_received() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            with pytest.raises(uni.DeadlineExceeded) as caught:
                comm.send(np.full(100_000, 1.0), 1, 2, timeout=0.02)
            comm.send(np.zeros(0), 1, 3)
            comm.send(np.full(100_000, 2.0), 1, 2)
            return caught.value.waiting_on, caught.value.operation
        comm.recv(np.zeros(0), 0, 3)  # the other rank has aborted
        buf = np.zeros(100_000)
        comm.recv(buf, 0, 2)
        return set(buf.tolist())

    assert run_ranks(program, 2).values() == [((1,), "send"), {2.0}]


@pytest.mark.parametrize("timeout", [0, 0.001, 0.05])
def test_no_timeout_is_rounded_to_nothing_or_for_ever(timeout: float) -> None:
    def program(comm: uni.Communicator) -> Any:
        for call in (
            lambda: comm.recv(np.zeros(1), 1, timeout=timeout),
            lambda: comm.recv_bytes(1, timeout=timeout),
            lambda: comm.send(np.zeros(100_000), 1, timeout=timeout),
            lambda: comm.sendrecv(np.zeros(9), 1, np.zeros(9), 1, timeout=timeout),
        ):
            with pytest.raises(uni.DeadlineExceeded) as caught:
                call()
            assert caught.value.elapsed_s is not None
            assert caught.value.elapsed_s >= timeout
            assert f"within {timeout:.3g} s" in str(caught.value)
        return caught.value.waiting_on

    world = uni.local(2)  # rank 1 is alive and makes no call
    assert run_each(program, world[:1]).values() == [(1,)]
    for comm in world:
        comm.close()


@pytest.mark.on_every_link
@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_a_timeout_that_makes_no_sense_is_refused(timeout: Any) -> None:
    def program(comm: uni.Communicator) -> Any:
        with pytest.raises(uni.UsageError, match="timeout"):
            comm.send(np.ones(1), 0, timeout=timeout)
        with pytest.raises(uni.UsageError, match="timeout"):
            comm.all_reduce(np.ones(1), timeout=timeout)
        return comm.probe(timeout=0)

    assert run_ranks(program, 1).values() == [None]
