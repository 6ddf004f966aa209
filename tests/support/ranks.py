"""Ranks for tests: `run_ranks` runs a function on ranks that are threads, or processes of their own.

An acceptance test that is marked `on_every_link` gets native ranks in processes, too: see conftest.py.
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
from unisono.config import Config

__all__ = [
    "IN_THREADS",
    "IS_SANITIZED",
    "ON_EVERY_LINK",
    "PATIENCE_S",
    "Ended",
    "ranks_live_in",
    "run_each",
    "run_ranks",
]

# Where the ranks of an acceptance test live: on threads, or in processes with these links between them. Each
# test goes through all its parameters on threads, and through one of them in processes, with one kind;
# with --long through all of them with every kind.
IN_THREADS = "threads"
ON_EVERY_LINK = ("shm", "tcp", "hosts", "tls", "hosts tls")
_place = IN_THREADS

# Under `make sanitize` freed memory is kept for a while: what a process takes then says nothing about ours.
IS_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")

# Long enough for a loaded machine; every wait in a test ends by then, so that a hang is a failure.
PATIENCE_S = 120


class Ended(list[Any]):
    """What each rank returned, or the exception that ended it."""

    def values(self) -> list[Any]:
        """The results; the first exception is raised."""
        for result in self:
            if isinstance(result, BaseException):
                raise result
        return list(self)


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, config: Config | None = None) -> Ended:
    """Run `fn(comm, *args)` on n in-process ranks, one thread each, inside `with comm`.

    In an acceptance test they may be native ranks, in processes of their own.
    """
    if _place != IN_THREADS:
        ended = run_processes(fn, n, *args, kind=_place, config=config)
        return Ended([each.error() if isinstance(each, Failed) else each for each in ended])

    def one(comm: uni.Communicator) -> Any:
        with comm:
            return fn(comm, *args)

    return run_each(one, uni.local(n, config))


def run_each(fn: Callable[[Any], Any], places: list[Any]) -> Ended:
    """Run `fn(place)` on a thread per place; collect how each ended. Who hangs is shown and left behind."""
    ended = Ended([None] * len(places))

    def one(index: int) -> None:
        try:
            ended[index] = fn(places[index])
        except BaseException as error:
            ended[index] = error

    threads = [
        threading.Thread(target=one, args=(index,), name=f"rank_{index}", daemon=True)
        for index in range(len(places))
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
        raise AssertionError(f"after {PATIENCE_S} s these still run:\n" + "\n".join(stacks))
    return ended


@contextmanager
def ranks_live_in(place: str) -> Iterator[None]:
    """Let `run_ranks` start ranks there within the block."""
    global _place
    _place = place
    try:
        yield
    finally:
        _place = IN_THREADS
