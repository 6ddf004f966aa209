"""Ranks in processes to which a test does harm, and what the others learn of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.metronome import Metronome
from tests.support.native_ranks import SECRET
from tests.support.processes import PATIENCE_S, Ranks

from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import PeerAborted, PeerLost
from unisono.messaging.peer_down import PeerDown

__all__ = [
    "Ends",
    "all_ready",
    "each_backend",
    "each_link",
    "each_with_heartbeats",
    "in_world",
    "rank_zero",
    "until_lost",
]

# Gloo has no heartbeats, so a stopped rank is not detected there.
_MORE_LINKS = {kind: pytest.param(kind, marks=pytest.mark.more) for kind in ("tls", "quic", "gloo", "iroh")}
each_link = pytest.mark.parametrize("kind", ["shm", "tcp"])
each_backend = pytest.mark.parametrize("kind", ["shm", "tcp", *_MORE_LINKS.values()])
each_with_heartbeats = pytest.mark.parametrize(
    "kind", ["shm", "tcp", _MORE_LINKS["tls"], "quic", _MORE_LINKS["iroh"]]
)


def in_world(
    program: Callable[[Communicator, Connection], Any],
) -> Callable[[NativeBackend, Connection], Any]:
    """Run a program on the communicator of each rank."""

    def live(backend: NativeBackend, pipe: Connection) -> Any:
        with Communicator.world(backend) as comm:
            return program(comm, pipe)

    return live


def until_lost(comm: Communicator, pipe: Connection) -> tuple[str, tuple[int, ...], float, float]:
    """Reduce until a call fails; return the error, its ranks, its time, and how long this rank really ran."""
    metronome, begun = Metronome(), time.monotonic()
    x = np.ones(2000, np.float32)
    try:
        comm.barrier()
        pipe.send("ready")
        while True:
            comm.all_reduce(x, "max")
    except (PeerLost, PeerAborted) as error:
        at = time.monotonic()
        ranks = error.ranks if isinstance(error, PeerLost) else (error.rank,)
        return type(error).__name__, ranks, at, at - begun - metronome.fair_s(begun, at)


def all_ready(ranks: Ranks) -> None:
    for rank in range(len(ranks.pids)):
        assert ranks.receive(rank) == "ready"


class Ends(list[PeerDown]):
    """The ranks that are reported down to a rank."""

    def __init__(self, backend: NativeBackend) -> None:
        super().__init__()
        backend.watch(self.append)

    def wait(self) -> PeerDown:
        deadline = time.monotonic() + PATIENCE_S
        while not self:
            assert time.monotonic() < deadline, "no rank is reported down"
            time.sleep(0.01)
        return self[0]


@pytest.fixture
def rank_zero(tmp_path: Path) -> Iterator[Callable[..., NativeBackend]]:
    """Make rank 0 of a world over TCP, not connected yet."""
    tmp_path.chmod(0o700)
    with contextlib.ExitStack() as stack:

        def make(size: int = 2, silence_s: float = 0.3, **how: Any) -> NativeBackend:
            config = Config(silence_s=silence_s)
            backend = NativeBackend(
                0, size, str(tmp_path), SECRET, config=config, shm=False, neighbours=False, **how
            )
            stack.callback(backend.close)
            return backend

        yield make
