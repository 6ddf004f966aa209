"""Worlds for tests of remote calls, on every kind of backend that supports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from tests.support.processes import Failed, run_processes
from tests.support.ranks import run_ranks

# A deadline that no test may reach: a wait that lasts this long is a failure.
LONG_S = 60.0


def on_local(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    return run_ranks(fn, size, *args).values()


def on_processes(kind: str) -> Callable[..., list[Any]]:
    def run(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        results = run_processes(fn, size, *args, kind=kind)
        for result in results:
            if isinstance(result, Failed):
                raise result
        return results

    return run


WORLDS = {
    "local": on_local,
    "shm": on_processes("shm"),
    "tcp": on_processes("tcp"),
    "rings": on_processes("rings"),
}


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
