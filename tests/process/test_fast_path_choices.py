"""A backend's own collectives and its own runs of plans: used where possible, otherwise plans in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.support.ranks import run_each

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.comm.communicator import Communicator
from unisono.core.call import Call
from unisono.core.request import Request
from unisono.core.task import Task
from unisono.messaging.backend import Capabilities
from unisono.messaging.stage import Stage
from unisono.plans import Buf, Plan, Problem
from unisono.plans.execute import Execution, execute


class PlanRunner(LocalBackend):
    """A backend that runs plans itself, with the reference executor."""

    def __init__(self, hub: Any, rank: int) -> None:
        super().__init__(hub, rank)
        self.ran: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("plan runner", run_plan=True)

    def run_plan(self, plan: Plan, counts: tuple[int, ...], stage: Stage) -> Request:
        self.ran.append(plan.shape.collective)
        assert stage.op is None or stage.op.fn is None
        request = Request(0)
        call = Call("plan", self.rank)
        how = Execution(self, stage, call, tuple(range(self.size)), lambda *_: None, lambda *_: None)
        task = Task(self.runtime, call, execute(plan, counts, how))
        task.on_done(request.complete)
        task.begin(timers=False)
        return request


class Adder(LocalBackend):
    """A backend with its own all_reduce, for float64 sums only."""

    def __init__(self, hub: Any, rank: int) -> None:
        super().__init__(hub, rank)
        self.asked: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("adder", run_collective=True)

    def run_collective(self, problem: Problem, stage: Stage) -> Request | None:
        self.asked.append(problem.collective)
        if problem.collective != "all_reduce" or stage.dtype.name != "float64":
            return None
        stage.memory[Buf.OUT][:] = 42 + self.rank  # no plan gives this result
        request = Request(0)
        request.complete()
        return request


def program(comm: Communicator) -> tuple[Any, ...]:
    with comm:
        x = np.arange(1003, dtype=np.float32) * (comm.rank + 1)
        comm.all_reduce(x)
        y = comm.all_reduce(np.full(5, comm.rank + 1.0))
        mine = comm.all_reduce(np.array([comm.rank + 1]), uni.op(np.multiply, name="times"))
        parts = comm.all_gather_v(np.arange(comm.rank) + 10 * comm.rank)
        long = comm.all_gather_v(np.arange(1000 * comm.rank))
        assert [part.tolist() for part in long] == [list(range(1000 * rank)) for rank in range(comm.size)]
        return x, y, mine, [part.tolist() for part in parts], comm.backend


def check_common(results: list[tuple[Any, ...]]) -> None:
    for x, _, mine, parts, _ in results:
        assert np.array_equal(x, np.arange(1003, dtype=np.float32) * 6)
        assert mine.tolist() == [6]
        assert parts == [[], [10], [20, 21]]


def test_a_backend_that_runs_plans_gets_all_but_users_operations() -> None:
    results = run_each(lambda b: program(Communicator.world(b)), PlanRunner.create(3)).values()
    check_common(results)
    for _, y, _, _, backend in results:
        assert y.tolist() == [6.0] * 5
        # Two built-in reductions; a short all_gather_v; the lengths and the data of a long one. Not the
        # user's product.
        assert backend.ran == ["all_reduce"] * 2 + ["all_gather"] * 3


def test_a_collective_that_a_backend_declines_is_done_by_a_plan() -> None:
    results = run_each(lambda b: program(Communicator.world(b)), Adder.create(3)).values()
    check_common(results)
    for rank, (_, y, _, _, backend) in enumerate(results):
        assert y.tolist() == [42.0 + rank] * 5
        assert backend.asked == ["all_reduce"] * 3 + ["all_gather"] * 3
