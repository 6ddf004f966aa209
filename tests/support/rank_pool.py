"""A pool of ranks that run many tests in step, because starting ranks costs more than most tests take.

Each test gets a new world of as many ranks as it needs; the other ranks wait until the test has ended.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import given, settings
from tests.conformance import test_properties
from tests.support.processes import BINDERS, PATIENCE_S, Failed, run_processes
from tests.support.ranks import Ended

from unisono.backends.registry import BindSpec
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.messaging.backend import Backend
from unisono.testing import CASES, run_case

__all__ = ["BindingRankPool", "RankPool", "ended_in_pool"]


class RankPool(ABC):
    """One process of the pool. All of them call the same methods in the same order."""

    rank: int
    kind: str  # name of the backend in test ids

    @abstractmethod
    def open_world(self, size: int, config: Config) -> Backend | None:
        """Make a world of the first `size` ranks; return None on the other ranks."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Gather the value of every rank of the pool."""

    def run_on(self, size: int, live: Callable[[Backend], Any], config: Config | None = None) -> list[Any]:
        """Run `live(backend)` on the first `size` ranks; all ranks learn what each returned or raised."""
        result: Any = None
        try:
            backend = self.open_world(size, config or Config())
            if backend is not None:
                result = live(backend)
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        return self.gather(result)[:size]

    def cases(self) -> dict[str, str]:
        """The outcome of each case of the conformance kit."""
        ended = {}
        for case in CASES:
            results = self.run_on(case.size, lambda backend, case=case: run_case(case, backend))
            wrong = [str(result) for result in results if result is not None]
            ended[case.name] = wrong[0] if wrong else "ok"
        return ended

    def properties(self, examples: int) -> dict[str, str]:
        """The outcome of each property of the communicator, with this number of examples each."""

        def run_here(
            fn: Callable[..., Any], size: int, *args: Any, kind: str, config: Config | None = None
        ) -> Ended:
            def live(backend: Backend) -> Any:
                with Communicator.world(backend) as comm:
                    return fn(comm, *args)

            return Ended(self.run_on(size, live, config))

        test_properties.KINDS.setdefault(self.kind, lambda rank: {})
        test_properties.run_processes = run_here
        few = settings(derandomize=True, deadline=None, database=None, max_examples=examples)
        ended = {}
        for name, (prop, strategies) in test_properties.PROPERTIES.items():
            try:
                few(given(*strategies)(prop))(world=self.kind)
            except Exception as error:
                ended[name] = repr(error)[:500]
            else:
                ended[name] = "ok"
        return ended


class BindingRankPool(RankPool):
    """A pool whose ranks exchange the cards of further worlds over a first world of their own."""

    def __init__(self, kind: str, world: Communicator) -> None:
        self.kind = kind
        self.rank = world.rank
        self._world = world

    def open_world(self, size: int, config: Config) -> Backend | None:
        bind = None
        if self.rank < size:
            spec = BindSpec(self.rank, size, "127.0.0.1", is_encrypted=False, config=config)
            bind = BINDERS[self.kind](spec)
        cards = self._world.all_gather_object(None if bind is None else bind.card())
        return None if bind is None else bind.connect(cards[:size])

    def gather(self, value: Any) -> list[Any]:
        return [pickle.loads(each) for each in self._world.all_gather_object(pickle.dumps(value))]


@cache
def ended_in_pool(kind: str, what: str, size: int) -> dict[str, str]:
    """The outcome of each case or property in a pool of this kind; each runs in a new world."""

    def program(comm: Communicator) -> dict[str, str]:
        pool = BindingRankPool(kind, comm)
        return pool.cases() if what == "cases" else pool.properties(examples=2)

    # Dozens of tests run one after another: on a busy machine they exceed the time limit of a single test.
    ended = run_processes(program, size, kind=kind, patience_s=4 * PATIENCE_S)
    assert not [each for each in ended if isinstance(each, Failed)], ended
    return ended[0]
