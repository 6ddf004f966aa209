"""Calls: which operation runs, what it is doing, and how its steps wait for requests.

The steps of an operation are a generator. It starts requests, registers to be woken by each, and yields until
one ends. Which thread carries it on is decided in task.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from unisono.core.envelope import ANY
from unisono.core.request import Request
from unisono.core.runtime import NEVER, Deadline, Waiting
from unisono.errors import Location, PeerLost, UnisonoError, UsageError

__all__ = ["Begun", "Call", "LocalError", "Message", "Steps", "T", "await_request", "await_requests"]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]


class Message(NamedTuple):
    """A message that an operation sends or receives: with whom, by world rank, and its tag; -1 is any."""

    is_send: bool
    peer: int
    tag: int
    request: Request


@dataclass(slots=True)
class Call:
    """Which operation this is, and what it is doing: errors, logs and the deadlock report read it here.

    `translate_error` turns the error of a request into the operation's own. `interruption` is the error by
    which the operation was told to end: a request that has already matched may still complete; no further
    request is started.
    """

    operation: str
    rank: int
    communicator: str = ""
    epoch: int | None = None
    sequence: int | None = None
    deadline: Deadline = NEVER
    started_at: float = 0.0
    waiting_on: Callable[[], tuple[int, ...]] = tuple
    is_wildcard: bool = False  # any rank may end it
    is_joint: bool = False  # all ranks are in it at once: one that called it before it left has done its part
    absent: set[int] = field(default_factory=set)
    on_stall: Callable[[], None] | None = None
    on_end: Callable[[UnisonoError | None], None] | None = None
    unreachable_error: Callable[[], UnisonoError | None] | None = None
    translate_error: Callable[[BaseException], BaseException] = field(default=lambda error: error)
    wake: Callable[[], None] = field(default=lambda: None)
    interruption: UnisonoError | None = None
    stall_query_s: float | None = None
    stall_log_s: float | None = None
    long_wait_s: float | None = None
    on_long_wait: Callable[[], None] | None = None
    messages: tuple[Message, ...] = ()  # of an operation between two ranks
    on_result: Callable[[BaseException | None], None] | None = None  # a user's thread has seen its end
    number: int = field(default_factory=itertools.count().__next__)

    def __str__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        return f'{self.operation}{number} on "{self.communicator}"'

    def location(self, now: float) -> Location:
        """Where it stands now."""
        return Location(self.operation, self.communicator, self.epoch, self.sequence, now - self.started_at)

    def missing(self) -> tuple[int, ...]:
        """The ranks it waits for: those known not to have called it, else those it waits for directly."""
        return tuple(sorted(self.absent)) or self.waiting_on()

    def let_go(self) -> None:
        """It has ended: refer to its task and its memory no more.

        So both are freed with the work, without the garbage collector.
        """
        self.wake = _nothing
        self.waiting_on = tuple
        self.on_stall = self.on_end = self.on_long_wait = self.unreachable_error = None
        self.messages = ()

    def waiting(self) -> Waiting:
        """Which rank waits for which, in which operation."""
        return Waiting(self.rank, self.waiting_on(), str(self))


def _nothing() -> None:
    """No task is to be woken."""


class Begun(Generator[None, None, T]):
    """Steps that take the first one even if they are to end before it.

    For an operation that is under way already: only its own steps can withdraw it.
    """

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self._has_begun = False

    def send(self, value: None) -> None:
        """Take a step."""
        self._has_begun = True
        self._steps.send(value)

    def throw(self, *error: Any) -> None:
        """Raise an error in it."""
        if not self._has_begun:
            self.send(None)
        self._steps.throw(*error)


class LocalError(Exception):
    """The operation has ended well, but what this rank made of the result has raised the cause of this error.

    The cause is the error of the operation here. It is not reported to the others: it does not concern them.
    """


def await_requests(call: Call, requests: Iterable[Request]) -> Steps[None]:
    """Sleep until all requests are done, however they end."""
    pending = [r for r in requests if not r.done]
    for request in pending:
        request.notify(call.wake)
    while not all(request.done for request in pending):
        yield


def await_request(call: Call, request: Request, peers: Callable[[], tuple[int, ...]]) -> Steps[Request]:
    """Wait for one request. If interrupted, it is withdrawn; if it was matched already, it ends normally."""
    call.waiting_on = peers
    call.is_wildcard = request.peer is ANY
    request.notify(call.wake)
    try:
        if call.interruption is not None:
            raise call.interruption
        while not request.done:
            yield
    except BaseException as interruption:  # a KeyboardInterrupt too: the backend must release the buffer
        request.cancel()
        while not request.done and not isinstance(interruption, GeneratorExit):
            yield
        # A message that was matched and refused ends the call by that: its sender may be gone by now.
        is_refused = isinstance(request.error, UsageError) and isinstance(interruption, PeerLost)
        if not isinstance(interruption, UnisonoError) or (request.error is not None and not is_refused):
            raise
    if request.error is not None:
        # That a peer is gone is a symptom. Control reports it with the cause, after all that the peer sent.
        while isinstance(request.error, PeerLost) and peers():
            yield
        raise call.translate_error(request.error)
    return request
