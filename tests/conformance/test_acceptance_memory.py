"""Arrays of every family: NumPy, torch, raw bits, the buffer protocol, DLPack, numbers."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.oracle import (
    DTYPES,
    PAIRS,
    Notes,
    as_numpy,
    differs,
    dtype_of,
    in_family,
    moved,
    operand,
    operands,
    prefix,
    result,
)
from tests.support.ranks import run_ranks

import unisono as uni

SHORT = uni.Config(segment_bytes=64)
SIZE = 3


def is_of(kind: str, x: Any) -> bool:
    return isinstance(x, {"torch": torch.Tensor, "typed": uni.Typed, "numpy": np.ndarray}[kind])


# -- results have the family of the arguments -------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("kind", ["torch", "typed", "numpy"])
def test_every_verb_takes_and_gives_the_same_kind_of_memory_for_every_type(kind: str) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        me, size = comm.rank, comm.size

        def expect(got: Any, want: Any, *label: object) -> None:
            for one in got if isinstance(got, list) else [got]:
                notes.check(one is None or is_of(kind, one), *label, "gave", type(one))
            notes.expect(got, want, *label)

        for turn, name in enumerate(DTYPES):
            root = turn % size
            xs = [moved(name, (5, 2), r) for r in range(size)]
            rows = [moved(name, (size, 3), "rows", r) for r in range(size)]
            uneven = [moved(name, (r + 1, 2), "uneven", r) for r in range(size)]

            def mine(x: Any) -> Any:
                return in_family(kind, x.copy())

            x = mine(xs[me])
            notes.check(comm.broadcast(x, root) is x, "broadcast", name)
            expect(x, xs[root], "broadcast", name)
            expect(comm.all_gather(mine(xs[me])), np.stack(xs), "all_gather", name)
            expect(comm.gather(mine(xs[me]), root), np.stack(xs) if me == root else None, "gather", name)
            expect(
                comm.scatter(mine(rows[root]) if me == root else None, root), rows[root][me], "scatter", name
            )
            expect(comm.all_to_all(mine(rows[me])), np.stack([row[me] for row in rows]), "all_to_all", name)
            expect(comm.all_gather_v(mine(uneven[me])), uneven, "all_gather_v", name)
            want = uneven if me == root else None
            expect(comm.gather_v(mine(uneven[me]), root), want, "gather_v", name)
            parts = [mine(part) for part in uneven] if me == root else None
            expect(comm.scatter_v(parts, root), uneven[me], "scatter_v", name)
            parts = [mine(moved(name, me + t, "to", me, t)) for t in range(size)]
            want = [moved(name, s + me, "to", s, me) for s in range(size)]
            expect(comm.all_to_all_v(parts), want, "all_to_all_v", name)
            buf = mine(np.zeros((5, 2), dtype_of(name)))
            comm.sendrecv(mine(xs[me]), (me + 1) % size, buf, (me - 1) % size)
            expect(buf, xs[(me - 1) % size], "sendrecv", name)
        return notes

    assert run_ranks(program, SIZE, config=SHORT).values() == [[]] * SIZE


@pytest.mark.on_every_link
@pytest.mark.parametrize("kind", ["torch", "typed"])
def test_every_type_and_op_is_reduced_in_any_memory(kind: str) -> None:
    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        for name, op in PAIRS:
            x = in_family(kind, operand(name, op, 37, comm.rank, SIZE).copy())
            want = result(name, op, 37, SIZE)
            notes.check(comm.all_reduce(x, op) is x, "all_reduce gives another object", name, op)
            notes.expect(x, want, "all_reduce", name, op)
            x = in_family(kind, operand(name, op, 37, comm.rank, SIZE).copy())
            got = comm.reduce(x, 1, op)
            notes.expect(got, want if comm.rank == 1 else None, "reduce", name, op)
            x = in_family(kind, operand(name, op, (SIZE, 5), comm.rank, SIZE).copy())
            got = comm.reduce_scatter(x, op)
            notes.check(is_of(kind, got), "reduce_scatter gives", type(got), name)
            notes.expect(got, result(name, op, (SIZE, 5), SIZE)[comm.rank], "reduce_scatter", name, op)
            if op == "mean":
                continue
            xs = operands(name, op, 9, SIZE)
            for verb in ("scan", "exscan"):
                got = getattr(comm, verb)(in_family(kind, xs[comm.rank].copy()), op)
                notes.check(is_of(kind, got), verb, "gives", type(got), name)
                want = prefix(op, xs, comm.rank, name, exclusive=verb == "exscan")
                notes.expect(got, want, verb, name, op)
        return notes

    assert run_ranks(program, SIZE, config=SHORT).values() == [[]] * SIZE


@pytest.mark.on_every_link
def test_bfloat16_from_torch_ml_dtypes_and_raw_memory_meet_in_one_collective() -> None:
    kinds = ("torch", "typed", "numpy")

    def program(comm: uni.Communicator) -> Any:
        x = in_family(kinds[comm.rank], operand("bfloat16", "mean", 21, comm.rank, 3).copy())
        comm.all_reduce(x, "mean")
        gathered = comm.all_gather(x)
        return is_of(kinds[comm.rank], gathered), differs(x, result("bfloat16", "mean", 21, 3))

    assert run_ranks(program, 3).values() == [(True, None)] * 3


# -- torch ------------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_a_parameter_is_reduced_in_place_and_its_storage_stays() -> None:
    def program(comm: uni.Communicator) -> Any:
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3) + comm.rank)
        place = weight.data_ptr()
        assert comm.all_reduce(weight, "mean") is weight
        return weight.data_ptr() == place, weight.requires_grad, weight.tolist()

    assert run_ranks(program, 3).values() == [(True, True, [[1, 2, 3], [4, 5, 6]])] * 3


@pytest.mark.on_every_link
def test_a_strided_tensor_is_sent_right_and_refused_in_place() -> None:
    def program(comm: uni.Communicator) -> Any:
        wide = torch.arange(12.0).reshape(3, 4) * (comm.rank + 1)
        gathered = comm.all_gather(wide.T)
        with pytest.raises(uni.UsageError, match="contiguous"):
            comm.all_reduce(wide.T)
        return gathered.tolist()

    want = [[i * 4 + j for i in range(3)] for j in range(4)]
    doubled = [[2 * v for v in row] for row in want]
    assert run_ranks(program, 2).values() == [[want, doubled]] * 2


@pytest.mark.on_every_link
@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(3).to_sparse(), "dense tensors"),
        (torch.empty(3, device="meta"), "CPU"),
        (torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(3, dtype=torch.float8_e4m3fn), "dtype"),
    ],
    ids=["sparse", "meta", "conjugated", "float8"],
)
def test_a_tensor_that_cannot_travel_is_refused_before_anything_is_sent(tensor: Any, text: str) -> None:
    def program(comm: uni.Communicator) -> Any:
        for call in (lambda: comm.all_reduce(tensor), lambda: comm.send(tensor, 0)):
            with pytest.raises(uni.UsageError, match=text):
                call()
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]


# -- the buffer protocol and DLPack -----------------------------------------------------------------------


@pytest.mark.on_every_link
def test_anything_with_a_writable_buffer_is_filled_in_place() -> None:
    def program(comm: uni.Communicator) -> Any:
        raw = bytearray([comm.rank + 1, 10 * comm.rank, 200])
        assert comm.all_reduce(raw) is raw  # uint8, which wraps
        numbers = array.array("d", [comm.rank, 0.5])
        assert comm.all_reduce(numbers, "max") is numbers
        memory = bytearray(16)
        view = memoryview(memory)[4:12].cast("i")
        view[0], view[1] = comm.rank, -comm.rank
        assert comm.all_reduce(view, "min") is view
        gathered = comm.all_gather(bytes([comm.rank, 7]))
        return list(raw), list(numbers), list(np.frombuffer(memory, np.int32)), gathered.tolist()

    want = ([1 + 2, 10, (200 + 200) % 256], [1.0, 0.5], [0, 0, -1, 0], [[0, 7], [1, 7]])
    assert run_ranks(program, 2).values() == [want] * 2


@pytest.mark.on_every_link
def test_what_is_only_read_may_be_read_only() -> None:
    def program(comm: uni.Communicator) -> Any:
        arrived = []
        for count in (3, 200_000):  # the first call, a call by the fast path, and a long one
            for _ in range(3):
                x = np.arange(count) + comm.rank
                x.flags.writeable = comm.rank != 1
                assert comm.broadcast(x, root=1) is x
                arrived.append(bool((x == np.arange(count) + 1).all()))
        raw = b"abc" if comm.rank == 1 else bytearray(3)
        assert comm.broadcast(raw, root=1) is raw
        return arrived, bytes(raw)

    assert run_ranks(program, 3).values() == [([True] * 6, b"abc")] * 3


@pytest.mark.on_every_link
def test_many_arrays_come_back_as_the_list_that_was_given() -> None:
    def program(comm: uni.Communicator) -> Any:
        arrays = [np.full(3, comm.rank), np.full((2, 2), 0.5)]
        assert comm.all_reduce_many(arrays) is arrays
        numbers = comm.all_reduce_many([comm.rank, arrays[1]])
        assert numbers[1] is arrays[1]
        return arrays[0].tolist(), numbers[0], arrays[1].tolist()

    assert run_ranks(program, 2).values() == [([1, 1, 1], 1, [[2.0, 2.0], [2.0, 2.0]])] * 2


class Capsule:
    """An array with DLPack as its only interface."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._inner.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._inner.__dlpack_device__()


@pytest.mark.on_every_link
@pytest.mark.parametrize("name", ["float32", "int16", "bfloat16", "complex128"])
def test_dlpack_memory_is_reduced_where_it_lies(name: str) -> None:
    def program(comm: uni.Communicator) -> Any:
        tensor = in_family("torch", operand(name, "sum", 11, comm.rank, 2).copy())
        given = Capsule(tensor)
        assert comm.all_reduce(given) is given
        return differs(tensor, result(name, "sum", 11, 2))

    assert run_ranks(program, 2).values() == [None, None]


@pytest.mark.on_every_link
def test_memory_of_no_use_is_refused_before_anything_is_sent() -> None:
    frozen = np.ones(3)
    frozen.flags.writeable = False
    cases = [
        (frozen, "read-only"),
        (b"abc", "read-only"),
        (np.ones(8)[::2], "contiguous"),
        (np.asfortranarray(np.ones((3, 2))), "contiguous"),
        ([1, 2, 3], "buffer protocol"),
        ("text", "buffer protocol"),
        (None, "buffer protocol"),
        (np.array(["a"]), "dtype"),
        (np.array([None]), "dtype"),
        (np.ones(2, "datetime64[s]"), "dtype"),
        (np.ones(2, ">i4"), "byte order"),
        (np.ma.masked_array([1, 2]), "masked"),
        (2**63, "64 bits"),
    ]

    def program(comm: uni.Communicator) -> int:
        for x, text in cases:
            for verb in ("all_reduce", "broadcast"):
                with pytest.raises(uni.UsageError, match=text):
                    getattr(comm, verb)(x, **({"root": 1 - comm.rank} if verb == "broadcast" else {}))
        return comm.all_reduce(comm.rank + 1)

    assert run_ranks(program, 2).values() == [3, 3]


@pytest.mark.on_every_link
def test_strided_and_read_only_memory_is_right_where_it_is_only_read() -> None:
    def program(comm: uni.Communicator) -> Any:
        full = np.arange(24).reshape(4, 6) * (comm.rank + 1)
        full.flags.writeable = False
        strided, fortran = full[::2, ::3], np.asfortranarray(full[:2])
        return [
            comm.all_gather(strided).tolist(),
            comm.reduce_scatter(fortran).tolist(),
            comm.all_to_all(full[::-2, 1::2]).tolist(),
            comm.scan(strided[:, 1]).tolist(),
            comm.all_reduce(strided, out=np.empty((2, 2), np.int64)).tolist(),
            as_numpy(comm.gather_v(full[:, comm.rank], 0)[1]).tolist()
            if comm.rank == 0
            else comm.gather_v(full[:, 1]),
        ]

    base = np.arange(24).reshape(4, 6)
    got = run_ranks(program, 2).values()
    for rank in range(2):
        strided = base[::2, ::3]
        assert got[rank][0] == [strided.tolist(), (2 * strided).tolist()]
        assert got[rank][1] == (3 * base[rank]).tolist()
        flipped = base[::-2, 1::2]
        assert got[rank][2] == [flipped[rank].tolist(), (2 * flipped[rank]).tolist()]
        assert got[rank][3] == (strided[:, 1] * (3 if rank else 1)).tolist()
        assert got[rank][4] == (3 * strided).tolist()
    assert got[0][5] == (2 * base[:, 1]).tolist()


# -- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.on_every_link
def test_a_number_comes_back_as_a_number() -> None:
    def program(comm: uni.Communicator) -> Any:
        r = comm.rank
        return [
            comm.all_reduce(r + 1),
            comm.all_reduce(0.5 * r, "max"),
            comm.all_reduce(1j * r),
            comm.all_reduce(r == 1, "lor"),
            comm.all_reduce(2.0 * r, "mean"),
            comm.reduce(r + 1, 2),
            comm.broadcast(r * 10, 1),
            comm.scan(r + 1),
            comm.exscan(r + 1, "prod"),
            comm.all_gather(r * 1.5).tolist(),
            None if (got := comm.gather(r, 1)) is None else got.tolist(),
        ]

    got = run_ranks(program, 3).values()
    for r in range(3):
        want = [6, 1.0, 3j, True, 2.0, 6 if r == 2 else None, 10, (1, 3, 6)[r], (1, 1, 2)[r]]
        assert got[r][:9] == want
        assert [type(x) for x in got[r][:9]] == [type(x) for x in want]
        assert got[r][9:] == [[0, 1.5, 3.0], [0, 1, 2] if r == 1 else None]


@pytest.mark.on_every_link
def test_a_numpy_scalar_comes_back_as_one_and_a_0d_array_is_filled_in_place() -> None:
    def program(comm: uni.Communicator) -> Any:
        scalar = comm.all_reduce(np.float32(comm.rank + 0.5))
        point = np.array(comm.rank + 1, np.int16)
        assert comm.all_reduce(point) is point
        tensor = torch.tensor(comm.rank + 1.0)
        assert comm.broadcast(tensor, 1) is tensor
        return type(scalar), float(scalar), int(point), tensor.item()

    assert run_ranks(program, 2).values() == [(np.float32, 2.0, 3, 2.0)] * 2


@pytest.mark.on_every_link
def test_integers_at_the_edge_of_64_bits_wrap_around() -> None:
    def program(comm: uni.Communicator) -> Any:
        return comm.all_reduce(2**63 - 1), comm.all_reduce(-(2**63), "min"), comm.all_reduce(2**62, "prod")

    assert run_ranks(program, 2).values() == [(-2, -(2**63), 0)] * 2
