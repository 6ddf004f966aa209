"""The conformance kit: our backends and a user's pass it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import pytest

from unisono.backends.hybrid import HybridBackend
from unisono.backends.local import LocalBackend
from unisono.backends.sub import SubBackend
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.messaging.actions import Frame, Transmit
from unisono.messaging.backend import Backend, Capabilities
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol
from unisono.messaging.protocol_backend import ProtocolBackend
from unisono.testing import CASES, check_backend

# -- our own backends ----------------------------------------------------------------------------------


class OwnedView(SubBackend):
    """A view that also closes its parent, so that its ranks leave like those of a real backend."""

    def close(self) -> None:
        self.parent.close()


def local(size: int) -> list[LocalBackend]:
    return LocalBackend.create(size)


def tight(size: int) -> list[LocalBackend]:
    """Almost no message is eager, and segments are short."""
    return LocalBackend.create(size, Config(eager_bytes=48, eager_credit_bytes=256, segment_bytes=512))


def never_eager(size: int) -> list[LocalBackend]:
    return LocalBackend.create(size, Config(eager_bytes=0, eager_credit_bytes=0))


def view(size: int) -> list[SubBackend]:
    """Every second rank of a larger world."""
    world, members = LocalBackend.create(2 * size + 1), range(1, 2 * size, 2)
    return [OwnedView(world[member], members) for member in members]


def view_on_a_view(size: int) -> list[SubBackend]:
    """A view on some ranks of another view, in another order."""
    world = LocalBackend.create(2 * size + 3)
    outer, inner = range(1, 2 * size + 2, 2), range(size, 0, -1)
    views = [OwnedView(world[member], outer) for member in outer]
    return [OwnedView(views[member], inner, ordered=True) for member in inner]


def hybrid_by_peer(size: int) -> list[HybridBackend]:
    """Ranks of equal parity exchange messages through one part, ranks of different parity through another."""
    parts = list(zip(LocalBackend.create(size), LocalBackend.create(size), strict=True))
    return [HybridBackend(pair, lambda peer, r=r: (peer + r) % 2) for r, pair in enumerate(parts)]


# -- a user's backend ----------------------------------------------------------------------------------


class QueueBackend(ProtocolBackend):
    """A user's own backend: a queue and a thread that delivers per rank, on unisono's protocol classes."""

    @classmethod
    def create(cls, size: int) -> list[QueueBackend]:
        ranks: list[QueueBackend] = []
        ranks.extend(cls(rank, size, ranks) for rank in range(size))
        for each in ranks:
            each.deliverer.start()
        return ranks

    def __init__(self, rank: int, size: int, ranks: list[QueueBackend]) -> None:
        config = Config()
        super().__init__(Endpoint(Protocol(rank, config), self._carry), size, config, RealRuntime())
        self.frames: queue.Queue[tuple[int, Frame] | PeerDown | None] = queue.Queue()
        self.deliverer = threading.Thread(target=self._deliver_all, name=f"deliverer-{rank}", daemon=True)
        self._ranks = ranks

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("post")

    def close(self) -> None:
        if not self.endpoint.close():
            return
        self.endpoint.cut()
        for each in self._ranks:
            each.frames.put(None if each is self else PeerDown(self.rank, "left", left=True))

    def _carry(self, outgoing: Transmit) -> tuple[()]:
        frame = outgoing.frame._replace(data=bytes(outgoing.frame.data))
        self._ranks[outgoing.peer].frames.put((self.rank, frame))
        return ()

    def _deliver_all(self) -> None:
        while (item := self.frames.get()) is not None:
            if isinstance(item, PeerDown):
                self.endpoint.peer_down(item)
            elif not self.endpoint.protocol.is_closed:
                self.endpoint.arrive(*item)


FACTORIES = [
    local,
    pytest.param(tight, marks=pytest.mark.more),
    pytest.param(never_eager, marks=pytest.mark.more),
    view,
    pytest.param(view_on_a_view, marks=pytest.mark.more),
    hybrid_by_peer,
    QueueBackend.create,
]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__qualname__)
def test_a_backend_keeps_its_contract(factory: Callable[[int], Sequence[Backend]]) -> None:
    assert check_backend(factory) == [case.name for case in CASES]
