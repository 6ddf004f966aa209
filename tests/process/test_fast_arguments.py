"""Tensors and numbers on the fast path: the same types and values as on the slow path."""

from __future__ import annotations

import enum
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import NO_STALL, MakeWorld, every_kind, found, outcome, world
from tests.support.oracle import Notes

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError

__all__ = ["world"]


class Level(enum.IntEnum):
    """Numbers by name, as programs have them."""

    low, high = 3, 4


DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.float16, torch.complex64)


def begun_fast(comm: Communicator) -> int:
    native_group = comm._group.native
    assert native_group is not None
    return native_group.ended + native_group.adopted


def tensor(shape: tuple[int, ...], dtype: Any, rank: int, k: int) -> Any:
    count = int(np.prod(shape))
    return ((torch.arange(count) * 3 + 5 * rank + k) % 100).to(dtype).reshape(shape)


def is_same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


# -- tensors --------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [2, 3])
def test_tensors_are_reduced_and_moved_as_numpys_arrays_are(world: MakeWorld, kind: str, size: int) -> None:
    comms = world(size, kind, **NO_STALL)
    shapes = [(), (5,), (2, 3), (0, 2), (1021,)]

    def program(comm: Communicator) -> Notes:
        notes, rank, every = Notes(), comm.rank, range(size)
        for shape, dtype, k in itertools.product(shapes, DTYPES, range(3)):
            what = f"{dtype} {shape} #{k}"
            here = [tensor(shape, dtype, r, k) for r in every]
            x = here[rank].clone()
            notes.expect(comm.all_reduce(x) is x, True, f"all_reduce gives what it got {what}")
            notes.expect(is_same(x, sum(here[1:], here[0])), True, f"all_reduce {what}")
            x = here[rank].clone()
            notes.expect(comm.broadcast(x, 1) is x, True, f"broadcast gives what it got {what}")
            notes.expect(is_same(x, here[1]), True, f"broadcast {what}")
            gathered = comm.all_gather(here[rank])
            notes.expect(is_same(gathered, torch.stack(here)), True, f"all_gather {what}")
            into = torch.empty_like(gathered)
            notes.expect(comm.all_gather(here[rank], out=into) is into, True, f"out {what}")
            notes.expect(is_same(into, gathered), True, f"all_gather into out {what}")
            mixed = np.empty(gathered.shape, gathered.numpy().dtype)
            notes.expect(comm.all_gather(here[rank], out=mixed) is mixed, True, f"out of NumPy {what}")
            notes.expect(mixed, gathered.numpy(), f"all_gather into NumPy {what}")
            rows = [tensor((size, *shape), dtype, r, k) for r in every]
            want = torch.stack([rows[r][rank] for r in every])
            notes.expect(is_same(comm.all_to_all(rows[rank]), want), True, f"all_to_all {what}")
            combined = sum(rows[1:], rows[0])[rank]
            notes.expect(is_same(comm.reduce_scatter(rows[rank]), combined), True, f"reduce_scatter {what}")
        return notes

    assert found(comms, program) == []
    for comm in comms:
        assert begun_fast(comm) == len(shapes) * len(DTYPES) * 3 * 7


@every_kind
def test_tensors_of_bfloat16_and_parameters_are_seen_like_others(world: MakeWorld, kind: str) -> None:
    """NumPy has no bfloat16, so results are made from the bits."""
    comms = world(3, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, rank, every = Notes(), comm.rank, range(3)
        for shape in [(), (5,), (2, 3), (0, 2), (1021,)]:
            here = [tensor(shape, torch.bfloat16, r, 0) for r in every]
            x = here[rank].clone()
            notes.expect(comm.all_reduce(x) is x, True, f"all_reduce gives what it got {shape}")
            notes.expect(is_same(x, sum(here[1:], here[0])), True, f"all_reduce {shape}")
            notes.expect(is_same(comm.all_gather(here[rank]), torch.stack(here)), True, f"all_gather {shape}")
            rows = [tensor((3, *shape), torch.bfloat16, r, 0) for r in every]
            combined = sum(rows[1:], rows[0])[rank]
            notes.expect(is_same(comm.reduce_scatter(rows[rank]), combined), True, f"reduce_scatter {shape}")
            parameter = torch.nn.Parameter(tensor(shape, torch.float32, rank, 0))
            want = sum(tensor(shape, torch.float32, r, 0) for r in every)
            notes.expect(comm.all_reduce(parameter) is parameter, True, f"parameter {shape}")
            notes.expect(bool((parameter == want).all()), True, f"all_reduce of a parameter {shape}")
        return notes

    assert found(comms, program) == []
    assert all(begun_fast(comm) == 5 * 4 for comm in comms)


def test_parts_of_tensors_that_lie_in_a_row_are_seen_where_they_lie(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        whole = torch.arange(24.0).reshape(4, 6) + comm.rank
        notes.expect(comm.all_reduce(whole[1:3]).tolist(), (whole[1:3]).tolist(), "two rows, in place")
        notes.expect(
            whole[0].tolist(), [i + float(comm.rank) for i in range(6)], "the row before is untouched"
        )
        notes.expect(whole[1].tolist(), [2.0 * (6 + i) + 1 for i in range(6)], "a row that was reduced")
        one = torch.arange(6.0).reshape(3, 2)[:, 1:2][1:2]  # one element: its strides do not matter
        notes.expect(comm.all_gather(one).tolist(), [[[3.0]], [[3.0]]], "one element of a column")
        odd = torch.frombuffer(bytearray(range(9)), dtype=torch.uint8)[1:].view(torch.uint8)
        notes.expect(comm.all_gather(odd)[1].tolist(), list(range(1, 9)), "at an odd address")
        deep = torch.ones((1,) * 9 + (3,)) * (comm.rank + 1)
        notes.expect(comm.all_reduce(deep).flatten().tolist(), [3.0] * 3, "ten axes")
        return notes

    assert found(comms, program) == []


def test_a_mean_of_tensors(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for k in range(4):
            x = torch.tensor([comm.rank + k, 7.0], dtype=torch.float64)
            comm.all_reduce(x, "mean")
            notes.expect(x.tolist(), [k + 0.5, 7.0], f"#{k}")
        return notes

    assert found(comms, program) == []
    assert all(begun_fast(comm) == 4 for comm in comms)


def test_tensors_that_are_not_plain_take_the_slow_path(world: MakeWorld) -> None:
    comms = world(2)

    class Own(torch.Tensor):
        pass

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank

        def total(x: Any) -> Any:
            return comm.all_reduce(x)

        for k in range(3):
            plain = torch.full((4,), rank + k + 1.0)
            notes.expect(total(plain).tolist(), [2.0 * k + 3] * 4, f"plain #{k}")
            leaf = torch.full((4,), rank + 1.0, requires_grad=True)
            notes.expect(total(leaf) is leaf and leaf.tolist() == [3.0] * 4, True, f"with a gradient #{k}")
            own = torch.full((4,), rank + 1.0).as_subclass(Own)
            notes.expect(total(own) is own and own.tolist() == [3.0] * 4, True, f"of a subclass #{k}")
            narrow = torch.full((4,), rank + 1.0, dtype=torch.bfloat16)
            notes.expect(total(narrow).tolist(), [3.0] * 4, f"bfloat16 #{k}")
            parameter = torch.nn.Parameter(torch.full((4,), rank + 1.0))
            notes.expect(total(parameter) is parameter, True, f"a parameter #{k}")
            bad: list[Callable[[], Any]] = [
                lambda: total(torch.ones(4, 4).T),
                lambda: total(torch.ones(4, device="meta")),
                lambda: total(torch.ones(4, dtype=torch.complex64).conj()),
                lambda: total(torch._neg_view(torch.ones(4))),
                lambda: total(torch.ones(2).to_sparse()),
                lambda: total(torch.ones(4, dtype=torch.float8_e5m2)),
                lambda: comm.all_gather(torch.ones(4), out=torch.ones(3, 4)),
                lambda: comm.all_gather(torch.ones(4), out=3.0),
                lambda: comm.all_to_all(torch.ones(3, 4)),
            ]
            for i, call in enumerate(bad):
                notes.expect(isinstance(outcome(call), UsageError), True, f"bad call {i} #{k}")
        return notes

    assert found(comms, program) == []


def test_memory_that_is_both_given_and_filled_is_refused(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes, x = Notes(), torch.arange(6.0).reshape(2, 3)

        def swap(out: Any) -> Any:
            return comm.all_to_all(x, out=out)

        for _ in range(3):
            swap(torch.empty(2, 3))
        for out in (x, x.numpy()):
            notes.expect(isinstance(outcome(lambda out=out: swap(out)), UsageError), True, "overlap")
        return notes

    assert found(comms, program) == []


# -- arrays of subclasses -------------------------------------------------------------------------------


@every_kind
def test_arrays_of_subclasses_are_seen_where_they_lie(world: MakeWorld, kind: str, tmp_path: Path) -> None:
    comms = world(2, kind, **NO_STALL)

    class Own(np.ndarray):  # type: ignore[type-arg]
        pass

    def program(comm: Communicator) -> Notes:
        notes, rank, every = Notes(), comm.rank, range(2)
        here = [np.arange(35.0).reshape(5, 7) * (r + 1) for r in every]
        mapped = np.memmap(tmp_path / f"of rank {rank}", float, "w+", shape=(5, 7))
        for x in (mapped, np.empty((5, 7)).view(Own), np.empty((5, 7)).view(np.recarray)):
            what = type(x).__name__
            x[:] = here[rank]
            gathered = comm.all_gather(x)
            notes.check(type(gathered) is np.ndarray, f"the result for {what} is a plain array")
            notes.expect(gathered, np.stack(here), f"all_gather of {what}")
            notes.expect(comm.all_gather(x[1:3]), np.stack(here)[:, 1:3], f"rows of {what}")
            comm.sendrecv(x, 1 - rank, into := np.empty_like(x), 1 - rank)
            notes.expect(np.asarray(into), here[1 - rank], f"a message into {what}")
            notes.check(comm.all_reduce(x) is x, f"all_reduce gives what it got: {what}")
            notes.expect(np.asarray(x), here[0] + here[1], f"all_reduce of {what}")
        notes.check(begun_fast(comm) == 3 * 4, "the engine has run all of them but", 12 - begun_fast(comm))
        bad = np.ma.masked_array(np.ones(3), [0, 1, 0])
        for call in (comm.all_reduce, comm.all_gather, lambda x: comm.send(x, 0)):
            error = outcome(lambda call=call: call(bad))
            notes.check(isinstance(error, UsageError) and "masked array" in str(error), error)
        locked = np.ones(3).view(Own)
        locked.flags.writeable = False
        error = outcome(lambda: comm.all_reduce(locked))
        notes.check(isinstance(error, UsageError) and "read-only" in str(error), error)
        error = outcome(lambda: comm.all_reduce(np.ones((3, 3)).view(Own).T))
        notes.check(isinstance(error, UsageError) and "not contiguous" in str(error), error)
        return notes

    assert found(comms, program) == []


# -- numbers --------------------------------------------------------------------------------------------


@every_kind
def test_numbers_come_back_as_numbers(world: MakeWorld, kind: str) -> None:
    comms = world(3, kind, **NO_STALL)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        for k in range(4):
            given: list[Any] = [rank + k, rank + 0.5, -(2**62) // 3 * (rank > 0), float("inf"), -0.0]
            for i, number in enumerate(given):
                got = comm.all_reduce(number)
                want = comm.start.all_reduce(number).wait()
                notes.expect(type(got) is type(want) and got == want, True, f"sum {i} #{k}: {got!r} {want!r}")
                top = comm.all_reduce(number, "max")
                notes.expect(type(top) is type(number), True, f"max {i} #{k}")
                cast = comm.broadcast(number, 1)
                notes.expect(type(cast) is type(number), True, f"broadcast {i} #{k}")
                row = comm.all_gather(number)
                notes.expect(isinstance(row, np.ndarray) and row.shape == (3,), True, f"all_gather {i} #{k}")
                notes.expect(row[rank] == number, True, f"all_gather's own {i} #{k}")
                notes.expect(cast == row[1] and top == row.max(), True, f"values {i} #{k}")
            notes.expect(comm.all_reduce(rank + 1.0, "mean"), 2.0, f"mean #{k}")
            for odd in (True, np.float32(2), np.int64(3)):
                got = comm.all_reduce(odd, "max")
                notes.expect(type(got) is type(odd) and got == odd, True, f"{odd!r} #{k}: {got!r}")
            notes.expect(isinstance(outcome(lambda: comm.all_reduce(2**63)), UsageError), True, "too large")
            notes.expect(isinstance(outcome(lambda: comm.all_to_all(1.0)), UsageError), True, "no row")
        return notes

    assert found(comms, program) == []
    assert all(begun_fast(comm) >= 3 * 5 * 3 for comm in comms)


def test_numbers_of_subclasses_travel_as_their_base_types(world: MakeWorld) -> None:
    comms = world(2, **NO_STALL)

    class Metres(float):
        pass

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for given, want in (
            (Level(3 + comm.rank), 7),
            (Metres(0.5 + comm.rank), 2.0),
            (np.complex128(comm.rank), np.complex128(1)),
        ):
            got = comm.all_reduce(given)
            notes.check(type(got) is type(want) and got == want, f"{given!r}: {got!r}")
        return notes

    assert found(comms, program) == []
    assert all(begun_fast(comm) == 3 for comm in comms)


@pytest.mark.parametrize("axes", [8, 9, 32])
def test_arrays_and_tensors_of_many_axes_are_seen_where_they_lie(world: MakeWorld, axes: int) -> None:
    comms = world(2, **NO_STALL)
    shape = (*(1,) * (axes - 2), 2, 3)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        here = [(np.arange(6.0) * (r + 1)).reshape(shape) for r in range(2)]
        notes.expect(comm.all_reduce(here[rank].copy()), here[0] + here[1], "all_reduce")
        notes.expect(comm.all_reduce(torch.tensor(here[rank])).numpy(), here[0] + here[1], "of a tensor")
        notes.expect(comm.all_gather_v(here[rank]), here, "all_gather_v")
        if axes < 32:  # NumPy 1 has no more
            notes.expect(comm.all_gather(here[rank]), np.stack(here), "all_gather")
            notes.expect(comm.scatter(np.stack(here) if rank == 1 else None, 1), here[rank], "scatter")
        return notes

    assert found(comms, program) == []
    assert all(begun_fast(comm) == (5 if axes < 32 else 3) for comm in comms)


def test_a_number_an_array_and_a_tensor_meet(world: MakeWorld) -> None:
    """One value of one type, in different families of arrays: the calls are equal."""
    comms = world(3)

    def program(comm: Communicator) -> Notes:
        notes, rank = Notes(), comm.rank
        kinds: list[Callable[[float], Any]] = [
            float,
            lambda x: np.array([x], float),
            lambda x: torch.tensor([x], dtype=torch.float64),
        ]
        for k in range(9):
            got = comm.all_reduce(kinds[(rank + k) % 3](rank + k))
            notes.expect(np.asarray(got).item(), 3.0 * k + 3, f"#{k}")
        return notes

    assert found(comms, program) == []


# -- messages -------------------------------------------------------------------------------------------


@every_kind
def test_tensors_and_numbers_are_sent_and_received(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)

    def program(comm: Communicator) -> Notes:
        notes, there = Notes(), 1 - comm.rank
        for k, count in itertools.product(range(3), (0, 1, 7, 5000)):
            given, into = tensor((count,), torch.float32, comm.rank, k), torch.empty(count)
            if comm.rank == 0:
                comm.send(given, there, k)
                status = comm.recv(into, there, k)
            else:
                status = comm.recv(into, there, k)
                comm.send(given, there, k)
            notes.expect(tuple(status), (there, k, 4 * count), f"status {count} #{k}")
            notes.expect(is_same(into, tensor((count,), torch.float32, there, k)), True, f"{count} #{k}")
        for base, dtype in ((3.5, torch.float64), (-(2**40), torch.int64)):
            comm.send(base + comm.rank, there)
            into = torch.zeros(1, dtype=dtype)
            comm.recv(into, there)
            notes.expect(into.item(), base + there, "a number")
        notes.expect(isinstance(outcome(lambda: comm.recv(1.0, there)), UsageError), True, "into a number")
        return notes

    assert found(comms, program) == []
    for comm in comms:
        messages = comm._group.native
        assert messages is not None
        assert messages.ended + messages.adopted == 2 * (3 * 4 + 2)


def test_numbers_do_not_bring_torch_in(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, unisono as uni\n"
        "class Tensor: pass\n"
        "def main(comm):\n"
        "    for k in range(4): comm.all_reduce(1.0)\n"
        "    try: comm.all_reduce(Tensor())\n"
        "    except uni.UsageError: pass\n"
        "    return 'torch' in sys.modules\n"
        "if __name__ == '__main__': print(uni.spawn(main, 1))\n"
    )
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.strip() == "[False]", ended.stderr
