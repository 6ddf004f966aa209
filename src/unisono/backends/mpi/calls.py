"""Known calls on MPI: a collective that was made before goes straight to MPI, on the caller's thread.

Knows the verbs with plain arguments and what was decided when such a call was made first. Does not know why.
Whatever else is given goes the long way, and so does a call that is not known yet, from which it learns. What
does not end soon and well is handed over while it goes on: errors, stalls, interrupts and other people's news
are looked after there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono._native import CallLog
from unisono.backends.mpi.collectives import CollectiveQueue, Task
from unisono.core.call_site import is_users
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
_LEARNED_MAX: Final = 512
# Who waits asks so often in a row; then lets others run in between, and at last sleeps for moments.
_SPINS: Final = 64
_YIELDS: Final = 2000
_PAUSE_S: Final = 50e-6


@dataclass(frozen=True, slots=True)
class Decision:
    """What MPI is asked for, and where; `stage` is that of the first such call."""

    room: CollectiveQueue
    problem: Problem
    stage: Stage


@dataclass(slots=True)
class _Known:
    """A decision, and what the verb does around it. `spare` is a task that has ended, to be used again."""

    decision: Decision
    header: bytes
    divisor: int
    spare: Task | None = None

    def task(self, memory: Mapping[Any, Array]) -> Task:
        task, self.spare = self.spare, None
        room = self.decision.room
        if task is None:
            task = Task(room, self.decision.problem, self.decision.stage, is_driven=True)
        task.prepare(room, memory)
        return task


class _Miss(threading.local):
    """The call of this thread that is not known yet: which verb, under which key, with what."""

    verb: _Verb | None = None
    key: Any = None
    x: Array | None = None
    sequence = -1


class MpiCalls:
    """The known calls of one communicator."""

    verbs = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")

    def __init__(self, backend: MpiBackend, size: int, call_log: CallLog) -> None:
        self.backend = backend
        self.size = size
        self.call_log = call_log
        self.miss = _Miss()
        # Calls that ended here, and that were handed over.
        self.ended = 0
        self.handed_over = 0

    def verb(self, name: str, slow: Callable[..., Any], slow_path: Any) -> Callable[..., Any]:
        """Stand in front of a verb."""
        return _Verb(self, name, slow, slow_path.take_over)

    def unclaimed(self, sequence: int) -> tuple[tuple[int, int, bytes], ...]:
        """None: every call begins with an agreement."""
        return ()

    def unconfirmed_ranks(self) -> tuple[int, ...]:
        """Nobody, for the same reason."""
        return ()

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
        """Keep a decision for the call that this thread is in, if it works on what was given."""
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
        self._word = "op" if name in _WITH_OP else "root" if name == "broadcast" else ""
        self._known: dict[Any, _Known] = {}
        self.__doc__ = slow.__doc__
        self.__name__ = name

    def keep(self, key: Any, known: _Known) -> None:
        if len(self._known) >= _LEARNED_MAX:
            self._known.clear()
        self._known[key] = known

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named and self._word in named and len(named) == 1 and len(args) == 1:
            args, named = (*args, named[self._word]), {}
        frame = sys._getframe(1)
        key = None if named else self._key_of(args, frame.f_code, frame.f_lasti)
        if key is None:
            return self._slow(*args, **named)
        known = self._known.get(key)
        if known is not None and self._calls.call_log.fast_path_open:
            return self._run(known, args)
        return self._ask(key, args) if is_users(frame.f_code.co_filename) else self._slow(*args)

    def _key_of(self, args: tuple[Any, ...], *place: Any) -> Any:
        """What tells calls apart, their place included: its line is shown. None if it is no plain call."""
        if self.name == "barrier":
            return place if not args else None
        if not 1 <= len(args) <= (2 if self._word else 1):
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
        if second is not None and type(second) is not (str if self._word == "op" else int):
            return None
        return (x.dtype, x.shape, second, *place)

    def _ask(self, key: Any, args: tuple[Any, ...]) -> Any:
        """Go the long way, and cache_decision."""
        miss = self._calls.miss
        miss.verb, miss.key, miss.sequence = self, key, self._calls.call_log.next
        miss.x = args[0] if args else None
        try:
            return self._slow(*args)
        finally:
            miss.verb = miss.x = None

    def _run(self, known: _Known, args: tuple[Any, ...]) -> Any:
        calls, decision = self._calls, known.decision
        backend, room = calls.backend, decision.room
        engine, call_log = backend.engine, calls.call_log
        x = args[0] if args else None
        out, memory = self._memory(x)
        started_at = backend.runtime.now()
        task = known.task(memory)
        is_over, interruption = False, None
        with engine.lock:
            # Who hears only now that the others have given up must not begin.
            may_begin = not engine.hears() and call_log.fast_path_open and room.is_free()
            if may_begin:
                sequence = call_log.take()
                call_log.remember(sequence, known.header)
                room.tasks.append(task)
        if not may_begin:
            return self._slow(*args)
        try:
            is_over = self._drive(room, task, started_at + backend.config.stall_query_s)
            is_slip = is_over and task.agreement.is_whole
            if is_slip:
                task.conclude()
        except BaseException as error:  # an interrupt: what was begun must end first
            interruption = error
        if is_over and task.failure is None and interruption is None:
            calls.ended += 1
            if is_slip:  # nobody has used its request
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

    def _drive(self, room: CollectiveQueue, task: Task, stalled_at: float) -> bool:
        """Carry a task on until it is over; False if somebody else has to."""
        engine, call_log, runtime = (
            self._calls.backend.engine,
            self._calls.call_log,
            self._calls.backend.runtime,
        )
        lock, advance = engine.lock, room.advance
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
