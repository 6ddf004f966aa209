"""Waits for several works: for all of them, for the first, or one after another as they end.

No wait takes a thread. Works of one engine are waited for there. For others, and for works of several
backends together, each work sets one event when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from unisono import _native
from unisono.core.clock import Deadline, Runtime, Waiting, refuse_blocking
from unisono.core.work import Work
from unisono.errors import DeadlineExceeded, UsageError

__all__ = ["as_completed", "wait_all", "wait_any", "wait_some"]


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
    return wait_some(works, timeout)[0]


def wait_some(works: Iterable[Work[Any]], timeout: float | None = None) -> list[int]:
    """Wait until a work has ended, and return the indices of all that have.

    Raises:
        DeadlineExceeded: none has ended within `timeout` seconds; all go on.
        UsageError: there is none to wait for.
    """
    given = _checked(works)
    if not given:
        raise UsageError("there is no work to wait for; allowed: at least one")
    return _ended(given, _runtime_of(given).deadline(timeout), timeout)


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


def _as_completed(left: list[Work[Any]], deadline: Deadline, timeout: float | None) -> Iterator[Work[Any]]:
    while left:
        ended = [left[index] for index in _ended(tuple(left), deadline, timeout)]
        for work in ended:
            left.remove(work)
            yield work


def _checked(works: Iterable[Work[Any]]) -> tuple[Work[Any], ...]:
    given = tuple(works) if isinstance(works, Iterable) and not isinstance(works, Work) else (None,)
    for work in given:
        if not isinstance(work, Work):
            wrong = type(works if work is None else work).__name__
            raise UsageError(f"cannot wait for an object of type {wrong}; allowed: works, in a list")
    return given  # type: ignore[return-value]


def _runtime_of(works: tuple[Work[Any], ...]) -> Runtime:
    """The clock of the works: real ones tell the same time, and virtual ones are not mixed with others."""
    return works[0]._runtime_and_rank()[0]


def _ended(works: tuple[Work[Any], ...], deadline: Deadline, timeout: float | None) -> list[int]:
    left = deadline.remaining(_runtime_of(works).now())
    ended = _native.wait_works(works, -1.0 if left is None else left)
    if ended is None:
        ended = _wait_in_python(works, deadline)
    if not ended:
        raise DeadlineExceeded(
            f"none of {len(works)} works ended within {timeout:.3g} s, they go on",
            next_step="wait again, or cancel them",
        )
    return ended


def _wait_in_python(works: tuple[Work[Any], ...], deadline: Deadline) -> list[int]:
    runtime, rank = works[0]._runtime_and_rank()
    # A work of another backend may end the wait: then no runtime alone can tell that nobody will.
    is_alone = all(work._runtime_and_rank()[0] is runtime for work in works)
    event = runtime.event()

    def notify() -> None:
        event.set()

    def waiting() -> Waiting:
        tasks = [task for work in works if (task := getattr(work, "_task", None)) is not None]
        ranks = {rank for task in tasks for rank in task.call.waiting_on()}
        return Waiting(rank, tuple(sorted(ranks)), f"a wait for one of {len(works)} works")

    with runtime.defer_signals():
        try:
            for work in works:
                work._on_end(notify)
            while True:
                event.clear()
                ended = [index for index, work in enumerate(works) if work._has_ended()]
                now = runtime.now()
                if ended or deadline.has_passed(now):
                    return ended
                left = deadline.remaining(now)
                refuse_blocking()
                runtime.block(event, left, waiting, is_limited=left is not None or not is_alone)
        finally:
            for work in works:
                work._off_end(notify)
