"""Tasks: how an operation is carried on from its first step to its end, and by which thread.

A *call* (call.py) says which operation this is; a *task* carries its generator on; a *work* (work.py) is what
the user holds. The thread that waits for a task carries it on. If no thread waits, the thread that ended its
request does: no operation needs a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple

from unisono.core.call import Call, LocalError, Steps, T
from unisono.core.runtime import Deadline, Runtime, Timer
from unisono.errors import DeadlineExceeded, Deadlock, Location, PeerAborted, UnisonoError, ranks_text

__all__ = ["Blocked", "Task", "blocked_threads"]

_log = logging.getLogger("unisono")


class _State(Enum):
    PARKED = "waits to be woken"
    RUNNING = "a thread carries it on, or has it in its queue"
    DONE = "ended"


class Task(Generic[T]):
    """Carries one operation on, from its first step to its end."""

    def __init__(self, runtime: Runtime, call: Call, steps: Steps[T]) -> None:
        self.call = call
        self._runtime = runtime
        self.steps = steps
        self._lock = threading.Lock()
        self._state = _State.PARKED
        self._runner: int | None = None  # the thread that has claimed it
        self._woken = True
        self._interruption: Callable[[], UnisonoError] | None = None
        self._is_interrupted = False
        self._waiters = 0
        self._event = runtime.event()
        self._callbacks: list[Callable[[], object]] = []
        self._timers: list[Timer] = []
        self._result: T | None = None
        self._error: BaseException | None = None
        call.wake = self.wake

    def begin(self, timers: bool) -> None:
        """Take the first step. With `timers`, deadlines and stalls are handled while no thread waits."""
        self.wake()
        if timers and not self.is_done():
            call, now = self.call, self._runtime.now()
            if call.deadline.at is not None:
                self._timers.append(self._runtime.call_at(call.deadline.at, self._expire))
            if call.on_stall is not None and call.stall_query_s is not None:
                self._timers.append(self._runtime.call_at(now + call.stall_query_s, self._on_stall))
            if self.is_done():
                self._cancel_timers()

    def is_done(self) -> bool:
        """Whether it ended."""
        return self._state is _State.DONE

    def wake(self) -> None:
        """Something it waits for has changed."""
        with self._lock:
            self._woken = True
            if self._state is not _State.PARKED:
                return
            if self._waiters:
                self._event.set()
                return
            self._claim()
        _carry_on(self)

    def interrupt(self, error: UnisonoError | Callable[[], UnisonoError]) -> None:
        """End it with an error: it is raised in the next step, and the operation cleans up. The first counts.

        What is called for the error is called then, so that it can say what has become known meanwhile.
        """
        with self._lock:
            if self._state is _State.DONE or self._is_interrupted:
                return
            self._is_interrupted = True
            self._interruption = error if callable(error) else lambda: error
        self.wake()

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call back once it ended; at once if it has."""
        with self._lock:
            if self._state is not _State.DONE:
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], object]) -> None:
        """Do not call back any more."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def wait(self, timeout: float | None) -> T:
        """Carry it on, or wait while another thread does, until it ends."""
        limit = self._runtime.deadline(timeout)
        with self._runtime.defer_signals():
            self._wait(limit, timeout)
        return self.result()

    def _wait(self, limit: Deadline, timeout: float | None) -> None:
        with self._lock:
            self._waiters += 1
        me = threading.get_ident()
        outer = _blocked.get(me)  # a wait inside an operation, such as a verb in a user's own reduce function
        _blocked[me] = Blocked(self.call, self, limit.at is not None or self.call.deadline.at is not None)
        try:
            stalls = self._stalls()
            while not self._claim_or_done():
                _carry_on_claimed()
                now = self._runtime.now()
                if self.call.deadline.has_passed(now) and not self._is_interrupted:
                    self._expire()
                elif limit.has_passed(now):
                    raise self._late(timeout)
                else:
                    self._block(limit, stalls)
        finally:
            if outer is None:
                del _blocked[me]
            else:
                _blocked[me] = outer
            self._stop_waiting()

    def result(self) -> T:
        """What it gave, or the error that ended it."""
        if self.call.on_result is not None:
            self.call.on_result(self._error)
        if self._error is not None:
            error = self._error
            # Each thread that asks raises its own copy, so that tracebacks do not grow into each other.
            raise error.located(Location()) if isinstance(error, UnisonoError) else error
        return self._result  # type: ignore[return-value]

    def take_step(self) -> None:
        """Carry it on until it sleeps or ends, if the calling thread has claimed it."""
        if self._state is not _State.RUNNING or self._runner != threading.get_ident():
            return
        while True:
            try:
                interruption, self._interruption = self._interruption, None
                if interruption is not None:
                    self._throw(interruption())
                else:
                    self.steps.send(None)
                if (unreachable_error := self._unreachable_error()) is not None:
                    self._throw(unreachable_error)
            except StopIteration as stop:
                self._finish(stop.value, None)
                return
            except BaseException as error:
                self._finish(None, error)
                return
            with self._lock:
                if not self._woken and self._interruption is None:
                    self._state = _State.PARKED
                    return
                self._woken = False

    def _throw(self, error: UnisonoError) -> None:
        self.call.interruption = error
        self.steps.throw(error)

    def _unreachable_error(self) -> UnisonoError | None:
        """Why it can never end; nothing if it was interrupted already, for the first reason counts."""
        unreachable_error = None if self.call.unreachable_error is None else self.call.unreachable_error()
        if unreachable_error is None:
            return None
        with self._lock:
            if self._is_interrupted:
                return None
            self._is_interrupted = True
        return unreachable_error

    def _claim_or_done(self) -> bool:
        """Take a step if there is one to take; True once it ended."""
        with self._lock:
            if self._state is _State.DONE:
                return True
            claimed = self._state is _State.PARKED and self._woken
            if claimed:
                self._claim()
            else:
                self._event.clear()
        if claimed:
            _carry_on(self)
            return self.is_done()
        return False

    def _claim(self) -> None:
        """Let the calling thread carry it on; the caller holds the lock."""
        self._state = _State.RUNNING
        self._runner = threading.get_ident()
        self._woken = False

    def _block(self, limit: Deadline, stalls: _Stalls) -> None:
        now = self._runtime.now()
        # Once interrupted, it ends when its requests let go of the memory: no deadline hastens that.
        deadlines = (limit,) if self._is_interrupted else (self.call.deadline, limit)
        limits = [d.remaining(now) for d in deadlines if d.at is not None]
        times = [t for t in (*limits, stalls.next_at.remaining(now)) if t is not None]
        try:
            self._runtime.block(
                self._event, min(times, default=None), self.call.waiting, is_limited=bool(limits)
            )
        except Deadlock as deadlock:
            self.interrupt(deadlock)
        stalls.look(self._runtime.now())

    def _stalls(self) -> _Stalls:
        call = self.call
        return _Stalls(
            [
                (call.started_at + after, action)
                for after, action in (
                    (call.stall_query_s, call.on_stall),
                    (call.long_wait_s, call.on_long_wait),
                    (call.stall_log_s, self._log_stall),
                )
                if after is not None and action is not None
            ]
        )

    def _stop_waiting(self) -> None:
        with self._lock:
            self._waiters -= 1
            claimed = self._waiters == 0 and self._woken and self._state is _State.PARKED
            if claimed:
                self._claim()
        if claimed:
            _carry_on(self)

    def _expire(self) -> None:
        budget = self.call.deadline.given_s
        on = self.call.missing()
        self.interrupt(
            DeadlineExceeded(
                f"{self.call.operation} did not end within {budget:.3g} s",
                waiting_on=on,
                cause=_awaiting(on),
            )
        )

    def _late(self, timeout: float | None) -> DeadlineExceeded:
        on = self.call.missing()
        return DeadlineExceeded(
            f"waited {timeout:.3g} s, the work goes on",
            waiting_on=on,
            where=self.call.location(self._runtime.now()),
            cause=_awaiting(on),
        )

    def _on_stall(self) -> None:
        on_stall = self.call.on_stall  # None once it has ended
        if on_stall is not None:
            on_stall()

    def _log_stall(self) -> None:
        call = self.call
        _log.warning(
            "rank %d: %s stalled for %.3g s, waiting for %s%s",
            call.rank,
            call,
            self._runtime.now() - call.started_at,
            ranks_text(call.missing()) if call.missing() else "any rank",
            f", which {'has' if len(call.absent) == 1 else 'have'} not called it" if call.absent else "",
        )

    def _finish(self, result: T | None, error: BaseException | None) -> None:
        if isinstance(error, UnisonoError):
            error = error.located(self.call.location(self._runtime.now()))
        # First the consequences, then the callbacks: whatever they look at is up to date.
        if self.call.on_end is not None:
            self.call.on_end(self._told(error))
        if isinstance(error, LocalError):
            error = error.__cause__
        with self._lock:
            self._result, self._error = result, error
            self._state = _State.DONE
            callbacks, self._callbacks = self._callbacks, []
        self._event.set()
        self._cancel_timers()
        self.call.let_go()
        for callback in callbacks:
            callback()

    def _told(self, error: BaseException | None) -> UnisonoError | None:
        """An error as it is reported to the other ranks."""
        if error is None or isinstance(error, LocalError):
            return None
        if isinstance(error, UnisonoError):
            return error
        first_line, rank = (str(error).splitlines() or [""])[0], self.call.rank
        return PeerAborted(f"rank {rank} gave up", rank=rank, cause=f"{type(error).__name__}: {first_line}")

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


@dataclass(slots=True)
class _Stalls:
    """What to do, once each, while an operation does not end."""

    due: list[tuple[float, Callable[[], None]]]

    @property
    def next_at(self) -> Deadline:
        return Deadline(min((at for at, _ in self.due), default=None))

    def look(self, now: float) -> None:
        for entry in [e for e in self.due if e[0] <= now]:
            self.due.remove(entry)
            entry[1]()


class Blocked(NamedTuple):
    """A thread that waits for an operation; `is_limited` if with a timeout."""

    call: Call
    task: Task[Any]
    is_limited: bool


_blocked: dict[int, Blocked] = {}


def blocked_threads() -> dict[int, Blocked]:
    """The threads of this process that wait for operations, by their idents."""
    return _blocked.copy()


class _Queue(threading.local):
    """The tasks this thread has claimed; the outermost frame carries them on, so that nothing recurses.

    The first `depth` of them are being carried on by frames of this thread further out.
    """

    def __init__(self) -> None:
        self.tasks: deque[Task[Any]] = deque()
        self.depth = 0


_queue = _Queue()


def _carry_on(task: Task[Any]) -> None:
    _queue.tasks.append(task)
    if not _queue.depth:
        _carry_on_claimed()


def _carry_on_claimed() -> None:
    """Carry on what this thread has claimed.

    Called with a depth only by a wait inside an operation, such as a verb in a user's own reduce function: no
    other frame would do it.
    """
    tasks, depth = _queue.tasks, _queue.depth
    if len(tasks) <= depth:
        return
    _queue.depth = depth + 1
    try:
        while len(tasks) > depth:
            tasks[depth].take_step()
            # Only now: a Ctrl-C between two lines must not lose a task that no other thread may touch.
            del tasks[depth]
    finally:
        _queue.depth = depth


def _awaiting(ranks: tuple[int, ...]) -> str:
    return f"waiting for {ranks_text(ranks)}" if ranks else "waiting for any rank"
