"""The scheduler: threads that run one at a time, in virtual time.

Knows threads, timed calls and whose turn it is. Does not know messages, networks or ranks' programs.

The nouns. A *thread* belongs to one rank. Who holds the *baton* runs, all others wait for it. The *driver*
is the thread that called `run`: it moves the clock and makes the timed calls. Time stands still while anyone
runs and moves on when all wait. Among threads that are ready at the same time the seed chooses.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from enum import Enum
from typing import Final

from unisono.core.clock import Killed, Waiting
from unisono.errors import Deadlock, UsageError

__all__ = ["Due", "Scheduler", "SimThread", "Stopped", "scheduler_here"]


# Cancelled calls stay in the heap until there are so many that rebuilding it pays.
_CANCELLED_MIN: Final = 1024


class Stopped(Killed):
    """The simulation itself ends early; every thread unwinds."""


class Due:
    """A call at a time; `fn` is None once it was made or cancelled."""

    __slots__ = ("_scheduler", "fn", "is_housekeeping")

    def __init__(self, scheduler: Scheduler, fn: Callable[[], None], is_housekeeping: bool) -> None:
        self._scheduler = scheduler
        self.fn: Callable[[], None] | None = fn
        self.is_housekeeping = is_housekeeping

    def cancel(self) -> None:
        """Forget it, unless it was made."""
        if self.take() is not None:
            self._scheduler.note_cancelled()

    def take(self) -> Callable[[], None] | None:
        """Use it up."""
        fn, self.fn = self.fn, None
        if fn is not None and not self.is_housekeeping:
            self._scheduler.pending -= 1
        return fn


class Scheduler:
    """Passes the baton. With only housekeeping left to wait for, it is a deadlock after `patience_s`."""

    def __init__(self, seed: int, patience_s: float) -> None:
        self.now = 0.0
        self.threads: list[SimThread] = []
        self._helpers: list[SimThread] = []
        self.current: SimThread | None = None
        self.is_stopping = False
        self.is_over = False
        self.pending = 0
        self._patience_s = patience_s
        self._random = random.Random(f"threads {seed}").random
        self._ready: list[SimThread] = []
        self._calls: list[tuple[float, int, Due]] = []
        self._calls_made = 0
        self._cancelled = 0
        self._moved_at = 0.0
        self._alive = 0
        self._bug: BaseException | None = None
        self._baton = _taken_lock()
        self._driver = 0
        self._holder = 0

    # -- from the driver -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run every thread to its end.

        An error of the scheduler itself, or an interrupt, unwinds all threads and comes out here.
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
                self._await_baton()
            elif not self._let_time_pass():
                self._end_deadlock()
            if self._bug is not None:
                raise self._bug

    def _make_due_calls(self) -> None:
        calls = self._calls
        while calls and calls[0][0] <= self.now:
            due = heapq.heappop(calls)[2]
            if (fn := due.take()) is None:
                self._cancelled -= 1
                continue
            if not due.is_housekeeping:
                self._moved_at = self.now
            fn()

    def _let_time_pass(self) -> bool:
        """Go to the time of the next call; False if there is none that could help anybody."""
        calls = self._calls
        while calls and calls[0][2].fn is None:
            heapq.heappop(calls)
            self._cancelled -= 1
        if not calls:
            return False
        when = calls[0][0]
        if not self.pending and self._patience_s and when - self._moved_at > self._patience_s:
            return False
        self.now = when
        return True

    def _end_deadlock(self) -> None:
        """Nothing will ever happen again: tell those who wait; if there are none, end the paused."""
        stuck = [thread for thread in self._everyone() if thread.is_blocked and not thread.is_paused]
        paused = [thread for thread in self.threads if thread.is_paused and not thread.has_ended]
        lines = [str(thread.waiting()) for thread in stuck if thread.waiting is not None]
        lines += [f"rank {thread.rank} is paused" for thread in paused]
        for thread in stuck:
            thread.deadlock = Deadlock(
                "no rank can go on",
                cause="; ".join(lines),
                next_step="break the cycle: pair every send with a receive",
            )
            thread.wake()
        if not stuck:
            for thread in paused:
                thread.kill(f"paused at {thread.paused_at:g} s and never resumed (simulated)")

    def _stop(self) -> None:
        self.is_stopping = True
        self._await_baton()
        for thread in self._everyone():
            if thread.has_started and not thread.has_ended:
                self._give(thread)
                self._await_baton()

    def _await_baton(self) -> None:
        # An interrupt may come between the two lines, so `current` is what counts.
        while self.current is not None:
            self._baton.acquire()

    # -- from whoever holds the baton ----------------------------------------------------------------------

    def call_at(self, when: float, fn: Callable[[], None], *, is_housekeeping: bool = False) -> Due:
        """Let the driver call `fn` at a time; calls for the same time in the order they were asked for."""
        due = Due(self, fn, is_housekeeping)
        self._calls_made += 1
        if not is_housekeeping:
            self.pending += 1
        heapq.heappush(self._calls, (max(when, self.now), self._calls_made, due))
        return due

    def note_cancelled(self) -> None:
        """A call is no longer wanted; once most are not, throw them out."""
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
        """Start another thread of a rank, which shares its fate."""
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
        """Refuse threads that the scheduler does not run: it could not repeat what they do."""
        if threading.get_ident() != self._holder:
            raise UsageError(
                "the simulation is over"
                if self.is_over
                else "a thread called that the simulator does not run; allowed: the rank's own function, "
                "which can overlap operations by `.start`"
            )

    def blocking_thread(self) -> SimThread:
        """The thread that wants to wait."""
        self.check_caller()
        if self.current is None:
            raise UsageError(
                "a callback must not wait: it runs between two points of virtual time",
                next_step="start operations there, and wait for them elsewhere",
            )
        return self.current

    def make_ready(self, thread: SimThread) -> None:
        """Let a thread have its turn."""
        self._ready.append(thread)

    def take_back(self, thread: SimThread) -> None:
        """Let a thread that was ready have no turn for now."""
        self._ready.remove(thread)

    def pass_on(self, thread: SimThread) -> None:
        """Pass the baton from a thread to the next one, or to the driver if it has calls to make first."""
        is_call_due = bool(self._calls) and self._calls[0][0] <= self.now
        if not self._ready or is_call_due or self.is_stopping or self._bug is not None:
            self._give(None)
        elif (following := self._choose()) is not thread:
            self._give(following)
        else:
            thread.take_turn()

    def end(self, thread: SimThread, bug: BaseException | None) -> None:
        """A thread has come to its end."""
        self._alive -= 1
        self._bug = self._bug or bug
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
    ENDED = "is over"


class SimThread:
    """A thread of a rank, and what faults do to it: to the first one, and to all that help it."""

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
        # A daemon, because a second Ctrl-C must get out even if a rank computes for ever.
        self._thread = threading.Thread(target=self._main, name=f"unisono-simulated-{rank}", daemon=True)

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def ident(self) -> int:
        """The number of the real thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def has_started(self) -> bool:
        """Whether there is a real thread."""
        return self._thread.ident is not None

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
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
        """Let the others run until somebody wakes it.

        Raises:
            Killed: this rank was killed.
            Deadlock: nobody will ever wake it.
        """
        self.check_life()
        self.waiting = waiting
        self._state = _State.BLOCKED
        self._let_others_run()
        deadlock, self.deadlock = self.deadlock, None
        if deadlock is not None:
            raise deadlock

    def sleep(self, seconds: float) -> None:
        """Let the others run until the time has passed."""
        timer = self.scheduler.call_at(self.scheduler.now + seconds, self.wake)
        try:
            self.wait(None)
        finally:
            timer.cancel()

    def stand_still(self) -> None:
        """Let the others run for as long as it is paused."""
        if self.is_paused:
            self._state = _State.READY
            self._let_others_run()

    def check_life(self) -> None:
        """Raise what must end this thread, if anything must."""
        if self.scheduler.is_stopping:
            raise Stopped
        if self.killed is not None:
            raise Killed(f"rank {self.rank} was {self.killed}")

    def _let_others_run(self) -> None:
        self.scheduler.pass_on(self)
        self._baton.acquire()
        self.waiting = None
        self.check_life()

    def _main(self) -> None:
        _here.scheduler = self.scheduler
        bug: BaseException | None = None
        self._baton.acquire()
        try:
            if not self.scheduler.is_stopping:
                self._target()
        except Stopped:
            pass
        except BaseException as error:
            bug = error
        self._state = _State.ENDED
        self.scheduler.end(self, bug)

    # -- from others ---------------------------------------------------------------------------------------

    def add_helper(self, helper: SimThread) -> None:
        """Let another thread be killed and paused with this one."""
        self._helpers = [thread for thread in self._helpers if not thread.has_ended]
        self._helpers.append(helper)
        for pause in self._pauses:
            helper._pauses.append(pause)

    def start(self) -> None:
        """Make the real thread; it waits for the baton."""
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

    def when_awake(self, fn: Callable[[], None]) -> None:
        """Call now, or when it is no longer paused; not at all once it is killed."""
        if self.killed is not None:
            return
        if self._pauses:
            self._held.append(fn)
        else:
            fn()

    def pause(self, pause: object) -> None:
        """Keep it from running, beside other pauses."""
        if self._state is _State.READY and not self._pauses:
            self.scheduler.take_back(self)
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
        """End it: it unwinds when it next does anything, at once if it waits."""
        self.killed = cause
        for helper in self._helpers:
            helper.kill(cause)
        self._held.clear()
        self.resume(None)
        self.wake()


_here = threading.local()


def scheduler_here() -> Scheduler | None:
    """The scheduler of the simulation that the caller is part of, if it is."""
    return getattr(_here, "scheduler", None)


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
