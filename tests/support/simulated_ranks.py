"""Ranks of the simulated backend without communicators.

Latency and speed are powers of two, so that every time is exact in binary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.core.envelope import ANY
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.messaging.peer_down import PeerDown
from unisono.simulation import Network, SimBackend, SimResult, now, run

LATENCY = 2.0**-10
SPEED = 2.0**20  # 1 KiB takes as long as the latency
NETWORK = Network(LATENCY, SPEED)
KIB = 1024


class Rank:
    """A backend with blocking verbs."""

    def __init__(self, backend: SimBackend) -> None:
        self.backend = backend
        self.rank, self.size = backend.rank, backend.size
        self.downs: list[tuple[float, PeerDown]] = []
        backend.watch(lambda down: self.downs.append((now(), down)))

    def start_send(self, dst: int, data: bytes, tag: int = 0, **how: Any) -> Request:
        return self.backend.start_send(dst, 1, tag, memoryview(data), **how)

    def start_recv(self, src: Any, tag: Any = 0) -> Request:
        return self.backend.start_recv(src, 1, tag, None)

    def send(self, dst: int, data: bytes, tag: int = 0, **how: Any) -> None:
        self.wait(self.start_send(dst, data, tag, **how), "send")

    def recv(self, src: Any, tag: Any = 0) -> bytes:
        request = self.start_recv(src, tag)
        self.wait(request, "recv")
        return bytes(request.data or b"")

    def wait(self, request: Request, operation: str = "wait", timeout: float | None = None) -> bool:
        event = self.backend.runtime.event()
        request.notify(event.set)
        peers = () if request.peer is ANY else (request.peer,)
        waiting = Waiting(self.rank, peers, operation)  # type: ignore[arg-type]
        is_done = self.backend.runtime.block(event, timeout, lambda: waiting)
        if request.error is not None:
            raise request.error
        return is_done


def simulated(program: Callable[[Rank], Any], n: int, **how: Any) -> SimResult:
    how.setdefault("network", NETWORK)
    return run(lambda backend: program(Rank(backend)), n, **how)


def by_rank(*programs: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
    return lambda me: programs[me.rank](me)
