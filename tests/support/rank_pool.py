"""A crew: processes that run many tests in step, because starting them costs more than most tests take.

Knows how the cases and properties of every backend are run by ranks that stay. Each works in a world of as
many ranks as it needs, made for it; whoever has no part in it waits. Does not know how such a world is made.
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

__all__ = ["Crew", "DraftCrew", "ended_by_drafts"]


class Crew(ABC):
    """One of the processes. All of them call the same methods, in the same order."""

    rank: int
    kind: str  # what tests call its backend

    @abstractmethod
    def opened(self, size: int, config: Config) -> Backend | None:
        """Make a world of the first ranks; None for those who have no part in it."""

    @abstractmethod
    def gathered(self, said: Any) -> list[Any]:
        """What each of the whole crew says."""

    def on_some(self, size: int, live: Callable[[Backend], Any], config: Config | None = None) -> list[Any]:
        """Run `live(backend)` on the first ranks; what each returned or raised, told to all."""
        result: Any = None
        try:
            backend = self.opened(size, config or Config())
            if backend is not None:
                result = live(backend)
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        return self.gathered(result)[:size]

    def cases(self) -> dict[str, str]:
        """How each case of the conformance kit ended."""
        ended = {}
        for case in CASES:
            results = self.on_some(case.size, lambda backend, case=case: run_case(case, backend))
            wrong = [str(result) for result in results if result is not None]
            ended[case.name] = wrong[0] if wrong else "ok"
        return ended

    def properties(self, examples: int) -> dict[str, str]:
        """How each property of the communicator ended, by so many examples."""

        def run_here(
            fn: Callable[..., Any], size: int, *args: Any, kind: str, config: Config | None = None
        ) -> Ended:
            def live(backend: Backend) -> Any:
                with Communicator.world(backend) as comm:
                    return fn(comm, *args)

            return Ended(self.on_some(size, live, config))

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


class DraftCrew(Crew):
    """Ranks that have a world, by which they tell each other how to make more."""

    def __init__(self, kind: str, world: Communicator) -> None:
        self.kind = kind
        self.rank = world.rank
        self._world = world

    def opened(self, size: int, config: Config) -> Backend | None:
        bind = None
        if self.rank < size:
            spec = BindSpec(self.rank, size, "127.0.0.1", is_encrypted=False, config=config)
            bind = BINDERS[self.kind](spec)
        cards = self._world.all_gather_object(None if bind is None else bind.card())
        return None if bind is None else bind.connect(cards[:size])

    def gathered(self, said: Any) -> list[Any]:
        return [pickle.loads(each) for each in self._world.all_gather_object(pickle.dumps(said))]


@cache
def ended_by_drafts(kind: str, what: str, size: int) -> dict[str, str]:
    """How the cases or the properties ended on such ranks, each in a world of its own."""

    def program(comm: Communicator) -> dict[str, str]:
        crew = DraftCrew(kind, comm)
        return crew.cases() if what == "cases" else crew.properties(examples=2)

    # Dozens of tests, one after the other: on a busy machine they take longer than any of them may.
    ended = run_processes(program, size, kind=kind, patience_s=4 * PATIENCE_S)
    assert not [each for each in ended if isinstance(each, Failed)], ended
    return ended[0]
