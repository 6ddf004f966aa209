"""MPI's own collectives: which of them give our results, and how they are run.

Knows a communicator of MPI that is used for nothing else. Does not know messages, nor who makes progress: a
check, called again and again under the engine's lock, brings every collective one step further.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from unisono.backends import own
from unisono.backends.own import OwnRequest
from unisono.config import Config
from unisono.contract import HEADER_BYTES_MAX, PeerDown, Request, Stage
from unisono.errors import PeerAborted
from unisono.plans.steps import Buf, Problem
from unisono.runtime import Runtime
from unisono.values import Kind, ReduceOp

__all__ = ["REDUCTIONS", "Collectives"]

Array = np.ndarray[Any, Any]

_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS: Final = ("float32", "float64")
_COMPLEX: Final = ("complex64", "complex128")
# Halves are no types of MPI's, and its min and max lose NaN: those go by plans.
REDUCTIONS: Final = {
    "sum": (*_FLOATS, *_COMPLEX, *_INTEGERS),
    "mean": (*_FLOATS, *_COMPLEX),
    "prod": (*_FLOATS, *_INTEGERS),
    "min": _INTEGERS,
    "max": _INTEGERS,
    "band": _INTEGERS,
    "bor": _INTEGERS,
    "bxor": _INTEGERS,
}
_NAMES: Final = {"mean": "SUM"}
_MOVING: Final = ("broadcast", "all_gather", "gather", "all_to_all", "barrier")
_REDUCING: Final = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")

# What a collective waits for: MPI requests, one after the other.
Steps = Generator[Any, None, None]


@dataclass(slots=True, eq=False)
class _Task:
    """A collective under way. Its memory is its own: MPI cannot be told to let go of it."""

    problem: Problem
    stage: Stage
    given: Array
    taken: Array
    request: OwnRequest | None = None
    steps: Steps | None = None
    awaits: Any = None
    failure: BaseException | None = None
    keep: list[Any] = field(default_factory=list)


class Collectives:
    """The collectives of one rank. MPI counts their calls, so they begin in the order of the user's."""

    def __init__(self, comm: Any, lock: threading.Lock, config: Config, runtime: Runtime) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm = comm
        self._lock = lock
        self._reproducible = config.reproducible
        self._runtime = runtime
        self._others = tuple(peer for peer in range(comm.size) if peer != comm.rank)
        self._tasks: list[_Task] = []

    def run(self, problem: Problem, stage: Stage) -> Request | None:
        """Begin a collective, or leave it to plans: None."""
        if not self._others or not self._fits(problem, stage):
            return None
        task = _Task(problem, stage, *_memory(problem, stage, self._comm.rank))
        result = _result(problem, stage, self._comm.rank)

        def finish() -> None:
            if result is not None:
                result[:] = task.taken

        task.request = request = OwnRequest(self._others, finish)
        task.steps = self._steps(task)
        with self._lock:
            self._tasks.append(task)
        return request

    def check(self) -> list[Callable[[], None]]:
        """Bring the first collectives further; the caller holds the lock.

        The agreements of several may be under way at once, but what MPI counts begins in order: a collective
        begins when the one before it has ended.
        """
        told: list[Callable[[], None]] = []
        while self._tasks:
            task = self._tasks[0]
            assert task.steps is not None
            assert task.request is not None
            try:
                if task.awaits is not None and not task.awaits.Test():
                    break
                task.awaits = next(task.steps)
            except StopIteration:
                self._tasks.pop(0)
                told.append(
                    partial(task.request.break_off, task.failure) if task.failure else task.request.succeed
                )
            except self._mpi.Exception as error:
                self._tasks.pop(0)
                told.append(partial(task.request.break_off, error))
        return told

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone: what needs it ends, unless it has done its part."""
        with self._lock:
            requests = [task.request for task in self._tasks if task.request is not None]
        for request in requests:
            request.peer_down(self._runtime, down)

    def close(self) -> None:
        """End. What others never joined stays with MPI."""
        with self._lock:
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            assert task.request is not None
            task.request.cancel()
            if task.awaits is not None:
                _ABANDONED.append(task)

    def _fits(self, problem: Problem, stage: Stage) -> bool:
        if not own.is_first_stage(stage):
            return False
        if problem.collective == "barrier":
            return True
        if not own.is_even(problem):
            return False
        if problem.collective in _MOVING:
            return True
        op = stage.op
        if problem.collective not in _REDUCING or op is None or stage.dtype.is_half:
            return False
        if not own.is_exact(stage, self._reproducible):
            return False
        if op.fn is not None:
            return stage.dtype.kind is not Kind.BOOL
        return stage.dtype.name in REDUCTIONS.get(op.name, ())

    def _steps(self, task: _Task) -> Steps:
        """The agreement, then the call, then the word of all that a user's function did well."""
        comm, stage = self._comm, task.stage
        digests = np.empty((comm.size, own.DIGEST_BYTES), np.uint8)
        yield comm.Iallgather(own.digest_of(stage), digests)
        if (digests != digests[0]).any():
            everyone = np.empty((comm.size, HEADER_BYTES_MAX), np.uint8)
            yield comm.Iallgather(own.shown(stage), everyone)
            task.failure = own.disagreement(stage, everyone, comm.rank)
            return
        op = self._op(stage.op, task)
        if task.problem.collective != "barrier":
            yield self._call(task, op)
        if stage.op is not None and stage.op.fn is not None:
            has_failed = np.array([task.failure is not None], np.int8)
            anybody = np.empty(comm.size, np.int8)
            yield comm.Iallgather(has_failed, anybody)
            op.Free()
            if task.failure is None and anybody.any():
                # The ranks where it failed say why; who was well has a result that means nothing.
                first = int(np.flatnonzero(anybody)[0])
                task.failure = PeerAborted(
                    f"rank {first} gave up", rank=first, cause=f"op {stage.op} failed there"
                )

    def _op(self, op: ReduceOp | None, task: _Task) -> Any:
        if op is None:
            return None
        if op.fn is None:
            return getattr(self._mpi, _NAMES.get(op.name, op.name.upper()))
        fn, dtype = op.fn, task.stage.dtype.storage

        def combine(left: Any, right: Any, datatype: Any) -> None:
            """MPI cannot bear an exception: it is kept, and told when the collective is over."""
            if task.failure is not None:
                return
            try:
                into = np.frombuffer(right, dtype)
                into[:] = fn(np.frombuffer(left, dtype).copy(), into.copy())
            except Exception as error:
                task.failure = error

        return self._mpi.Op.Create(combine, commute=op.commutative)

    def _call(self, task: _Task, op: Any) -> Any:
        comm, root, rank = self._comm, task.problem.root, self._comm.rank
        given, taken = task.given, task.taken
        if task.problem.collective in _MOVING:
            given, taken = given.view(np.uint8), taken.view(np.uint8)
        match task.problem.collective:
            case "all_reduce":
                return comm.Iallreduce(given, taken, op)
            case "reduce":
                return comm.Ireduce(given, taken if rank == root else None, op, root)
            case "broadcast":
                return comm.Ibcast(taken, root)
            case "all_gather":
                return comm.Iallgather(given, taken)
            case "gather":
                return comm.Igather(given, taken if rank == root else None, root)
            case "all_to_all":
                return comm.Ialltoall(given, taken)
            case "reduce_scatter":
                return comm.Ireduce_scatter_block(given, taken, op)
            case "scan":
                return comm.Iscan(given, taken, op)
            case _:
                return comm.Iexscan(given, taken, op)


# What MPI may still write to although nobody waits for it.
_ABANDONED: Final[list[_Task]] = []


def _memory(problem: Problem, stage: Stage, rank: int) -> tuple[Array, Array]:
    """What goes in and where it comes out: copies, so that a collective can be given up at any time."""
    memory = stage.memory
    match problem.collective:
        case "all_reduce" | "broadcast":
            given = memory[Buf.OUT].copy()
            return given, given if problem.collective == "broadcast" else np.empty_like(given)
        case "reduce":
            given = memory[Buf.OUT if rank == problem.root else Buf.IN].copy()
            return given, np.empty_like(given)
        case "barrier":
            return np.empty(0, np.uint8), np.empty(0, np.uint8)
        case _:
            given = memory[Buf.IN].copy()
            out = memory.get(Buf.OUT)
            return given, np.empty(0, given.dtype) if out is None else np.empty_like(out)


def _result(problem: Problem, stage: Stage, rank: int) -> Array | None:
    """The user's memory that gets the result, if this rank gets one."""
    is_root = rank == problem.root
    if problem.collective == "barrier" or (problem.collective in ("reduce", "gather") and not is_root):
        return None
    if problem.collective == "exscan" and rank == 0:
        return None
    result: Array = stage.memory[Buf.OUT]
    return None if problem.collective == "broadcast" and is_root else result
