"""The cases and properties of every backend, unchanged, on native ranks in processes of their own."""

from __future__ import annotations

import itertools
from multiprocessing.connection import Connection

import pytest
from hypothesis import given, settings

from unisono.backends.native import NativeBackend
from unisono.testing import CASES, run_case

from .processes import forked
from .test_properties import PROPERTIES

LINKS = ("shm", "tcp", "hosts")
HARDLY_ANY = settings(derandomize=True, deadline=None, database=None, max_examples=4)
# Every case on shared memory, and on each of the others every second: together they see all.
PLACES = [
    (case.name, kind)
    for number, case in enumerate(CASES)
    for kind in ("shm", LINKS[1 + number % 2])
    if case.size > 1
]


@pytest.mark.parametrize(("name", "kind"), PLACES)
def test_a_case_holds_in_processes(name: str, kind: str) -> None:
    (case,) = (case for case in CASES if case.name == name)

    def live(backend: NativeBackend, pipe: Connection) -> bool:
        run_case(case, backend)
        return True

    with forked(live, case.size, kind=kind) as ranks:
        assert [ranks.result(rank) for rank in range(case.size)] == [True] * case.size
        assert [ranks.code(rank) for rank in range(case.size)] == [0] * case.size


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(PROPERTIES, LINKS)))
def test_a_property_holds_in_processes(name: str, kind: str) -> None:
    prop, strategies = PROPERTIES[name]
    HARDLY_ANY(given(*strategies)(prop))(world=kind)
