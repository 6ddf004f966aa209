"""MPI's own collectives: which of them give our results, and how they are run.

A queue uses an MPI communicator for nothing else. `check`, called under the engine's lock whenever a thread
makes progress, takes its first collective as far as it goes. A rank that has sent its preamble is *bound*:
other ranks rely on it. If its user cancels the collective, the rank still does its part, on a copy of the
memory, after the request has ended.

After the agreement the call is MPI's blocking one, which is several times as fast as the non-blocking one. It
cannot wait for long: every rank noted in its preamble that it has no other collective under way, so all enter
at once. If a rank has others under way, in other queues, the call is non-blocking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono.backends import collective_queue
from unisono.backends.collective_queue import CollectiveQueue, Collectives, Steps
from unisono.backends.foreign import ForeignRequest
from unisono.core.dtypes import Kind
from unisono.core.kernels import reduce_into
from unisono.core.ops import ReduceOp
from unisono.core.request import Request
from unisono.errors import PeerAborted
from unisono.messaging.backend import Backend
from unisono.messaging.stage import Stage
from unisono.plans.catalog import reduces
from unisono.plans.steps import Buf, Problem

if TYPE_CHECKING:
    from unisono.backends.mpi.backend import Engine

__all__ = ["REDUCTIONS", "MpiCollectives", "MpiQueue", "Task"]

Array = np.ndarray[Any, Any]

_WIDE: Final = ("int32", "int64", "uint32", "uint64")
_INTEGERS: Final = ("int8", "int16", "uint8", "uint16", *_WIDE)
_FLOATS: Final = ("float32", "float64")
_COMPLEX: Final = ("complex64", "complex128")
# The rest goes by plans: halves, which MPI has no type for; float min and max, because MPI's lose NaN; sums
# and products of narrow integers, because Open MPI's vector code saturates and its remainder loop wraps.
REDUCTIONS: Final = {
    "sum": (*_FLOATS, *_COMPLEX, *_WIDE),
    "mean": (*_FLOATS, *_COMPLEX),
    "prod": (*_FLOATS, *_WIDE),
    "min": _INTEGERS,
    "max": _INTEGERS,
    "band": _INTEGERS,
    "bor": _INTEGERS,
    "bxor": _INTEGERS,
}
_NAMES: Final = {"mean": "SUM"}
# MPI counts in 32 bits.
_BYTES_MAX: Final = 2**31 - 1
# Open MPI's in-place all_reduce is fastest in pieces of this length.
_PIECE_BYTES: Final = 1 << 20
_BUSY, _IDLE = 0, 1  # the note in a preamble: whether this rank has other collectives under way
_TAGS: Final = 1 << 15  # every MPI has at least as many tags


class Task(collective_queue.Task):
    """A collective, and how far it has come: `awaits` is the MPI request that it waits for.

    With `is_driven`, the thread that called makes progress by itself.
    """

    __slots__ = ("awaits", "is_copied", "is_driven", "steps")

    def __init__(self, queue: MpiQueue, problem: Problem, stage: Stage, *, is_driven: bool = False) -> None:
        request = ForeignRequest(queue.others, on_abandoned=partial(queue.leave, self))
        super().__init__(queue.rank, problem, stage, request)
        self.is_driven = is_driven
        self.prepare(queue, stage.memory)

    def prepare(self, queue: MpiQueue, memory: Mapping[Any, Array]) -> None:
        """Go back to the start, to run on `memory`."""
        self.memory = memory
        self.is_copied = False
        self.steps: Steps = queue.steps(self)
        self.awaits: Any = None
        self.failure = None

    def copy_memory(self) -> None:
        """Go on with a copy: the user's memory goes back to the user."""
        if not self.is_copied:
            self.is_copied = True
            self.memory = {which: array.copy() for which, array in self.memory.items()}


class MpiQueue(CollectiveQueue):
    """The collectives of one communicator."""

    def __init__(self, collectives: MpiCollectives, members: tuple[int, ...], comm: Any = None) -> None:
        super().__init__(collectives.backend, members)
        self._collectives = collectives
        self._lock = collectives.engine.lock
        self._mpi: Any = collectives.mpi
        self.comm = comm
        self.tasks: deque[Task] = deque()

    def is_free(self) -> bool:
        """Whether a collective may begin at once; the caller holds the lock."""
        return not self.tasks and self.comm is not None and not self.has_lost_member

    def is_bound(self) -> bool:
        """Whether this rank has sent a preamble and not done the rest."""
        return any(task.awaits is not None for task in self.tasks)

    def run(self, problem: Problem, stage: Stage) -> Request:
        """Put a collective behind those under way."""
        task = Task(self, problem, stage)
        with self._lock:
            self.tasks.append(task)
        return task.request

    def pending(self) -> list[ForeignRequest]:
        """The requests that have not ended."""
        return [task.request for task in self.tasks]

    def check(self) -> list[Callable[[], None]]:
        """Take the first collectives as far as they go; the caller holds the lock.

        Returns the ends to dispatch.
        """
        ends: list[Callable[[], None]] = []
        while self.tasks and self.comm is not None and not self.tasks[0].is_driven:
            task = self.tasks[0]
            if self.has_lost_member and task.awaits is None:
                break
            if not self.advance(task):
                break
            ends.append(task.end)
        return ends

    def advance(self, task: Task) -> bool:
        """Take the first task as far as it goes; True once it is over. The caller holds the lock."""
        if task.awaits is None:
            self._collectives.under_way += 1
        try:
            while task.awaits is None or task.awaits.Test():
                task.awaits = next(task.steps)
        except StopIteration:
            pass
        except self._mpi.Exception as error:
            task.failure = error
        else:
            return False
        self.tasks.popleft()
        self._collectives.under_way -= 1
        return True

    def leave(self, task: Task) -> None:
        """Its caller wants the memory back: drop the task, or go on with a copy if other ranks rely on it."""
        with self._lock:
            if task.awaits is not None:
                task.copy_memory()
            elif task in self.tasks:
                self.tasks.remove(task)

    def open(self, context: int) -> None:
        """Let MPI make a communicator once all members want one, on a thread: MPI blocks meanwhile."""

        def make() -> None:
            comm = self._collectives.make_comm(self.members, context % _TAGS)
            with self._lock:
                self.comm = comm

        runtime = self.backend.runtime
        self._introduce(context, b"", lambda _: runtime.start_thread(make, "unisono-mpi-group"))

    def release(self) -> bool:
        """Free the MPI communicator, unless other ranks still rely on this one."""
        if self.is_bound():
            return False
        comm, self.comm = self.comm, None
        if comm is not None:
            comm.Free()
        return True

    def close(self) -> None:
        """Cancel everything. MPI keeps the memory of what other ranks never joined."""
        super().close()
        for task in list(self.tasks):
            task.request.cancel()
            if task.awaits is not None:
                _ABANDONED.append(task)

    def _note(self) -> int:
        return _IDLE if self._collectives.under_way == 1 else _BUSY

    def _gather(self, mine: bytearray, everyone: bytearray) -> Any:
        return self.comm.Iallgather([mine, self._mpi.BYTE], [everyone, self._mpi.BYTE])

    def _call(self, task: collective_queue.Task) -> Steps:
        """The call, and after a user's operation an exchange of whether it raised on any rank."""
        assert isinstance(task, Task)
        if not task.request.commit():
            task.copy_memory()
        stage = task.stage
        op = self._op(stage.op, task)
        yield from self._mpi_call(task, op, is_blocking=all(task.agreement.notes()))
        if stage.op is not None and stage.op.fn is not None:
            has_failed, any_failed = bytearray([task.failure is not None]), bytearray(self.size)
            yield self._gather(has_failed, any_failed)
            op.Free()
            if task.failure is None and any(any_failed):
                # The ranks where it raised report why; the results of all others are meaningless.
                first = self.members[next(rank for rank, failed in enumerate(any_failed) if failed)]
                task.failure = PeerAborted(
                    f"rank {first} gave up", rank=first, cause=f"op {stage.op} failed there"
                )

    def _op(self, op: ReduceOp | None, task: Task) -> Any:
        if op is None:
            return None
        if op.fn is None:
            return getattr(self._mpi, _NAMES.get(op.name, op.name.upper()))
        dtype = task.stage.dtype

        def combine(left: Any, right: Any, datatype: Any) -> None:
            """An exception cannot pass through MPI: keep it until the collective is over."""
            if task.failure is not None:
                return
            try:
                into = np.frombuffer(right, dtype.storage)
                reduce_into(into, np.frombuffer(left, dtype.storage), op, dtype, left=True)
            except Exception as error:
                task.failure = error

        return self._mpi.Op.Create(combine, commute=op.commutative)

    def _mpi_call(self, task: Task, op: Any, *, is_blocking: bool) -> Steps:
        root, is_root = task.problem.root, self.rank == task.problem.root
        operand, result = task.memory.get(Buf.IN), task.memory.get(Buf.OUT)
        if not reduces(task.problem.collective):
            operand = None if operand is None else operand.view(np.uint8)
            result = None if result is None else result.view(np.uint8)
        in_place = self._mpi.IN_PLACE

        def mpi(name: str, *arguments: Any) -> Steps:
            request = getattr(self.comm, name if is_blocking else "I" + name.lower())(*arguments)
            if request is not None:
                yield request

        match task.problem.collective:
            case "all_reduce":
                assert result is not None
                step = _PIECE_BYTES // result.itemsize if is_blocking else result.size
                for start in range(0, result.size, step):
                    yield from mpi("Allreduce", in_place, result[start : start + step], op)
            case "reduce":
                yield from mpi(
                    "Reduce", in_place if is_root else operand, result if is_root else None, op, root
                )
            case "broadcast":
                yield from mpi("Bcast", result, root)
            case "all_gather":
                yield from mpi("Allgather", operand, result)
            case "gather":
                yield from mpi("Gather", operand, result if is_root else None, root)
            case "all_to_all":
                yield from mpi("Alltoall", operand, result)
            case "reduce_scatter":
                yield from mpi("Reduce_scatter_block", operand, result, op)
            case "scan":
                yield from mpi("Scan", operand, result, op)
            case _:
                # MPI does not define rank 0's result: the verb fills it with the identity.
                yield from mpi("Exscan", operand, result, op)


class MpiCollectives(Collectives[MpiQueue]):
    """The queues of one rank, under the engine's lock."""

    def __init__(self, backend: Backend, comm: Any, engine: Engine) -> None:
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.backend = backend  # a queue needs it before the base class has it
        self.engine = engine
        self.under_way = 0  # collectives in all queues that have begun
        # A communicator for a group is made on a thread beside all other calls.
        self._has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        super().__init__(backend, MpiQueue(self, tuple(range(backend.size)), comm), engine.lock)

    def check(self) -> list[Callable[[], None]]:
        """Take every queue as far as it goes; the caller holds the lock. Returns the ends to dispatch."""
        ends = self._world.check()
        for queue in list(self._queues.values()):
            ends += queue.check()
        return ends

    def is_bound(self) -> bool:
        """Whether other ranks may still rely on this one."""
        return any(queue.is_bound() for queue in self._all())

    def make_comm(self, members: tuple[int, ...], tag: int) -> Any:
        """Make an MPI communicator together with the other members."""
        everyone = self._world.comm.Get_group()
        comm = self._world.comm.Create_group(everyone.Incl(members), tag)
        everyone.Free()
        return comm

    def _make_queue(self, members: tuple[int, ...]) -> MpiQueue | None:
        return MpiQueue(self, members) if self._has_threads else None

    def _has_call(self, problem: Problem, stage: Stage) -> bool:
        op, dtype = stage.op, stage.dtype
        if problem.counts[0] * problem.size * dtype.storage.itemsize > _BYTES_MAX:
            return False
        if not reduces(problem.collective):
            return problem.collective != "scatter"
        if op is not None and op.fn is not None:
            # MPI cuts where it likes, so it gets no items of several elements.
            return op.width == 1 and not dtype.is_half and dtype.kind is not Kind.BOOL
        return op is not None and dtype.name in REDUCTIONS.get(op.name, ())


# What MPI may still write to although its caller has gone on.
_ABANDONED: Final[list[Task]] = []
