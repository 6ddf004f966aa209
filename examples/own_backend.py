"""Own backend: the smallest backend that keeps the whole contract. Its transport is a method call.

python examples/own_backend.py
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import unisono as uni
from unisono.core.clock import RealRuntime
from unisono.messaging.actions import Action, Transmit
from unisono.messaging.backend import Capabilities
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol
from unisono.messaging.protocol_backend import ProtocolBackend
from unisono.testing import check_backend


class MinimalBackend(ProtocolBackend):
    """One rank among several of this process."""

    @classmethod
    def create(cls, size: int) -> list[MinimalBackend]:
        """Make the ranks of a fresh world; each knows the others."""
        lock, ranks = threading.Lock(), list[MinimalBackend]()
        ranks.extend(cls(rank, size, ranks, lock) for rank in range(size))
        return ranks

    def __init__(self, rank: int, size: int, ranks: list[MinimalBackend], lock: threading.Lock) -> None:
        config = uni.Config()
        endpoint = Endpoint(Protocol(rank, config, shares_memory=True), self._carry, lock)
        super().__init__(endpoint, size, config, RealRuntime())
        self._ranks = ranks

    @property
    def capabilities(self) -> Capabilities:
        """Messages only: collectives are executed from plans above it."""
        return Capabilities("minimal")

    def close(self) -> None:
        """Leave: end what is pending here, then notify the others. Eager messages stay receivable."""
        if self.endpoint.close():
            for other in self._ranks:
                if other is not self:
                    other.endpoint.peer_down(PeerDown(self.rank, "left", left=True))

    def _carry(self, outgoing: Transmit) -> list[Action]:
        """The transport. Between processes, bytes would travel, and a receive thread would call `arrive`."""
        return self._ranks[outgoing.peer].endpoint.take(outgoing.source, outgoing.frame)


def program(backend: MinimalBackend) -> int:
    """What one rank runs: every verb of a communicator works over the backend."""
    with uni.Communicator.world(backend) as world:
        return int(world.all_reduce(world.rank + 1))


if __name__ == "__main__":
    with ThreadPoolExecutor(3) as threads:
        print(f"all_reduce over our own backend: {list(threads.map(program, MinimalBackend.create(3)))}")
    passed = check_backend(MinimalBackend.create)
    print(f"it keeps the contract: {len(passed)} cases passed")
