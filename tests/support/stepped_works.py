"""Works whose steps a test writes itself, requests that it ends, and clocks that count."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unisono.core.call import Call, await_requests
from unisono.core.clock import RealRuntime
from unisono.core.request import Request
from unisono.core.task import Task
from unisono.core.work import Started as Handed
from unisono.core.work import Work
from unisono.errors import UnisonoError


class CountingRuntime(RealRuntime):
    """Counts the readings of the clock: a thread that polls instead of sleeping reads it all the time."""

    looks = 0

    def now(self) -> float:
        self.looks += 1
        return super().now()


class HookedRuntime(RealRuntime):
    """Calls a function at each reading of the clock, which then jumps ahead by an hour."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[Callable[[], object]] = []
        self.jumps = 0

    def now(self) -> float:
        if self.hooks:
            self.hooks.pop(0)()
            self.jumps += 1
        return super().now() + 3600 * self.jumps


class Started:
    """A work and its task, and what the test has recorded of them."""

    def __init__(self, steps, *, timers: bool = True, runtime: RealRuntime | None = None, **call) -> None:
        self.runtime = runtime if runtime is not None else RealRuntime()
        self.call = Call("test", 3, "world", 0, 7, started_at=self.runtime.now(), **call)
        self.task: Task = Task(self.runtime, self.call, steps(self.call))
        self.work: Work = Handed(self.task, self.runtime)
        self.timers = timers

    def begin(self) -> Work:
        self.task.begin(self.timers)
        return self.work


def start(steps, **how) -> Work:
    return Started(steps, **how).begin()


def gate(result: object = None, error: Exception | None = None):
    """An operation that waits for one request, which the test completes."""
    request = Request(0)

    def steps(call):
        yield from await_requests(call, [request])
        if error is not None:
            raise error
        return result

    return request, steps


def in_thread(fn: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=fn)
    thread.start()
    return thread


def careful(request: Request, thrown: list, cleanup: Request | None = None):
    """An operation that records the exception thrown into it, and cleans up before it ends."""

    def steps(call):
        request.notify(call.wake)
        try:
            while not request.done:
                yield
        except UnisonoError as error:
            thrown.append(str(error.what))
            if cleanup is not None:
                cleanup.notify(call.wake)
                while not cleanup.done:
                    try:
                        yield
                    except UnisonoError as second:
                        thrown.append(str(second.what))
            raise

    return steps


def expiring(steps, seconds: float, **how) -> Started:
    runtime = how.pop("runtime", None) or RealRuntime()
    return Started(steps, deadline=runtime.deadline(seconds), runtime=runtime, **how)
