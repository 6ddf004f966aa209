"""The scheduler: threads that run one at a time, in virtual time.

A *thread* belongs to one rank. The thread that holds the *baton* runs, all others wait for the baton. The
*driver* is the thread that called `run`: it moves the clock and makes the timed calls. Time stands still
while a thread runs and moves on when all wait. Among threads that are ready at the same time, the seed
chooses.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from enum import Enum
from typing import Final

from unisono.core.runtime import Killed, Waiting
from unisono.errors import Deadlock, UsageError

__all__ = ["Scheduler", "SimThread", "Stopped", "TimedCall", "scheduler_here"]


# The heap is rebuilt once it has more cancelled calls than this, and more than live ones.
_CANCELLED_MIN: Final = 1024


class Stopped(Killed):
    """The simulation ends early; every thread unwinds."""


class TimedCall:
    """A call at a virtual time; `fn` is None once it was made or cancelled."""

    __slots__ = ("_scheduler", "fn", "is_housekeeping")

    def __init__(self, scheduler: Scheduler, fn: Callable[[], None], is_housekeeping: bool) -> None:
        self._scheduler = scheduler
        self.fn: Callable[[], None] | None = fn
        self.is_housekeeping = is_housekeeping

    def cancel(self) -> None:
        """Cancel it, unless it was made."""
        if self.take() is not None:
            self._scheduler.note_cancelled()

    def take(self) -> Callable[[], None] | None:
        """Return `fn` once, then None."""
        fn, self.fn = self.fn, None
        if fn is not None and not self.is_housekeeping:
            self._scheduler.pending -= 1
        return fn


class Scheduler:
    """Passes the baton. If only housekeeping calls are left, it is a deadlock after `deadlock_after_s`."""

    def __init__(self, seed: int, deadlock_after_s: float) -> None:
        self.now = 0.0
        self.threads: list[SimThread] = []
        self._helpers: list[SimThread] = []
        self.current: SimThread | None = None
        self.is_stopping = False
        self.is_over = False
        self.pending = 0
        self._deadlock_after_s = deadlock_after_s
        self._random = random.Random(f"threads {seed}").random
        self._ready: list[SimThread] = []
        self._calls: list[tuple[float, int, TimedCall]] = []
        self._calls_made = 0
        self._cancelled = 0
        self._progress_at = 0.0
        self._alive = 0
        self._failure: BaseException | None = None
        self._baton = _taken_lock()
        self._driver = 0
        self._holder = 0

    # -- from the driver -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run every thread to its end.

        An error of the scheduler itself, or an interrupt, unwinds all threads and is raised here.
        """
        self._driver = self._holder = threading.get_ident()
        _here.scheduler = self
        try:
            for thread in self.threads:
                thread.start()
            self._ready.extend(self.threads)
            self._alive = len(self.threads)
            self._drive()
        except BaseException:
            self._stop()
            raise
        finally:
            _here.scheduler = None
            self.is_over = True
            self._holder = 0
            for thread in self._everyone():
                thread.join()

    def _drive(self) -> None:
        while self._alive:
            self._make_due_calls()
            if self._ready:
                self._give(self._choose())
                self._wait_for_baton()
            elif not self._let_time_pass():
                self._break_deadlock()
            if self._failure is not None:
                raise self._failure

    def _make_due_calls(self) -> None:
        calls = self._calls
        while calls and calls[0][0] <= self.now:
            due = heapq.heappop(calls)[2]
            if (fn := due.take()) is None:
                self._cancelled -= 1
                continue
            if not due.is_housekeeping:
                self._progress_at = self.now
            fn()

    def _let_time_pass(self) -> bool:
        """Move the clock to the next call; False if no call is left that could end a wait."""
        calls = self._calls
        while calls and calls[0][2].fn is None:
            heapq.heappop(calls)
            self._cancelled -= 1
        if not calls:
            return False
        when = calls[0][0]
        if not self.pending and self._deadlock_after_s and when - self._progress_at > self._deadlock_after_s:
            return False
        self.now = when
        return True

    def _break_deadlock(self) -> None:
        """Nothing can happen any more: raise Deadlock in waiting threads; if none waits, kill paused ones."""
        stuck = [thread for thread in self._everyone() if thread.is_blocked and not thread.is_paused]
        paused = [thread for thread in self.threads if thread.is_paused and not thread.has_ended]
        lines = [str(thread.waiting()) for thread in stuck if thread.waiting is not None]
        lines += [f"rank {thread.rank} is paused" for thread in paused]
        for thread in stuck:
            thread.deadlock = Deadlock("no rank can go on", cause="; ".join(lines))
            thread.wake()
        if not stuck:
            for thread in paused:
                thread.kill(f"paused at {thread.paused_at:g} s and never resumed (simulated)")

    def _stop(self) -> None:
        self.is_stopping = True
        self._wait_for_baton()
        for thread in self._everyone():
            if thread.has_started and not thread.has_ended:
                self._give(thread)
                self._wait_for_baton()

    def _wait_for_baton(self) -> None:
        # An interrupt may come between the two lines, so check `current`.
        while self.current is not None:
            self._baton.acquire()

    # -- from the thread that holds the baton --------------------------------------------------------------

    def call_at(self, when: float, fn: Callable[[], None], *, is_housekeeping: bool = False) -> TimedCall:
        """Let the driver call `fn` at a virtual time; calls for the same time run in order."""
        due = TimedCall(self, fn, is_housekeeping)
        self._calls_made += 1
        if not is_housekeeping:
            self.pending += 1
        heapq.heappush(self._calls, (max(when, self.now), self._calls_made, due))
        return due

    def note_cancelled(self) -> None:
        """A call was cancelled; once most are, remove them from the heap."""
        self._cancelled += 1
        if self._cancelled > _CANCELLED_MIN and self._cancelled * 2 > len(self._calls):
            self._calls[:] = [entry for entry in self._calls if entry[2].fn is not None]
            heapq.heapify(self._calls)
            self._cancelled = 0

    def add_thread(self, target: Callable[[], None]) -> SimThread:
        """Make the thread of the next rank."""
        thread = SimThread(self, len(self.threads), target)
        self.threads.append(thread)
        return thread

    def add_helper(self, of: SimThread, target: Callable[[], None]) -> None:
        """Start another thread of a rank, which is paused and killed with it."""
        self.check_caller()
        helper = SimThread(self, of.rank, target)
        self._helpers = [thread for thread in self._helpers if not thread.has_ended]
        self._helpers.append(helper)
        of.add_helper(helper)
        helper.start()
        self._alive += 1
        if not helper.is_paused:
            self._ready.append(helper)

    def _everyone(self) -> list[SimThread]:
        return [*self.threads, *self._helpers]

    def check_caller(self) -> None:
        """Raise UsageError in a thread that the scheduler does not run: no seed could repeat its actions."""
        if threading.get_ident() != self._holder:
            raise UsageError(
                "the simulation is over"
                if self.is_over
                else "called from a thread that the simulator does not run; "
                "allowed: the rank's own function, which can overlap operations by `.start`"
            )

    def blocking_thread(self) -> SimThread:
        """The current thread, which wants to wait; UsageError in a callback of the driver."""
        self.check_caller()
        if self.current is None:
            raise UsageError(
                "a callback must not wait: virtual time stands still while it runs",
                next_step="start operations there, and wait for them elsewhere",
            )
        return self.current

    def make_ready(self, thread: SimThread) -> None:
        """Let a thread run when its turn comes."""
        self._ready.append(thread)

    def make_unready(self, thread: SimThread) -> None:
        """Keep a ready thread from running."""
        self._ready.remove(thread)

    def pass_on(self, thread: SimThread) -> None:
        """Pass the baton from a thread to the next one, or to the driver if a call is due."""
        is_call_due = bool(self._calls) and self._calls[0][0] <= self.now
        if not self._ready or is_call_due or self.is_stopping or self._failure is not None:
            self._give(None)
        elif (following := self._choose()) is not thread:
            self._give(following)
        else:
            thread.take_turn()

    def end(self, thread: SimThread, failure: BaseException | None) -> None:
        """A thread has ended."""
        self._alive -= 1
        self._failure = self._failure or failure
        self.pass_on(thread)

    def _choose(self) -> SimThread:
        ready = self._ready
        i = int(self._random() * len(ready))
        ready[i], ready[-1] = ready[-1], ready[i]
        return ready.pop()

    def _give(self, thread: SimThread | None) -> None:
        self.current = thread
        if thread is not None:
            self._holder = thread.ident
            thread.take_turn()
        else:
            self._holder = self._driver
            if self._baton.locked():
                self._baton.release()


class _State(Enum):
    READY = "may run"
    RUNNING = "holds the baton"
    BLOCKED = "waits for something"
    ENDED = "has ended"


class SimThread:
    """A thread of a rank. Pauses and kills of a rank's first thread extend to its helpers."""

    def __init__(self, scheduler: Scheduler, rank: int, target: Callable[[], None]) -> None:
        self.rank = rank
        self.waiting: Callable[[], Waiting] | None = None
        self.deadlock: Deadlock | None = None
        self.killed: str | None = None
        self.paused_at = 0.0
        self._pauses: list[object] = []
        self._held: list[Callable[[], None]] = []
        self._helpers: list[SimThread] = []
        self.scheduler = scheduler
        self._target = target
        self._state = _State.READY
        self._baton = _taken_lock()
        # A daemon, so that a second Ctrl-C ends the process even if a rank never returns.
        self._thread = threading.Thread(target=self._main, name=f"unisono-simulated-{rank}", daemon=True)

    # -- its state -----------------------------------------------------------------------------------------

    @property
    def ident(self) -> int:
        """The identifier of the real thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def has_started(self) -> bool:
        """Whether the real thread was started."""
        return self._thread.ident is not None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._state is _State.ENDED

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for something."""
        return self._state is _State.BLOCKED

    @property
    def is_paused(self) -> bool:
        """Whether a fault keeps it from running."""
        return bool(self._pauses)

    # -- from its own code ---------------------------------------------------------------------------------

    def wait(self, waiting: Callable[[], Waiting] | None) -> None:
        """Let other threads run until `wake`.

        Raises:
            Killed: this rank was killed.
            Deadlock: no thread can wake it any more.
        """
        self.check_alive()
        self.waiting = waiting
        self._state = _State.BLOCKED
        self._yield_baton()
        deadlock, self.deadlock = self.deadlock, None
        if deadlock is not None:
            raise deadlock

    def sleep(self, seconds: float) -> None:
        """Let other threads run until the time has passed."""
        timer = self.scheduler.call_at(self.scheduler.now + seconds, self.wake)
        try:
            self.wait(None)
        finally:
            timer.cancel()

    def wait_while_paused(self) -> None:
        """Let other threads run as long as this one is paused."""
        if self.is_paused:
            self._state = _State.READY
            self._yield_baton()

    def check_alive(self) -> None:
        """Raise Killed or Stopped if this thread must end."""
        if self.scheduler.is_stopping:
            raise Stopped
        if self.killed is not None:
            raise Killed(f"rank {self.rank} was {self.killed}")

    def _yield_baton(self) -> None:
        self.scheduler.pass_on(self)
        self._baton.acquire()
        self.waiting = None
        self.check_alive()

    def _main(self) -> None:
        _here.scheduler = self.scheduler
        failure: BaseException | None = None
        self._baton.acquire()
        try:
            if not self.scheduler.is_stopping:
                self._target()
        except Stopped:
            pass
        except BaseException as error:
            failure = error
        self._state = _State.ENDED
        self.scheduler.end(self, failure)

    # -- from others ---------------------------------------------------------------------------------------

    def add_helper(self, helper: SimThread) -> None:
        """Pause and kill another thread together with this one."""
        self._helpers = [thread for thread in self._helpers if not thread.has_ended]
        self._helpers.append(helper)
        for pause in self._pauses:
            helper._pauses.append(pause)

    def start(self) -> None:
        """Start the real thread; it waits for the baton."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the real thread."""
        if self.has_started:
            self._thread.join()

    def take_turn(self) -> None:
        """Hand it the baton."""
        if self._state is not _State.ENDED:
            self._state = _State.RUNNING
        self._baton.release()

    def wake(self) -> None:
        """End its wait; it runs when its turn comes."""
        if self._state is _State.BLOCKED:
            self._state = _State.READY
            if not self._pauses:
                self.scheduler.make_ready(self)

    def when_running(self, fn: Callable[[], None]) -> None:
        """Call `fn` now, or when the thread is no longer paused; never once it is killed."""
        if self.killed is not None:
            return
        if self._pauses:
            self._held.append(fn)
        else:
            fn()

    def pause(self, pause: object) -> None:
        """Add a pause: it does not run."""
        if self._state is _State.READY and not self._pauses:
            self.scheduler.make_unready(self)
        if not self._pauses:
            self.paused_at = self.scheduler.now
        self._pauses.append(pause)
        for helper in self._helpers:
            helper.pause(pause)

    def resume(self, pause: object | None) -> bool:
        """End one pause, or all; True if it may run again."""
        for helper in self._helpers:
            helper.resume(pause)
        if not self._pauses:
            return False
        self._pauses = [] if pause is None else [p for p in self._pauses if p is not pause]
        if self._pauses:
            return False
        if self._state is _State.READY:
            self.scheduler.make_ready(self)
        held, self._held = self._held, []
        for fn in held:
            fn()
        return True

    def kill(self, cause: str) -> None:
        """End it: it unwinds at its next operation, at once if it waits."""
        self.killed = cause
        for helper in self._helpers:
            helper.kill(cause)
        self._held.clear()
        self.resume(None)
        self.wake()


_here = threading.local()


def scheduler_here() -> Scheduler | None:
    """The scheduler of the simulation that the calling thread is part of, if any."""
    return getattr(_here, "scheduler", None)


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
