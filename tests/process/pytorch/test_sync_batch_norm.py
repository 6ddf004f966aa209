"""SyncBatchNorm: every rank has a part of the batch, and one process with the whole batch is the oracle."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_checks import RUNS, Check, run_checks
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.pytorch import SyncBatchNorm, convert_sync_batchnorm
from unisono.pytorch.sync_batch_norm import _Normalize, _statistics

CHECKS: dict[str, Check] = {}


def check(fn: Check) -> Check:
    CHECKS[fn.__name__] = fn
    return fn


@functools.cache
def ended(backend: str, size: int) -> dict[str, str]:
    return run_checks(CHECKS, size, backend)


def batches(size: int, shape: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    """All parts of a batch, the same list on every rank. They are uneven; that of the last rank is empty."""
    made = torch.Generator().manual_seed(7)
    rows = [5, *(3 + rank for rank in range(1, size - 1)), 0]
    scale = torch.arange(1, shape[0] + 1).view(1, -1, *(1,) * (len(shape) - 1))
    return [
        (torch.randn(n, *shape, generator=made, dtype=torch.float64) * scale + scale).to(dtype) for n in rows
    ]


def weights(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(0.5, 2, parameter.numel()))
    return layer


def compare(comm: Communicator, shape: tuple[int, ...], **how: Any) -> None:
    """Compare output, gradients and buffers after three steps with a batch norm of the whole batch."""
    parts = batches(comm.size, shape)
    ours = weights(SyncBatchNorm(shape[0], dtype=torch.float64, **how))
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)]
    oracle = weights(kind(shape[0], dtype=torch.float64, **how))
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    for step in range(3):
        whole = (torch.cat(parts) + step).requires_grad_()
        mine = (parts[comm.rank] + step).requires_grad_()
        wanted, got = oracle(whole), ours(mine)
        start = ends[comm.rank] - len(mine)
        torch.testing.assert_close(got, wanted[start : ends[comm.rank]])
        factor = torch.linspace(-1, 3, whole.numel(), dtype=torch.float64).view(whole.shape) ** 2
        (wanted * wanted * factor).sum().backward()
        (got * got * factor[start : ends[comm.rank]]).sum().backward()
        torch.testing.assert_close(mine.grad, whole.grad[start : ends[comm.rank]])
    for parameter, other in zip(ours.parameters(), oracle.parameters(), strict=True):
        total = parameter.grad.clone()
        if len(mine) == 0:
            assert not total.any(), "the gradient of a parameter is this rank's alone"
        dist.all_reduce(total)
        torch.testing.assert_close(total, other.grad)
    assert len(list(ours.buffers())) == len(list(oracle.buffers()))
    for buffer, other in zip(ours.buffers(), oracle.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    ours.eval()
    oracle.eval()
    if ours.track_running_stats:
        torch.testing.assert_close(ours(mine), oracle(mine))


@check
def it_equals_one_process_on_input_of_every_dimension(comm: Communicator) -> None:
    for shape in ((7,), (3, 5), (4, 3, 2), (2, 3, 1, 2)):
        compare(comm, shape)


@check
def it_equals_one_process_with_every_option(comm: Communicator) -> None:
    compare(comm, (3, 4), momentum=None)
    compare(comm, (3, 4), momentum=0.7, eps=0.3)
    compare(comm, (3, 4), affine=False)
    compare(comm, (3, 4), bias=False)
    compare(comm, (3, 4), track_running_stats=False)


@check
def gradients_are_those_of_the_whole_batch(comm: Communicator) -> None:
    """Checked by finite differences: one input of one rank changes the sum of a function of all outputs."""
    layer = weights(SyncBatchNorm(2, dtype=torch.float64, track_running_stats=False))
    mine = batches(comm.size, (2,))[comm.rank].requires_grad_()

    def whole(x: Any) -> Any:
        value = layer(x).pow(3).sum()
        total = value.detach().clone()
        dist.all_reduce(total)
        return value, total.item()

    whole(mine)[0].backward()
    for rank, row, column in ((0, 0, 0), (0, 3, 1), (comm.size - 2, 2, 1)):
        values = []
        for move in (1e-6, -1e-6):
            moved = mine.detach().clone()
            if comm.rank == rank:
                moved[row, column] += move
            values.append(whole(moved)[1])
        if comm.rank == rank:
            assert mine.grad[row, column].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)


@check
def gradcheck_agrees(comm: Communicator) -> None:
    groups = [dist.new_group([rank]) for rank in range(comm.size)]
    alone = groups[comm.rank]

    def normalised(x: Any, weight: Any, bias: Any) -> Any:
        mean, variance, count = _statistics(x.detach(), alone)
        return _Normalize.apply(x, weight, bias, mean, variance, 1e-5, count, alone)

    for shape in ((6, 3), (2, 3, 2, 2)):
        inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (3,), (3,))]
        assert torch.autograd.gradcheck(normalised, inputs)


@check
def half_precision_has_statistics_in_float32(comm: Communicator) -> None:
    for dtype, rtol in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        parts = batches(comm.size, (3, 8, 5), dtype)
        for layer in (weights(SyncBatchNorm(3)), weights(SyncBatchNorm(3)).to(dtype)):
            oracle = weights(nn.BatchNorm2d(3, dtype=torch.float64))
            mine = parts[comm.rank].clone().requires_grad_()
            whole = torch.cat(parts).double().requires_grad_()
            got, wanted = layer(mine), oracle(whole)
            assert got.dtype == dtype
            start = sum(len(part) for part in parts[: comm.rank])
            rows = slice(start, start + len(mine))
            torch.testing.assert_close(got.double(), wanted[rows], rtol=rtol, atol=4 * rtol)
            factor = torch.linspace(-1, 1, whole.numel()).view(whole.shape).to(dtype)
            got.backward(factor[rows])
            wanted.backward(factor.double())
            assert mine.grad.dtype == dtype
            torch.testing.assert_close(mine.grad.double(), whole.grad[rows], rtol=rtol, atol=rtol)
            assert layer.weight.grad.dtype == layer.weight.dtype
            torch.testing.assert_close(layer.running_var.double(), oracle.running_var, rtol=rtol, atol=0)


@check
def the_variance_of_a_large_mean_is_stable(comm: Communicator) -> None:
    """As E[x^2] - E[x]^2 in float32 the variance would be wrong in every digit, or negative."""
    noise = [
        torch.randn(400 + rank, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)
    ]
    layer = SyncBatchNorm(2, momentum=1.0)
    layer(noise[comm.rank] * 0.25 + 8192.0 + comm.rank)
    whole = torch.cat([(part * 0.25 + 8192.0 + rank).double() for rank, part in enumerate(noise)])
    torch.testing.assert_close(layer.running_var.double(), whole.var(0), rtol=1e-5, atol=0)


@check
def channels_last_stays(comm: Communicator) -> None:
    layer = SyncBatchNorm(3)
    x = torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@check
def it_takes_one_collective_forward_and_one_backward(comm: Communicator) -> None:
    calls: list[str] = []
    names = [
        name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "barrier"))
    ]
    kept = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}

    def counted(name: str, fn: Any) -> Any:
        return lambda *args, **named: (calls.append(name), fn(*args, **named))[1]

    try:
        for name, fn in kept.items():
            setattr(dist, name, counted(name, fn))
        layer = SyncBatchNorm(3)
        y = layer(torch.randn(4, 3).requires_grad_())
        assert calls == ["all_gather_single"]
        y.sum().backward()
        assert calls == ["all_gather_single", "all_reduce"]
        layer.eval()
        layer(torch.randn(4, 3))
        assert len(calls) == 2
    finally:
        for name, fn in kept.items():
            setattr(dist, name, fn)


@check
def a_group_normalises_by_itself(comm: Communicator) -> None:
    ranks = [0, comm.size - 1]
    group = dist.new_group(ranks)
    if comm.rank in ranks:
        parts = [torch.arange(6.0).view(3, 2) * 10**rank for rank in range(comm.size)]
        got = SyncBatchNorm(2, process_group=group)(parts[comm.rank])
        wanted = nn.BatchNorm1d(2)(torch.cat([parts[rank] for rank in ranks])).view(2, 3, 2)
        torch.testing.assert_close(got, wanted[ranks.index(comm.rank)])


@check
def too_few_values_are_refused_on_all_ranks(comm: Communicator) -> None:
    for rows in (0, int(comm.rank == 0)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            SyncBatchNorm(2)(torch.zeros(rows, 2))
    for wrong in (torch.zeros(2), torch.zeros(4, 3), torch.zeros(4, 0)):
        with pytest.raises(ValueError, match=r"expected input of shape \(N, 2, ...\)"):
            SyncBatchNorm(2)(wrong)
    with pytest.raises(ValueError, match="shape"):
        SyncBatchNorm(0)(torch.zeros(4, 0))


@check
def ddp_with_it_equals_one_process(comm: Communicator) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5)
    ).double()
    ddp = nn.parallel.DistributedDataParallel(convert_sync_batchnorm(copy.deepcopy(model)))
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (ddp, model))
    for _ in range(3):
        whole = torch.randn(comm.size, 4, 2, 6, 6, dtype=torch.float64)
        target = torch.randn(comm.size, 4, 5, dtype=torch.float64)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        (ddp(whole[comm.rank]) - target[comm.rank]).pow(2).mean().backward()
        (model(whole.flatten(0, 1)) - target.flatten(0, 1)).pow(2).mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
    for got, wanted in zip(ddp.module.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("backend", "size"), RUNS)
@pytest.mark.parametrize("name", CHECKS)
def test_sync_batch_norm(name: str, backend: str, size: int) -> None:
    assert (what := ended(backend, size)[name]) == "ok", what


# -- without other ranks ----------------------------------------------------------------------------------


def test_without_a_process_group_it_is_a_batch_norm() -> None:
    ours, theirs = SyncBatchNorm(3), nn.BatchNorm1d(3)
    x = torch.arange(12.0).view(4, 3)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked == 1


def test_a_converted_model_keeps_everything_but_the_class() -> None:
    shared = nn.BatchNorm1d(4, eps=0.5, momentum=None)
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(4, 4), nn.Sequential(shared)),
            "b": nn.Sequential(shared, nn.BatchNorm2d(2, affine=False, track_running_stats=False).eval()),
            "c": nn.InstanceNorm2d(3),
        }
    )
    seen: list[Any] = []
    shared.register_forward_hook(lambda *call: seen.append(call))
    before = dict(model.state_dict(keep_vars=True))
    group = object()
    assert convert_sync_batchnorm(model, group) is model
    new = model["a"][1][0]
    assert type(new) is SyncBatchNorm
    assert new is model["b"][0]
    assert (new.eps, new.momentum, new.process_group, new.training) == (0.5, None, group, True)
    assert not model["b"][1].training
    assert type(model["c"]) is nn.InstanceNorm2d
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in after)
    new.eval()(torch.zeros(2, 4))
    assert len(seen) == 1
    convert_sync_batchnorm(model)
    assert model["a"][1][0] is new
    assert new.process_group is None
    assert "SyncBatchNorm(4, eps=0.5" in repr(model)


def test_a_single_layer_is_converted_and_a_lazy_one_refused() -> None:
    assert type(convert_sync_batchnorm(nn.BatchNorm3d(2))) is SyncBatchNorm
    with pytest.raises(ValueError, match="number of features"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))
