"""Rank 0 holds the parameters; all ranks pull them, compute gradients on their own data and push them.

unisono run -n 4 examples/parameter_server.py
"""

import threading

import numpy as np

import unisono as uni

FEATURES, STEPS, RATE = 20, 60, 0.1


class ParameterServer:
    """The weights of a linear model; every pushed gradient updates them."""

    def __init__(self, size: int, rate: float) -> None:
        self._weights = np.zeros(size)
        self._rate = rate
        self._lock = threading.Lock()

    def pull(self) -> np.ndarray:
        """Return a copy of the current weights."""
        with self._lock:
            return self._weights.copy()

    def push(self, gradient: np.ndarray) -> None:
        """Take one step of gradient descent."""
        with self._lock:
            self._weights -= self._rate * gradient


def main() -> None:
    with uni.init() as world:
        agent = uni.rpc.Agent(world)
        agent.expose(ParameterServer)
        server = agent.remote(0, ParameterServer, FEATURES, RATE / world.size) if world.rank == 0 else None
        # The other ranks get a reference; the object lives as long as rank 0 holds its proxy.
        shared = world.broadcast_object(server.reference if server is not None else None)
        parameters = agent.proxy(shared)

        truth = np.random.default_rng(0).normal(size=FEATURES)
        data = np.random.default_rng(1 + world.rank).normal(size=(500, FEATURES))
        target = data @ truth
        for _ in range(STEPS):
            weights = parameters.pull()
            parameters.push(data.T @ (data @ weights - target) / len(data))
        world.barrier()
        if world.rank == 0:
            error = float(np.abs(parameters.pull() - truth).max())
            print(f"{world.size} ranks trained {FEATURES} weights; the largest error is {error:.4f}")
            assert error < 0.05
        world.barrier()


if __name__ == "__main__":
    main()
