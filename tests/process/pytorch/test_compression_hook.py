"""Compressed gradients in DistributedDataParallel and on process groups, of Gloo and of unisono."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.torch_checks import RUNS, Check, run_checks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.pytorch import CompressionState, compression_hook, convert_sync_batchnorm
from unisono.train import BFloat16, Compressor, Float16, Int8, RandomK, TopK

CHECKS: dict[str, Check] = {}
COMPRESSORS: tuple[Compressor, ...] = (TopK(0.05), RandomK(0.1), Float16(), BFloat16(), Int8())
# Small enough that the model below has several buckets, which are arranged differently after the first step.
SMALL_BUCKETS_MB = 0.003


def check(fn: Check) -> Check:
    CHECKS[fn.__name__] = fn
    return fn


@functools.cache
def ended(size: int, backend: str) -> dict[str, str]:
    return run_checks(CHECKS, size, backend)


def model(*, has_norm: bool = False) -> Any:
    torch.manual_seed(1)
    norm: list[Any] = [nn.BatchNorm1d(40)] if has_norm else []
    first = [nn.Linear(20, 40), *norm, nn.Tanh()]
    rest = [nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)]
    return nn.Sequential(*first, *rest)


def batch(rank: int, step: int) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 20, generator=made), torch.randn(8, 3, generator=made)


def loss_of(net: Any, rank: int, step: int) -> Any:
    x, y = batch(rank, step)
    return (net(x) - y).pow(2).mean()


def flat(tensors: Any) -> Any:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double().numpy()


def gradients(net: Any) -> Any:
    return flat([each.grad for each in net.parameters() if each.grad is not None])


def residuals(state: CompressionState, net: Any) -> Any:
    """The residuals of all parameters, in the order of the model."""
    parts = {}
    for index, layout in state._layouts.items():
        cuts = np.cumsum([parameter.numel() for parameter in layout])[:-1]
        for parameter, part in zip(
            layout, np.split(state.feedback.residuals[f"bucket {index}"], cuts), strict=True
        ):
            parts[id(parameter)] = part
    return np.concatenate([parts[id(parameter)] for parameter in net.parameters()]).astype(np.float64)


def hooked(compressor: Compressor, net: Any, **how: Any) -> tuple[Any, CompressionState]:
    ddp = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB, **how)
    state = CompressionState(compressor)
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state


@check
def nothing_is_lost_over_many_steps_and_all_ranks_agree(comm: Communicator) -> None:
    """The averaged gradients plus the residuals equal the ranks' inputs, also when buckets change."""
    for compressor in COMPRESSORS:
        ddp, state = hooked(compressor, model())
        alone = copy.deepcopy(ddp.module)
        got, put = np.zeros(sum(p.numel() for p in alone.parameters())), 0.0
        layouts = []
        for step in range(12):
            for each in (ddp, alone):
                each.zero_grad()
                loss_of(each, comm.rank, step).backward()
            got, put = got + gradients(ddp), put + gradients(alone)
            for other in comm.all_gather(gradients(ddp)):
                assert other.tobytes() == gradients(ddp).tobytes(), "ranks differ"
            layouts.append([len(layout) for layout in state._layouts.values()])
        assert layouts[0] != layouts[-1], "the buckets stayed as they were"
        assert len(layouts[-1]) > 2
        left = comm.all_reduce(residuals(state, ddp.module))
        assert np.abs(left).max() > 0
        np.testing.assert_allclose(comm.size * got + left, comm.all_reduce(put), atol=2e-5)


@check
def training_goes_on_after_a_restart_as_if_there_had_been_none(comm: Communicator) -> None:
    """A new DDP begins with other buckets than those with which the old one ended."""
    for compressor in COMPRESSORS:
        ddp, state = hooked(compressor, model())
        for step in range(5):
            ddp.zero_grad()
            loss_of(ddp, comm.rank, step).backward()
        saved = state.state_dict(ddp.module)
        again, resumed = hooked(compressor, copy.deepcopy(ddp.module))
        resumed.load_state_dict(saved, again.module)
        before = residuals(state, ddp.module)
        put = comm.all_reduce(before.copy())
        alone, got = copy.deepcopy(ddp.module), np.zeros(before.size)
        for step in range(5, 9):
            for each in (again, alone):
                each.zero_grad()
                loss_of(each, comm.rank, step).backward()
            got, put = got + gradients(again), put + comm.all_reduce(gradients(alone))
        left = comm.all_reduce(residuals(resumed, again.module))
        np.testing.assert_allclose(comm.size * got + left, put, atol=2e-5)
        # Residuals of other buckets are never used for these buckets.
        _, careless = fresh = hooked(compressor, model())
        careless.feedback.load_state_dict(state.feedback.state_dict())
        with pytest.raises(uni.UsageError, match=r"state_dict\(model\)"):
            loss_of(fresh[0], comm.rank, 0).backward()
        with pytest.raises(uni.UsageError, match="no parameter"):
            resumed.load_state_dict({**saved, "parameters": {"other": np.zeros(3, np.float32)}}, again.module)


@check
def everything_sent_is_the_plain_mean(comm: Communicator) -> None:
    for how in (
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ):
        plain = DistributedDataParallel(model(), **how)
        for compressor in (TopK(1.0), RandomK(1.0)):
            ddp, _ = hooked(compressor, model(), **how)
            for step in range(3):
                for each in (plain, ddp):
                    each.zero_grad()
                    loss_of(each, comm.rank, step).backward()
                np.testing.assert_allclose(gradients(ddp), gradients(plain), rtol=1e-6, atol=1e-7)


@check
def training_with_it_converges(comm: Communicator) -> None:
    for compressor in COMPRESSORS:
        ddp, _ = hooked(compressor, model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = loss_of(ddp, comm.rank, 0)
            loss.backward()
            optimizer.step()
            losses.append(comm.all_reduce(loss.item(), "mean"))
        assert losses[-1] < 0.6 * losses[0], (compressor, losses)


@check
def it_stands_beside_sync_batch_norm_and_no_sync(comm: Communicator) -> None:
    """Both the hook and SyncBatchNorm send on the same group during backward."""
    ddp, state = hooked(Int8(), convert_sync_batchnorm(model(has_norm=True)))
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, comm.rank, step).backward()
        loss_of(ddp, comm.rank, step + 10).backward()
        mine = gradients(ddp)
        assert all(other.tobytes() == mine.tobytes() for other in comm.all_gather(mine))
    assert np.isfinite(residuals(state, ddp.module)).all()


@check
def what_is_not_finite_is_seen_on_all_ranks(comm: Communicator) -> None:
    for compressor in COMPRESSORS:
        ddp, state = hooked(compressor, model())
        for step in range(3):
            ddp.zero_grad()
            loss_of(ddp, comm.rank, step).backward()
        before = residuals(state, ddp.module)
        ddp.zero_grad()
        loss = loss_of(ddp, comm.rank, 3)
        (loss * float("inf") if comm.rank == 1 else loss).backward()
        assert not np.isfinite(gradients(ddp)).all()
        np.testing.assert_array_equal(residuals(state, ddp.module), before)


@check
def tensors_and_arrays_are_reduced_on_a_process_group(comm: Communicator) -> None:
    make: list[Callable[[Any], Any]] = [torch.tensor, lambda values: np.array(values, np.float32)]
    for compressor in COMPRESSORS:
        for kind in make:
            state, same = CompressionState(compressor), uni.train.ErrorFeedback(compressor)
            for step in range(4):
                values = [float((comm.rank + 1) * (place + step) % 13) for place in range(50)]
                x, y = kind(values), np.array(values, np.float32)
                assert state.all_reduce(x, "mean", key="x") is x
                same.all_reduce(comm, y, "mean", key="x")
                np.testing.assert_allclose(np.asarray(x), y, rtol=1e-6)
    half = torch.arange(5, dtype=torch.bfloat16) * (comm.rank + 1)
    CompressionState(TopK(1.0)).all_reduce(half, key="half")
    assert half.tolist() == [place * sum(range(comm.size + 1)) for place in range(5)]
    with pytest.raises(uni.UsageError, match='"sum", "mean"'):
        CompressionState(TopK(1.0)).all_reduce(torch.ones(3), "max", key="x")
    with pytest.raises(uni.UsageError, match="cannot be compressed"):
        CompressionState(TopK(1.0)).all_reduce(torch.ones(3, dtype=torch.int32), key="x")


@check
def a_group_of_some_ranks_compresses_by_itself(comm: Communicator) -> None:
    ranks = [0, comm.size - 1]
    group = dist.new_group(ranks)
    if comm.rank in ranks:
        x = torch.arange(10.0) + comm.rank
        CompressionState(Int8(), group).all_reduce(x, "mean", key="x")
        np.testing.assert_allclose(x, np.arange(10.0) + (comm.size - 1) / 2, atol=0.1)


@pytest.mark.parametrize(("backend", "size"), RUNS)
@pytest.mark.parametrize("name", CHECKS)
def test_compression(name: str, backend: str, size: int) -> None:
    assert (what := ended(size, backend)[name]) == "ok", what
