"""Ranks of a library that are killed or stopped, and what the other ranks learn of it."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.processes import Failed, forked

from unisono.comm.communicator import Communicator
from unisono.errors import PeerLost
from unisono.messaging.backend import Backend

__all__ = ["Lost", "lose_rank"]


class Lost(NamedTuple):
    """What one rank learned: after how many seconds, which ranks, and the text of the error."""

    after_s: float
    ranks: tuple[int, ...]
    text: str


def lose_rank(kind: str, signal_number: int) -> list[Lost]:
    """Kill or stop rank 1 of three that are in an all_reduce; return what each other rank learned."""

    def live(backend: Backend, pipe: Connection) -> tuple[Any, ...]:
        comm = Communicator.world(backend)
        comm.barrier()
        pipe.send("ready")
        if comm.rank == 1:
            time.sleep(60)
        with pytest.raises(PeerLost) as caught:
            comm.all_reduce(np.ones(100))
        return time.monotonic(), caught.value.ranks, str(caught.value)

    with forked(live, 3, kind=kind) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "ready"
        begun = time.monotonic()
        ranks.signal(1, signal_number)
        results = [ranks.result(rank) for rank in (0, 2)]
    assert not [each for each in results if isinstance(each, Failed)], results
    return [Lost(at - begun, lost, text) for at, lost, text in results]
