"""Gloo's own collectives: which of them give our results, and how they are run.

Knows a process group that is used for nothing else, and the one thread that runs its collectives in order.
Does not know messages.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

from unisono.backends import own
from unisono.backends.own import OwnRequest
from unisono.config import Config
from unisono.contract import PeerDown, Request, Stage
from unisono.errors import UnisonoError
from unisono.plans.steps import Buf, Problem
from unisono.runtime import Runtime

__all__ = ["REDUCTIONS", "Collectives", "break_links"]

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
_MOVING: Final = ("broadcast", "all_gather", "gather", "all_to_all", "barrier")
_REDUCING: Final = ("all_reduce", "reduce", "reduce_scatter")
_JOIN_S: Final = 1.0
# A receive that nobody serves, and that waits no longer than this.
_NO_TAG: Final = 3
_AT_ONCE: Final = datetime.timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class _Task:
    """A collective that waits for its turn. `given` and `taken` are memory of its own."""

    problem: Problem
    stage: Stage
    request: OwnRequest
    given: Array
    taken: Array


class Collectives:
    """The collectives of one rank, one after the other."""

    def __init__(self, group: Any, rank: int, size: int, config: Config, runtime: Runtime) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._reproducible = config.reproducible
        self._runtime = runtime
        self._others = tuple(peer for peer in range(size) if peer != rank)
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._pending: dict[OwnRequest, None] = {}
        self._thread: threading.Thread | None = None
        self._is_busy = False

    def run(self, problem: Problem, stage: Stage) -> Request | None:
        """Put a collective in the line, or leave it to plans: None."""
        if self._size == 1 or not self._fits(problem, stage):
            return None
        given, taken = _memory(problem, stage, self._rank)
        result = _result(problem, stage, self._rank)

        def finish() -> None:
            if result is not None:
                result[:] = taken

        request = OwnRequest(self._others, finish)
        self._pending[request] = None
        request.notify(lambda: self._pending.pop(request, None))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="unisono-gloo-collectives", daemon=True)
            self._thread.start()
        self._tasks.put(_Task(problem, stage, request, given, taken))
        return request

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone: what needs it ends, unless it has done its part."""
        for request in list(self._pending):
            request.peer_down(self._runtime, down)

    def close(self) -> None:
        """End, also in the midst of a collective that others never joined."""
        is_stuck = bool(self._pending) or self._is_busy
        for request in list(self._pending):
            request.cancel()
        if self._thread is None:
            return
        self._tasks.put(None)
        if is_stuck:
            break_links(self._group, self._others)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _fits(self, problem: Problem, stage: Stage) -> bool:
        if not own.is_first_stage(stage):
            return False
        if problem.collective == "barrier":
            return True
        if not own.is_even(problem):
            return False
        if problem.collective in _MOVING:
            return True
        op = stage.op
        return (
            problem.collective in _REDUCING
            and op is not None
            and op.fn is None
            and stage.dtype.name in REDUCTIONS.get(op.name, ())
            and own.is_exact(stage, self._reproducible)
        )

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if task.request.done:
                continue  # given up before its turn: the communicator is broken, so nobody follows
            self._is_busy = True
            try:
                self._run(task)
            except RuntimeError as error:
                text = (str(error).splitlines() or [""])[0]
                task.request.break_off_later(
                    self._runtime, UnisonoError("gloo's collective failed", cause=text)
                )
            else:
                task.request.succeed()
            self._is_busy = False

    def _run(self, task: _Task) -> None:
        stage = task.stage
        digests = self._gathered(own.digest_of(stage)).reshape(self._size, -1)
        if (digests != digests[0]).any():
            everyone = self._gathered(own.shown(stage))
            task.request.break_off(own.disagreement(stage, everyone, self._rank))
            return
        _CALLS[task.problem.collective](self._group, task, self._rank, self._size)

    def _gathered(self, mine: Array) -> Array:
        import torch

        everyone = np.empty(mine.size * self._size, np.uint8)
        self._group._allgather_base(torch.from_numpy(everyone), torch.from_numpy(mine)).wait()
        return everyone


def break_links(group: Any, others: tuple[int, ...]) -> None:
    """End whatever waits in a process group, by the one means there is: an expired wait breaks all links."""
    import torch

    for peer in others:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NO_TAG).wait(_AT_ONCE)


def _memory(problem: Problem, stage: Stage, rank: int) -> tuple[Array, Array]:
    """What goes in and where it comes out: copies, so that a collective can be given up at any time."""
    memory = stage.memory
    match problem.collective:
        case "all_reduce" | "broadcast":
            one = memory[Buf.OUT].copy()
            return one, one
        case "reduce":
            one = memory[Buf.OUT if rank == problem.root else Buf.IN].copy()
            return one, one
        case "barrier":
            return np.empty(0, np.uint8), np.empty(0, np.uint8)
        case _:
            given = memory[Buf.IN].copy()
            out = memory.get(Buf.OUT)
            return given, np.empty(0, given.dtype) if out is None else np.empty_like(out)


def _result(problem: Problem, stage: Stage, rank: int) -> Array | None:
    """The user's memory that gets the result, if this rank gets one."""
    is_root = rank == problem.root
    if problem.collective == "barrier" or (problem.collective in ("reduce", "gather") and not is_root):
        return None
    result: Array = stage.memory[Buf.OUT]
    return None if problem.collective == "broadcast" and is_root else result


def _tensors(task: _Task) -> tuple[Any, Any]:
    """The memory as numbers, for what computes."""
    import torch

    return torch.from_numpy(task.given), torch.from_numpy(task.taken)


def _bytes(task: _Task) -> tuple[Any, Any]:
    """The memory as bytes, for what only moves."""
    import torch

    return torch.from_numpy(task.given.view(np.uint8)), torch.from_numpy(task.taken.view(np.uint8))


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
    given, _ = _tensors(task)
    group.allreduce([given], _options("AllreduceOptions", reduceOp=_op(task))).wait()


def _reduce(group: Any, task: _Task, rank: int, size: int) -> None:
    given, _ = _tensors(task)
    options = _options("ReduceOptions", reduceOp=_op(task), rootRank=task.problem.root, rootTensor=0)
    group.reduce([given], options).wait()


def _broadcast(group: Any, task: _Task, rank: int, size: int) -> None:
    given, _ = _bytes(task)
    group.broadcast([given], _options("BroadcastOptions", rootRank=task.problem.root, rootTensor=0)).wait()


def _all_gather(group: Any, task: _Task, rank: int, size: int) -> None:
    given, taken = _bytes(task)
    group._allgather_base(taken, given).wait()


def _gather(group: Any, task: _Task, rank: int, size: int) -> None:
    given, taken = _bytes(task)
    parts = [list(taken.chunk(size))] if rank == task.problem.root else []
    group.gather(parts, [given], _options("GatherOptions", rootRank=task.problem.root)).wait()


def _reduce_scatter(group: Any, task: _Task, rank: int, size: int) -> None:
    given, taken = _tensors(task)
    options = _options("ReduceScatterOptions", reduceOp=_op(task))
    group._reduce_scatter_base(taken, given, options).wait()


def _all_to_all(group: Any, task: _Task, rank: int, size: int) -> None:
    given, taken = _bytes(task)
    group.alltoall_base(taken, given, [], []).wait()


def _barrier(group: Any, task: _Task, rank: int, size: int) -> None:
    """Everybody has agreed, so everybody is here."""


_CALLS: Final[dict[str, Callable[[Any, _Task, int, int], None]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
