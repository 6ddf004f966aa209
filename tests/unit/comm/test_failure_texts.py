"""The texts of errors after a failure: what happened, where, when and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.failing_ranks import (
    backend_of,
    close_all,
    ended_by,
    metronome,  # noqa: F401
)
from tests.support.ranks import PATIENCE_S, reference_local, run_each, run_ranks

import unisono as uni
from unisono.comm.control_messages import StallQuery
from unisono.config import Config
from unisono.errors import (
    CollectiveMismatch,
    DeadlineExceeded,
    PeerAborted,
    PeerLost,
    UnisonoError,
)

# -- the text of an error ---------------------------------------------------------------------------------


def errors_of_all_kinds() -> Iterator[tuple[str, UnisonoError, bool]]:
    """Errors with their names, and whether a collective raised them."""
    quick = Config(deadlock_after_s=0.1, stall_query_s=0.05)

    worlds = reference_local(2, quick)
    yield "expired collective", ended_by(DeadlineExceeded, lambda: worlds[0].all_reduce(1, timeout=0.1)), True
    yield "expired receive", ended_by(DeadlineExceeded, lambda: worlds[0].recv_bytes(1, timeout=0.02)), False
    work = worlds[0].start.recv_bytes(1)
    yield "impatient wait", ended_by(DeadlineExceeded, lambda: work.wait(0.02)), False
    backend_of(worlds[1]).kill("flood")
    yield "lost message", ended_by(PeerLost, lambda: work.wait(PATIENCE_S)), False
    close_all(worlds)

    worlds = reference_local(2, quick)
    works: list[uni.Work[Any]] = [worlds[0].start.all_reduce(1), worlds[0].start.recv_bytes(1)]
    worlds[1].abort("had enough")
    yield "aborted collective", ended_by(PeerAborted, lambda: works[0].wait(PATIENCE_S)), True
    yield "aborted message", ended_by(PeerAborted, lambda: works[1].wait(PATIENCE_S)), False
    close_all(worlds)

    worlds = reference_local(2, quick)
    works = [worlds[0].start.all_reduce(1), worlds[1].start.barrier()]
    for work in works:
        yield "mismatch", ended_by(CollectiveMismatch, lambda work=work: work.wait(PATIENCE_S)), True
    close_all(worlds)

    worlds = reference_local(2, quick)
    works = [world.start.all_reduce(1) for world in worlds[:1]]
    worlds[1].close()
    yield "left", ended_by(PeerLost, lambda: works[0].wait(PATIENCE_S)), True
    close_all(worlds)

    ended = run_ranks(lambda comm: comm.recv_bytes(1 - comm.rank), 2, config=quick)
    yield "deadlock", ended[0], False


def test_every_error_says_what_where_when_and_why() -> None:
    names = []
    for name, error, is_collective in errors_of_all_kinds():
        names.append(name)
        assert isinstance(error, UnisonoError), name
        assert error.operation in ("all_reduce", "recv_bytes", "barrier"), name
        assert error.communicator == "world", name
        assert error.epoch == 0, name
        assert (error.sequence == 0) == is_collective, name
        assert error.elapsed_s is not None, name
        assert 0 <= error.elapsed_s < 10, name
        assert error.cause, name
        number = " #0" if is_collective else ""
        where = f'during {error.operation}{number} on "world", epoch 0, after '
        assert where in str(error), name
        assert error.cause in str(error), name
    assert len(names) == 10


def test_a_later_call_on_a_broken_communicator_shows_what_broke_it() -> None:
    worlds = uni.local(2)
    worlds[0].barrier, worlds[1].close()
    first = ended_by(PeerLost, lambda: worlds[0].all_reduce(1))
    again = ended_by(PeerLost, lambda: worlds[0].broadcast(np.ones(2)))
    assert (again.ranks, again.operation, again.sequence) == (first.ranks, "all_reduce", 0)
    close_all(worlds)


# -- a handler of control messages fails ------------------------------------------------------------------


def test_a_rank_whose_control_fails_reports_it_and_goes_on_receiving(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = uni.local(3)
    group = worlds[1]._group
    queried_by: list[int] = []

    def fail_once(sender: int, query: StallQuery) -> None:
        queried_by.append(sender)
        raise RuntimeError("no threads left")

    monkeypatch.setattr(group._stalls, "on_query", fail_once)

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            comm.recv_bytes(0)  # the others wait in the barrier meanwhile, and send stall queries
        elif comm.rank == 0:
            with pytest.raises(PeerAborted) as caught:
                comm.barrier()
            comm.send(np.arange(3), 1)
            return str(caught.value)
        return str(ended_by(PeerAborted, comm.barrier))

    texts = run_each(program, worlds).values()
    assert queried_by
    assert all("rank 1" in text and "no threads left" in text for text in texts), texts
    close_all(worlds)
