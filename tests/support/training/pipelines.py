"""Pipelines: layers on different ranks, which exchange microbatches in messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.support.training.network import STEPS, batch, named, network
from tests.support.training.pieces import Job, Tensors, piece
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

MICROBATCHES = 4
ROWS = 12


def deep(stages: int) -> list[nn.Sequential]:
    """A small network with this number of stages, each of a different width."""
    widths = [11, *(17 + 2 * stage for stage in range(stages - 1)), 3]
    return [
        nn.Sequential(*network((width, 2 * width, wider)), nn.Tanh())
        for width, wider in itertools.pairwise(widths)
    ]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target, reduction="sum")


def prefixed(stage: int, module: nn.Module) -> Tensors:
    return {f"{stage} {name}": tensor for name, tensor in named(module).items()}


def piped_alone(stages_of: Callable[[int], int]) -> Callable[[int], Tensors]:
    def alone(size: int) -> Tensors:
        stages = deep(stages_of(size))
        model = nn.Sequential(*stages)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step, 0, ROWS)
            loss_of(model(x), y).backward()
            optimizer.step()
        out: Tensors = {}
        for stage, module in enumerate(stages):
            out |= prefixed(stage, module)
        return out

    return alone


def piped(job: Job, schedule: Callable[..., Any], stages: int, *, several: bool) -> Tensors:
    """Train as a pipeline; every rank returns the weights of all stages."""
    modules = deep(stages)
    mine = range(job.rank, stages, job.size)
    parts = [PipelineStage(modules[i], i, stages, torch.device("cpu")) for i in mine]
    # The single process adds the losses of all rows, so gradients of microbatches are added, not averaged.
    run = schedule(
        parts if several else parts[0], n_microbatches=MICROBATCHES, loss_fn=loss_of, scale_grads=False
    )
    optimizer = torch.optim.SGD([p for i in mine for p in modules[i].parameters()], lr=0.002)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, 0, ROWS)
        given = (x,) if job.rank == 0 else ()
        target = {"target": y} if stages - 1 in mine else {}
        run.step(*given, **target)
        optimizer.step()
    every: list[Any] = [None] * job.size
    mine_named: Tensors = {}
    for i in mine:
        mine_named |= prefixed(i, modules[i])
    dist.all_gather_object(every, mine_named)
    return {name: tensor for each in every for name, tensor in each.items()}


@piece(alone=piped_alone(lambda size: size))
def pipeline_gpipe(job: Job) -> Tensors:
    return piped(job, ScheduleGPipe, job.size, several=False)


@piece(alone=piped_alone(lambda size: size))
def pipeline_1f1b(job: Job) -> Tensors:
    return piped(job, Schedule1F1B, job.size, several=False)


@piece(alone=piped_alone(lambda size: 2 * size))
def pipeline_interleaved(job: Job) -> Tensors:
    """Two stages on every rank: a microbatch passes every rank twice."""
    return piped(job, ScheduleInterleaved1F1B, 2 * job.size, several=True)
