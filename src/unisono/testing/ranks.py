"""Ranks on threads, for the tests of programs that use unisono."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.world import local
from unisono.config import Config
from unisono.core.parked_threads import current_frames

__all__ = ["Threads", "run_local"]

# Seconds for ranks to end after their world was aborted.
_GRACE_S = 1.0


def run_local(
    fn: Callable[..., Any], n: int, *args: Any, config: Config | None = None, timeout: float = 60.0
) -> list[Any]:
    """Run `fn(comm, *args)` on n ranks inside this process, a thread each, and return the results by rank.

    The exception of the rank that failed first is raised.

    Raises:
        TimeoutError: ranks had not ended after `timeout` seconds; the text names them and their stacks.
    """
    worlds = local(n, config)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def run_rank(world: Communicator) -> None:
        with world:
            try:
                results[world.rank] = fn(world, *args)
            except BaseException as error:
                errors.append(error)  # before the world closes: errors that follow from it come later
                raise

    threads = Threads(run_rank, worlds)
    hanging = threads.join(timeout)
    first = next(iter(errors), None)
    if hanging:
        for world in worlds:
            world.abort(f"run_local gave up after {timeout:g} s")
        threads.join(_GRACE_S)
        where = "; ".join(f"rank {rank} is at {stack}" for rank, stack in hanging.items())
        first = first or TimeoutError(f"not ended after {timeout:g} s: {where}")
    if first is not None:
        raise first
    return results


class Threads:
    """One thread per argument, each of them a rank. Exceptions are dropped: `fn` records its own."""

    def __init__(self, fn: Callable[[Any], None], arguments: Sequence[Any]) -> None:
        def run(argument: Any) -> None:
            try:
                fn(argument)
            except BaseException:
                return

        self._threads = [
            threading.Thread(target=run, args=(argument,), name=f"rank-{rank}", daemon=True)
            for rank, argument in enumerate(arguments)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> dict[int, str]:
        """Wait for all to end; the ranks that did not, each with the innermost lines of its stack."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        frames = current_frames()
        return {
            rank: _stack(frames.get(thread.ident or 0))
            for rank, thread in enumerate(self._threads)
            if thread.is_alive()
        }


def _stack(frame: Any) -> str:
    """The innermost lines of a thread that are not the standard library's."""
    if frame is None:
        return "its end"
    stack = traceback.extract_stack(frame)
    own = [line for line in stack if "/threading.py" not in line.filename] or list(stack)
    return " < ".join(f"{line.filename}:{line.lineno} in {line.name}" for line in reversed(own[-3:]))
