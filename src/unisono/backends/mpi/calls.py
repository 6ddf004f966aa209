"""MPI's fast path: a blocking collective that was made before goes straight to MPI, on the caller's thread.

It takes verbs with plain arguments, and calls that were decided before. All other calls take the slow path,
and the decision for a new call is cached. A call that fails, takes longer than `Config.stall_query_s` or is
interrupted is handed over to the slow path while it goes on: errors, stalls and interrupts are handled there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono._native import CallLog
from unisono.backends.mpi.collectives import MpiQueue, Task
from unisono.core.kernels import divide
from unisono.messaging.backend import Stage
from unisono.plans.steps import Buf, Problem

if TYPE_CHECKING:
    from unisono.backends.mpi.backend import MpiBackend

__all__ = ["Decision", "MpiCalls"]

Array = np.ndarray[Any, Any]

_WITH_OP: Final = ("all_reduce", "reduce_scatter")
_IN_PLACE: Final = ("all_reduce", "broadcast")
_BY_RANK: Final = ("reduce_scatter", "all_to_all")
_DECISIONS_MAX: Final = 512
# A waiting call polls this many times in a row, then this many times with a yield in between, then sleeps for
# this time between two polls.
_SPINS: Final = 64
_YIELDS: Final = 2000
_PAUSE_S: Final = 50e-6


@dataclass(frozen=True, slots=True)
class Decision:
    """The MPI call, and its queue; `stage` is that of the first such call."""

    queue: MpiQueue
    problem: Problem
    stage: Stage


@dataclass(slots=True)
class _Known:
    """A cached decision; the result is divided by `divisor`. `spare` is an ended task, to be used again."""

    decision: Decision
    header: bytes
    divisor: int
    spare: Task | None = None

    def task(self, memory: Mapping[Any, Array]) -> Task:
        task, self.spare = self.spare, None
        queue = self.decision.queue
        if task is None:
            task = Task(queue, self.decision.problem, self.decision.stage, is_driven=True)
        task.prepare(queue, memory)
        return task


class _Miss(threading.local):
    """The call of this thread that has no cached decision yet: its verb, key, operand and number."""

    verb: _Verb | None = None
    key: Any = None
    x: Array | None = None
    sequence = -1


class MpiCalls:
    """The fast path of one communicator."""

    verbs = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")

    def __init__(self, backend: MpiBackend, size: int, call_log: CallLog) -> None:
        self.backend = backend
        self.size = size
        self.call_log = call_log
        self.miss = _Miss()
        # Numbers of calls that ended here and that were handed over.
        self.ended = 0
        self.handed_over = 0

    def verb(self, name: str, slow: Callable[..., Any], take_over: Callable[..., None]) -> Callable[..., Any]:
        """Return a callable that replaces the verb `slow`."""
        return _Verb(self, name, slow, take_over)

    def cache_decision(
        self,
        sequence: int,
        operation: str,
        program: Any,
        dtype: int,
        op: int,
        memory_in: Any,
        memory_out: Any,
        header: bytes,
        divisor: int,
    ) -> bool:
        """Cache the decision for this thread's current call, if it works on the user's own memory."""
        miss = self.miss
        if miss.verb is None or miss.sequence != sequence or miss.verb.name != operation:
            return False
        if miss.x is not None:
            used = memory_out if operation in _IN_PLACE else memory_in
            if (
                used.dtype != miss.x.dtype
                or used.ctypes.data != miss.x.ctypes.data
                or used.size != miss.x.size
            ):
                return False
        miss.verb.keep(miss.key, _Known(program, header, divisor))
        return True


class _Verb:
    """One verb of one communicator."""

    def __init__(
        self, calls: MpiCalls, name: str, slow: Callable[..., Any], take_over: Callable[..., None]
    ) -> None:
        self.name = name
        self._calls = calls
        self._slow = slow
        self._take_over = take_over
        self._second = "op" if name in _WITH_OP else "root" if name == "broadcast" else ""
        self._known: dict[Any, _Known] = {}
        self.__doc__ = slow.__doc__
        self.__name__ = name

    def keep(self, key: Any, known: _Known) -> None:
        if len(self._known) >= _DECISIONS_MAX:
            self._known.clear()
        self._known[key] = known

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named and self._second in named and len(named) == 1 and len(args) == 1:
            args, named = (*args, named[self._second]), {}
        key = None if named else self._key_of(args)
        if key is None:
            return self._slow(*args, **named)
        known = self._known.get(key)
        if known is not None and self._calls.call_log.fast_path_open:
            return self._run(known, args, sys._getframe(1))
        return self._decide(key, args)

    def _key_of(self, args: tuple[Any, ...]) -> Any:
        """The key of a decision; None if an argument is not plain. Reports show the line of the call site."""
        if self.name == "barrier":
            return () if not args else None
        if not 1 <= len(args) <= (2 if self._second else 1):
            return None
        x = args[0]
        if type(x) is not np.ndarray:
            return None
        flags = x.flags
        if not (flags.carray if self.name in _IN_PLACE else flags.c_contiguous and flags.aligned):
            return None
        if self.name in _BY_RANK and (not x.shape or x.shape[0] != self._calls.size):
            return None
        second = args[1] if len(args) == 2 else None
        if second is not None and type(second) is not (str if self._second == "op" else int):
            return None
        return (x.dtype, x.shape, second)

    def _decide(self, key: Any, args: tuple[Any, ...]) -> Any:
        """Take the slow path, which calls `cache_decision`."""
        miss = self._calls.miss
        miss.verb, miss.key, miss.sequence = self, key, self._calls.call_log.next
        miss.x = args[0] if args else None
        try:
            return self._slow(*args)
        finally:
            miss.verb = miss.x = None

    def _run(self, known: _Known, args: tuple[Any, ...], caller: FrameType) -> Any:
        calls, decision = self._calls, known.decision
        backend, queue = calls.backend, decision.queue
        engine, call_log = backend.engine, calls.call_log
        x = args[0] if args else None
        out, memory = self._memory(x)
        started_at = backend.runtime.now()
        task = known.task(memory)
        is_over, interruption = False, None
        with engine.lock:
            # An arrived message may say that other ranks have given up: then this call must not begin.
            may_begin = not engine.has_events() and call_log.fast_path_open and queue.is_free()
            if may_begin:
                sequence = call_log.take()
                call_log.remember(sequence, known.header, caller.f_code, caller.f_lasti)
                queue.tasks.append(task)
        if not may_begin:
            return self._slow(*args)
        try:
            is_over = self._drive(queue, task, started_at + backend.config.stall_query_s)
            is_concluded = is_over and task.agreement.is_sufficient
            if is_concluded:
                task.conclude()
        except BaseException as error:  # an interrupt: the call must end first
            interruption = error
        if is_over and task.failure is None and interruption is None:
            calls.ended += 1
            if is_concluded:  # its request was never used
                known.spare = task
        else:
            calls.handed_over += 1
            task.is_driven = False
            if is_over:
                task.end()
            handle = backend.keep(task.request)
            self._take_over(self.name, sequence, known.header, started_at, handle, (x, out), interruption)
        if known.divisor and out is not None:
            divide(out.reshape(-1), known.divisor, decision.stage.dtype)
        return out

    def _memory(self, x: Array | None) -> tuple[Array | None, dict[Buf, Array]]:
        """The result, and the flat memory of the collective."""
        if x is None:
            return None, {}
        flat = x if x.ndim == 1 else x.reshape(-1)
        if self.name in _IN_PLACE:
            return x, {Buf.OUT: flat}
        shape = x.shape
        if self.name == "all_gather":
            shape = (self._calls.size, *shape)
        elif self.name == "reduce_scatter":
            shape = shape[1:]
        out = np.empty(shape, x.dtype)
        return out, {Buf.IN: flat, Buf.OUT: out.reshape(-1)}

    def _drive(self, queue: MpiQueue, task: Task, stalled_at: float) -> bool:
        """Drive a task until it is over; False if it must be handed over."""
        engine, call_log, runtime = (
            self._calls.backend.engine,
            self._calls.call_log,
            self._calls.backend.runtime,
        )
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
