"""Native ranks in processes: each runs one function on its backend, and the test connects them."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.resource_tracker
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.credentials import credentials
from tests.support.native_ranks import CONTEXT, PATIENCE_S, SECRET, ended

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card, Credentials
from unisono.config import Config
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.messaging.peer_down import PeerDown

__all__ = ["LINKS", "DownReports", "Ranks", "done", "exchange", "meet", "ramp", "ranks"]

# A process of the standard library that stays; started here, so that the leak check knows it.
multiprocessing.resource_tracker.ensure_running()

LINKS = {
    "shm": {},
    "rings": {"direct_read": False},
    "tcp": {"shm": False},
    "tls": {"shm": False, "tls": True},
    "quic": {"shm": False, "quic": True},
}


class Ranks:
    """Processes that each run one function on a backend; the parent connects the backends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = mp.get_context("spawn")
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(
        self, fn: Callable[..., Any], size: int, *args: Any, links: str = "shm", config: Any = None
    ) -> None:
        """Run `fn(backend, pipe, *args)` in `size` processes; the result is sent back through the pipe."""
        given = credentials(size) if links in ("tls", "quic") else [None] * size
        for rank in range(size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_live,
                args=(fn, rank, size, str(self._folder), theirs, args, links, config or {}, given[rank]),
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        cards = [self.get(rank) for rank in range(size)]
        for pipe in self.pipes:
            pipe.send(cards)

    def get(self, rank: int, timeout: float = PATIENCE_S) -> Any:
        assert self.pipes[rank].poll(timeout), f"rank {rank} sends nothing"
        said = self.pipes[rank].recv()
        if isinstance(said, BaseException):
            raise said
        return said

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.join(0.5 if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


def _live(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    pipe: Connection,
    args: tuple[Any, ...],
    links: str,
    config: dict[str, Any],
    given: Credentials | None,
) -> None:
    backend = NativeBackend(rank, size, folder, SECRET, config=Config(**config), **LINKS[links])
    try:
        pipe.send(tuple(backend.card()))
        backend.connect([Card(*card) for card in pipe.recv()], given)
        pipe.send(fn(backend, pipe, *args))
    except BaseException as error:
        pipe.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        backend.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Processes that are ended with the test."""
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    made = Ranks(folder)
    yield made
    made.end()


def done(backend: NativeBackend, request: Request) -> Request:
    """Wait for a request that must succeed."""
    if ended(backend, request).error is not None:
        raise request.error
    return request


def ramp(rank: int, nbytes: int) -> np.ndarray[Any, Any]:
    return ((np.arange(nbytes, dtype=np.uint64) * 2654435761 + rank * 97) >> 7).astype(np.uint8)


def meet(backend: NativeBackend) -> None:
    """Wait until all ranks have called this."""
    for step in (0, 1):
        for peer in range(backend.size):
            if (backend.rank == 0) == (peer != 0):
                wants = (step == 0) == (backend.rank == 0)
                if wants:
                    done(backend, backend.start_recv(peer, 1, 0, memoryview(bytearray(0))))
                else:
                    done(backend, backend.start_send(peer, 1, 0, memoryview(b"")))


def exchange(backend: NativeBackend, pipe: Connection, sizes: list[int]) -> list[str]:
    peers = [p for p in range(backend.size) if p != backend.rank]
    for n in sizes:
        mine = ramp(backend.rank, n)
        into = {p: np.zeros(n + 1, np.uint8) for p in peers}
        receives = {p: backend.start_recv(p, CONTEXT, n, memoryview(into[p])) for p in peers}
        sends = [backend.start_send(p, CONTEXT, n, memoryview(mine)) for p in peers]
        for p, request in receives.items():
            envelope = done(backend, request).envelope
            assert envelope is not None
            assert envelope.nbytes == n
            assert np.array_equal(into[p][:n], ramp(p, n)), (n, p)
            assert into[p][n] == 0, "no byte beyond the message"
        for send in sends:
            done(backend, send)
    meet(backend)
    return backend.links()


class DownReports:
    """The times at which the backend reported ranks down."""

    def __init__(self, backend: NativeBackend) -> None:
        self.by_rank: dict[int, tuple[PeerDown, float]] = {}
        self._event = backend.runtime.event()
        self._backend = backend
        backend.watch(self._on_down)

    def _on_down(self, down: PeerDown) -> None:
        self.by_rank[down.rank] = (down, time.monotonic())
        self._event.set()

    def wait(self, rank: int) -> tuple[PeerDown, float]:
        end = time.monotonic() + PATIENCE_S
        while rank not in self.by_rank:
            assert self._backend.runtime.block(
                self._event, end - time.monotonic(), lambda: Waiting(0, (), "")
            ), "the end is not reported"
            self._event.clear()
        return self.by_rank[rank]
