"""In-process ranks that die at a given message, and random collectives with their expected results."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.bounds import REPORTED_WITHIN_S
from tests.support.metronome import Metronome

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.config import Config
from unisono.core.request import Request
from unisono.errors import (
    UnisonoError,
)
from unisono.plans import CATALOG

__all__ = [
    "NAMED",
    "SMALL",
    "DyingBackend",
    "ProgramError",
    "backend_of",
    "close_all",
    "dying_worlds",
    "ended_by",
    "ends_in_time",
    "is_in_time",
    "metronome",
    "one_collective",
    "ramp",
    "seeds",
    "survive",
    "survive_and_leave",
]

# Short segments and little credit: many messages, so a rank can die at many points.
SMALL = Config(segment_bytes=256, eager_bytes=128, eager_credit_bytes=1024, window_segments=2)
NAMED = {
    collective: [name for name, entry in entries.items() if not entry.needs_hosts]
    for collective, entries in CATALOG.items()
}


def seeds(number: int, together: int) -> pytest.MarkDecorator:
    """The first few seeds run in `make test`; tests/simulation/test_random_deaths.py runs more of them."""
    others = [pytest.param(first, marks=pytest.mark.more) for first in range(together, number, together)]
    return pytest.mark.parametrize("first", [0, *others])


@pytest.fixture(scope="module", autouse=True)
def metronome() -> Iterator[Metronome]:
    """One metronome that runs during all tests of the module."""
    global _metronome
    _metronome = Metronome()
    yield _metronome
    _metronome.is_over = True
    _metronome.join()


_metronome: Metronome


class DyingBackend(LocalBackend):
    """A rank that dies when it begins its `fatal`-th send or receive."""

    fatal: int | None = None
    died_at: float | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun = 0
        self._counting = threading.Lock()

    def start_send(self, *args: Any, **how: Any) -> Request:
        self._begin()
        return super().start_send(*args, **how)

    def start_recv(self, *args: Any, **how: Any) -> Request:
        self._begin()
        return super().start_recv(*args, **how)

    def _begin(self) -> None:
        with self._counting:  # any thread that delivers a message may begin the next receive
            self.begun += 1
            is_fatal = self.begun == self.fatal
        if is_fatal:
            self.died_at = time.monotonic()
            self.kill()


def dying_worlds(size: int, fatal: dict[int, int], config: Config = SMALL) -> list[uni.Communicator]:
    backends = DyingBackend.create(size, config)
    worlds = [uni.Communicator.world(backend) for backend in backends]
    for rank, step in fatal.items():
        # Counting starts here: messages that set up a communicator are not part of the program.
        backends[rank].fatal = backends[rank].begun + step  # type: ignore[attr-defined]
    return worlds


def backend_of(comm: uni.Communicator) -> Any:
    return comm.backend


def close_all(worlds: list[uni.Communicator]) -> None:
    for world in worlds:
        world.close()


def is_in_time(begun: float, ended: float) -> bool:
    late_s: float = _metronome.fair_s(begun, ended)
    return late_s < REPORTED_WITHIN_S


@contextmanager
def ends_in_time() -> Iterator[None]:
    """Check that the block ends within `REPORTED_WITHIN_S`."""
    begun = time.monotonic()
    yield
    assert is_in_time(begun, time.monotonic())


def ended_by(kind: type[UnisonoError], fn: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        fn()
    return caught.value


# -- a program of random collectives, with their expected results ------------------------------------------


def ramp(count: int, rank: int, turn: int) -> np.ndarray[Any, Any]:
    return ((np.arange(count) * 5 + rank * 3 + turn) % 13).astype(np.float64)


def one_collective(comm: uni.Communicator, rng: random.Random, turn: int) -> None:
    """A random collective, the same on all ranks, checked against NumPy."""
    size, rank = comm.size, comm.rank
    verb = rng.choice(list(NAMED))
    name = rng.choice(["auto", *NAMED[verb]])
    count, root = rng.choice([0, 1, 7, 100, 600]), rng.randrange(size)
    rows = np.stack([ramp(count * size, r, turn).reshape(size, count) for r in range(size)])
    x, total = rows[rank], rows.sum(0)
    expected: Any = None
    match verb:
        case "all_reduce":
            got, expected = comm.all_reduce(x.copy(), algorithm=name), total
        case "reduce":
            got = comm.reduce(x.copy(), root, algorithm=name)
            expected = total if rank == root else None
        case "broadcast":
            got, expected = comm.broadcast(x.copy(), root, algorithm=name), rows[root]
        case "all_gather":
            got, expected = comm.all_gather(x, algorithm=name), rows
        case "gather":
            got = comm.gather(x, root, algorithm=name)
            expected = rows if rank == root else None
        case "scatter":
            got = comm.scatter(x if rank == root else None, root, algorithm=name)
            expected = rows[root, rank]
        case "reduce_scatter":
            got, expected = comm.reduce_scatter(x, algorithm=name), total[rank]
        case "all_to_all":
            got, expected = comm.all_to_all(x, algorithm=name), rows[:, rank]
        case "scan":
            got, expected = comm.scan(x, algorithm=name), rows[: rank + 1].sum(0)
        case "exscan":
            got, expected = comm.exscan(x, algorithm=name), rows[:rank].sum(0)
        case "barrier":
            got = comm.barrier(algorithm=name)
        case _:
            raise AssertionError(verb)
    if expected is None:
        assert got is None, verb
    else:
        np.testing.assert_array_equal(got, expected, err_msg=f"{verb} by {name}")


def survive(comm: uni.Communicator, seed: int, turns: int = 400) -> tuple[float, UnisonoError] | None:
    """Run collectives until one fails; return the time of the failure and the error."""
    rng = random.Random(seed)
    try:
        for turn in range(turns):
            one_collective(comm, rng, turn)
    except UnisonoError as error:
        return time.monotonic(), error
    return None


def survive_and_leave(comm: uni.Communicator, seed: int) -> tuple[float, UnisonoError]:
    """The same inside `with comm`, which the error leaves; the first call may already find a dead rank."""
    failure: tuple[float, UnisonoError] | None = None
    try:
        with comm:
            failure = survive(comm, seed)
            raise failure[1] if failure is not None else AssertionError("no rank died")
    except UnisonoError as error:
        return failure or (time.monotonic(), error)


# -- a rank whose program raises --------------------------------------------------------------------------


class ProgramError(Exception):
    pass
