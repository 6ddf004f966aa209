"""Waits for several works: for all of them, for the first, or one after another as they end.

No wait takes a thread. Works of one engine are waited for there. For others, and for works of several
backends together, each work sets one event when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

from unisono import _native
from unisono.core.runtime import Deadline, Event, Runtime, Waiting, refuse_blocking
from unisono.core.work import Work
from unisono.errors import DeadlineExceeded, UsageError

__all__ = ["as_completed", "wait_all", "wait_any", "wait_some"]

# as_completed polls up to 64 works, or 64 for each that has ended; more of them are observed.
_LOOKED_AT_MAX: Final = 64


def wait_all(works: Iterable[Work[Any]], timeout: float | None = None) -> list[Any]:
    """Wait for all works and return their results.

    Raises:
        UnisonoError: the first error in the order of `works`, after all have ended or the timeout passed.
    """
    given = _checked(works)
    if not given:
        return []
    runtime = _runtime_of(given)
    deadline = runtime.deadline(timeout)
    results: list[Any] = []
    first: BaseException | None = None
    for work in given:
        try:
            results.append(work.wait(deadline.remaining(runtime.now())))
        except Exception as error:  # a user's own reduce operation may raise anything
            first = first if first is not None else error
    if first is not None:
        raise first
    return results


def wait_any(works: Iterable[Work[Any]], timeout: float | None = None) -> int:
    """Wait until a work has ended, successfully or not, and return its index: the first of those that have.

    Its `wait` then gives the result, or raises the error, at once.

    Raises:
        DeadlineExceeded: none has ended within `timeout` seconds; all go on.
        UsageError: there is none to wait for.
    """
    return _wait_some(works, timeout, is_one=True)[0]


def wait_some(works: Iterable[Work[Any]], timeout: float | None = None) -> list[int]:
    """Wait until a work has ended, and return the indices of all that have.

    Raises:
        DeadlineExceeded: none has ended within `timeout` seconds; all go on.
        UsageError: there is none to wait for.
    """
    return _wait_some(works, timeout, is_one=False)


def as_completed(works: Iterable[Work[Any]], timeout: float | None = None) -> Iterator[Work[Any]]:
    """Give the works as they end, successfully or not, each once.

    Raises:
        DeadlineExceeded: they have not all ended within `timeout` seconds from the call; the others go on.
    """
    given = _checked(works)
    if not given:
        return iter(())
    deadline = _runtime_of(given).deadline(timeout)
    return _as_completed(list(dict.fromkeys(given)), deadline, timeout)


def _wait_some(works: Iterable[Work[Any]], timeout: float | None, *, is_one: bool) -> list[int]:
    """The indices of all works that have ended, or with `is_one` of the first of them."""
    given = _checked(works)
    if not given:
        raise UsageError("there is no work to wait for; allowed: at least one")
    return _ended(given, _runtime_of(given).deadline(timeout), timeout, is_one=is_one)


def _as_completed(left: list[Work[Any]], deadline: Deadline, timeout: float | None) -> Iterator[Work[Any]]:
    while left:
        indices = set(_ended(tuple(left), deadline, timeout, is_one=False))
        ended = deque(left[index] for index in sorted(indices))
        left = [work for index, work in enumerate(left) if index not in indices]
        # A look at all that are left for each that ends takes the square of their number.
        is_observed = len(left) > _LOOKED_AT_MAX and len(ended) * _LOOKED_AT_MAX < len(left)
        while ended:
            yield ended.popleft()
        if is_observed:
            yield from _as_observed(left, deadline, timeout)
            return


def _as_observed(left: list[Work[Any]], deadline: Deadline, timeout: float | None) -> Iterator[Work[Any]]:
    """As above, for many: each says once that it has ended."""
    runtime = _runtime_of(left)
    event = runtime.event()
    ended: deque[Work[Any]] = deque()
    observed: dict[Work[Any], Callable[[], None]] = {}

    def on_end(work: Work[Any]) -> Callable[[], None]:
        def notify() -> None:
            ended.append(work)
            event.set()

        return notify

    try:
        with runtime.defer_signals():
            for work in left:
                observed[work] = on_end(work)
                work._on_end(observed[work])
        left.clear()  # so that a work that was given is freed when the user drops it
        wait = _waiter(observed, event, deadline)
        while observed:
            wait(lambda: bool(ended))
            if not ended:
                raise _none_ended(len(observed), timeout)
            while ended:
                work = ended.popleft()
                del observed[work]
                yield work
    finally:
        with runtime.defer_signals():
            for work, notify in observed.items():
                work._off_end(notify)


def _checked(works: Iterable[Work[Any]]) -> tuple[Work[Any], ...]:
    given = tuple(works) if isinstance(works, Iterable) and not isinstance(works, Work) else (None,)
    if _native.are_works(given):
        return given  # type: ignore[return-value]
    for work in given:
        if not isinstance(work, Work):
            wrong = type(works if work is None else work).__name__
            raise UsageError(f"cannot wait for an object of type {wrong}; allowed: works, in a list")
    return given  # type: ignore[return-value]


def _runtime_of(works: Iterable[Work[Any]]) -> Runtime:
    """The clock of the works: real ones tell the same time, and virtual ones are not mixed with others."""
    return next(iter(works))._runtime_and_rank()[0]


def _ended(
    works: tuple[Work[Any], ...], deadline: Deadline, timeout: float | None, *, is_one: bool
) -> list[int]:
    left = deadline.remaining(_runtime_of(works).now())
    ended = _native.wait_works(works, -1.0 if left is None else left, is_one)
    if ended is None:
        ended = _wait_in_python(works, deadline)
    if not ended:
        raise _none_ended(len(works), timeout)
    return ended


def _none_ended(count: int, timeout: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"none of {count} works ended within {timeout:.3g} s, they go on",
        next_step="wait again, or cancel them",
    )


def _wait_in_python(works: tuple[Work[Any], ...], deadline: Deadline) -> list[int]:
    runtime = _runtime_of(works)
    event = runtime.event()
    wait = _waiter(works, event, deadline)
    ended: list[int] = []

    def notify() -> None:
        event.set()

    def has_one() -> bool:
        ended[:] = [index for index, work in enumerate(works) if work._has_ended()]
        return bool(ended)

    with runtime.defer_signals():
        try:
            for work in works:
                work._on_end(notify)
            wait(has_one)
        finally:
            for work in works:
                work._off_end(notify)
    return ended


def _waiter(
    works: Collection[Work[Any]], event: Event, deadline: Deadline
) -> Callable[[Callable[[], bool]], None]:
    """A function that waits for the event until a condition is true, or the time is over."""
    runtime, rank = next(iter(works))._runtime_and_rank()
    # A work of another backend may end the wait: then no single runtime can tell that no rank will.
    is_alone = all(work._runtime_and_rank()[0] is runtime for work in works)

    def waiting() -> Waiting:
        tasks = [task for work in list(works) if (task := getattr(work, "_task", None)) is not None]
        ranks = {rank for task in tasks for rank in task.call.waiting_on()}
        return Waiting(rank, tuple(sorted(ranks)), f"a wait for one of {len(works)} works")

    def wait(is_over: Callable[[], bool]) -> None:
        with runtime.defer_signals():
            while True:
                event.clear()
                now = runtime.now()
                if is_over() or deadline.has_passed(now):
                    return
                left = deadline.remaining(now)
                refuse_blocking()
                runtime.block(event, left, waiting, is_limited=left is not None or not is_alone)

    return wait
