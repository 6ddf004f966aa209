"""Functional collectives, their gradients, and collectives inside compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.support.training.pieces import Job, Tensors, piece
from torch import Tensor

SHAPE = (12, 5)


def rows(rank: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(50 + rank))


def parts(size: int) -> Tensor:
    return torch.stack([rows(rank) for rank in range(size)])


def functional_alone(size: int) -> Tensors:
    every = parts(size)
    summed = every.sum(0)
    return {
        "sum": summed,
        "mean": every.mean(0),
        "max": every.amax(0),
        "gathered": every.reshape(-1, 5),
        "gathered along 1": torch.cat(list(every), 1),
        "sum, scattered and gathered": summed,
        "broadcast": every[size - 1],
        "exchanged twice": every.sum(0) - summed,
        "many": torch.cat([summed, 2 * summed]),
    }


@piece(alone=functional_alone)
def functional_collectives(job: Job) -> Tensors:
    world = dist.group.WORLD
    x = rows(job.rank)
    scattered = functional.reduce_scatter_single(x, "sum", 0, world)
    split = [SHAPE[0] // job.size] * job.size
    there = functional.all_to_all_single(x, split, split, world)
    back = functional.all_to_all_single(there, split, split, world)
    many = functional.all_reduce_coalesced([x, 2 * x], "sum", world)
    out = {
        "sum": functional.all_reduce(x, "sum", world),
        "mean": functional.all_reduce(x, "avg", world),
        "max": functional.all_reduce(x, "max", world),
        "gathered": functional.all_gather_single(x, 0, world),
        "gathered along 1": functional.all_gather_single(x, 1, world),
        "sum, scattered and gathered": functional.all_gather_single(scattered, 0, world),
        "broadcast": functional.broadcast(x, job.size - 1, world),
        "exchanged twice": functional.wait_tensor(back) - x,
        "many": torch.cat([functional.wait_tensor(each) for each in many]),
    }
    return {name: functional.wait_tensor(tensor).clone() for name, tensor in out.items()}


def gradients_alone(size: int) -> Tensors:
    """The gradient of the sum of all losses; a rank's loss is its weight times the squares of its result."""
    every = parts(size).requires_grad_()
    weight = torch.arange(1.0, size + 1)
    chunks = every.sum(0).chunk(size)
    shares = torch.stack([each.reshape(size, -1, 5) for each in every])  # [from, to, rows, 5]
    losses = {
        "all_gather": weight.sum() * every.square().sum(),
        "reduce_scatter": sum(weight[r] * chunks[r].square().sum() for r in range(size)),
        "all_to_all": sum(weight[r] * shares[:, r].square().sum() for r in range(size)),
        "all_reduce": weight.sum() * every.sum(0).square().sum(),
    }
    out = {}
    for name, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss, every, retain_graph=True)
        out |= {f"{name} {rank}": gradient[rank] for rank in range(size)}
    return out


@piece(alone=gradients_alone)
def functional_gradients(job: Job) -> Tensors:
    world = dist.group.WORLD
    split = [SHAPE[0] // job.size] * job.size
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_gather": lambda x: functional.all_gather_single_autograd(x, 0, world),
        "reduce_scatter": lambda x: functional.reduce_scatter_single_autograd(x, "sum", 0, world),
        "all_to_all": lambda x: functional.all_to_all_single_autograd(x, split, split, world),
        "all_reduce": lambda x: functional.all_reduce(x, "sum", world),
    }
    out = {}
    for name, call in calls.items():
        x = rows(job.rank).requires_grad_()
        ((job.rank + 1) * functional.wait_tensor(call(x)).square().sum()).backward()
        every = [torch.empty(SHAPE) for _ in range(job.size)]
        dist.all_gather(every, x.grad)
        out |= {f"{name} {rank}": gradient for rank, gradient in enumerate(every)}
    return out


# -- compiled ------------------------------------------------------------------------------------------------


def compiled_alone(size: int) -> Tensors:
    every = parts(size)
    summed = every.sum(0)
    return {
        "functional": summed.sin() + every.reshape(size, *SHAPE).sum(0).cos(),
        "plain": (2 * every).sum(0) + 1,
    }


def compiled(job: Job, backend: str) -> Tensors:
    world = dist.group.WORLD

    def by_functions(x: Tensor) -> Tensor:
        summed = functional.all_reduce(x, "sum", world)
        gathered = functional.all_gather_single(x, 0, world)
        return summed.sin() + gathered.reshape(job.size, *SHAPE).sum(0).cos()

    def by_plain_calls(x: Tensor) -> Tensor:
        x = 2 * x
        dist.all_reduce(x)
        return x + 1

    out: dict[str, Any] = {}
    for name, fn in {"functional": by_functions, "plain": by_plain_calls}.items():
        out[name] = torch.compile(fn, backend=backend, fullgraph=True)(rows(job.rank))
    torch.compiler.reset()
    return out


@piece(alone=compiled_alone)
def compiled_eagerly(job: Job) -> Tensors:
    return compiled(job, "aot_eager")


@piece(alone=compiled_alone)
def compiled_by_inductor(job: Job) -> Tensors:
    return compiled(job, "inductor")
