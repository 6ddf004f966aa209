"""The cases and properties of every backend, unchanged, on native ranks in processes."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
from hypothesis import given, settings
from tests.conformance.test_properties import PROPERTIES
from tests.support.processes import forked
from tests.support.ranks import ON_EVERY_LINK

from unisono.backends.native.backend import NativeBackend
from unisono.testing import CASES, run_case

pytestmark = pytest.mark.more

HARDLY_ANY = settings(derandomize=True, deadline=None, database=None, max_examples=3)
NAMES = [case.name for case in CASES if case.size > 1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every case on shared memory and on one more kind of links; with --long on all kinds."""
    names = NAMES if metafunc.function is test_a_case_holds_in_processes else list(PROPERTIES)
    others = ON_EVERY_LINK[1:]
    places = [(name, kind) for name in names for kind in ON_EVERY_LINK]
    if not metafunc.config.getoption("--long"):
        mine = [("shm", others[number % len(others)]) for number in range(len(names))]
        places = [(name, kind) for name, kinds in zip(names, mine, strict=True) for kind in kinds]
    metafunc.parametrize(("name", "kind"), places)


def test_a_case_holds_in_processes(name: str, kind: str) -> None:
    (case,) = (case for case in CASES if case.name == name)

    def program(backend: NativeBackend, pipe: Connection) -> bool:
        run_case(case, backend)
        return True

    with forked(program, case.size, kind=kind) as ranks:
        assert [ranks.result(rank) for rank in range(case.size)] == [True] * case.size
        assert [ranks.code(rank) for rank in range(case.size)] == [0] * case.size


def test_a_property_holds_in_processes(name: str, kind: str) -> None:
    prop, strategies = PROPERTIES[name]
    HARDLY_ANY(given(*strategies)(prop))(world=kind)
