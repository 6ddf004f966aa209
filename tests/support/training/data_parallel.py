"""DistributedDataParallel, its options and hooks, and torch's optimizers and averagers for it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from tests.support.training.network import STEPS, batch, loss_of, named, network, sgd, train, train_alone
from tests.support.training.pieces import Job, Tensors, piece
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

# Several buckets for some thousand parameters.
SMALL_BUCKETS_MB = 0.002


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


@piece(alone=train_alone())
def ddp_overlaps(job: Job) -> Tensors:
    """The sum of the first bucket ends while backward still runs and no thread waits for the sum."""
    model = DDP(network(), bucket_cap_mb=SMALL_BUCKETS_MB)
    futures: list[torch.futures.Future[Any]] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, but not as text
        summed = default_hooks.allreduce_hook(None, bucket)
        futures.append(summed)
        return summed

    model.register_comm_hook(None, hook)
    overlapped = 0

    def at_the_first_layer(gradient: Tensor) -> None:
        nonlocal overlapped
        deadline = time.monotonic() + 20
        while futures and not futures[0].done():
            assert time.monotonic() < deadline, "the sum makes no progress while no thread waits for it"
            time.sleep(0.0005)
        overlapped += bool(futures)
        futures.clear()

    model.module[0].bias.register_hook(at_the_first_layer)
    train(job, model)
    # In the first step the buckets follow the order of the parameters, afterwards the order of their
    # gradients.
    assert overlapped >= STEPS - 1, overlapped
    return named(model.module)


@piece(alone=train_alone())
def ddp_static_graph(job: Job) -> Tensors:
    model = DDP(network(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=SMALL_BUCKETS_MB)
    train(job, model)
    return named(model.module)


@piece(alone=train_alone())
def ddp_compiled(job: Job) -> Tensors:
    """While it runs, torch.compile sees every Python frame, also of calls that DDP's reducer makes."""
    model = DDP(network(), bucket_cap_mb=1)
    train(job, torch.compile(model, backend="aot_eager"))
    torch.compiler.reset()
    return named(model.module)


class Branches(nn.Module):
    """Two branches, of which each rank uses one in each step; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([network(), network((11, 5, 3)), network((11, 3))])

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.branches[which](x)
        return out


def branch_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x, (step + rank) % 2 if step else 0), y)


@piece(alone=train_alone(Branches, branch_loss, plain_sgd))
def ddp_unused_parameters(job: Job) -> Tensors:
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS_MB)
    train(job, model, branch_loss, plain_sgd)
    return named(model.module)


def two_losses(model: nn.Module, step: int, rank: int) -> Tensor:
    return loss_of(model, 2 * step, rank) + loss_of(model, 2 * step + 1, rank)


@piece(alone=train_alone(forward=two_losses))
def ddp_no_sync(job: Job) -> Tensors:
    """Gradients of two batches are added locally, then averaged once."""
    model = DDP(network(), gradient_as_bucket_view=True)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, 2 * step, job.rank).backward()
        loss_of(model, 2 * step + 1, job.rank).backward()
        optimizer.step()
    return named(model.module)


def joined_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Rank r has r batches more than rank 0; a rank that has joined adds zeros."""
    return loss_of(model, step, rank) * (step < 3 + rank)


@piece(alone=lambda size: train_alone(forward=joined_loss, steps=3 + size - 1)(size))
def ddp_join(job: Job) -> Tensors:
    model = DDP(network())
    optimizer = sgd(model.parameters())
    with Join([model]):
        for step in range(3 + job.rank):
            optimizer.zero_grad()
            loss_of(model, step, job.rank).backward()
            optimizer.step()
    # A rank that joined early gets the weights of the last rank from Join, but keeps its own momentum.
    return named(model.module)


class Bag(nn.Module):
    """An embedding with sparse gradients below a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag = nn.EmbeddingBag(23, 5, sparse=True)
        self.head = nn.Linear(5, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.bag(words))
        return out


def bag_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, 23, (4 + rank, 3), generator=made)  # as many rows as the rank wants
    return model(words).square().mean()


@piece(alone=train_alone(Bag, bag_loss, plain_sgd))
def ddp_sparse(job: Job) -> Tensors:
    model = DDP(Bag())
    train(job, model, bag_loss, plain_sgd)
    return named(model.module)


@piece(alone=train_alone())
def ddp_built_in_hook(job: Job) -> Tensors:
    model = DDP(network(), bucket_cap_mb=SMALL_BUCKETS_MB)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train(job, model)
    return named(model.module)


@piece(alone=train_alone())
def ddp_fp16_hook(job: Job) -> Tensors:
    """Gradients are sent as float16."""
    model = DDP(network(), bucket_cap_mb=SMALL_BUCKETS_MB)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(job, model)
    return named(model.module)


def power_sgd(job: Job, **options: Any) -> Tensors:
    """Low-rank factors are sent; in callbacks of collectives the hook starts others and waits for them."""
    model = DDP(network(), **options)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(job, model, steps=2 * STEPS)
    assert state.total_numel_after_compression > 0
    return named(model.module)


@piece()
def ddp_power_sgd_hook(job: Job) -> Tensors:
    return power_sgd(job)


@piece(is_on_gloo=False)
def ddp_power_sgd_hook_with_buckets(job: Job) -> Tensors:
    """Backward and callbacks start collectives at the same time; Gloo may match the wrong ones, and hang."""
    mine = power_sgd(job, bucket_cap_mb=SMALL_BUCKETS_MB)
    for name, tensor in mine.items():
        every = [torch.empty_like(tensor) for _ in range(job.size)]
        dist.all_gather(every, tensor)
        assert all(torch.equal(tensor, each) for each in every), name
    return mine


@piece()
def ddp_buffers(job: Job) -> Tensors:
    """Before every forward pass all ranks get the running statistics of BatchNorm from rank 0."""

    def make() -> nn.Sequential:
        layers = network()
        return nn.Sequential(layers[0], nn.BatchNorm1d(37), *layers[1:])

    model = DDP(make(), bucket_cap_mb=SMALL_BUCKETS_MB)
    train(job, model)
    model(batch(STEPS, 0)[0])  # once more, with the same rows: each rank now has the statistics of rank 0
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


@piece(alone=train_alone(optimizer=partial(torch.optim.Adam, lr=0.01)))
def zero_optimizer(job: Job) -> Tensors:
    """Each rank keeps Adam's state for its share of the parameters."""
    model = DDP(network())
    train(
        job,
        model,
        optimizer=lambda given: ZeroRedundancyOptimizer(given, optimizer_class=torch.optim.Adam, lr=0.01),
    )
    return named(model.module)


WARM_UP, PERIOD = 2, 3


def post_local_sgd_alone(size: int) -> Tensors:
    """One model per rank: at first the gradients are averaged, later the weights, every few steps."""
    models = [network() for _ in range(size)]
    optimizers = [plain_sgd(model.parameters()) for model in models]
    for step in range(2 * STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, step, rank).backward()
        together = list(zip(*(model.parameters() for model in models), strict=True))
        if step < WARM_UP:
            for parameters in together:
                mean = torch.stack([each.grad for each in parameters]).mean(0)
                for each in parameters:
                    each.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step >= WARM_UP and (step - WARM_UP) % PERIOD == 0:
            with torch.no_grad():
                for parameters in together:
                    mean = torch.stack(parameters).mean(0)
                    for each in parameters:
                        each.copy_(mean)
    return {
        f"{rank} {name}": tensor for rank, model in enumerate(models) for name, tensor in named(model).items()
    }


@piece(alone=post_local_sgd_alone)
def post_local_sgd(job: Job) -> Tensors:
    model = DDP(network())
    alone = dist.new_subgroups(group_size=1)[0]
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=alone, start_localSGD_iter=WARM_UP, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP)
    optimizer = PostLocalSGDOptimizer(plain_sgd(model.parameters()), averager)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        optimizer.step()
    every: list[Any] = [None] * job.size
    dist.all_gather_object(every, named(model.module))
    return {f"{rank} {name}": tensor for rank, each in enumerate(every) for name, tensor in each.items()}
