"""Process groups of torch.distributed on our backend: ranks, names, and methods as programs call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import Pair, TorchPool, assert_equal, torch_pool

CHECKS: dict[str, Callable[[Pair], None]] = {}


def check(fn: Callable[[Pair], None]) -> Callable[[Pair], None]:
    CHECKS[fn.__name__] = fn
    return fn


@pytest.fixture(scope="module")
def pool() -> Iterator[TorchPool]:
    with torch_pool(CHECKS, 3) as made:
        yield made


def ramp(rank: int, count: int = 1021) -> torch.Tensor:
    return torch.arange(count) * 3.0 + rank


@check
def groups_in_any_order_and_again_and_again(pair: Pair) -> None:
    if pair.size < 3:
        return
    order = [2, 0, 1]
    group: Any = dist.new_group(order, sort_ranks=False)
    rank = order.index(pair.rank)
    assert group.rank() == rank
    outs = [torch.zeros(1) for _ in order]
    dist.all_gather(outs, torch.tensor([float(pair.rank)]), group=group)
    assert [int(out) for out in outs] == order
    x = ramp(pair.rank)
    dist.broadcast(x, src=2, group=group)
    assert_equal(x, ramp(2))
    again = [dist.new_group([0, 1, 2]) for _ in range(3)]
    for number, one in enumerate(again):
        y = torch.full((2,), float(number))
        dist.all_reduce(y, group=one)
        assert_equal(y, torch.full((2,), number * 3.0))
    for one in again:
        dist.destroy_process_group(one)
    dist.destroy_process_group(group)


@check
def members_alone_make_a_group(pair: Pair) -> None:
    if pair.rank >= 2:
        return  # other ranks do not take part
    for number in range(2):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        x = ramp(pair.rank, 7 + number)
        dist.all_reduce(x, group=group)
        assert_equal(x, ramp(0, 7 + number) + ramp(1, 7 + number))
        dist.destroy_process_group(group)


@check
def a_group_has_the_names_and_answers_that_torch_asks_for(pair: Pair) -> None:
    group = pair.ours
    assert (group.rank(), group.size()) == (pair.rank, pair.size)
    assert group.name() == group._get_backend_name() == group.getBackendName() == "unisono"
    assert dist.get_backend(group) == "unisono"
    assert group.group_name == group.getGroupName() != ""
    assert group.group_desc == group.getGroupDesc()
    assert group._device_types == [torch.device("cpu")]
    assert group._get_backend(torch.device("cpu")) is group
    assert group.bound_device_id is None
    assert not group.supports_coalescing
    assert not group.supports_splitting
    assert not group.supports_time_estimate
    assert not group.supports_tensor_alloc(torch.device("cpu"))
    assert not group._has_hooks()
    before = group._get_sequence_number_for_group()
    group._set_sequence_number_for_group()
    dist.barrier(group=group)
    assert group._get_sequence_number_for_group() == before + 1
    store = group.get_group_store()
    store.set(f"from {pair.rank}", "here")
    assert store.get(f"from {pair.rank}") == b"here"


@check
def older_names_are_the_same_methods(pair: Pair) -> None:
    group, kind = pair.ours, type(pair.ours)
    for older, newer in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ("alltoall_base", "all_to_all_single"),
        ("_set_default_timeout", "set_timeout"),
    ):
        assert getattr(kind, older) is getattr(kind, newer)
    out = torch.zeros(2 * pair.size)
    group._allgather_base(out, ramp(pair.rank, 2)).wait()
    assert_equal(out, torch.cat([ramp(rank, 2) for rank in range(pair.size)]))
    part = torch.zeros(2)
    group._reduce_scatter_base(part, out).wait()
    assert_equal(part, ramp(pair.rank, 2) * pair.size)
    crossed = torch.zeros(pair.size)
    group.alltoall_base(crossed, ramp(pair.rank, pair.size), [], []).wait()
    assert_equal(crossed, torch.stack([ramp(r, pair.size)[pair.rank] for r in range(pair.size)]))


@check
def a_monitored_barrier_names_the_absent_rank(pair: Pair) -> None:
    dist.monitored_barrier(pair.ours, timedelta(seconds=30))
    dist.monitored_barrier(pair.gloo, timedelta(seconds=30))
    short, last = timedelta(milliseconds=300), pair.size - 1
    if pair.rank == 0:
        with pytest.raises(RuntimeError, match=rf"Rank {last} failed to pass monitoredBarrier in 300 ms"):
            dist.monitored_barrier(pair.ours, short)
        with pytest.raises(RuntimeError, match=rf"Ranks .*{last} failed to pass monitoredBarrier in 300 ms"):
            pair.ours.monitored_barrier(short, wait_all_ranks=True)
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            pair.ours.monitored_barrier(timedelta(0))
    elif pair.rank != last:
        text = f"Rank {pair.rank} successfully reached monitoredBarrier, but received errors"
        with pytest.raises(RuntimeError, match=text):
            pair.ours.monitored_barrier(short)
    dist.barrier(group=pair.ours)  # the group lives on
    dist.monitored_barrier(pair.ours, timedelta(seconds=30), wait_all_ranks=True)
    dist.barrier(group=pair.ours)


def reduced(rank: int, call: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """What a call makes of a rank's tensor."""
    x = ramp(rank, 5)
    call(x).wait()
    return x


def filled(count: int, call: Callable[[list[torch.Tensor]], Any]) -> list[torch.Tensor]:
    """Tensors that a call fills."""
    outs = [torch.zeros(2) for _ in range(count)]
    call(outs).wait()
    return outs


@check
def methods_take_one_tensor_and_values_in_place_of_lists_and_options(pair: Pair) -> None:
    """As Gloo's do, in every form that torch binds; another one is an error before anything is sent."""
    limit, largest = timedelta(seconds=30), dist.ReduceOp.MAX
    rank, size, root = pair.rank, pair.size, pair.size - 1
    parts = [torch.full((2,), 10.0 * rank + other) for other in range(size)]
    is_root = rank == root
    for call in (
        lambda group: reduced(rank, group.allreduce),
        lambda group: reduced(rank, lambda x: group.allreduce(tensor=x)),
        lambda group: reduced(rank, lambda x: group.allreduce(x, largest, limit)),
        lambda group: reduced(rank, lambda x: group.allreduce([x])),
        lambda group: reduced(rank, lambda x: group.allreduce([x], op=largest)),
        lambda group: reduced(rank, lambda x: group.allreduce(tensors=[x], opts=dist.AllreduceOptions())),
        lambda group: reduced(rank, lambda x: group.allreduce_coalesced([x])),
        lambda group: reduced(rank, lambda x: group.broadcast(x, root=root)),
        lambda group: reduced(rank, lambda x: group.broadcast(x, root, limit)),
        lambda group: (
            reduced(rank, lambda x: group.reduce(x, root, largest))
            if is_root
            else group.reduce(ramp(rank, 5), root, op=largest).wait()
        ),
        lambda group: filled(size, lambda outs: group.allgather(outs, parts[0])),
        lambda group: filled(size, lambda outs: group.allgather([outs], [parts[0]])),
        lambda group: filled(size if is_root else 0, lambda outs: group.gather(outs, parts[0], root=root)),
        lambda group: filled(
            1, lambda outs: group.scatter(outs[0], parts if is_root else [], root, timeout=limit)
        ),
        lambda group: filled(1, lambda outs: group.reduce_scatter(outs[0], parts, op=largest)),
        lambda group: group.barrier().wait(),
        lambda group: group.barrier(timeout=limit).wait(),
        lambda group: group.barrier(limit).wait(),
    ):
        pair.same(call)
    crossed = filled(size, lambda outs: pair.ours.alltoall(outs, parts, timeout=limit))
    assert_equal(crossed, [torch.full((2,), 10.0 * other + rank) for other in range(size)])
    whole = torch.zeros(2 * size)
    pair.ours.all_to_all_single(whole, torch.cat(parts), [], [], limit).wait()
    assert_equal(whole, torch.cat(crossed))
    for wrong in (
        lambda: pair.ours.allreduce(),
        lambda: pair.ours.allreduce(parts[0], root=1),
        lambda: pair.ours.broadcast(parts[0], 0, limit, 3),
    ):
        with pytest.raises(TypeError, match="argument"):
            wrong()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", list(CHECKS))
def test_group(pool: TorchPool, name: str, size: int) -> None:
    pool.run(name, size)
