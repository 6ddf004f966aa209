"""Exchanges that take several collectives each, advanced together.

An exchange is a generator: it yields the collective that it needs and gets its result. It knows neither a
communicator nor a process group, so the same exchanges run on both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from unisono.comm.communicator import Communicator

__all__ = ["Begin", "Collective", "Exchange", "FloatArray", "Pipeline", "collectives_of"]

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]


class Collective(NamedTuple):
    """A call that an exchange asks for: the sum of x, or bytes by rank along the first axis of the result."""

    verb: Literal["all_reduce", "all_gather", "all_to_all"]
    x: npt.NDArray[Any]


Exchange: TypeAlias = Generator[Collective, npt.NDArray[Any], FloatArray]
# Starts a collective; what it returns waits for the result.
Begin: TypeAlias = Callable[[Collective], Callable[[], npt.NDArray[Any]]]


def collectives_of(comm: Communicator, left_s: Callable[[], float | None] = lambda: None) -> Begin:
    """How the collectives of exchanges are started on a communicator; each has the seconds that are left."""

    def begin(asked: Collective) -> Callable[[], npt.NDArray[Any]]:
        return getattr(comm.start, asked.verb)(asked.x, timeout=left_s()).wait  # type: ignore[no-any-return]

    return begin


class Pipeline:
    """Exchanges under way, of which each has started one collective.

    `add` starts the first collective of a new exchange and takes every older one a step further; `finish`
    brings all to their end. So collectives overlap with what the caller computes between two calls, and
    their order follows from the order of the calls alone: it is the same on all ranks, whatever ends first.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._under_way: list[_UnderWay] = []

    def add(self, exchange: Exchange, then: Callable[[FloatArray], None]) -> None:
        """Start an exchange; `then` gets its result, at the latest in `finish`."""
        older, self._under_way = self._under_way, []
        self._advance(exchange, then, None)
        self._step(older)

    def finish(self) -> None:
        """Bring every exchange to its end."""
        while self._under_way:
            older, self._under_way = self._under_way, []
            self._step(older)

    def clear(self) -> None:
        """Forget exchanges that an error has left under way."""
        self._under_way = []

    def _step(self, older: list[_UnderWay]) -> None:
        for each in older:
            self._advance(each.exchange, each.then, each.wait())

    def _advance(
        self, exchange: Exchange, then: Callable[[FloatArray], None], result: npt.NDArray[Any] | None
    ) -> None:
        try:
            asked = next(exchange) if result is None else exchange.send(result)
        except StopIteration as end:
            then(end.value)
            return
        self._under_way.append(_UnderWay(exchange, then, self._begin(asked)))


class _UnderWay(NamedTuple):
    exchange: Exchange
    then: Callable[[FloatArray], None]
    wait: Callable[[], npt.NDArray[Any]]
