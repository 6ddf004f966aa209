"""The quic backend in processes: the cases and properties of every backend, and what is QUIC's."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import pytest

from unisono.backends.quic import Draft, QuicBackend
from unisono.backends.registry import Berth
from unisono.communicator import Communicator
from unisono.config import Config
from unisono.testing import CASES

from .crew import Crew
from .processes import Failed, run_processes
from .test_properties import PROPERTIES


class QuicCrew(Crew):
    """Ranks that have a world, by which they tell each other how to make more."""

    kind = "quic"

    def __init__(self, world: Communicator) -> None:
        self.rank = world.rank
        self._world = world

    def opened(self, size: int, config: Config) -> QuicBackend | None:
        draft = None
        if self.rank < size:
            draft = Draft(Berth(self.rank, size, "127.0.0.1", is_encrypted=False, config=config))
        cards = self._world.all_gather_object(None if draft is None else draft.card())
        return None if draft is None else draft.connect(cards[:size])

    def gathered(self, said: Any) -> list[Any]:
        return [pickle.loads(each) for each in self._world.all_gather_object(pickle.dumps(said))]


@cache
def crew(what: str, size: int) -> dict[str, str]:
    """How the cases or properties ended, each in a world of its own."""

    def program(comm: Communicator) -> dict[str, str]:
        one = QuicCrew(comm)
        return one.cases() if what == "cases" else one.properties(examples=2)

    ended = run_processes(program, size, kind="quic")
    assert not [each for each in ended if isinstance(each, Failed)], ended
    return ended[0]


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_case_holds_on_quic(name: str) -> None:
    assert crew("cases", 4)[name] == "ok"


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_holds_on_quic(name: str) -> None:
    assert crew("properties", 6)[name] == "ok"
