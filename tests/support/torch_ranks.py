"""Ranks of torch.distributed that run many checks, because importing torch and joining take seconds.

The default group is ours; for the first 2, 3, ... ranks there is a group of ours and one of Gloo, the oracle.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from tests.support.processes import PATIENCE_S, forked

import unisono.pytorch
from unisono.messaging.backend import Backend

__all__ = ["Pair", "TorchPool", "join_torch", "torch_pool"]

TIMEOUT = timedelta(seconds=PATIENCE_S)
assert unisono.pytorch  # registers the backend


@dataclass
class Pair:
    """A group of ours and one of Gloo with the same ranks."""

    ours: Any
    gloo: Any
    rank: int
    size: int
    # Tells the test that a case is done: ranks hang if none ends for a minute, however many a check has.
    progress: Callable[[], None]

    def same(self, run: Callable[[Any], Any]) -> Any:
        """Run a function on both groups; the results must be equal. Return the result on ours."""
        expected, got = run(self.gloo), run(self.ours)
        assert_equal(got, expected)
        return got


def assert_equal(got: Any, expected: Any) -> None:
    """Compare tensors, or lists of tensors: equal except for rounding, which depends on the order of sums."""
    if isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, equal_nan=True)
    else:
        assert got == expected, (got, expected)


def join_torch(rank: int, size: int, folder: str, backend: str = "unisono", name: str = "store") -> None:
    """`init_process_group` through a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/{name}", rank=rank, world_size=size, timeout=TIMEOUT
    )


class TorchPool:
    """The test's side of the pool."""

    def __init__(self, pipes: list[Connection], stacks: Callable[[], str]) -> None:
        self._pipes, self._stacks = pipes, stacks

    def run(self, check: str, size: int) -> None:
        """Run the check of this name on the first `size` ranks."""
        for pipe in self._pipes:
            pipe.send((check, size))
        said: dict[Connection, str] = {}
        while left := [pipe for pipe in self._pipes if pipe not in said]:
            # A send of progress must not wait for the test: so all ranks are read.
            ready = multiprocessing.connection.wait(left, PATIENCE_S)
            assert ready, f"{len(left)} ranks hang in {check}\n{self._stacks()}"
            said |= {pipe: text for pipe in left if pipe in ready and (text := pipe.recv()) is not None}
        failures = "\n".join(
            f"rank {rank}: {said[pipe]}" for rank, pipe in enumerate(self._pipes) if said[pipe]
        )
        assert not failures, failures


@contextlib.contextmanager
def torch_pool(checks: dict[str, Callable[[Pair], None]], size: int) -> Iterator[TorchPool]:
    """Ranks that run the checks until the end of the block."""
    folder = tempfile.mkdtemp(prefix="unisono-torch-")

    def program(backend: Backend, pipe: Connection) -> None:
        join_torch(backend.rank, size, folder)
        pairs = {}
        for members in range(2, size + 1):
            ours = dist.new_group(list(range(members)), timeout=TIMEOUT)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gloo = dist.new_group(list(range(members)), timeout=TIMEOUT, backend="gloo")
            pairs[members] = Pair(ours, gloo, backend.rank, members, functools.partial(pipe.send, None))
        while (asked := pipe.recv()) is not None:
            check, members = asked
            text = ""
            if backend.rank < members:
                try:
                    checks[check](pairs[members])
                except BaseException:
                    text = traceback.format_exc()
            pipe.send(text)
        dist.destroy_process_group()

    with forked(program, size) as ranks:
        pool = TorchPool(ranks.pipes, ranks.stacks)
        yield pool
        for pipe in ranks.pipes:
            pipe.send(None)
        for rank in range(size):
            result = ranks.result(rank)
            assert result is None, result
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{folder}/store")
    os.rmdir(folder)
