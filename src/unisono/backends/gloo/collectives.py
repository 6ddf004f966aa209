"""Gloo's own collectives: which of them give our results, and how they are run.

Knows process groups that are used for nothing else, one for each communicator. Does not know messages, nor
how a process group is made.

A *room* is where the collectives of one communicator happen, one after the other, on a thread that waits for
Gloo. One that is no longer wanted ends by the one means there is: an expired wait breaks all links of its
group, so that the room is of no use any more, like its communicator.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono.backends import foreign
from unisono.backends.foreign import Agreement, ForeignRequest, Introductions
from unisono.core.envelope import HEADER_BYTES_MAX
from unisono.core.request import Request
from unisono.errors import UnisonoError
from unisono.messaging.backend import Backend, PeerDown, Stage
from unisono.plans.catalog import reduces
from unisono.plans.steps import Buf, Problem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["REDUCTIONS", "Collectives", "Opening", "break_links"]

Array = np.ndarray[Any, Any]

_INTEGERS: Final = ("int8", "int32", "int64", "uint8")
_FLOATS: Final = ("float32", "float64")
# Halves are added in float32 here and not there, and NaN gets lost in Gloo's min and max: those go by plans.
REDUCTIONS: Final = {
    "sum": (*_FLOATS, *_INTEGERS),
    "mean": _FLOATS,
    "prod": (*_FLOATS, *_INTEGERS),
    "min": _INTEGERS,
    "max": _INTEGERS,
}
_NAMES: Final = {"sum": "SUM", "mean": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
_JOIN_S: Final = 1.0
# A receive that nobody serves, and that waits no longer than this.
_NO_TAG: Final = 3
_AT_ONCE: Final = datetime.timedelta(milliseconds=1)


class Opening:
    """A process group that is being made."""

    def card(self) -> bytes:
        """What the other members need to know."""
        raise NotImplementedError

    def opened(self, cards: list[bytes]) -> Any:
        """Wait for the group, given what all members said."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Task:
    """A collective that waits for its turn."""

    problem: Problem
    stage: Stage
    request: ForeignRequest


class CollectiveQueue:
    """The collectives of one communicator."""

    def __init__(self, backend: Backend, members: tuple[int, ...], group: Any = None) -> None:
        self._backend = backend
        self.members = members
        self._rank = members.index(backend.rank)
        self._size = len(members)
        self._others = tuple(rank for rank in range(self._size) if rank != self._rank)
        self._group = group
        self._opening: Opening | None = None
        self._introductions: Introductions | None = None
        self._cards: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._pending: dict[ForeignRequest, None] = {}
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._is_broken = False

    def open(self, context: int, opening: Opening) -> None:
        """Make the group with the other members, as soon as all want it."""
        self._opening = opening
        self._introductions = Introductions(
            self._backend, context, self.members, opening.card(), self._cards.put
        )

    def run(self, problem: Problem, stage: Stage) -> Request:
        """Put a collective in the line."""
        request = ForeignRequest(self._others, on_unwanted=self._break)
        self._pending[request] = None
        request.notify(lambda: self._pending.pop(request, None))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="unisono-gloo-collectives", daemon=True)
            self._thread.start()
        self._tasks.put(_Task(problem, stage, request))
        return request

    def peer_down(self, down: PeerDown) -> None:
        """A member is gone: what needs it ends, unless it has done its part."""
        for request in list(self._pending):
            request.peer_down(self._backend.runtime, down)

    def close(self) -> None:
        """End, also in the midst of a collective that others never joined."""
        is_stuck = bool(self._pending) or self._is_busy
        for request in list(self._pending):
            request.cancel()
        self._cards.put(None)
        if self._introductions is not None:
            self._introductions.close()
        if self._thread is None:
            return
        self._tasks.put(None)
        if is_stuck:
            self._break()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _break(self) -> None:
        self._is_broken = True
        if self._group is not None:
            break_links(self._group, self._others)

    def _work(self) -> None:
        if not self._is_open():
            return
        while (task := self._tasks.get()) is not None:
            if task.request.done:
                continue  # given up before its turn: the communicator is broken, so nobody follows
            self._is_busy = True
            try:
                self._run(task)
            except RuntimeError as error:
                text = (str(error).splitlines() or [""])[0]
                task.request.break_off_later(
                    self._backend.runtime,
                    UnisonoError(
                        "gloo's collective failed",
                        cause=text,
                        next_step="see whether a rank has ended; the communicator is of no use any more",
                    ),
                )
            except Exception as error:  # a user's operation may raise anything
                task.request.break_off(error)
            else:
                task.request.succeed()
            self._is_busy = False

    def _is_open(self) -> bool:
        """Wait for the group. Whoever waits for a collective does not hear of it if it cannot be made."""
        if self._opening is None:
            return True
        cards = self._cards.get()
        if cards is None:
            self._opening.close()
            return False
        try:
            self._group = self._opening.opened(cards)
        except UnisonoError as error:
            for request in list(self._pending):
                request.break_off_later(self._backend.runtime, error)
            return False
        if self._is_broken:
            self._break()
        return True

    def _run(self, task: _Task) -> None:
        stage, problem = task.stage, task.problem
        agreement = Agreement(problem, stage, self._rank)
        agreement.show(stage.memory)
        self._gather(agreement.mine, agreement.everyone)
        if not agreement.is_met():
            everyone = bytearray(HEADER_BYTES_MAX * self._size)
            self._gather(foreign.shown(stage), everyone)
            task.request.break_off(foreign.disagreement(stage, everyone, self._rank))
        elif not task.request.commit():
            self._is_broken = True
        elif agreement.is_whole:
            agreement.conclude()
        else:
            _CALLS[problem.collective](self._group, task, self._rank, self._size)

    def _gather(self, mine: bytearray, everyone: bytearray) -> None:
        import torch

        taken = torch.frombuffer(everyone, dtype=torch.uint8)
        self._group._allgather_base(taken, torch.frombuffer(mine, dtype=torch.uint8)).wait()


class Collectives:
    """The rooms of one rank. `make` begins to make a process group of some ranks, given this one's place."""

    def __init__(self, backend: Backend, group: Any, make: Callable[[int, int], Opening]) -> None:
        self._backend = backend
        self._make = make
        self._world = CollectiveQueue(backend, tuple(range(backend.size)), group)
        self._rooms: dict[int, CollectiveQueue] = {}
        self._lock = threading.Lock()
        self._reproducible = backend.config.reproducible

    def run(self, problem: Problem, stage: Stage) -> Request | None:
        """Put a collective in the line, or leave it to plans: None."""
        if problem.size == 1 or not foreign.library_may_run(problem, stage) or not self._fits(problem, stage):
            return None
        return self._room_of(stage).run(problem, stage)

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone."""
        for room in self._all():
            if down.rank in room.members:
                room.peer_down(down)

    def close_queue(self, context: int) -> None:
        """A communicator has ended."""
        with self._lock:
            room = self._rooms.pop(context, None)
        if room is not None:
            room.close()

    def close(self) -> None:
        """End."""
        for room in self._all():
            room.close()

    def _all(self) -> list[CollectiveQueue]:
        with self._lock:
            return [self._world, *self._rooms.values()]

    def _room_of(self, stage: Stage) -> CollectiveQueue:
        """The room of a communicator, which is opened when it is needed first."""
        members = stage.members
        if members is None:
            return self._world
        with self._lock:
            room = self._rooms.get(stage.context)
            is_new = room is None
            if room is None:
                room = self._rooms[stage.context] = CollectiveQueue(self._backend, members)
        if is_new:
            room.open(stage.context, self._make(members.index(self._backend.rank), len(members)))
        return room

    def _fits(self, problem: Problem, stage: Stage) -> bool:
        if foreign.is_slip(problem, stage, self._reproducible):
            return True
        if problem.collective not in _CALLS or not reduces(problem.collective):
            return problem.collective in _CALLS
        op = stage.op
        return (
            op is not None
            and op.fn is None
            and stage.dtype.name in REDUCTIONS.get(op.name, ())
            and foreign.is_exact(stage, self._reproducible)
        )


def break_links(group: Any, others: tuple[int, ...]) -> None:
    """End whatever waits in a process group: an expired wait breaks all links."""
    import torch

    for peer in others:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NO_TAG).wait(_AT_ONCE)


def _numbers(task: _Task, which: Buf) -> Tensor:
    """Memory as numbers, for what computes; a copy of what may not be written to, because torch warns."""
    import torch

    array = task.stage.memory[which]
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _bytes(task: _Task, which: Buf) -> Tensor:
    """Memory as bytes, for what only moves."""
    import torch

    array = task.stage.memory[which].view(np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _op(task: _Task) -> Any:
    from torch.distributed import ReduceOp

    assert task.stage.op is not None
    return getattr(ReduceOp, _NAMES[task.stage.op.name])


def _options(kind: str, **settings: Any) -> Any:
    import torch.distributed as dist

    options = getattr(dist, kind)()
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def _all_reduce(group: Any, task: _Task, rank: int, size: int) -> None:
    group.allreduce([_numbers(task, Buf.OUT)], _options("AllreduceOptions", reduceOp=_op(task))).wait()


def _reduce(group: Any, task: _Task, rank: int, size: int) -> None:
    """Gloo reduces in what it was given; who is not the root keeps its foreign."""
    root = task.problem.root
    given = _numbers(task, Buf.OUT) if rank == root else _numbers(task, Buf.IN).clone()
    group.reduce([given], _options("ReduceOptions", reduceOp=_op(task), rootRank=root, rootTensor=0)).wait()


def _broadcast(group: Any, task: _Task, rank: int, size: int) -> None:
    options = _options("BroadcastOptions", rootRank=task.problem.root, rootTensor=0)
    group.broadcast([_bytes(task, Buf.OUT)], options).wait()


def _all_gather(group: Any, task: _Task, rank: int, size: int) -> None:
    group._allgather_base(_bytes(task, Buf.OUT), _bytes(task, Buf.IN)).wait()


def _gather(group: Any, task: _Task, rank: int, size: int) -> None:
    parts = [list(_bytes(task, Buf.OUT).chunk(size))] if rank == task.problem.root else []
    options = _options("GatherOptions", rootRank=task.problem.root)
    group.gather(parts, [_bytes(task, Buf.IN)], options).wait()


def _reduce_scatter(group: Any, task: _Task, rank: int, size: int) -> None:
    options = _options("ReduceScatterOptions", reduceOp=_op(task))
    group._reduce_scatter_base(_numbers(task, Buf.OUT), _numbers(task, Buf.IN), options).wait()


def _all_to_all(group: Any, task: _Task, rank: int, size: int) -> None:
    group.alltoall_base(_bytes(task, Buf.OUT), _bytes(task, Buf.IN), [], []).wait()


_CALLS: Final[dict[str, Callable[[Any, _Task, int, int], None]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
