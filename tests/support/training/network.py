"""A small network with odd sizes, its data, and its training: by ranks, and the same in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from tests.support.training.pieces import Job, Tensors
from torch import Tensor, nn

__all__ = ["ROWS", "STEPS", "batch", "named", "network", "sgd", "train", "train_alone"]

ROWS = 6  # of each rank in each step
STEPS = 5
WIDTHS = (11, 37, 24, 3)

Forward = Callable[[nn.Module, int, int], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def network(widths: tuple[int, ...] = WIDTHS) -> nn.Sequential:
    """The network, with the same weights on every rank and in one process."""
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for width, wider in itertools.pairwise(widths):
        layers += [nn.Linear(width, wider), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, rank: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Input rows that differ by rank and step, and the outputs that the network should learn."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, WIDTHS[0], generator=made)
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1], x.amax(1)], 1).sin()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x), y)


def train(
    job: Job, model: nn.Module, forward: Forward = loss_of, optimizer: MakeOptimizer = sgd, steps: int = STEPS
) -> None:
    """Train on one rank with the rank's own rows. The model averages gradients over ranks."""
    steps_taken = optimizer(model.parameters())
    for step in range(steps):
        steps_taken.zero_grad()
        forward(model, step, job.rank).backward()
        steps_taken.step()


def train_alone(
    make: Callable[[], nn.Module] = network,
    forward: Forward = loss_of,
    optimizer: MakeOptimizer = sgd,
    steps: int = STEPS,
) -> Callable[[int], Tensors]:
    """The same training in one process: the loss is the mean of the losses of all ranks."""

    def alone(size: int) -> Tensors:
        model = make()
        steps_taken = optimizer(model.parameters())
        for step in range(steps):
            steps_taken.zero_grad()
            for rank in range(size):
                (forward(model, step, rank) / size).backward()
            steps_taken.step()
        return named(model)

    return alone


def named(model: nn.Module) -> Tensors:
    """The parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
