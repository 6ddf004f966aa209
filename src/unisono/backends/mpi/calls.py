"""Blocking collectives that go straight to MPI, on the caller's thread.

The arguments have been read, and the class of the call has been decided (native/python/call.hpp). A call is
handed over while it goes on if it fails, takes longer than `Config.stall_query_s` or its deadline, or is
interrupted: errors, stalls and interrupts are handled as for every other call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono._native import CallLog, RankMap
from unisono.backends.mpi.collectives import MpiQueue, Task
from unisono.core.dtypes import DType
from unisono.core.envelope import Tags
from unisono.core.ops import ReduceOp
from unisono.messaging.fast_path import Adopter, LibraryCall
from unisono.messaging.stage import Stage
from unisono.plans.steps import Buf, Problem

if TYPE_CHECKING:
    from unisono.backends.mpi.backend import MpiBackend

__all__ = ["MpiCalls"]

Array = np.ndarray[Any, Any]

_KNOWN_MAX: Final = 512
# A waiting call polls this many times in a row, then this many times with a yield in between, then sleeps for
# this time between two polls.
_SPINS: Final = 64
_YIELDS: Final = 2000
_PAUSE_S: Final = 50e-6


class MpiCalls:
    """The calls of one communicator."""

    def __init__(
        self, backend: MpiBackend, context: int, rank_map: RankMap | None, call_log: CallLog
    ) -> None:
        self.backend = backend
        self.context = context
        self.rank_map = rank_map
        self.call_log = call_log

    def decide(self, problem: Problem, dtype: DType, op: ReduceOp | None) -> LibraryCall:
        """What makes the calls of one class, with any counts."""
        return _CallClass(self, problem, dtype, op).run

    def queue(self) -> MpiQueue | None:
        """The queue of the communicator, which is opened by its first collective."""
        return self.backend.collectives.queue_of(self.context, self.rank_map)


class _Known:
    """A call with given counts that was made before; `spare` is an ended task, to be used again."""

    __slots__ = ("problem", "queue", "spare", "stage")

    def __init__(self, queue: MpiQueue, problem: Problem, stage: Stage) -> None:
        self.queue = queue
        self.problem = problem
        self.stage = stage
        self.spare: Task | None = None

    def task(self, memory: Mapping[Any, Array]) -> Task:
        task, self.spare = self.spare, None
        if task is None:
            task = Task(self.queue, self.problem, self.stage, is_driven=True)
        task.prepare(self.queue, memory)
        return task


class _CallClass:
    """A class of calls: a collective, its element type, operation and root, with any counts."""

    def __init__(self, calls: MpiCalls, problem: Problem, dtype: DType, op: ReduceOp | None) -> None:
        self._calls = calls
        self._problem = problem
        self._dtype = dtype
        self._op = op
        self._known: dict[bytes, _Known | None] = {}  # by fingerprint; None if plans make it

    def run(
        self,
        adopter: Adopter,
        count: int,
        fingerprint: bytes,
        operand: Array | None,
        result: Array | None,
        code: CodeType | None,
        instruction: int,
        timeout: float | None,
    ) -> bool:
        """Make the call; see messaging.fast_path.LibraryCall."""
        known = self._known.get(fingerprint) or self._add(count, fingerprint)
        if known is None:
            return False
        calls, queue = self._calls, known.queue
        backend, call_log = calls.backend, calls.call_log
        engine = backend.engine
        buffers, shape = {}, None
        if operand is not None:
            shape = operand.shape
            buffers[Buf.IN] = operand if operand.ndim == 1 else operand.reshape(-1)
        if result is not None:
            buffers[Buf.OUT] = result if result.ndim == 1 else result.reshape(-1)
        started_at = backend.runtime.now()
        task = known.task(buffers)
        with engine.lock:
            # An arrived message may say that other ranks have given up: then this call must not begin.
            if engine.has_events() or not call_log.fast_path_open or not queue.is_free():
                return False
            sequence = call_log.take()
            call_log.remember(sequence, fingerprint, code, instruction, shape)
            queue.tasks.append(task)
        limit_s = backend.config.stall_query_s
        is_over, interruption = False, None
        try:
            is_over = self._drive(
                queue, task, started_at + (limit_s if timeout is None else min(limit_s, timeout))
            )
            is_concluded = is_over and task.agreement.is_sufficient
            if is_concluded:
                task.conclude()
        except BaseException as error:  # an interrupt: the call must end first
            interruption = error
        if is_over and task.failure is None and interruption is None:
            if is_concluded:  # its request was never used
                known.spare = task
            return True
        task.is_driven = False
        if is_over:
            task.end()
        name, memory = self._problem.collective, (operand, result)
        handle = backend.keep(task.request)
        adopter.take_over(name, sequence, fingerprint, started_at, timeout, handle, memory, interruption)
        return True

    def _add(self, count: int, fingerprint: bytes) -> _Known | None:
        """What the first call with these counts needs; None if plans make it."""
        if fingerprint in self._known:
            return None
        calls, problem = self._calls, self._problem
        exact = replace(problem, counts=(count,) * len(problem.counts))
        tag = Tags.collective(0, 0)
        stage = Stage(calls.context, tag, self._dtype, self._op, {}, fingerprint, calls.rank_map)
        known = None
        if calls.backend.collectives.is_suitable(exact, stage) and (queue := calls.queue()) is not None:
            known = _Known(queue, exact, stage)
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[fingerprint] = known
        return known

    def _drive(self, queue: MpiQueue, task: Task, stalled_at: float) -> bool:
        """Drive a task until it is over; False if it must be handed over."""
        calls = self._calls
        engine, call_log, runtime = calls.backend.engine, calls.call_log, calls.backend.runtime
        lock, advance = engine.lock, queue.advance
        for _ in range(_SPINS):
            with lock:
                if advance(task):
                    return True
        turns = 0
        while True:
            engine.progress()
            with lock:
                if advance(task):
                    return True
            if not call_log.fast_path_open or runtime.now() > stalled_at:
                return False
            turns += 1
            if turns < _YIELDS:
                os.sched_yield()
            else:
                runtime.sleep(_PAUSE_S)
