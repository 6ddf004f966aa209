"""Train a small network data-parallel on four ranks, and check the result against one process.

Each rank sees a quarter of every batch; `all_reduce_many` averages the gradients. With equal shares the mean
of the quarters' gradients is the gradient of the whole batch, so one process must come to the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import unisono as uni

RANKS, STEPS, BATCH, RATE = 4, 800, 256, 2.0


class Network:
    """Two inputs, one hidden layer, one output: is the point inside the spiral's arm?"""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.weights = [rng.normal(0, 2.0, (2, 32)), np.zeros(32), rng.normal(0, 0.3, (32, 1)), np.zeros(1)]

    def gradients(self, x: np.ndarray, y: np.ndarray) -> tuple[list[np.ndarray], float]:
        """The gradient of the loss, for each weight, and the loss itself."""
        w1, b1, w2, b2 = self.weights
        hidden = np.tanh(x @ w1 + b1)
        guess = 1 / (1 + np.exp(-(hidden @ w2 + b2)))
        loss = -np.mean(y * np.log(guess) + (1 - y) * np.log(1 - guess))
        at_output = (guess - y) / len(x)
        at_hidden = at_output @ w2.T * (1 - hidden**2)
        return [x.T @ at_hidden, at_hidden.sum(0), hidden.T @ at_output, at_output.sum(0)], float(loss)

    def step(self, gradients: list[np.ndarray]) -> None:
        """Go downhill."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight -= RATE * gradient


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of two interleaved spirals; the same on every rank, from the step's number."""
    rng = np.random.default_rng(step)
    arm, turn = rng.integers(0, 2, BATCH), rng.uniform(0.2, 1.0, BATCH)
    angle = 3 * np.pi * turn + np.pi * arm
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) * 2
    return points + rng.normal(0, 0.03, points.shape), arm[:, None].astype(np.float64)


def train(world: uni.Communicator, tell: Callable[[float], None]) -> tuple[list[np.ndarray], float]:
    """One rank's training; rank 0 tells its progress."""
    with world:
        network, loss = Network(), 0.0
        share = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
        for step in range(STEPS):
            x, y = batch(step)
            gradients, part = network.gradients(x[share], y[share])
            world.all_reduce_many(gradients, op="mean")
            network.step(gradients)
            loss = world.all_reduce(part, op="mean")
            if world.rank == 0:
                tell(loss)
        return network.weights, loss


def train_on(count: int, console: Console) -> tuple[list[list[np.ndarray]], float]:
    """Train on `count` ranks, with a progress bar; every rank's weights and the last loss."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as progress:
        bar = progress.add_task(f"{count} rank{'s' * (count > 1)}", total=STEPS, loss=float("nan"))
        with ThreadPoolExecutor(count) as ranks:
            tell = lambda loss: progress.update(bar, advance=1, loss=loss)  # noqa: E731
            results = list(ranks.map(lambda world: train(world, tell), uni.local(count)))
    return [weights for weights, _ in results], results[0][1]


def largest_difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def main() -> None:
    console = Console()
    together, loss = train_on(RANKS, console)
    alone, _ = train_on(1, console)
    among = max(largest_difference(together[0], weights) for weights in together)
    apart = largest_difference(together[0], alone[0])
    console.print(f"final loss {loss:.4f}; the {RANKS} ranks differ by {among:g}")
    console.print(f"from one process they differ by {apart:.1e}")
    if among != 0 or apart > 1e-9:
        raise SystemExit("the weights differ: data-parallel training is broken")
    console.print("[green]data-parallel training equals training in one process[/green]")


if __name__ == "__main__":
    main()
