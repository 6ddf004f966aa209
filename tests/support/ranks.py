"""Ranks for tests: `run_ranks` runs a function on ranks that are threads or processes.

An acceptance test that is marked `on_every_link` also runs on native ranks in processes: see conftest.py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.processes import Failed, run_processes

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.config import Config

__all__ = [
    "IN_THREADS",
    "IS_SANITIZED",
    "ON_EVERY_LINK",
    "PATIENCE_S",
    "Ended",
    "ranks_linked_by",
    "reference_local",
    "run_each",
    "run_ranks",
    "sleep",
    "wait_until",
]

# The ranks of an acceptance test are threads, or processes with one of these kinds of links. A test runs with
# all its parameters on threads, and with one of them in processes; with --long it runs with all of them on
# every kind.
IN_THREADS = "threads"
ON_EVERY_LINK = ("shm", "tcp", "hosts", "tls", "hosts tls", "quic", "hosts quic")
_links = IN_THREADS

# Under `make sanitize` freed memory is kept for a while, so the size of a process shows no leak of ours.
IS_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")

# Long enough for a loaded machine. Every wait in a test ends after this time, so that a hang is a failure.
PATIENCE_S = 120


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition did not become true",
    *,
    limit_s: float = PATIENCE_S,
) -> None:
    """Sleep until another thread or process has made a condition true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


class Ended(list[Any]):
    """The result of each rank, or the exception that ended it."""

    def values(self) -> list[Any]:
        """The results; raises the first exception."""
        for result in self:
            if isinstance(result, BaseException):
                raise result
        return list(self)


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, config: Config | None = None) -> Ended:
    """Run `fn(comm, *args)` on n in-process ranks, one thread each, inside `with comm`.

    In an acceptance test they may be native ranks in processes.
    """
    if _links != IN_THREADS:
        ended = run_processes(fn, n, *args, kind=_links, config=config)
        return Ended([each.error() if isinstance(each, Failed) else each for each in ended])

    def one(comm: uni.Communicator) -> Any:
        with comm:
            return fn(comm, *args)

    return run_each(one, uni.local(n, config))


def reference_local(n: int, config: Config | None = None) -> list[uni.Communicator]:
    """In-process ranks on the Python backend, which uses the reference executor and can be killed."""
    return [uni.Communicator.world(backend) for backend in LocalBackend.create(n, config)]


def sleep(comm: uni.Communicator, seconds: float) -> None:
    """Sleep for virtual seconds; only in a simulation."""
    comm.backend.runtime.sleep(seconds)


def run_each(fn: Callable[[Any], Any], ranks: list[Any]) -> Ended:
    """Run `fn(rank)` on a thread per rank; return all outcomes. If a thread hangs, fail with its stack."""
    ended = Ended([None] * len(ranks))

    def one(index: int) -> None:
        try:
            ended[index] = fn(ranks[index])
        except BaseException as error:
            ended[index] = error

    threads = [
        threading.Thread(target=one, args=(index,), name=f"rank_{index}", daemon=True)
        for index in range(len(ranks))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        frames = sys._current_frames()
        stacks = [
            f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-8:])
            for thread in threads
            if thread.ident in frames and thread.is_alive()
        ]
        stacks += [
            f"{threads[i].name} ended: {e!r}" for i, e in enumerate(ended) if isinstance(e, BaseException)
        ]
        raise AssertionError(f"after {PATIENCE_S} s these still run:\n" + "\n".join(stacks))
    return ended


@contextmanager
def ranks_linked_by(kind: str) -> Iterator[None]:
    """Let `run_ranks` link ranks this way within the block."""
    global _links
    _links = kind
    try:
        yield
    finally:
        _links = IN_THREADS
