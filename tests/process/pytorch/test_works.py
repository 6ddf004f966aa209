"""Works, futures and messages of torch.distributed on our backend."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
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


def summed(size: int, count: int = 1021) -> torch.Tensor:
    return torch.stack([ramp(rank, count) for rank in range(size)]).sum(0)


# -- works and futures --------------------------------------------------------------------------------------


@check
def a_work_is_waited_for_by_itself_or_by_its_future(pair: Pair) -> None:
    for count in (1, 1021, 300_007):
        x = ramp(pair.rank, count)
        work = dist.all_reduce(x, group=pair.ours, async_op=True)
        future = work.get_future()
        assert isinstance(future, torch.futures.Future)
        assert work.get_future() is future
        (value,) = future.wait()
        assert value is x
        assert_equal(x, summed(pair.size, count))
        assert work.wait()
        assert work.exception() is None
        assert future.done()
        assert future.value()[0] is x


@check
def several_works_are_under_way_at_once(pair: Pair) -> None:
    tensors = [ramp(pair.rank + k, 5003 + k) for k in range(12)]
    works = [dist.all_reduce(x, group=pair.ours, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    for k, x in enumerate(tensors):
        assert_equal(x, torch.stack([ramp(rank + k, 5003 + k) for rank in range(pair.size)]).sum(0))


@check
def callbacks_run_in_order_and_may_wait_for_collectives_of_the_group(pair: Pair) -> None:
    seen: list[int] = []
    children = []

    def after(number: int) -> Callable[[Any], torch.Tensor]:
        def callback(future: Any) -> torch.Tensor:
            (reduced,) = future.value()
            seen.append(number)
            # The lengths differ, so collectives that were matched in another order would fail.
            more = torch.full((number + 1,), float(reduced[0]))
            dist.all_reduce(more, group=pair.ours)
            started = dist.all_reduce(more, group=pair.ours, async_op=True)
            return started.get_future().wait()[0] + number

        return callback

    for number in range(8):
        work = dist.all_reduce(ramp(pair.rank, 40 + number), group=pair.ours, async_op=True)
        future = work.get_future()
        if (number + pair.rank) % 2:  # already done on some ranks, not on others
            work.wait()
        children.append(future.then(after(number)))
    between = [ramp(pair.rank, 900 + k) for k in range(8)]
    for k, x in enumerate(between):  # at the same time as those of the callbacks
        dist.all_reduce(x, group=pair.ours)
        assert_equal(x, summed(pair.size, 900 + k))
    first = float(summed(pair.size)[0])
    for number, child in enumerate(children):
        expected = first * pair.size * pair.size + number
        assert_equal(child.wait(), torch.full((number + 1,), expected))
    assert seen == sorted(seen)


@check
def a_callback_in_a_callback_of_a_callback(pair: Pair) -> None:
    def deeper(level: int) -> Callable[[Any], Any]:
        def callback(future: Any) -> Any:
            x = future.value()[0].clone()
            work = dist.all_reduce(x, group=pair.ours, async_op=True)
            if level == 0:
                return work.get_future().wait()
            return work.get_future().then(deeper(level - 1)).wait()

        return callback

    x = torch.ones(3)
    work = dist.all_reduce(x, group=pair.ours, async_op=True)
    (result,) = work.get_future().then(deeper(2)).wait()
    assert_equal(result, torch.full((3,), float(pair.size**4)))


@check
def callbacks_are_chained_and_their_errors_arrive(pair: Pair) -> None:
    def fail(future: Any) -> None:
        raise ValueError("the callback failed")

    work = dist.all_reduce(torch.ones(2), group=pair.ours, async_op=True)
    future = work.get_future()
    chained = future.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    assert_equal(chained.wait(), torch.full((2,), 2.0 * pair.size + 1))
    failed = future.then(fail)
    with pytest.raises(ValueError, match="the callback failed"):
        failed.wait()
    called = threading.Event()
    future.add_done_callback(lambda f: called.set())
    assert called.wait(30)
    together = torch.futures.collect_all([future, chained])
    assert len(together.wait()) == 2


@check
def the_future_of_a_message_does_not_hold_up_that_of_a_collective(pair: Pair) -> None:
    if pair.rank == 0:
        x = torch.zeros(2)
        message = dist.irecv(x, group=pair.ours, group_src=1, tag=7)
        future = message.get_future().then(lambda f: f.value()[0] + 1)
    y = torch.ones(2)
    work = dist.all_reduce(y, group=pair.ours, async_op=True)
    work.get_future().then(lambda f: None).wait()
    dist.barrier(group=pair.ours)
    if pair.rank == 1:
        dist.send(torch.full((2,), 4.0), group=pair.ours, group_dst=0, tag=7)
    if pair.rank == 0:
        assert_equal(future.wait(), torch.full((2,), 5.0))


@check
def a_wait_that_times_out_says_so_and_the_work_goes_on(pair: Pair) -> None:
    x = ramp(pair.rank)
    if pair.rank == 0:
        work = dist.all_reduce(x, group=pair.ours, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"all_reduce at test_works.py:\d+: Timed out"):
            work.wait(timedelta(milliseconds=40))
        dist.send(torch.zeros(1), group=pair.ours, group_dst=1)
        work.wait()
    else:
        if pair.rank == 1:
            dist.recv(torch.zeros(1), group=pair.ours, group_src=0)
        dist.all_reduce(x, group=pair.ours)
    assert_equal(x, summed(pair.size))


@check
def works_may_be_dropped(pair: Pair) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [ramp(pair.rank, 20_011) for _ in range(6)]
        for x in tensors:
            dist.all_reduce(x, group=pair.ours, async_op=True)
        gc.collect()
        dist.barrier(group=pair.ours)
        deadline = time.monotonic() + 30
        while not all(torch.equal(x, summed(pair.size, 20_011)) for x in tensors):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert [w for w in caught if w.category is ResourceWarning] == []


@check
def calls_have_names_in_a_profile(pair: Pair) -> None:
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3), group=pair.ours)
        dist.broadcast(torch.ones(3), group=pair.ours, group_src=0)
        if pair.rank == 0:
            dist.send(torch.ones(3), group=pair.ours, group_dst=1)
        elif pair.rank == 1:
            dist.recv(torch.ones(3), group=pair.ours, group_src=0)
    names = {event.name for event in profile.events()}
    messages = {0: {"unisono:send"}, 1: {"unisono:recv"}}.get(pair.rank, set())
    assert {"unisono:all_reduce", "unisono:broadcast"} | messages <= names


@check
def gradients_are_compressed_by_hooks_that_wait_in_callbacks(pair: Pair) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def run(group: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6)))
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
        if group is pair.ours:
            state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=40, start_powerSGD_iter=2, use_error_feedback=False
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            ddp(ramp(pair.rank + step, 120).reshape(3, 40) / 300).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected, got = run(pair.gloo), run(pair.ours)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@check
def an_error_in_a_hooks_callback_leaves_backward_as_itself(pair: Pair) -> None:
    class OfTheUser(ValueError):
        pass

    def hook(state: Any, bucket: Any) -> Any:
        def fail(_: Any) -> Any:
            raise OfTheUser(f"of rank {pair.rank}")

        return dist.all_reduce(bucket.buffer(), group=pair.ours, async_op=True).get_future().then(fail)

    hook.__annotations__ = {}  # torch does not resolve annotations that are strings
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3), process_group=pair.ours)
    ddp.register_comm_hook(None, hook)
    with pytest.raises(OfTheUser, match=f"^of rank {pair.rank}$") as raised:
        ddp(torch.ones(2, 4)).sum().backward()
    assert raised.traceback[-1].name == "fail", "the line is the user's"
    dist.barrier(group=pair.ours)  # the group lives on


# -- messages -----------------------------------------------------------------------------------------------


@check
def messages_of_every_type_by_tag(pair: Pair) -> None:
    types = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    for tag, dtype in enumerate(types):
        if pair.rank == 0:
            for dst in range(1, pair.size):
                dist.send(ramp(dst, 9).to(dtype), group=pair.ours, group_dst=dst, tag=tag)
        else:
            x = torch.zeros(9).to(dtype)
            dist.recv(x, group=pair.ours, group_src=0, tag=tag)
            assert_equal(x.to(torch.complex64), ramp(pair.rank, 9).to(dtype).to(torch.complex64))
    # Messages received in another order of tags than that in which they were sent, and long messages.
    if pair.rank == 0:
        works = [dist.isend(ramp(t, 70_001), group=pair.ours, group_dst=1, tag=t) for t in (1, 2, 3)]
        for work in works:
            work.wait()
    elif pair.rank == 1:
        for tag in (3, 1, 2):
            x = torch.zeros(70_001)
            dist.recv(x, group=pair.ours, group_src=0, tag=tag)
            assert_equal(x, ramp(tag, 70_001))


@check
def a_message_from_any_source_has_its_source(pair: Pair) -> None:
    if pair.rank == 0:
        sources = []
        for _ in range(1, pair.size):
            x = torch.zeros(2)
            # Called on the group itself: torch's own receive accepts any source on the default group only.
            work = pair.ours.recv_anysource([x], 5)
            work.wait()
            assert work.source_rank() == work._source_rank()
            sources.append(work._source_rank())
            assert_equal(x, torch.full((2,), float(sources[-1])))
        assert sorted(sources) == list(range(1, pair.size))
    else:
        dist.send(torch.full((2,), float(pair.rank)), group=pair.ours, group_dst=0, tag=5)


@check
def batches_of_messages_around_a_ring(pair: Pair) -> None:
    after, before = (pair.rank + 1) % pair.size, (pair.rank - 1) % pair.size
    for is_coalesced in (False, True):
        given, taken = ramp(pair.rank, 33), torch.zeros(66)[::2]
        if is_coalesced:
            with dist._coalescing_manager(pair.ours, device=torch.device("cpu"), async_ops=True) as manager:
                dist.isend(given, group=pair.ours, group_dst=after)
                dist.irecv(taken, group=pair.ours, group_src=before)
            manager.wait()
        else:
            ops = [
                dist.P2POp(dist.isend, given, group=pair.ours, group_peer=after),
                dist.P2POp(dist.irecv, taken, group=pair.ours, group_peer=before),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        assert_equal(taken, ramp(before, 33))


@check
def objects_by_message(pair: Pair) -> None:
    if pair.rank == 0:
        dist.send_object_list([{"a": 1}, "text", None], group=pair.ours, group_dst=1)
    elif pair.rank == 1:
        got: list[Any] = [0, 0, 0]
        dist.recv_object_list(got, group=pair.ours, group_src=0)
        assert got == [{"a": 1}, "text", None]


@check
def a_message_of_another_length_is_refused(pair: Pair) -> None:
    if pair.rank == 0:
        dist.send(torch.ones(3), group=pair.ours, group_dst=1, tag=11)
        dist.send(torch.ones(5), group=pair.ours, group_dst=1, tag=12)
    elif pair.rank == 1:
        with pytest.raises(dist.DistBackendError, match="12 bytes"):
            dist.recv(torch.zeros(4), group=pair.ours, group_src=0, tag=11)
        with pytest.raises(dist.DistBackendError, match="20 bytes"):
            dist.recv(torch.zeros(4), group=pair.ours, group_src=0, tag=12)
        dist.recv(torch.zeros(5), group=pair.ours, group_src=0, tag=12)


# -- callbacks and references -------------------------------------------------------------------------------


@check
def a_callback_may_wait_for_what_follows_the_work_that_it_is_called_for(pair: Pair) -> None:
    x = ramp(pair.rank, 5)
    future = dist.all_reduce(x, group=pair.ours, async_op=True).get_future()
    order = []

    def inner(ended: Any) -> Any:
        order.append("inner")
        y = ended.value()[0].clone()
        dist.all_reduce(y, group=pair.ours)
        return y

    def outer(_: Any) -> Any:
        order.append("outer")
        grandchild = future.then(inner).then(lambda child: child.value() + 1)
        return grandchild.wait()

    assert_equal(future.then(outer).wait(), summed(pair.size, 5) * pair.size + 1)
    future.then(lambda _: order.append("last")).wait()
    assert order == ["outer", "inner", "last"]
    sent = dist.isend(x, group=pair.ours, group_dst=(pair.rank + 1) % pair.size)
    taken = torch.zeros(5)
    got = dist.irecv(taken, group=pair.ours, group_src=(pair.rank - 1) % pair.size).get_future()
    got.then(lambda _: got.then(lambda f: f.value()).wait()).wait()
    sent.wait()
    assert_equal(taken, summed(pair.size, 5))


@check
def a_work_and_its_future_are_dropped_with_their_last_owner(pair: Pair) -> None:
    gc.collect()
    gc.disable()
    try:
        x = ramp(pair.rank)
        kept = weakref.ref(x)
        work = dist.all_reduce(x, group=pair.ours, async_op=True)
        work.get_future().then(lambda _: None).wait()
        dist.barrier(group=pair.ours)
        work.wait()
        del work, x
        last = dist.barrier(group=pair.ours, async_op=True)  # the thread for callbacks drops its reference
        last.get_future().then(lambda _: None).wait()
        assert kept() is None
    finally:
        gc.enable()


@check
def an_error_is_asked_for_without_waiting(pair: Pair) -> None:
    taken = torch.zeros(3)
    if pair.rank == 0:
        work = dist.irecv(taken, group=pair.ours, group_src=1)
        assert work.exception() is None
        assert not work.is_success()
    dist.barrier(group=pair.ours)
    if pair.rank == 1:
        dist.send(torch.ones(3), group=pair.ours, group_dst=0)
    if pair.rank == 0:
        work.wait()
        assert work.exception() is None


@check
def several_works_share_one_deadline(pair: Pair) -> None:
    device = torch.device("cpu")
    if pair.rank == 0:
        with dist._coalescing_manager(pair.ours, device=device, async_ops=True) as manager:
            for tag in range(5):
                dist.irecv(torch.zeros(3), group=pair.ours, group_src=1, tag=tag)
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            manager.works[0].wait(timedelta(milliseconds=200))
        assert time.monotonic() - began < 0.5
    dist.barrier(group=pair.ours)
    if pair.rank == 1:
        for tag in range(5):
            dist.send(torch.ones(3), group=pair.ours, group_dst=0, tag=tag)
    if pair.rank == 0:
        manager.wait()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", list(CHECKS))
def test_work(pool: TorchPool, name: str, size: int) -> None:
    pool.run(name, size)
