"""`Config.deadline_s`: the deadline of every operation that is called without `timeout=`."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, world
from tests.support.ranks import PATIENCE_S, run_each

import unisono as uni
from unisono import simulation
from unisono.config import Config
from unisono.errors import DeadlineExceeded

__all__ = ["world"]

OPERATIONS = {
    "barrier": lambda c, **how: c.barrier(**how),
    "all_reduce": lambda c, **how: c.all_reduce(np.ones(3), **how),
    "recv": lambda c, **how: c.recv(np.ones(3), src=1, **how),
    "probe": lambda c, **how: c.probe(src=1, **how),
    "a long send": lambda c, **how: c.send(np.ones(1 << 18), 1, **how),
    "a started recv": lambda c, **how: c.start.recv(np.ones(3), src=1, **how).wait(),
    "broadcast_object": lambda c, **how: c.broadcast_object(None, root=1, **how),
    "all_reduce_object": lambda c, **how: c.all_reduce_object(1, max, **how),
    "split": lambda c, **how: c.split(0, **how),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


CONFIG = {"deadline_s": 7.0, "deadlock_after_s": 0.0}


def after_s(operation: Any, **how: Any) -> float:
    """The virtual seconds after which the operation of rank 0 expires; rank 1 takes part in no operation."""

    def program(comm: Any) -> float | None:
        if comm.rank == 1:
            simulation.sleep(100.0)
            return None
        with pytest.raises(DeadlineExceeded) as caught:
            operation(comm, **how)
        return caught.value.elapsed_s

    result = uni.simulate(program, 2, config=Config(**CONFIG)).results[0]
    assert isinstance(result, float), result
    return result


@every_operation
def test_an_operation_ends_after_the_deadline_of_its_communicator(operation: Any) -> None:
    assert after_s(operation) == pytest.approx(7.0, abs=0.5)


@every_operation
def test_a_timeout_of_the_call_wins(operation: Any) -> None:
    assert after_s(operation, timeout=20.0) == pytest.approx(20.0, abs=0.5)
    assert after_s(operation, timeout=2.0) == pytest.approx(2.0, abs=0.5)


def test_a_call_may_have_no_limit_all_the_same() -> None:
    def program(comm: Any) -> float:
        if comm.rank == 1:
            simulation.sleep(50.0)
        return comm.all_reduce(1.5, timeout=math.inf)

    assert uni.simulate(program, 2, config=Config(**CONFIG)).results == [3.0, 3.0]


def test_a_group_has_the_deadline_of_its_world() -> None:
    def program(comm: Any) -> float | None:
        half = comm.split(0)
        if comm.rank == 1:
            simulation.sleep(100.0)
            return None
        with pytest.raises(DeadlineExceeded) as caught:
            half.barrier()
        return caught.value.elapsed_s

    assert uni.simulate(program, 2, config=Config(**CONFIG)).results[0] == pytest.approx(7.0, abs=0.5)


@pytest.mark.parametrize("verb", ["all_reduce", "recv"])
def test_a_call_of_the_engine_that_was_made_before_has_it_too(world: MakeWorld, verb: str) -> None:
    """The last call has the line, type and shape of earlier calls; the peer makes one call less."""
    gone = threading.Event()

    def program(comm: Any) -> type | None:
        x = np.ones(3)
        try:
            for turn in range(6):
                if comm.rank == 1 and turn == 5:
                    gone.wait(PATIENCE_S)
                elif verb == "all_reduce":
                    comm.all_reduce(x)
                elif comm.rank == 1:
                    comm.send(x, 0)
                else:
                    comm.recv(x, 1)
        except DeadlineExceeded as error:
            return type(error)
        finally:
            if comm.rank == 0:
                gone.set()
        return None

    ranks = world(2, deadline_s=0.4, deadlock_after_s=0.0)
    assert run_each(program, list(ranks)).values() == [DeadlineExceeded, None]
