"""Verbs whose ranks do not know each other's lengths: short and long parts, in the engine and in Python."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import NO_STALL, MakeWorld, every_kind, found, outcome, world
from tests.support.oracle import Notes
from tests.support.ranks import run_each

import unisono as uni
from unisono.comm.announcement import Announcement, row_bytes
from unisono.comm.communicator import Communicator
from unisono.comm.verb_table import Fact, verbs_with
from unisono.core import buffers
from unisono.errors import DeadlineExceeded, PeerAborted, PeerLost, ProtocolError, UnisonoError, UsageError

__all__ = ["world"]

DTYPES = ("uint8", "float32", "complex128")


def array(dtype: str, length: int, rank: int, width: int | None = None) -> np.ndarray[Any, Any]:
    """Elements that depend on rank and index."""
    count = length * (1 if width is None else width)
    flat = ((np.arange(count) * 7 + rank * 31) % 113).astype(dtype)
    return flat if width is None else flat.reshape(length, width)


def alike(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(got, list) and len(got) == len(wanted) and all(map(alike, got, wanted))
    if isinstance(wanted, np.ndarray):
        return got.dtype == wanted.dtype and got.shape == wanted.shape and bool((got == wanted).all())
    return bool(got == wanted)


def lengths_around_rows(size: int, dtype: str, width: int | None, parts: int) -> list[int]:
    """Zero, a few, the most that fit into a row, one more, and many."""
    free = row_bytes(size, parts) - 8 - 8 * (parts + (0 if width is None else 1))
    fit = free // (np.dtype(dtype).itemsize * (width or 1) * parts)
    return [0, 1, 5, fit, fit + 1, 5 * fit + 3]


Verb = Callable[[Any, Communicator, str, int, int | None], tuple[Any, Any]]


def all_gather_v(
    verbs: Any, comm: Communicator, dtype: str, length: int, width: int | None
) -> tuple[Any, Any]:
    every = [array(dtype, max(0, length - rank), rank, width) for rank in range(comm.size)]
    return verbs.all_gather_v(every[comm.rank]), every


def gather_v(verbs: Any, comm: Communicator, dtype: str, length: int, width: int | None) -> tuple[Any, Any]:
    root = length % comm.size
    every = [array(dtype, max(0, length - rank), rank, width) for rank in range(comm.size)]
    return verbs.gather_v(every[comm.rank], root), every if comm.rank == root else None


def scatter(verbs: Any, comm: Communicator, dtype: str, length: int, width: int | None) -> tuple[Any, Any]:
    root = length % comm.size
    every = np.stack([array(dtype, length, rank, width) for rank in range(comm.size)])
    return verbs.scatter(every if comm.rank == root else None, root), every[comm.rank]


def scatter_out(
    verbs: Any, comm: Communicator, dtype: str, length: int, width: int | None
) -> tuple[Any, Any]:
    every = np.stack([array(dtype, length, rank, width) for rank in range(comm.size)])
    out = np.empty_like(every[comm.rank])
    return verbs.scatter(every if comm.rank == 0 else None, out=out), every[comm.rank]


def scatter_v(verbs: Any, comm: Communicator, dtype: str, length: int, width: int | None) -> tuple[Any, Any]:
    root = length % comm.size
    every = [array(dtype, max(0, length - rank), rank, width) for rank in range(comm.size)]
    return verbs.scatter_v(every if comm.rank == root else None, root), every[comm.rank]


def all_to_all_v(
    verbs: Any, comm: Communicator, dtype: str, length: int, width: int | None
) -> tuple[Any, Any]:
    def part(source: int, target: int) -> np.ndarray[Any, Any]:
        return array(dtype, max(0, length - source - 2 * target), source + 10 * target, width)

    parts = [part(comm.rank, target) for target in range(comm.size)]
    return verbs.all_to_all_v(parts), [part(source, comm.rank) for source in range(comm.size)]


def memory_for(parts: list[np.ndarray[Any, Any]], *, is_row: bool) -> list[np.ndarray[Any, Any]]:
    """`out=` for these parts: contiguous, or each in its own memory."""
    if not is_row:
        return [np.full_like(part, 99) for part in parts]
    whole = np.full_like(np.concatenate(parts), 99)
    return np.split(whole, np.cumsum([len(part) for part in parts])[:-1])


def into(verb: Verb, *, is_row: bool) -> Verb:
    """The same verb with `out=`."""

    class Filling:
        """A communicator whose verbs get `out=` of the lengths in the expected result."""

        def __init__(self, verbs: Any) -> None:
            self.verbs = verbs

        def __getattr__(self, name: str) -> Any:
            return lambda *args: (
                lambda wanted: getattr(self.verbs, name)(
                    *args, out=None if wanted is None else memory_for(wanted, is_row=is_row)
                )
            )

    def filling(
        verbs: Any, comm: Communicator, dtype: str, length: int, width: int | None
    ) -> tuple[Any, Any]:
        call, wanted = verb(Filling(verbs), comm, dtype, length, width)
        return call(wanted), wanted

    filling.__name__ = f"{verb.__name__} into {'a row' if is_row else 'lists'}"
    return filling


def value(rank: int, length: int) -> dict[str, Any]:
    return {"rank": rank, "text": "x" * length, "more": [1, None, 2.5, (rank, b"y" * rank)]}


def all_gather_object(verbs: Any, comm: Communicator, _: str, length: int, __: int | None) -> tuple[Any, Any]:
    return verbs.all_gather_object(value(comm.rank, length)), [
        value(rank, length) for rank in range(comm.size)
    ]


def gather_object(verbs: Any, comm: Communicator, _: str, length: int, __: int | None) -> tuple[Any, Any]:
    root = length % comm.size
    wanted = [value(rank, length) for rank in range(comm.size)] if comm.rank == root else None
    return verbs.gather_object(value(comm.rank, length), root), wanted


def broadcast_object(verbs: Any, comm: Communicator, _: str, length: int, __: int | None) -> tuple[Any, Any]:
    root = length % comm.size
    return verbs.broadcast_object(value(root, length) if comm.rank == root else None, root), value(
        root, length
    )


def scatter_object(verbs: Any, comm: Communicator, _: str, length: int, __: int | None) -> tuple[Any, Any]:
    root = length % comm.size
    values = [value(rank, length + rank) for rank in range(comm.size)]
    return verbs.scatter_object(values if comm.rank == root else None, root), values[comm.rank]


def all_to_all_object(verbs: Any, comm: Communicator, _: str, length: int, __: int | None) -> tuple[Any, Any]:
    def part(source: int, target: int) -> dict[str, Any]:
        return value(source + 10 * target, max(0, length - 100 * source - 200 * target))

    parts = [part(comm.rank, target) for target in range(comm.size)]
    return verbs.all_to_all_object(parts), [part(source, comm.rank) for source in range(comm.size)]


def all_reduce_object(verbs: Any, comm: Communicator, _: str, length: int, __: int | None) -> tuple[Any, Any]:
    def joined(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        a["more"].append(b["rank"])  # a copy, because a fold may change its first object
        return {**a, "text": a["text"] + b["text"], "rank": a["rank"] * 10 + b["rank"]}

    wanted = functools.reduce(joined, [value(rank, length) for rank in range(comm.size)])
    return verbs.all_reduce_object(value(comm.rank, length), joined), wanted


ARRAYS: tuple[Verb, ...] = (
    all_gather_v,
    gather_v,
    scatter,
    scatter_out,
    scatter_v,
    all_to_all_v,
    *(
        into(verb, is_row=is_row)
        for verb in (all_gather_v, gather_v, all_to_all_v)
        for is_row in (True, False)
    ),
)
OBJECTS: tuple[Verb, ...] = (
    all_gather_object,
    gather_object,
    broadcast_object,
    scatter_object,
    all_to_all_object,
    all_reduce_object,
)


def cases(size: int) -> list[tuple[Verb, str, int, int | None]]:
    made: list[tuple[Verb, str, int, int | None]] = []
    for verb, dtype, width in itertools.product(ARRAYS, DTYPES, (None, 3)):
        parts = 1 if "gather_v" in verb.__name__ else size
        made += [(verb, dtype, length, width) for length in lengths_around_rows(size, dtype, width, parts)]
    made += [
        (verb, "uint8", length, None) for verb in OBJECTS for length in (0, 300, 1900, 2100, 9000, 70_001)
    ]
    return made


def closed(comm: Communicator, is_closed: bool) -> None:
    """Let the next call of this rank take the reference path, or the fast path."""
    comm._group.call_log.fast_path_open = not is_closed


# -- right results ----------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [2, 3])
def test_every_verb_gives_what_numpy_says(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, native = Notes(), comm._group.native
        assert native is not None
        for verb, dtype, length, width in cases(size):
            what = f"{verb.__name__} {dtype} {length} x {width}"
            before = native.ended
            got, wanted = verb(comm, comm, dtype, length, width)
            notes.expect(alike(got, wanted), True, what)
            work, wanted = verb(comm.start, comm, dtype, length, width)
            notes.expect(alike(work.wait(timeout=60), wanted), True, f"start.{what}")
            notes.expect(native.ended > before or native.adopted > 0, True, f"{what} ran in the engine")
        return notes

    assert found(comms, program) == []


@every_kind
def test_memory_of_wrong_lengths_is_refused_and_other_ranks_are_not_delayed(
    world: MakeWorld, kind: str
) -> None:
    comms = world(3, kind)

    def program(comm: Communicator) -> list[str]:
        texts = []
        for count in (5, 70_001):
            out = [np.zeros(count + (comm.rank == 1 and rank == 2)) for rank in range(3)]
            try:
                comm.all_gather_v(array("float64", count, comm.rank), out=out)
                texts.append("")
            except UsageError as error:
                texts.append(str(error).partition(";")[0])
            comm.barrier()
        return texts

    assert run_each(program, comms) == [["", ""], ["out[2] has 6 rows", "out[2] has 70002 rows"], ["", ""]]


@every_kind
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_may_send_its_own_array_of_out(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for turn, (length, is_closed) in enumerate(itertools.product((5, 70_001), (False, True))):
            closed(comm, is_closed)
            wanted = [array("float64", length + rank, rank) for rank in range(size)]
            for root in (None, turn % size):
                out = memory_for(wanted, is_row=bool(turn % 2))
                x = out[comm.rank] if root in (None, comm.rank) else wanted[comm.rank]
                x[:] = wanted[comm.rank]
                if root is None:
                    comm.all_gather_v(x, out=out)
                else:
                    comm.gather_v(x, root, out=out if root == comm.rank else None)
                if root in (None, comm.rank):
                    notes.expect(alike(out, wanted), True, length, root)
        closed(comm, is_closed=False)
        return notes

    assert found(comms, program) == []


@every_kind
def test_memory_that_cannot_be_filled_is_refused_before_anything_is_sent(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)
    whole, other = np.zeros(10), np.zeros(10)
    refused: list[tuple[Any, str]] = [
        ([np.zeros(5)], "list of length 2"),
        ([np.zeros(5), np.zeros(5, np.float32)], r"out\[1\] is float32"),
        ([np.zeros((5, 1)), np.zeros(5)], r"out\[0\] is float64 of shape \(5, 1\)"),
        ([np.zeros(5), 3.0], r"out\[1\]"),
        ([np.zeros(5), whole[3:8]], r"out\[1\] overlaps what is sent"),
        ([other[:5], other[4:9]], r"out\[1\] overlaps out\[0\]"),
        ([other[4:9], other[:5]], r"out\[1\] overlaps out\[0\]"),
        ([other, other], r"out\[1\] overlaps out\[0\]"),
    ]

    def program(comm: Communicator) -> None:
        x = whole[5:]
        for out, text in refused:
            with pytest.raises(UsageError, match=text):
                comm.all_gather_v(x, out=out)
            with pytest.raises(UsageError, match=text):
                comm.all_to_all_v([x, x], out=out)
            with pytest.raises(UsageError, match=text):
                comm.start.gather_v(x, comm.rank, out=out)
        comm.barrier()

    run_each(program, comms)


@every_kind
def test_a_scatter_of_tensors_into_memory_of_the_receivers_runs_in_the_engine(
    world: MakeWorld, kind: str
) -> None:
    """A receiver that passes its own memory need not know how to make a tensor."""
    comms = world(3, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, native = Notes(), comm._group.native
        assert native is not None
        for length, dtype in itertools.product((1, 300, 70_001), (torch.float32, torch.int64)):
            rows = (torch.arange(3 * length) % 251).to(dtype).reshape(3, length)
            out = torch.zeros(length, dtype=dtype)
            before = native.ended + native.adopted
            got = comm.scatter(rows if comm.rank == 1 else None, 1, out=out)
            notes.expect(got is out and torch.equal(out, rows[comm.rank]), True, f"{length} of {dtype}")
            notes.expect(native.ended + native.adopted > before, True, f"{length} of {dtype} in the engine")
        return notes

    assert found(comms, program) == []


@every_kind
def test_a_scatter_of_tensors_and_of_viewed_arrays_runs_in_the_engine(world: MakeWorld, kind: str) -> None:
    comms = world(3, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, native = Notes(), comm._group.native
        assert native is not None
        for length in (1, 300, 70_001):
            tensor = (torch.arange(3 * length) % 251).reshape(3, length)
            halves = tensor.to(torch.bfloat16)
            numbers = np.arange(3 * length).reshape(3, length)
            strided = np.arange(6 * length).reshape(3, 2 * length)[:, ::2]
            for what, rows in (
                ("int64", tensor),
                ("bfloat16", halves),
                ("longlong", numbers.astype(np.longlong)),
                ("strided", strided),
            ):
                alike = torch.equal if isinstance(rows, torch.Tensor) else np.array_equal
                before = native.ended
                got = comm.scatter(rows if comm.rank == 1 else None, 1)
                notes.expect(
                    type(got) is type(rows) and alike(got, rows[comm.rank]), True, f"{length} {what}"
                )
                parts = [rows[r] for r in range(3)]
                got = comm.scatter_v(parts if comm.rank == 2 else None, 2)
                notes.expect(
                    type(got) is type(rows) and alike(got, rows[comm.rank]), True, f"v {length} {what}"
                )
                # Every stage of a call ends in the engine.
                notes.expect(native.ended - before >= 2, True, f"{length} of {what} in the engine")
        notes.expect(native.adopted, 0, "adopted")
        return notes

    assert found(comms, program) == []


@every_kind
def test_ranks_on_both_paths_understand_each_other(world: MakeWorld, kind: str) -> None:
    comms, size = world(3, kind), 3

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for turn, (verb, dtype, length, width) in enumerate(cases(size)):
            closed(comm, is_closed=bool(turn >> comm.rank & 1))
            got, wanted = verb(comm, comm, dtype, length, width)
            notes.expect(
                alike(got, wanted), True, f"{verb.__name__} {dtype} {length} x {width} in turn {turn}"
            )
        closed(comm, is_closed=False)
        return notes

    assert found(comms, program) == []


@every_kind
def test_groups_with_other_ranks_than_the_world(world: MakeWorld, kind: str) -> None:
    """The ranks of a group in reverse order, and without the first rank of the world."""
    comms = world(3, kind)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        back = comm.split(0, key=-comm.rank)
        without = comm.split(0 if comm.rank else None, key=comm.rank)
        for group in (back, without):
            for verb, dtype, length, width in [] if group is None else cases(group.size)[::7]:
                got, wanted = verb(group, group, dtype, length, width)
                what = f"{verb.__name__} {dtype} {length} x {width} on {group.size} ranks"
                notes.expect(alike(got, wanted), True, what)
        return notes

    assert found(comms, program) == []


@every_kind
@pytest.mark.parametrize("name", ["ring", "auto"])
def test_a_named_algorithm_moves_parts_that_do_not_fit_into_rows(
    world: MakeWorld, kind: str, name: str
) -> None:
    comms = world(3, kind)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        every = [array("int32", 2000 + rank, rank) for rank in range(3)]
        for closes in (False, True):
            closed(comm, is_closed=closes and comm.rank == 1)
            got = comm.all_gather_v(every[comm.rank], algorithm=name)
            notes.expect(alike(got, every), True, "all_gather_v")
        closed(comm, is_closed=False)
        return notes

    assert found(comms, program) == []


@every_kind
def test_results_have_the_family_of_the_arguments(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for count in (3, 3000):
            gaps = array("int16", 2 * count, rank)[::2]
            got = comm.all_gather_v(gaps)
            notes.expect(alike(got, [array("int16", 2 * count, r)[::2] for r in range(2)]), True, "gaps")
            seen = comm.all_gather_v(memoryview(bytes([rank]) * count))
            notes.expect([bytes(part) for part in seen], [bytes([r]) * count for r in range(2)], "a buffer")
            bits = uni.typed(array("uint16", count, rank), "bfloat16")
            halves = comm.all_to_all_v([bits, bits])
            notes.expect(
                alike(
                    [np.asarray(getattr(h, "data", h)).view(np.uint16) for h in halves],
                    [array("uint16", count, r) for r in range(2)],
                ),
                True,
                "bfloat16",
            )
            tensors = comm.all_gather_v(torch.arange(count) * (rank + 1))
            wanted = [torch.arange(count) * (r + 1) for r in range(2)]
            notes.expect(all(map(torch.equal, tensors, wanted)), True, "tensors")
            rows = torch.arange(2 * count).reshape(2, count) if rank == 1 else None
            row = comm.scatter(rows, 1)
            notes.expect(torch.equal(row, torch.arange(2 * count).reshape(2, count)[rank]), True, "a row")
        return notes

    assert found(comms, program) == []


def test_a_started_call_is_completed_although_no_thread_waits(world: MakeWorld) -> None:
    """The second stage begins without a thread of the user."""
    comms = world(2, "shm")
    ended = [threading.Event() for _ in comms]
    works = []
    for comm in comms:
        work = comm.start.all_gather_v(array("float64", 40_000 + comm.rank, comm.rank))
        work.add_done_callback(lambda _, rank=comm.rank: ended[rank].set())
        works.append(work)
    assert all(event.wait(30) for event in ended)
    every = [array("float64", 40_000 + rank, rank) for rank in range(2)]
    assert all(alike(work.wait(), every) for work in works)


def test_several_threads_start_and_wait_at_once(world: MakeWorld) -> None:
    comms = world(2, "shm")
    groups = [[comm.sub([0, 1]) for comm in comms] for _ in range(4)]

    def program(comm: Communicator, number: int) -> bool:
        every = [array("int64", 900 * number + rank, rank) for rank in range(2)]
        work = [comm.start.all_gather_v(every[comm.rank]) for _ in range(10)]
        objects = [comm.start.broadcast_object(value(0, 700 * number)) for _ in range(10)]
        while not all(each.done() for each in work):
            pass
        return all(alike(each.wait(), every) for each in work) and all(
            each.wait() == value(0, 700 * number) for each in objects
        )

    right = []
    threads = [
        threading.Thread(target=lambda c=comm, n=number: right.append(program(c, n)))
        for number, pair in enumerate(groups)
        for comm in pair
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 8


# -- errors -----------------------------------------------------------------------------------------------


@every_kind
def test_a_missing_rank_is_named(world: MakeWorld, kind: str) -> None:
    comms = world(3, kind)

    def program(comm: Communicator) -> Any:
        if comm.rank == 2:
            return (2,)
        with pytest.raises(DeadlineExceeded) as caught:
            comm.all_gather_v(np.ones(5000), timeout=0.6)
        return caught.value.waiting_on

    assert run_each(program, comms).values() == [(2,)] * 3


@every_kind
def test_wrong_arguments_are_refused_before_anything_is_sent(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        ones = np.ones(3)
        wrong: list[tuple[Callable[[], Any], str]] = [
            (lambda: comm.all_gather_v(3.5), "no axis 0"),
            (lambda: comm.all_to_all_v([ones]), "list of length 2"),
            (lambda: comm.all_to_all_v([ones, ones.astype(np.int8)]), "differ in dtype"),
            (lambda: comm.all_to_all_v([ones, np.ones((3, 2))]), "differ in dtype or in shape"),
            (lambda: comm.all_to_all_v([ones, object()]), "parts[1]"),
            (lambda: comm.scatter(np.ones((3, 2)), comm.rank), "leading axis of 2"),
            (lambda: comm.scatter(None, comm.rank), "needs x on root"),
            (lambda: comm.scatter_v([ones], comm.rank), "list of length 2"),
            (lambda: comm.scatter_object([1], comm.rank), "list of 2 objects"),
            (lambda: comm.broadcast_object(object(), comm.rank), "register"),
            (lambda: comm.all_to_all_object([1]), "list of 2 objects"),
            (lambda: comm.all_to_all_object([1, object()]), "register"),
            (lambda: comm.all_reduce_object(1, None), "function of two objects"),
            (lambda: comm.all_reduce_object(object(), max), "register"),
            (lambda: comm.gather_v(ones, 7), "root"),
            (lambda: comm.all_gather_v(ones, algorithm="no such"), "algorithm"),
        ]
        for call, words in wrong:
            error = outcome(call)
            notes.expect(isinstance(error, UsageError | TypeError), True, f"{words}: {error!r}")
            notes.expect(words in str(error), True, f"{words} in {error}")
        notes.expect(alike(comm.all_gather_v(ones), [ones, ones]), True, "nothing was sent")
        return notes

    assert found(comms, program) == []


@every_kind
def test_an_out_that_does_not_fit_is_an_error_on_its_rank(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Any:
        x = np.ones((2, 3)) if comm.rank == 0 else None
        out = None if comm.rank == 0 else np.empty(4)
        calls = (lambda: (comm.scatter(x), comm.barrier()), lambda: comm.scatter(x, out=out))
        return [outcome(calls[comm.rank])]

    (first,), (second,) = run_each(program, comms).values()
    assert isinstance(second, UsageError)
    assert "root scatters float64 of shape (3,)" in str(second)
    assert isinstance(first, PeerAborted | PeerLost | UsageError), first


@every_kind
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_random_bytes_give_an_error_or_arrays(
    world: MakeWorld, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank announces random bytes: others get an error or arrays, but no foreign memory and no crash."""
    comms, chance = world(2, kind), random.Random(seed)
    real = Announcement.encoded

    def lie(said: Announcement, nbytes: int, parts: Any) -> np.ndarray[Any, Any]:
        row = real(said, nbytes, parts)
        for _ in range(chance.randrange(1, 6)):
            row[chance.randrange(40)] = chance.randrange(256)
        return row

    monkeypatch.setattr(Announcement, "encoded", lie)

    def program(comm: Communicator) -> Any:
        closed(comm, is_closed=comm.rank == 0)
        return [outcome(lambda: comm.all_gather_v(np.arange(4.0), timeout=10))]

    for (got,) in run_each(program, comms).values():
        if isinstance(got, list):
            assert all(part.dtype == np.float64 for part in got)
        else:
            assert isinstance(got, UnisonoError | MemoryError), got


@every_kind
def test_a_huge_announcement_takes_no_memory(
    world: MakeWorld, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comms = world(2, kind)
    real = Announcement.encoded

    def lie(said: Announcement, nbytes: int, parts: Any) -> np.ndarray[Any, Any]:
        row = real(said, nbytes, parts)
        row[8:16] = np.array([1 << 40]).view(np.uint8)
        return row

    monkeypatch.setattr(Announcement, "encoded", lie)

    def program(comm: Communicator) -> Any:
        closed(comm, is_closed=comm.rank == 0)
        return [outcome(lambda: comm.all_gather_object(b"x", timeout=20))]

    for (error,) in run_each(program, comms).values():
        assert isinstance(error, ProtocolError | PeerAborted), error
        assert f"announced {1 << 40} bytes; allowed: {1 << 30}" in str(error)


def test_rows_come_back_as_they_were_written() -> None:
    for dtype, length, width in (("uint8", 0, None), ("float32", 5, 3), ("complex128", 200, None)):
        parts = [buffers.view(array(dtype, length + k, k, width), "x") for k in range(2)]
        said = Announcement.of(parts, 1)
        row = said.encoded(row_bytes(2, 2), [part.flat for part in parts])
        back = Announcement.decoded(row, 2, 1 << 30)
        assert (back.dtype, back.family, back.shape, back.lengths) == (
            said.dtype,
            1,
            () if width is None else (width,),
            (length, length + 1),
        )
        assert (back.elements is not None) == (
            sum(said.counts) * np.dtype(dtype).itemsize <= row_bytes(2, 2) - 24
        )
        if back.elements is not None:
            assert all((back.part(k) == parts[k].flat).all() for k in range(2))


def test_the_verbs_are_those_of_the_reference() -> None:
    names = {verb.__name__.partition(" ")[0].removesuffix("_out") for verb in (*ARRAYS, *OBJECTS)}
    assert names == verbs_with(Fact.ANNOUNCED)
