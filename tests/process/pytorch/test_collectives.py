"""Every collective of torch.distributed, compared with Gloo: all element types, odd shapes, uneven lists."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import Pair, TorchPool, assert_equal, torch_pool
from torch.utils._python_dispatch import TorchDispatchMode

CHECKS: dict[str, Callable[[Pair], None]] = {}


def check(fn: Callable[[Pair], None]) -> Callable[[Pair], None]:
    CHECKS[fn.__name__] = fn
    return fn


@pytest.fixture(scope="module")
def pool() -> Iterator[TorchPool]:
    with torch_pool(CHECKS, 4) as made:
        yield made


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (7,), (3, 5), (2, 3, 4))
OPS = dist.ReduceOp


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small numbers that differ by rank and index, and whose sums and products are exact in every type."""
    count = 1
    for length in shape:
        count *= length
    numbers = (torch.arange(count) * 3 + rank * 5 + seed) % 4
    if dtype is torch.bool:
        return (numbers % 2 == 0).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def all_data(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [data(rank, shape, dtype, seed) for rank in range(size)]


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


# -- reductions ---------------------------------------------------------------------------------------------


@check
def all_reduce_of_every_type_and_operation(pair: Pair) -> None:
    ways: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
        OPS.SUM: lambda t: t.sum(0),
        OPS.PRODUCT: lambda t: t.prod(0),
        OPS.MIN: lambda t: t.amin(0),
        OPS.MAX: lambda t: t.amax(0),
    }
    for dtype in (*FLOATS, *INTS):
        for shape in SHAPES:
            for op, way in ways.items():
                x = data(pair.rank, shape, dtype)
                dist.all_reduce(x, op, group=pair.ours)
                expected = way(torch.stack(all_data(pair.size, shape, dtype))).to(dtype)
                assert_equal(x, expected)
                y = data(pair.rank, shape, dtype)
                work = dist.all_reduce(y, op, group=pair.ours, async_op=True)
                assert work.wait()
                assert work.is_completed()
                assert work.is_success()
                assert work.result()[0] is y
                assert_equal(y, expected)


@check
def all_reduce_as_gloo_does_it(pair: Pair) -> None:
    def run(group: Any) -> Any:
        results = []
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8):
            for op in (OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX):
                x = data(pair.rank, (5, 3), dtype)
                dist.all_reduce(x, op, group=group)
                results.append(x)
        for op in (OPS.BAND, OPS.BOR, OPS.BXOR):
            for dtype in (torch.int32, torch.uint8):
                x = data(pair.rank, (11,), dtype)
                dist.all_reduce(x, op, group=group)
                results.append(x)
        return results

    pair.same(run)


@check
def averages(pair: Pair) -> None:
    for dtype in FLOATS:
        x = data(pair.rank, (9,), dtype)
        dist.all_reduce(x, OPS.AVG, group=pair.ours)
        assert_equal(x, torch.stack(all_data(pair.size, (9,), torch.float64)).mean(0).to(dtype))
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
        for is_async in (False, True):
            x = data(pair.rank, (9,), dtype)
            work = dist.all_reduce(x, OPS.AVG, group=pair.ours, async_op=is_async)
            if work is not None:
                work.wait()
            whole = torch.stack(all_data(pair.size, (9,), torch.int64)).sum(0)
            assert_equal(x, whole.div(pair.size, rounding_mode="trunc").to(dtype))


@check
def truth_values(pair: Pair) -> None:
    whole = torch.stack(all_data(pair.size, (6,), torch.bool))
    for op, expected in (
        (OPS.SUM, whole.any(0)),
        (OPS.MAX, whole.any(0)),
        (OPS.BOR, whole.any(0)),
        (OPS.PRODUCT, whole.all(0)),
        (OPS.MIN, whole.all(0)),
        (OPS.BAND, whole.all(0)),
        (OPS.BXOR, whole.sum(0) % 2 == 1),
    ):
        x = data(pair.rank, (6,), torch.bool)
        dist.all_reduce(x, op, group=pair.ours)
        assert_equal(x, expected)


@check
def complex_numbers(pair: Pair) -> None:
    for dtype in (torch.complex64, torch.complex128):
        x = data(pair.rank, (5,), dtype) * (1 + 2j)
        dist.all_reduce(x, group=pair.ours)
        assert_equal(x, torch.stack(all_data(pair.size, (5,), dtype)).sum(0) * (1 + 2j))
        # Complex tensors as C++ passes them, without a real view.
        y = data(pair.rank, (5,), dtype) * 1j
        pair.ours.allreduce([y]).wait()
        assert_equal(y, torch.stack(all_data(pair.size, (5,), dtype)).sum(0) * 1j)
        z = (data(pair.rank, (5,), dtype) * 1j).conj()
        pair.ours.allreduce([z]).wait()
        assert_equal(z.resolve_conj(), torch.stack(all_data(pair.size, (5,), dtype)).sum(0) * -1j)
        w = data(pair.rank, (4,), dtype)
        dist.broadcast(w, group=pair.ours, group_src=1)
        assert_equal(w, data(1, (4,), dtype))


@check
def a_sum_that_is_scaled_first(pair: Pair) -> None:
    for factor in (0.5, torch.tensor([0.25])):
        op = dist._make_nccl_premul_sum(factor)
        x = data(pair.rank, (6,), torch.float32)
        dist.all_reduce(x, op, group=pair.ours)
        scale = float(factor)
        assert_equal(x, torch.stack(all_data(pair.size, (6,), torch.float32)).sum(0) * scale)
        given = data(pair.rank, (pair.size, 3), torch.float32)
        kept = given.clone()
        out = torch.empty(3)
        dist.reduce_scatter_single(out, given, op, group=pair.ours)
        assert_equal(given, kept)
        assert_equal(
            out, torch.stack(all_data(pair.size, (pair.size, 3), torch.float32)).sum(0)[pair.rank] * scale
        )


@check
def operations_that_are_not_defined_are_refused_before_anything_is_sent(pair: Pair) -> None:
    for dtype, op in ((torch.float32, OPS.BAND), (torch.float8_e4m3fn, OPS.SUM), (torch.bool, OPS.AVG)):
        with pytest.raises(
            dist.DistBackendError, match=r"all_reduce at test_collectives.py:\d+: .*; allowed: "
        ):
            dist.all_reduce(torch.zeros(3).to(dtype), op, group=pair.ours)
    dist.barrier(group=pair.ours)


@check
def bytes_are_never_added_up(pair: Pair) -> None:
    """Types without arithmetic are sent as bytes: every collective that reduces refuses them."""
    kind = torch.float8_e4m3fn
    whole, part = torch.ones(4 * pair.size).to(kind), torch.zeros(4).to(kind)
    uneven = [torch.ones(rank + 1).to(kind) for rank in range(pair.size)]
    for run in (
        lambda: dist.reduce_scatter(part, list(whole.chunk(pair.size)), group=pair.ours),
        lambda: dist.reduce_scatter(part, [part.clone() for _ in range(pair.size)], group=pair.ours),
        lambda: dist.reduce_scatter(uneven[pair.rank].clone(), uneven, group=pair.ours),
        lambda: dist.reduce_scatter_single(part, whole, group=pair.ours),
        lambda: dist.reduce(part, group=pair.ours, group_dst=0),
        lambda: pair.ours.allreduce_coalesced([part, part]),
    ):
        with pytest.raises(dist.DistBackendError, match=r"a reduction of torch\.float8"):
            run()
        assert_equal(part.float(), torch.zeros(4))
    dist.barrier(group=pair.ours)


@check
def a_scaled_sum_of_integers_keeps_their_type(pair: Pair) -> None:
    op = dist._make_nccl_premul_sum(2.0)
    x = data(pair.rank, (6,), torch.int32)
    dist.reduce(x, op=op, group=pair.ours, group_dst=0)
    if pair.rank == 0:
        assert_equal(x, torch.stack(all_data(pair.size, (6,), torch.int32)).sum(0).to(torch.int32) * 2)
    out = torch.zeros(3, dtype=torch.int64)
    dist.reduce_scatter_single(out, data(pair.rank, (pair.size * 3,), torch.int64), op, group=pair.ours)
    whole = torch.stack(all_data(pair.size, (pair.size * 3,), torch.int64)).sum(0)
    assert_equal(out, whole.view(pair.size, 3)[pair.rank] * 2)


@check
def reduce_to_a_root(pair: Pair) -> None:
    for root in range(pair.size):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for op in (OPS.SUM, OPS.MAX, OPS.AVG):
                x = data(pair.rank, (4, 2), dtype)
                dist.reduce(x, op=op, group=pair.ours, group_dst=root)
                if pair.rank != root:
                    assert_equal(x, data(pair.rank, (4, 2), dtype))
                    continue
                whole = torch.stack(all_data(pair.size, (4, 2), dtype)).to(torch.float64)
                way = {OPS.SUM: whole.sum(0), OPS.MAX: whole.amax(0), OPS.AVG: whole.mean(0)}[op]
                assert_equal(x, way.to(dtype))


@check
def reduce_scatter_in_all_forms(pair: Pair) -> None:
    def run(group: Any) -> Any:
        results = []
        for dtype in (torch.float32, torch.int64):
            out = fresh(data(0, (3, 2), dtype))
            dist.reduce_scatter_single(out, data(pair.rank, (3 * pair.size, 2), dtype), group=group)
            results.append(out)
            listed = fresh(out)
            parts = [data(pair.rank, (3, 2), dtype, seed=k) for k in range(pair.size)]
            dist.reduce_scatter(listed, parts, group=group)
            results.append(listed)
        return results

    pair.same(run)
    stacked = torch.zeros(5)  # Gloo refuses this case, and parts of different lengths
    dist.reduce_scatter_single(stacked, data(pair.rank, (pair.size, 5), torch.float32), group=pair.ours)
    whole = torch.stack(all_data(pair.size, (pair.size, 5), torch.float32)).sum(0)
    assert_equal(stacked, whole[pair.rank])
    for is_async in (False, True):
        parts = [data(pair.rank, (k + 1, 3), torch.float32, seed=k) for k in range(pair.size)]
        out = torch.empty(pair.rank + 1, 3)
        work = dist.reduce_scatter(out, parts, group=pair.ours, async_op=is_async)
        if work is not None:
            work.wait()
        shape = (pair.rank + 1, 3)
        assert_equal(out, torch.stack(all_data(pair.size, shape, torch.float32, seed=pair.rank)).sum(0))


@check
def reduce_scatter_of_means(pair: Pair) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        out = fresh(data(0, (4,), dtype))
        dist.reduce_scatter_single(out, data(pair.rank, (4 * pair.size,), dtype), OPS.AVG, group=pair.ours)
        whole = torch.stack(all_data(pair.size, (4 * pair.size,), torch.float64)).sum(0)
        part = whole.view(pair.size, 4)[pair.rank] / pair.size
        assert_equal(out, part.to(dtype))


@check
def sparse_tensors(pair: Pair) -> None:
    def sparse(rank: int) -> torch.Tensor:
        indices = torch.tensor([[rank, 2 * rank + 1, 0], [0, 1, 2]])[:, :rank]
        values = torch.arange(1.0, 4.0)[:rank]
        return torch.sparse_coo_tensor(indices, values, (9, 3), check_invariants=True)

    def run(group: Any) -> Any:
        x = sparse(pair.rank)
        dist.all_reduce(x, group=group)
        return x.to_dense()

    pair.same(run)
    x = sparse(pair.rank)
    work = dist.all_reduce(x, group=pair.ours, async_op=True)
    assert work.get_future().wait()[0] is x
    whole = sum(sparse(rank).to_dense() for rank in range(pair.size))
    assert_equal(x.to_dense(), whole)
    y = sparse(pair.rank)
    dist.all_reduce(y, OPS.AVG, group=pair.ours)
    assert_equal(y.to_dense(), whole / pair.size)
    with pytest.raises(dist.DistBackendError, match="of sparse tensors; allowed: SUM, AVG"):
        dist.all_reduce(y, OPS.MAX, group=pair.ours)


# -- moves --------------------------------------------------------------------------------------------------


@check
def broadcast_of_every_type(pair: Pair) -> None:
    for dtype in (*FLOATS, *INTS, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2):
        for shape in SHAPES:
            root = len(shape) % pair.size
            x = data(pair.rank, shape, torch.float32).to(dtype)
            dist.broadcast(x, group=pair.ours, group_src=root)
            assert_equal(x.to(torch.float32), data(root, shape, torch.float32).to(dtype).to(torch.float32))


@check
def all_gather_in_all_forms(pair: Pair) -> None:
    def run(group: Any) -> Any:
        results: list[Any] = []
        for dtype in (torch.float32, torch.int64, torch.bool, torch.float16):
            for shape in ((3, 2), (5,), (0, 2)):
                x = data(pair.rank, shape, dtype)
                outs = [fresh(x) for _ in range(pair.size)]
                dist.all_gather(outs, x, group=group)
                results.append(outs)
                single = torch.zeros((shape[0] * pair.size, *shape[1:]), dtype=dtype)
                dist.all_gather_single(single, x, group=group)
                results.append(single)
        return results

    pair.same(run)
    for is_async in (False, True):
        stacked = torch.zeros(pair.size, 3, 2)
        work = dist.all_gather_single(
            stacked, data(pair.rank, (3, 2), torch.float32), group=pair.ours, async_op=is_async
        )
        if work is not None:
            work.wait()
        assert_equal(stacked, torch.stack(all_data(pair.size, (3, 2), torch.float32)))
        # Parts of different lengths, and bytes, both of which Gloo refuses.
        outs = [torch.zeros(k, 2).to(torch.float8_e5m2) for k in range(pair.size)]
        mine = data(pair.rank, (pair.rank, 2), torch.float32).to(torch.float8_e5m2)
        work = dist.all_gather(outs, mine, group=pair.ours, async_op=is_async)
        if work is not None:
            work.wait()
        for k, out in enumerate(outs):
            assert_equal(out.float(), data(k, (k, 2), torch.float32))


class Copies(TorchDispatchMode):
    """Counts the copies that torch makes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


@check
def results_that_lie_in_a_row_are_written_where_they_belong(pair: Pair) -> None:
    for length in (1, 7, 5003):
        expected = torch.cat(all_data(pair.size, (length,), torch.float32))
        for is_own in (False, True):  # whether the input of a rank is its own part of the result
            for root in (None, 0, pair.size - 1):
                whole = torch.zeros(pair.size * length)
                parts = list(whole.chunk(pair.size))
                x = data(pair.rank, (length,), torch.float32)
                if is_own:
                    x = parts[pair.rank].copy_(x)
                given = parts if root in (None, pair.rank) else None
                with Copies() as copies:
                    if root is None:
                        dist.all_gather(parts, x, group=pair.ours)
                    else:
                        dist.gather(x, given, group=pair.ours, group_dst=root)
                assert copies.count == 0
                if given is not None:
                    assert_equal(whole, expected)


@check
def all_gather_into_the_tensor_that_the_input_is_a_slice_of(pair: Pair) -> None:
    out = torch.zeros(pair.size * 5)
    mine = out[pair.rank * 5 : pair.rank * 5 + 5]
    mine.copy_(data(pair.rank, (5,), torch.float32))
    dist.all_gather_single(out, mine, group=pair.ours)
    assert_equal(out, torch.cat(all_data(pair.size, (5,), torch.float32)))
    whole = data(pair.rank, (pair.size * 5,), torch.float32)
    dist.reduce_scatter_single(whole[pair.rank * 5 : pair.rank * 5 + 5], whole, group=pair.ours)
    total = torch.stack(all_data(pair.size, (pair.size * 5,), torch.float32)).sum(0)
    assert_equal(whole.view(pair.size, 5)[pair.rank], total.view(pair.size, 5)[pair.rank])


@check
def lists_that_lie_in_a_row_are_used_without_a_copy(pair: Pair) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.zeros(2 + pair.size * 3, dtype=dtype)
        dist.all_gather(list(whole[2:].chunk(pair.size)), data(pair.rank, (3,), dtype), group=pair.ours)
        assert_equal(whole[2:], torch.cat(all_data(pair.size, (3,), dtype)))
        assert_equal(whole[:2], torch.zeros(2, dtype=dtype))
        parts = list(whole[2:].chunk(pair.size))  # one output is also the input
        dist.all_gather(parts, parts[pair.rank], group=pair.ours)
        assert_equal(whole[2:], torch.cat(all_data(pair.size, (3,), dtype)))
        given = data(pair.rank, (pair.size * 2,), dtype)
        out = torch.zeros(2, dtype=dtype)
        dist.reduce_scatter(out, list(given.chunk(pair.size)), group=pair.ours)
        total = torch.stack(all_data(pair.size, (pair.size * 2,), dtype)).sum(0)
        assert_equal(out, total.view(pair.size, 2)[pair.rank])
        assert_equal(given, data(pair.rank, (pair.size * 2,), dtype))
        dist.scatter(
            out, list(given.chunk(pair.size)) if pair.rank == 1 else None, group=pair.ours, group_src=1
        )
        assert_equal(out, data(1, (pair.size * 2,), dtype).view(pair.size, 2)[pair.rank])


@check
def an_output_that_is_listed_again_keeps_what_comes_last(pair: Pair) -> None:
    def run(group: Any) -> Any:
        x = data(pair.rank, (5,), torch.float32)
        gathered, one = fresh(x), fresh(x)
        dist.all_gather([gathered] * pair.size, x, group=group)
        dist.gather(x, [one] * pair.size if pair.rank == 1 else None, group=group, group_dst=1)
        return gathered, one if pair.rank == 1 else None

    pair.same(run)


@check
def gather_and_scatter(pair: Pair) -> None:
    def run(group: Any) -> Any:
        results: list[Any] = []
        for root in range(pair.size):
            for shape in ((3,), (2, 2), (1,)):
                x = data(pair.rank, shape, torch.float32)
                outs = [fresh(x) for _ in range(pair.size)] if pair.rank == root else None
                dist.gather(x, outs, group=group, group_dst=root)
                results.append(outs or [])
                parts = [data(k, shape, torch.int64, seed=root) for k in range(pair.size)]
                out = torch.zeros(shape, dtype=torch.int64)
                dist.scatter(out, parts if pair.rank == root else None, group=group, group_src=root)
                results.append(out)
        return results

    pair.same(run)


@check
def all_to_all_in_all_forms(pair: Pair) -> None:
    size, rank = pair.size, pair.rank

    def run(group: Any) -> Any:
        even = torch.zeros(size * 2, 3)
        dist.all_to_all_single(even, data(rank, (size * 2, 3), torch.float32), group=group)
        gives, takes = [(rank + k) % 3 for k in range(size)], [(rank + k) % 3 for k in range(size)]
        uneven = torch.zeros(sum(takes), 2)
        dist.all_to_all_single(uneven, data(rank, (sum(gives), 2), torch.float32), takes, gives, group=group)
        return [even, uneven]

    pair.same(run)
    for is_async in (False, True):
        parts = [data(rank, (rank + k, 2), torch.int32, seed=k) for k in range(size)]
        outs = [torch.zeros(rank + k, 2, dtype=torch.int32) for k in range(size)]
        work = dist.all_to_all(outs, parts, group=pair.ours, async_op=is_async)
        if work is not None:
            work.wait()
        for k, out in enumerate(outs):
            assert_equal(out, data(k, (rank + k, 2), torch.int32, seed=rank))


@check
def objects(pair: Pair) -> None:
    def run(group: Any) -> Any:
        everyone: list[Any] = [None] * pair.size
        dist.all_gather_object(everyone, {"rank": pair.rank, "text": "x" * pair.rank}, group=group)
        listed = [("from", pair.rank), {1, pair.rank}]
        dist.broadcast_object_list(listed, group=group, group_src=1)
        gathered: list[Any] | None = [None] * pair.size if pair.rank == 0 else None
        dist.gather_object(pair.rank**2, gathered, group=group, group_dst=0)
        mine: list[Any] = [None]
        given = [f"for {k}" * (k + 1) for k in range(pair.size)] if pair.rank == 0 else None
        dist.scatter_object_list(mine, given, group=group, group_src=0)
        return [everyone, listed, gathered, mine]

    pair.same(run)


# -- memory -------------------------------------------------------------------------------------------------


@check
def tensors_that_are_not_contiguous(pair: Pair) -> None:
    for is_async in (False, True):

        def ended(work: Any) -> None:
            if work is not None:
                work.wait()

        base = torch.zeros(4, 6)
        view = base.t()[1:4]
        view.copy_(data(pair.rank, (3, 4), torch.float32))
        ended(dist.all_reduce(view, group=pair.ours, async_op=is_async))
        assert_equal(view, torch.stack(all_data(pair.size, (3, 4), torch.float32)).sum(0))
        assert_equal(base[:, 0], torch.zeros(4))
        view.copy_(data(pair.rank, (3, 4), torch.float32))
        ended(dist.broadcast(view, group=pair.ours, group_src=0, async_op=is_async))
        assert_equal(view, data(0, (3, 4), torch.float32))
        wide = torch.zeros(3 * pair.size, 8)[:, ::2]
        ended(
            dist.all_gather_single(
                wide, data(pair.rank, (4, 3), torch.float32).t(), group=pair.ours, async_op=is_async
            )
        )
        assert_equal(wide, torch.cat([x.t() for x in all_data(pair.size, (4, 3), torch.float32)]))
        channels = data(pair.rank, (2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last)
        ended(dist.all_reduce(channels, group=pair.ours, async_op=is_async))
        assert_equal(channels, torch.stack(all_data(pair.size, (2, 3, 4, 5), torch.float32)).sum(0))
        outs = [torch.zeros(6, 2).t() for _ in range(pair.size)]
        ended(
            dist.all_gather(outs, data(pair.rank, (2, 6), torch.float32), group=pair.ours, async_op=is_async)
        )
        assert_equal(torch.stack(outs), torch.stack(all_data(pair.size, (2, 6), torch.float32)))


@check
def a_dropped_work_still_copies_back(pair: Pair) -> None:
    base = torch.zeros(5, 4)
    view = base.t()
    view.copy_(data(pair.rank, (4, 5), torch.float32))
    dist.all_reduce(view, group=pair.ours, async_op=True)
    expected = torch.stack(all_data(pair.size, (4, 5), torch.float32)).sum(0)
    last = dist.barrier(group=pair.ours, async_op=True)
    last.get_future().then(lambda _: None).wait()
    assert_equal(view, expected)


@check
def tensors_that_need_gradients(pair: Pair) -> None:
    parameter = torch.nn.Parameter(data(pair.rank, (3,), torch.float32))
    dist.all_reduce(parameter, group=pair.ours)
    assert_equal(parameter.detach(), torch.stack(all_data(pair.size, (3,), torch.float32)).sum(0))
    outs = [torch.zeros(3, requires_grad=True) for _ in range(pair.size)]
    dist.all_gather(outs, parameter, group=pair.ours)
    assert_equal(outs[0].detach(), parameter.detach())
    leaf = torch.zeros(3, requires_grad=True)
    dist.broadcast(leaf, group=pair.ours, group_src=0)
    assert leaf.is_leaf
    assert leaf.requires_grad


@check
def scatter_into_a_chunk_of_its_own_list(pair: Pair) -> None:
    for own in range(pair.size):  # the root's own chunk, or another chunk
        given = torch.arange(3.0 * pair.size)
        parts = list(given.chunk(pair.size))
        out = parts[own] if pair.rank == 0 else torch.zeros(3)
        dist.scatter(out, parts if pair.rank == 0 else None, group=pair.ours, group_src=0)
        assert_equal(out, torch.arange(3.0 * pair.size).view(pair.size, 3)[pair.rank])


@check
def inference_mode_reaches_what_is_copied_back(pair: Pair) -> None:
    with torch.inference_mode():
        x = data(pair.rank, (3,), torch.float32)
        outs = [torch.zeros(3) for _ in range(pair.size)]
        strided = torch.zeros(3, 2)[:, 0]
        strided.copy_(x)
        works = [
            dist.all_gather(outs, x, group=pair.ours, async_op=True),
            dist.all_reduce(strided, group=pair.ours, async_op=True),
        ]
        futures = [work.get_future().then(lambda future: future.value()) for work in works]
        for future in futures:  # the thread for callbacks has copied back
            future.wait()
        for work in works:
            work.wait()
        assert_equal(torch.stack(outs), torch.stack(all_data(pair.size, (3,), torch.float32)))
        assert_equal(strided, torch.stack(all_data(pair.size, (3,), torch.float32)).sum(0))


@check
def another_default_device_changes_nothing(pair: Pair) -> None:
    x, base, wide = data(pair.rank, (3,), torch.float32), torch.zeros(6), torch.zeros(pair.size * 3, 2)
    bits = data(pair.rank, (3,), torch.float32).to(torch.float8_e5m2)
    lists = [torch.zeros(3) for _ in range(pair.size)]
    sparse = torch.sparse_coo_tensor(torch.tensor([[pair.rank]]), torch.ones(1), (4,), check_invariants=True)
    with torch.device("meta"):
        if pair.rank == 0:
            dist.recv(base[::2], group=pair.ours, group_src=1)
        elif pair.rank == 1:
            dist.send(x, group=pair.ours, group_dst=0)
        dist.all_gather_single(wide[:, 0], x, group=pair.ours)
        dist.all_gather(lists, x, group=pair.ours)
        dist.broadcast(bits, group=pair.ours, group_src=0)
        dist.all_reduce(sparse, group=pair.ours)
        pair.ours.monitored_barrier()
    if pair.rank == 0:
        assert_equal(base[::2], data(1, (3,), torch.float32))
    assert_equal(wide[:, 0], torch.cat(all_data(pair.size, (3,), torch.float32)))
    assert_equal(torch.stack(lists), torch.stack(all_data(pair.size, (3,), torch.float32)))
    assert_equal(bits.float(), data(0, (3,), torch.float32))
    assert_equal(sparse.to_dense(), (torch.arange(4) < pair.size).float())


@check
def results_of_functional_collectives_are_arguments(pair: Pair) -> None:
    import torch.distributed._functional_collectives as funcol

    def pending() -> torch.Tensor:
        return funcol.all_reduce(data(pair.rank, (3,), torch.float32), "sum", pair.ours)

    total = torch.stack(all_data(pair.size, (3,), torch.float32)).sum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames these
        out = torch.zeros(3 * pair.size)
        dist.all_gather_single(out, pending(), group=pair.ours)
        assert_equal(out, total.repeat(pair.size))
        outs = [torch.zeros(3) for _ in range(pair.size)]
        dist.all_gather(outs, pending(), group=pair.ours)
        assert_equal(outs[0], total)
        part = torch.zeros(3)
        dist.reduce_scatter(part, [pending() for _ in range(pair.size)], group=pair.ours)
        assert_equal(part, total * pair.size)
        twice = pending()
        dist.all_reduce(twice, group=pair.ours)
        assert_equal(twice.clone(), total * pair.size)
        if pair.rank == 0:
            dist.send(total, group=pair.ours, group_dst=1)
        elif pair.rank == 1:
            dist.recv(part, group=pair.ours, group_src=0)


@check
def what_is_no_array_is_refused_in_words(pair: Pair) -> None:
    one = torch.tensor(1.0)
    with pytest.raises(dist.DistBackendError, match=r"all_to_all at .*shape \(\); allowed"):
        dist.all_to_all_single(one.clone(), one, [1] * pair.size, [1] * pair.size, group=pair.ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated quantized tensors
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(dist.DistBackendError, match="quantized"):
        dist.broadcast(quantized, group=pair.ours, group_src=0)
    dist.barrier(group=pair.ours)


# -- several at once ----------------------------------------------------------------------------------------


@check
def coalesced(pair: Pair) -> None:
    shapes = ((3,), (2, 2), (0,), (1,))
    for dtypes in ((torch.float32,) * 4, (torch.float32, torch.int64, torch.float16, torch.float32)):
        tensors = [data(pair.rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        pair.ours.allreduce_coalesced(tensors).wait()
        for tensor, shape, dtype in zip(tensors, shapes, dtypes, strict=True):
            assert_equal(tensor, torch.stack(all_data(pair.size, shape, dtype)).sum(0).to(dtype))
    for device in (None, torch.device("cpu")):
        tensors = [data(pair.rank, s, torch.float32) for s in shapes]
        with dist._coalescing_manager(pair.ours, device=device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=pair.ours)
        manager.wait()
        for tensor, shape in zip(tensors, shapes, strict=True):
            assert_equal(tensor, torch.stack(all_data(pair.size, shape, torch.float32)).sum(0))
        outs = [torch.zeros(pair.size * k) for k in (1, 2, 3)]
        with dist._coalescing_manager(pair.ours, device=device):
            for k, out in enumerate(outs, 1):
                dist.all_gather_single(out, data(pair.rank, (k,), torch.float32), group=pair.ours)
        for k, out in enumerate(outs, 1):
            assert_equal(out, torch.cat(all_data(pair.size, (k,), torch.float32)))
        parts = [torch.zeros(k) for k in (1, 2)]
        with dist._coalescing_manager(pair.ours, device=device):
            for k, part in enumerate(parts, 1):
                given = data(pair.rank, (pair.size * k,), torch.float32)
                dist.reduce_scatter_single(part, given, group=pair.ours)
        for k, part in enumerate(parts, 1):
            whole = torch.stack(all_data(pair.size, (pair.size * k,), torch.float32)).sum(0)
            assert_equal(part, whole.view(pair.size, k)[pair.rank])


@check
def a_sparse_sum_that_is_coalesced_has_been_copied_back(pair: Pair) -> None:
    x = torch.sparse_coo_tensor(torch.tensor([[pair.rank]]), torch.ones(1), (4,), check_invariants=True)
    pair.ours._start_coalescing(torch.device("cpu"))
    pair.ours.allreduce([x])
    pair.ours._end_coalescing(torch.device("cpu")).wait()
    assert_equal(x.to_dense(), (torch.arange(4) < pair.size).float())


@check
def lists_of_lists(pair: Pair) -> None:
    shapes = ((2,), (3, 1))
    lists = [[torch.zeros(shape) for shape in shapes] for _ in range(pair.size)]
    pair.ours.allgather_coalesced(lists, [data(pair.rank, s, torch.float32) for s in shapes]).wait()
    for rank, tensors in enumerate(lists):
        for tensor, shape in zip(tensors, shapes, strict=True):
            assert_equal(tensor, data(rank, shape, torch.float32))


@check
def functional_collectives(pair: Pair) -> None:
    import torch.distributed._functional_collectives as funcol

    def run(group: Any) -> Any:
        x = data(pair.rank, (2 * pair.size, 3), torch.float32)
        return [
            funcol.all_reduce(x, "sum", group).clone(),
            funcol.all_gather_tensor(x, 0, group).clone(),
            funcol.reduce_scatter_tensor(x, "sum", 0, group).clone(),
            funcol.all_to_all_single(x, None, None, group).clone(),
            funcol.broadcast(x, 1, group).clone(),
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames these
        pair.same(run)


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.more)])
@pytest.mark.parametrize("name", list(CHECKS))
def test_collective(pool: TorchPool, name: str, size: int) -> None:
    pool.run(name, size)
