"""A world of engines in this process, each with a communicator: native ranks on threads.

Connects the ranks at the start and closes all of them at the end; the test decides what they run.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.credentials import credentials
from tests.support.oracle import Notes
from tests.support.processes import KINDS
from tests.support.ranks import run_each

from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config

__all__ = [
    "NO_STALL",
    "MakeWorld",
    "World",
    "calls_adopted",
    "calls_ended",
    "every_kind",
    "found",
    "outcome",
    "world",
]

every_kind = pytest.mark.parametrize("kind", ["shm", "tcp"])

World = list[Communicator]
MakeWorld = Callable[..., World]
# For tests that count the calls of the fast path. A call that stalls on a loaded machine would be adopted by
# Python, which might then also make the next call; with these settings no call counts as stalled.
NO_STALL: Final = {"stall_query_s": 60.0, "deadlock_after_s": 0}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MakeWorld]:
    """`world(size, kind, **config)`: connected communicators, by rank."""
    numbers = itertools.count()
    made: World = []

    def make(size: int, kind: str = "shm", **settings: Any) -> World:
        folder = tmp_path / str(next(numbers))
        folder.mkdir(mode=0o700)
        config, links = Config(**settings), KINDS[kind]
        shown = [None] * size if {"tls", "quic"}.isdisjoint(links(0)) else credentials(size)
        backends = [
            NativeBackend(r, size, str(folder), b"secret", config=config, **links(r)) for r in range(size)
        ]
        cards = [backend.card() for backend in backends]
        for backend in backends:
            backend.connect(cards, shown[backend.rank])
        comms = [Communicator.world(backend) for backend in backends]
        made.extend(comms)
        return comms

    yield make
    run_each(lambda comm: comm.close(), made)
    gc.collect()


def calls_ended(comm: Communicator) -> int:
    """The number of calls that ended in the engine, without Python."""
    assert comm._group.native is not None
    return comm._group.native.ended


def calls_adopted(comm: Communicator) -> int:
    """The number of calls that Python adopted."""
    assert comm._group.native is not None
    return comm._group.native.adopted


def found(comms: World, program: Callable[[Communicator], Notes]) -> list[str]:
    """All notes of the ranks about wrong results."""
    ended = run_each(program, list(comms)).values()
    return [f"rank {rank}: {note}" for rank, notes in enumerate(ended) for note in notes]


def outcome(call: Callable[[], Any]) -> Any:
    """The result of the call, or the exception that ended it."""
    try:
        return call()
    except Exception as error:
        return error
