"""Worlds for tests of remote calls, on every kind of backend that supports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from tests.support.processes import Failed, run_processes
from tests.support.ranks import run_ranks

# A deadline that no test may reach: a wait that lasts this long is a failure.
LONG_S = 60.0


def run(kind: str, fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """The results of ranks that are threads, or processes with this kind of links."""
    if kind == "local":
        return run_ranks(fn, size, *args).values()
    results = run_processes(fn, size, *args, kind=kind, patience_s=180)
    for result in results:
        if isinstance(result, Failed):
            raise result
    return results


WORLDS = {kind: partial(run, kind) for kind in ("local", "shm", "tcp", "rings")}


def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


class Counter:
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value, self.step = start, step

    def add(self, times: int) -> int:
        self.value += times * self.step
        return self.value

    async def later(self) -> int:
        await asyncio.sleep(0)
        return self.value

    def counts(self, times: int) -> Iterator[int]:
        for _ in range(times):
            yield self.add(1)

    async def later_counts(self, times: int) -> AsyncIterator[int]:
        for _ in range(times):
            yield await self.later()

    def _hidden(self) -> int:
        return -1


class Plain:
    def get(self) -> int:
        return 5
