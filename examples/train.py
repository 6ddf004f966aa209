"""Train a small network data-parallel, and check the result against one process.

    unisono run -n 4 examples/train.py

Each rank sees its share of every batch; `all_reduce_many` averages the gradients. With equal shares the mean
of the shares' gradients is the gradient of the whole batch, so training in one process must give the same
weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import unisono as uni

STEPS, BATCH, RATE = 800, 256, 2.0


class Network:
    """Tells on which of two spirals a point lies: two inputs, one hidden layer, one output."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.weights = [rng.normal(0, 2.0, (2, 32)), np.zeros(32), rng.normal(0, 0.3, (32, 1)), np.zeros(1)]

    def gradients(self, x: np.ndarray, y: np.ndarray) -> tuple[list[np.ndarray], float]:
        """Return the gradient of the loss for each weight, and the loss."""
        w1, b1, w2, b2 = self.weights
        hidden = np.tanh(x @ w1 + b1)
        guess = 1 / (1 + np.exp(-(hidden @ w2 + b2)))
        loss = -np.mean(y * np.log(guess) + (1 - y) * np.log(1 - guess))
        at_output = (guess - y) / len(x)
        at_hidden = at_output @ w2.T * (1 - hidden**2)
        return [x.T @ at_hidden, at_hidden.sum(0), hidden.T @ at_output, at_output.sum(0)], float(loss)

    def step(self, gradients: list[np.ndarray]) -> None:
        """Take one step of gradient descent."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight -= RATE * gradient


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points of two interleaved spirals. The step is the seed, so all ranks get the same points."""
    rng = np.random.default_rng(step)
    arm, turn = rng.integers(0, 2, BATCH), rng.uniform(0.2, 1.0, BATCH)
    angle = 3 * np.pi * turn + np.pi * arm
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) * 2
    return points + rng.normal(0, 0.03, points.shape), arm[:, None].astype(np.float64)


def train(world: uni.Communicator, report: Callable[[int, float], None]) -> np.ndarray:
    """Train on this rank; return the weights as one vector. Rank 0 reports its progress."""
    network = Network()
    share = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
    for step in range(STEPS):
        x, y = batch(step)
        gradients, part = network.gradients(x[share], y[share])
        world.all_reduce_many(gradients, op="mean")
        network.step(gradients)
        loss = world.all_reduce(part, op="mean")
        if world.rank == 0:
            report(step + 1, loss)
    return np.concatenate([weight.ravel() for weight in network.weights])


def bar(name: str) -> Callable[[int, float], None]:
    """Return a progress bar of ten lines: the launcher shows the output of ranks line by line."""

    def report(done: int, loss: float) -> None:
        if done % (STEPS // 10) == 0:
            filled = 40 * done // STEPS
            print(
                f"{name} {'━' * filled}{'·' * (40 - filled)} {done:>3}/{STEPS}  loss {loss:.4f}", flush=True
            )

    return report


def main() -> None:
    with uni.init() as world:
        if BATCH % world.size:
            raise SystemExit(f"{BATCH} examples cannot be divided equally among {world.size} ranks")
        weights = train(world, bar(f"{world.size} ranks"))
        all_weights = world.all_gather(weights)
        if world.rank != 0:
            return
        alone = train(uni.local(1)[0], bar("1 rank "))
        among, apart = np.abs(all_weights - weights).max(), np.abs(alone - weights).max()
        print(f"the {world.size} ranks differ by {among:g}, from one process they differ by {apart:.1e}")
        if among != 0 or apart > 1e-9:
            raise SystemExit("the weights differ: data-parallel training is broken")
        print("data-parallel training equals training in one process")


if __name__ == "__main__":
    main()
