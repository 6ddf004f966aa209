"""Ranks on threads, for the tests of programs that use unisono.

Knows how to run a function on every rank of this process and how each of them ended. Does not know what they
do.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.world import local
from unisono.config import Config

__all__ = ["Threads", "run_local"]

# How long ranks may take to end once they were told to give up.
_GRACE_S = 1.0


def run_local(
    fn: Callable[..., Any], n: int, *args: Any, config: Config | None = None, timeout: float = 60.0
) -> list[Any]:
    """Run `fn(comm, *args)` on n ranks inside this process, a thread each, and return the results by rank.

    The exception of the rank that failed first is raised.

    Raises:
        TimeoutError: ranks had not ended after `timeout` seconds; it says which, and where they are.
    """
    worlds = local(n, config)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def live(world: Communicator) -> None:
        with world:
            try:
                results[world.rank] = fn(world, *args)
            except BaseException as error:
                errors.append(error)  # before the others hear of it: the first is the cause of the rest
                raise

    threads = Threads(live, worlds)
    hanging = threads.join(timeout)
    first = next(iter(errors), None)
    if hanging:
        for world in worlds:
            world.abort(f"run_local gave up after {timeout:g} s")
        threads.join(_GRACE_S)
        where = "; ".join(f"rank {rank} is at {place}" for rank, place in hanging.items())
        first = first or TimeoutError(f"not ended after {timeout:g} s: {where}")
    if first is not None:
        raise first
    return results


class Threads:
    """A thread per place. What a thread raises is dropped: the function itself keeps what matters."""

    def __init__(self, fn: Callable[[Any], None], places: Sequence[Any]) -> None:
        def run(place: Any) -> None:
            try:
                fn(place)
            except BaseException:
                return

        self._threads = [
            threading.Thread(target=run, args=(place,), name=f"rank-{rank}", daemon=True)
            for rank, place in enumerate(places)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> dict[int, str]:
        """Wait for all to end; returns those that did not, each with the place in the code where it is."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        frames = sys._current_frames()
        return {
            rank: _place(frames.get(thread.ident or 0))
            for rank, thread in enumerate(self._threads)
            if thread.is_alive()
        }


def _place(frame: Any) -> str:
    """The innermost lines of a thread that are not the standard library's."""
    if frame is None:
        return "its end"
    stack = traceback.extract_stack(frame)
    own = [line for line in stack if "/threading.py" not in line.filename] or list(stack)
    return " < ".join(f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(own[-3:]))
