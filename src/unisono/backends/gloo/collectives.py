"""Gloo's own collectives: which of them give our results, and how they are run.

A queue uses a process group for nothing else and runs its collectives on a thread that waits for Gloo. A
committed collective that is no longer wanted ends by the only means Gloo has: an expired wait, which breaks
all links of the process group. After that the queue is unusable, like its communicator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono.backends.collective_queue import CollectiveQueue, Collectives, Steps, Task
from unisono.backends.foreign import ForeignRequest
from unisono.backends.gloo.process_group import GroupMaker, break_links
from unisono.core.request import Request
from unisono.errors import UnisonoError
from unisono.messaging.backend import Backend
from unisono.messaging.stage import Stage
from unisono.plans.catalog import reduces
from unisono.plans.steps import Buf, Problem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["REDUCTIONS", "GlooCollectives"]

_INTEGERS: Final = ("int8", "int32", "int64", "uint8")
_FLOATS: Final = ("float32", "float64")
# The rest goes by plans: halves, which we add in float32 and Gloo does not; float min and max, because Gloo's
# lose NaN.
REDUCTIONS: Final = {
    "sum": (*_FLOATS, *_INTEGERS),
    "mean": _FLOATS,
    "prod": (*_FLOATS, *_INTEGERS),
    "min": _INTEGERS,
    "max": _INTEGERS,
}
_NAMES: Final = {"sum": "SUM", "mean": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
_JOIN_S: Final = 1.0


class GlooQueue(CollectiveQueue):
    """The collectives of one communicator. Without a `group`, `open` makes one on the `device`."""

    def __init__(self, backend: Backend, members: tuple[int, ...], device: Any, group: Any = None) -> None:
        super().__init__(backend, members)
        self._device = device
        self._group = group
        self._maker: GroupMaker | None = None
        self._cards: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._pending: dict[ForeignRequest, None] = {}
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._is_broken = False

    def open(self, context: int) -> None:
        """Make the process group with the other members, once all of them want it."""
        self._maker = GroupMaker(self._device, self.rank, self.size)
        self._introduce(context, self._maker.card(), self._cards.put)

    def run(self, problem: Problem, stage: Stage) -> Request:
        """Put a collective behind those under way."""
        request = ForeignRequest(self.others, on_unwanted=self._break)
        self._pending[request] = None
        request.notify(lambda: self._pending.pop(request, None))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="unisono-gloo-collectives", daemon=True)
            self._thread.start()
        self._tasks.put(Task(self.rank, problem, stage, request))
        return request

    def pending(self) -> list[ForeignRequest]:
        """The requests that have not ended."""
        return list(self._pending)

    def close(self) -> None:
        """End, also during a collective that other ranks never joined."""
        is_stuck = bool(self._pending) or self._is_busy
        for request in self.pending():
            request.cancel()
        self._cards.put(None)
        super().close()
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
            break_links(self._group, self.others)

    def _work(self) -> None:
        if not self._has_group():
            return
        while (task := self._tasks.get()) is not None:
            if task.request.done:
                continue  # cancelled before its turn: the communicator is broken, so no call follows
            self._is_busy = True
            try:
                for work in self.steps(task):
                    work.wait()
            except RuntimeError as error:
                text = (str(error).splitlines() or [""])[0]
                task.request.abort_later(
                    self.backend.runtime,
                    UnisonoError(
                        "gloo's collective failed",
                        cause=text,
                        next_step="check whether a rank has ended; this communicator is unusable from now on",
                    ),
                )
            except Exception as error:
                task.request.abort(error)
            else:
                task.end()
            self._is_busy = False

    def _has_group(self) -> bool:
        """Wait for the process group; False if it could not be made, which ends the pending requests."""
        if self._group is not None:
            return True
        cards = self._cards.get()  # None: closed before all members wanted the group
        maker = self._maker
        if maker is None:
            return False
        if cards is None:
            maker.close()
            return False
        try:
            self._group = maker.finish(cards)
        except UnisonoError as error:
            for request in self.pending():
                request.abort_later(self.backend.runtime, error)
            return False
        if self._is_broken:
            self._break()
        return True

    def _gather(self, mine: bytearray, everyone: bytearray) -> Any:
        import torch

        gathered = torch.frombuffer(everyone, dtype=torch.uint8)
        return self._group._allgather_base(gathered, torch.frombuffer(mine, dtype=torch.uint8))

    def _call(self, task: Task) -> Steps:
        if task.request.commit():
            yield _CALLS[task.problem.collective](self._group, task, self.rank, self.size)


class GlooCollectives(Collectives[GlooQueue]):
    """The queues of one rank; `group` is the process group of the world."""

    def __init__(self, backend: Backend, group: Any, device: Any) -> None:
        world = GlooQueue(backend, tuple(range(backend.size)), device, group)
        super().__init__(backend, world, threading.Lock())
        self._device = device

    def _make_queue(self, members: tuple[int, ...]) -> GlooQueue:
        return GlooQueue(self.backend, members, self._device)

    def _has_call(self, problem: Problem, stage: Stage) -> bool:
        if problem.collective not in _CALLS or not reduces(problem.collective):
            return problem.collective in _CALLS
        op = stage.op
        return op is not None and op.fn is None and stage.dtype.name in REDUCTIONS.get(op.name, ())


def _numbers(task: Task, which: Buf) -> Tensor:
    """A buffer as numbers, for calls that compute."""
    return _tensor(task.memory[which])


def _bytes(task: Task, which: Buf) -> Tensor:
    """A buffer as bytes, for calls that only move them."""
    return _tensor(task.memory[which].view(np.uint8))


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor on an array; on a copy if the array is read-only, because torch warns about those."""
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _op(task: Task) -> Any:
    from torch.distributed import ReduceOp

    assert task.stage.op is not None
    return getattr(ReduceOp, _NAMES[task.stage.op.name])


def _options(kind: str, **settings: Any) -> Any:
    import torch.distributed as dist

    options = getattr(dist, kind)()
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def _all_reduce(group: Any, task: Task, rank: int, size: int) -> Any:
    return group.allreduce([_numbers(task, Buf.OUT)], _options("AllreduceOptions", reduceOp=_op(task)))


def _reduce(group: Any, task: Task, rank: int, size: int) -> Any:
    """Gloo reduces in place; ranks other than the root give it a copy of their operand."""
    root = task.problem.root
    given = _numbers(task, Buf.OUT) if rank == root else _numbers(task, Buf.IN).clone()
    return group.reduce([given], _options("ReduceOptions", reduceOp=_op(task), rootRank=root, rootTensor=0))


def _broadcast(group: Any, task: Task, rank: int, size: int) -> Any:
    options = _options("BroadcastOptions", rootRank=task.problem.root, rootTensor=0)
    return group.broadcast([_bytes(task, Buf.OUT)], options)


def _all_gather(group: Any, task: Task, rank: int, size: int) -> Any:
    return group._allgather_base(_bytes(task, Buf.OUT), _bytes(task, Buf.IN))


def _gather(group: Any, task: Task, rank: int, size: int) -> Any:
    parts = [list(_bytes(task, Buf.OUT).chunk(size))] if rank == task.problem.root else []
    options = _options("GatherOptions", rootRank=task.problem.root)
    return group.gather(parts, [_bytes(task, Buf.IN)], options)


def _reduce_scatter(group: Any, task: Task, rank: int, size: int) -> Any:
    options = _options("ReduceScatterOptions", reduceOp=_op(task))
    return group._reduce_scatter_base(_numbers(task, Buf.OUT), _numbers(task, Buf.IN), options)


def _all_to_all(group: Any, task: Task, rank: int, size: int) -> Any:
    return group.alltoall_base(_bytes(task, Buf.OUT), _bytes(task, Buf.IN), [], [])


_CALLS: Final[dict[str, Callable[[Any, Task, int, int], Any]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
