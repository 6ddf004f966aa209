"""The collectives that a foreign library runs: one queue for each communicator.

A queue runs its collectives one after the other, because a library matches the calls of a group by their
order. A library adds how it gathers preambles, makes the call, and waits for it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from unisono._native import RankMap
from unisono.backends import foreign
from unisono.backends.foreign import Agreement, ForeignRequest, Introductions
from unisono.core.request import Request
from unisono.messaging.backend import Backend
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import Stage
from unisono.plans.steps import Problem

__all__ = ["CollectiveQueue", "Collectives", "Steps", "Task"]

Array = np.ndarray[Any, Any]

# What a collective waits for: requests of the library, one after the other.
Steps = Generator[Any, None, None]


class Task:
    """One rank's part in a collective, from its preamble to its end. `memory` is the user's, or a copy."""

    __slots__ = ("agreement", "failure", "memory", "problem", "request", "stage")

    def __init__(self, rank: int, problem: Problem, stage: Stage, request: ForeignRequest) -> None:
        self.problem = problem
        self.stage = stage
        self.request = request
        self.agreement = Agreement(problem, stage, rank)
        self.memory: Mapping[Any, Array] = stage.memory
        self.failure: BaseException | None = None

    def end(self) -> None:
        """The library is done: end the request."""
        if self.failure is None and self.agreement.is_sufficient and self.request.commit():
            self.conclude()
        if self.failure is not None:
            self.request.abort(self.failure)
        else:
            self.request.succeed()

    def conclude(self) -> None:
        """Compute the result from the preambles."""
        try:
            self.agreement.conclude()
        except Exception as error:  # a user's operation may raise anything
            self.failure = error


class CollectiveQueue(ABC):
    """The collectives of one communicator, whose `members` are ranks of the backend."""

    def __init__(self, backend: Backend, members: tuple[int, ...]) -> None:
        self.backend = backend
        self.members = members
        self.rank = members.index(backend.rank)
        self.size = len(members)
        self.others = tuple(rank for rank in range(self.size) if rank != self.rank)
        self.has_lost_member = False
        self._introductions: Introductions | None = None

    @abstractmethod
    def run(self, problem: Problem, stage: Stage) -> Request:
        """Start a collective, or put it behind those under way."""

    @abstractmethod
    def pending(self) -> list[ForeignRequest]:
        """The requests that have not ended; the caller holds the lock of `Collectives`."""

    @abstractmethod
    def open(self, context: int) -> None:
        """Make the library's group with the other members, once all of them want it."""

    def release(self) -> bool:
        """The communicator has ended: free the library's group; the caller holds the lock of `Collectives`.

        Returns False if other ranks still rely on this one: then the queue stays.
        """
        return True

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._introductions is not None:
            self._introductions.close()

    @abstractmethod
    def _gather(self, mine: bytearray, everyone: bytearray) -> Any:
        """Start an all_gather of bytes in the library."""

    @abstractmethod
    def _call(self, task: Task) -> Steps:
        """Commit, and let the library do what all ranks have agreed on."""

    def _note(self) -> int:
        """The byte that this rank adds to its preamble."""
        return 0

    def _introduce(self, context: int, card: bytes, on_all: Callable[[list[bytes]], None]) -> None:
        self._introductions = Introductions(self.backend, context, self.members, card, on_all)

    def steps(self, task: Task) -> Steps:
        """The agreement, then the call."""
        agreement = task.agreement
        agreement.write(task.memory, self._note())
        yield self._gather(agreement.mine, agreement.everyone)
        if not agreement.is_unanimous():
            task.failure = agreement.disagreement()
        elif not agreement.is_sufficient:
            yield from self._call(task)


Queue = TypeVar("Queue", bound=CollectiveQueue)


class Collectives(ABC, Generic[Queue]):
    """The collective queues of one rank. `lock` guards the table of queues."""

    def __init__(self, backend: Backend, world: Queue, lock: threading.Lock) -> None:
        self.backend = backend
        self._world = world
        self._lock = lock
        self._queues: dict[int, Queue] = {}
        self._down: set[int] = set()
        self._reproducible = backend.config.reproducible

    @abstractmethod
    def _make_queue(self, members: tuple[int, ...]) -> Queue | None:
        """A queue that is not open yet; None if the library cannot make groups here."""

    @abstractmethod
    def _has_call(self, problem: Problem, stage: Stage) -> bool:
        """Whether the library has a call that gives our result."""

    def run(self, problem: Problem, stage: Stage) -> Request | None:
        """Start a collective; None if it must go by plans."""
        if not self.is_suitable(problem, stage):
            return None
        queue = self.queue_of(stage.context, stage.rank_map)
        return None if queue is None else queue.run(problem, stage)

    def queue_of(self, context: int, rank_map: RankMap | None) -> Queue | None:
        """The queue of a communicator, which is opened by its first collective."""
        if rank_map is None:
            return self._world
        with self._lock:
            queue = self._queues.get(context)
            if queue is not None:
                return queue
            members = rank_map.peers
            queue = self._make_queue(members)
            if queue is None:
                return None
            self._queues[context] = queue
            queue.has_lost_member = not self._down.isdisjoint(members)
        queue.open(context)
        return queue

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone: collectives that need it end, unless it has done its part."""
        with self._lock:
            self._down.add(down.rank)
            queues = [queue for queue in self._all() if down.rank in queue.members]
            for queue in queues:
                queue.has_lost_member = True
            requests = [request for queue in queues for request in queue.pending()]
        for request in requests:
            request.peer_down(self.backend.runtime, down)

    def close_queue(self, context: int) -> None:
        """A communicator has ended."""
        with self._lock:
            queue = self._queues.get(context)
            if queue is None or not queue.release():
                return
            del self._queues[context]
        queue.close()

    def close(self) -> None:
        """The backend is closed: end all queues."""
        with self._lock:
            queues = self._all()
        for queue in queues:
            queue.close()

    def _all(self) -> list[Queue]:
        return [self._world, *self._queues.values()]

    def is_suitable(self, problem: Problem, stage: Stage) -> bool:
        """Whether the library runs it; the same on all ranks."""
        return (
            problem.size > 1
            and foreign.library_may_run(problem, stage)
            and foreign.order_is_free(problem, stage, self._reproducible)
            and (foreign.fits_preamble(problem, stage) or self._has_call(problem, stage))
        )
