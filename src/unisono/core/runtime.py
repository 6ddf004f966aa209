"""The runtime: a clock, a way to wait, timers and threads, as all code above the transports uses them.

`core/clock.py` has the machine's runtime. The simulator has another one, on which everything above runs
unchanged in virtual time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Final, Protocol

from unisono._native import is_blocking_forbidden
from unisono.errors import UsageError, ranks_text

__all__ = [
    "FOREVER_S",
    "NEVER",
    "Deadline",
    "Event",
    "Finalizer",
    "Killed",
    "Runtime",
    "Timer",
    "Waiting",
    "refuse_blocking",
]

# Thirty years: longer timeouts overflow the clocks of some systems.
FOREVER_S: Final = 1e9


class Event(Protocol):
    """A flag that threads can wait for through their runtime."""

    def set(self) -> None:
        """Set the flag and wake the threads that wait for it."""

    def clear(self) -> None:
        """Clear the flag."""

    def is_set(self) -> bool:
        """Whether the flag is set."""


class Finalizer(Protocol):
    """A function call that follows when an object was dropped."""

    def detach(self) -> object:
        """Cancel the call; False or None if it was made or cancelled before."""


class Timer(Protocol):
    """A function call that is due later."""

    def cancel(self) -> None:
        """Cancel the call, unless it has begun."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time when an operation gives up; None means never. `given_s` is the user's timeout, for errors."""

    at: float | None
    given_s: float | None = None

    def remaining(self, now: float) -> float | None:
        """Seconds left, at least 0; None if there is no deadline."""
        return None if self.at is None else max(0.0, self.at - now)

    def has_passed(self, now: float) -> bool:
        """Whether it is over."""
        return self.at is not None and now >= self.at


NEVER: Final = Deadline(None)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One wait in the text of a Deadlock: a rank, the ranks it waits for, and the operation."""

    rank: int
    ranks: tuple[int, ...]
    operation: str

    def __str__(self) -> str:
        whom = ranks_text(self.ranks) if self.ranks else "any rank"
        return f"rank {self.rank} waits for {whom} in {self.operation}"


class Killed(BaseException):
    """Ends a rank's thread as a crash would: no cleanup, no goodbye, and it must not be caught."""


class Runtime(ABC):
    """A clock, a way to wait, and timers."""

    is_virtual = False
    # Whether it detects deadlocks itself, because all ranks are in this process.
    sees_deadlocks = False

    @property
    def is_dead(self) -> bool:
        """Whether a simulated crash has ended this rank: then unfinished operations are no mistake."""
        return False

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of its process: threads stayed behind, and their locks locked."""
        return False

    @abstractmethod
    def now(self) -> float:
        """Seconds on a monotonic clock."""

    @abstractmethod
    def event(self) -> Event:
        """Make an event."""

    @abstractmethod
    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event; False if the timeout passed first.

        Args:
            event: made by `event()` of this runtime.
            timeout: seconds; None waits for ever.
            waiting: describes the wait; called only for the text of a deadlock.
            is_limited: False if the caller will wait again after the timeout, which is only a pause for
                housekeeping. Then the wait may be part of a deadlock.

        Raises:
            Deadlock: no rank can go on, so the event will never be set.
        """

    @abstractmethod
    def call_at(self, when: float, fn: Callable[[], None]) -> Timer:
        """Call `fn` at a time of `now()` on the runtime's timer thread; it must return soon."""

    @abstractmethod
    def call_soon(self, fn: Callable[[], None]) -> None:
        """Call `fn` soon, without a lock held: for finalizers, which may run at any point of any code."""

    @abstractmethod
    def finalizer(self, one: object, fn: Callable[[], None]) -> Finalizer:
        """Call `fn` soon after an object was dropped, without a lock held. The result need not be kept."""

    @abstractmethod
    def start_thread(self, fn: Callable[[], None], name: str) -> None:
        """Run `fn` on a new daemon thread."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let the calling thread sleep."""

    def used(self, rank: int) -> None:  # noqa: B027 - optional: for runtimes that watch threads
        """The calling thread starts an operation of a rank."""

    def polled(self) -> None:  # noqa: B027 - optional: for virtual time
        """A caller polls for a condition instead of waiting.

        In virtual time this must take time, or a polling loop would never end.
        """

    def catch_up(self) -> None:  # noqa: B027 - optional: for backends whose completions wait to be dispatched
        """Dispatch what has ended by now, or wait until another thread has done so."""

    def defer_signals(self) -> AbstractContextManager[None]:
        """A context in which Python's signal handlers run only while `block` waits, or after the context."""
        return _NOT_DEFERRED

    def deadline(self, timeout: float | None) -> Deadline:
        """Convert a timeout in seconds to a deadline: once, in the public API.

        Raises:
            UsageError: it is no number of seconds.
        """
        if timeout is None:
            return NEVER
        # NumPy's numbers are Real; int and float come first because that check is slow.
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, Real)) or not timeout >= 0:
            raise UsageError(f"timeout={timeout!r}; allowed: seconds >= 0, or None for no limit")
        if timeout >= FOREVER_S:
            return NEVER
        return Deadline(self.now() + float(timeout), float(timeout))


# Threads of Python that wait for each other need no deferral.
_NOT_DEFERRED = nullcontext()


def refuse_blocking() -> None:
    """Refuse to wait on a thread that runs an inline handler of a remote call: others may wait for it.

    Raises:
        UsageError: the calling thread must not block.
    """
    if is_blocking_forbidden():
        raise UsageError(
            "a function that was exposed with inline=True must not wait",
            next_step="expose it without inline=True, or start the operation and do not wait for it",
        )
