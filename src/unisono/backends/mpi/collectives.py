"""MPI's own collectives: which of them give our results, and how they are run.

Knows MPI's communicators, one for each group, used for nothing else. Does not know messages, nor who makes
progress: a check, called again and again under the engine's lock, brings every collective one step further.

A *collective queue* runs the collectives of one group one after the other, because MPI counts the calls on a
communicator. A rank that has sent its preamble is bound: others rely on it. If its user gives the collective
up, it still does its part, with a copy of the memory, after the request has ended.

Once all have agreed the call is MPI's blocking one, several times as fast as the others. It can wait for
nobody: everyone who noted that it does nothing else enters at once, and no rank is in two such calls. If one
has other collectives under way, in other queues, the call is non-blocking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono.backends import foreign
from unisono.backends.foreign import Agreement, ForeignRequest, Introductions
from unisono.core.dtypes import Kind
from unisono.core.envelope import HEADER_BYTES_MAX
from unisono.core.kernels import reduce_into
from unisono.core.ops import ReduceOp
from unisono.core.request import Request
from unisono.errors import PeerAborted
from unisono.messaging.backend import Backend, PeerDown, Stage
from unisono.plans.catalog import reduces
from unisono.plans.steps import Buf, Problem

if TYPE_CHECKING:
    from unisono.backends.mpi.backend import Engine

__all__ = ["REDUCTIONS", "CollectiveQueue", "Collectives", "Task"]

Array = np.ndarray[Any, Any]

_WIDE: Final = ("int32", "int64", "uint32", "uint64")
_INTEGERS: Final = ("int8", "int16", "uint8", "uint16", *_WIDE)
_FLOATS: Final = ("float32", "float64")
_COMPLEX: Final = ("complex64", "complex128")
# What goes by plans: halves, which are no types of MPI's; float min and max, because MPI's lose NaN; sums and
# products of narrow integers, because Open MPI's vector code saturates and its remainder loop wraps.
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
# Open MPI adds in place fastest in pieces of this length.
_PIECE_BYTES: Final = 1 << 20
_BUSY, _ALONE = 0, 1  # what a rank notes on its preamble
_TAGS: Final = 1 << 15  # of MPI, at least

# What a collective waits for: MPI requests, one after the other.
Steps = Generator[Any, None, None]


class Task:
    """A collective of one rank, from its preamble to its end. `memory` is the user's, or a copy of it.

    With `is_driven`, the thread that called makes progress by itself.
    """

    __slots__ = (
        "agreement",
        "awaits",
        "failure",
        "is_copied",
        "is_driven",
        "memory",
        "problem",
        "request",
        "stage",
        "steps",
    )

    def __init__(
        self, room: CollectiveQueue, problem: Problem, stage: Stage, *, is_driven: bool = False
    ) -> None:
        self.problem = problem
        self.stage = stage
        self.agreement = Agreement(problem, stage, room.rank)
        self.request = ForeignRequest(room.others, on_given_up=partial(room.leave, self))
        self.is_driven = is_driven
        self.prepare(room, stage.memory)

    def prepare(self, room: CollectiveQueue, memory: Mapping[Any, Array]) -> None:
        """Be about to begin, on this memory."""
        self.memory = memory
        self.is_copied = False
        self.steps: Steps = room.steps(self)
        self.awaits: Any = None
        self.failure: BaseException | None = None

    def end(self) -> None:
        """All is done below: say so."""
        if self.failure is None and self.agreement.is_whole and self.request.commit():
            self.conclude()
        if self.failure is not None:
            self.request.break_off(self.failure)
        else:
            self.request.succeed()

    def conclude(self) -> None:
        """Make the result of what slips brought."""
        try:
            self.agreement.conclude()
        except Exception as error:  # a user's operation may raise anything
            self.failure = error


class CollectiveQueue:
    """The collectives of one group."""

    def __init__(self, collectives: Collectives, members: tuple[int, ...], comm: Any = None) -> None:
        self._all = collectives
        self._lock = collectives.engine.lock
        self._mpi: Any = collectives.mpi
        self.members = members
        self.rank = members.index(collectives.backend.rank)
        self.size = len(members)
        self.others = tuple(rank for rank in range(self.size) if rank != self.rank)
        self.comm = comm
        self.introductions: Introductions | None = None
        self.tasks: deque[Task] = deque()
        self.is_barred = False

    def is_free(self) -> bool:
        """Whether a collective may begin at once; the caller holds the lock."""
        return not self.tasks and self.comm is not None and not self.is_barred

    def run(self, problem: Problem, stage: Stage) -> Request:
        """Begin a collective, or put it behind those that are under way."""
        task = Task(self, problem, stage)
        with self._lock:
            self.tasks.append(task)
        return task.request

    def check(self) -> list[Callable[[], None]]:
        """Bring the first collectives further; the caller holds the lock."""
        told: list[Callable[[], None]] = []
        while self.tasks and self.comm is not None and not self.tasks[0].is_driven:
            task = self.tasks[0]
            if self.is_barred and task.awaits is None:
                break
            if not self.advance(task):
                break
            told.append(task.end)
        return told

    def advance(self, task: Task) -> bool:
        """Take the first task as far as it goes; True once it is over. The caller holds the lock."""
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
        self._all.begun -= 1
        return True

    def leave(self, task: Task) -> None:
        """Its caller wants its memory back: forget it, or go on with a copy if others may rely on it."""
        with self._lock:
            if task.awaits is None:
                if task in self.tasks:
                    self.tasks.remove(task)
            else:
                self._copy(task)

    def _copy(self, task: Task) -> None:
        if not task.is_copied:
            task.is_copied = True
            task.memory = {which: array.copy() for which, array in task.memory.items()}

    def is_bound(self) -> bool:
        """Whether this rank has shown a preamble and not done the rest."""
        return any(task.awaits is not None for task in self.tasks)

    def steps(self, task: Task) -> Steps:
        """The agreement, then the call, then the word of all that a user's function did well."""
        comm, stage, mpi = self.comm, task.stage, self._mpi
        agreement = task.agreement
        agreement.show(task.memory, _BUSY if self._all.begun else _ALONE)
        self._all.begun += 1
        yield comm.Iallgather([agreement.mine, mpi.BYTE], [agreement.everyone, mpi.BYTE])
        if not agreement.is_met():
            everyone = bytearray(HEADER_BYTES_MAX * self.size)
            yield comm.Iallgather([foreign.shown(stage), mpi.BYTE], [everyone, mpi.BYTE])
            task.failure = foreign.disagreement(stage, everyone, self.rank)
            return
        if agreement.is_whole:
            return
        if not task.request.commit():
            self._copy(task)
        op = self._op(stage.op, task)
        yield from self._call(task, op, is_blocking=all(agreement.notes()))
        if stage.op is not None and stage.op.fn is not None:
            has_failed, anybody = bytearray([task.failure is not None]), bytearray(self.size)
            yield comm.Iallgather([has_failed, mpi.BYTE], [anybody, mpi.BYTE])
            op.Free()
            if task.failure is None and any(anybody):
                # The ranks where it failed say why; who was well has a result that means nothing.
                first = self.members[next(rank for rank, failed in enumerate(anybody) if failed)]
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
            """MPI cannot bear an exception: it is kept, and told when the collective is over."""
            if task.failure is not None:
                return
            try:
                into = np.frombuffer(right, dtype.storage)
                reduce_into(into, np.frombuffer(left, dtype.storage), op, dtype, left=True)
            except Exception as error:
                task.failure = error

        return self._mpi.Op.Create(combine, commute=op.commutative)

    def _call(self, task: Task, op: Any, *, is_blocking: bool) -> Steps:
        root, is_root = task.problem.root, self.rank == task.problem.root
        given, taken = task.memory.get(Buf.IN), task.memory.get(Buf.OUT)
        if not reduces(task.problem.collective):
            given = None if given is None else given.view(np.uint8)
            taken = None if taken is None else taken.view(np.uint8)
        here = self._mpi.IN_PLACE

        def mpi(name: str, *arguments: Any) -> Steps:
            request = getattr(self.comm, name if is_blocking else "I" + name.lower())(*arguments)
            if request is not None:
                yield request

        match task.problem.collective:
            case "all_reduce":
                assert taken is not None
                step = _PIECE_BYTES // taken.itemsize if is_blocking else taken.size
                for start in range(0, taken.size, step):
                    yield from mpi("Allreduce", here, taken[start : start + step], op)
            case "reduce":
                yield from mpi("Reduce", here if is_root else given, taken if is_root else None, op, root)
            case "broadcast":
                yield from mpi("Bcast", taken, root)
            case "all_gather":
                yield from mpi("Allgather", given, taken)
            case "gather":
                yield from mpi("Gather", given, taken if is_root else None, root)
            case "all_to_all":
                yield from mpi("Alltoall", given, taken)
            case "reduce_scatter":
                yield from mpi("Reduce_scatter_block", given, taken, op)
            case "scan":
                yield from mpi("Scan", given, taken, op)
            case _:
                # MPI leaves rank 0's as it was, or not: it is filled by whoever knows the identity.
                yield from mpi("Exscan", given, taken, op)


class Collectives:
    """The rooms of one rank."""

    def __init__(self, backend: Backend, comm: Any, engine: Engine) -> None:
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.backend = backend
        self.engine = engine
        self._reproducible = backend.config.reproducible
        self._world = CollectiveQueue(self, tuple(range(backend.size)), comm)
        self._rooms: dict[int, CollectiveQueue] = {}
        self._down: set[int] = set()
        self.begun = 0  # collectives under way, in any room
        # Communicators for groups are made beside everything else.
        self._has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def run(self, problem: Problem, stage: Stage) -> Request | None:
        """Begin a collective, or leave it to plans: None."""
        if problem.size == 1 or not foreign.library_may_run(problem, stage) or not self._fits(problem, stage):
            return None
        room = self.queue_of(stage.context, stage.members)
        return None if room is None else room.run(problem, stage)

    def queue_of(self, context: int, members: tuple[int, ...] | None) -> CollectiveQueue | None:
        """The room of a group, which is opened when it is needed first."""
        if members is None:
            return self._world
        room = self._rooms.get(context)
        if room is None and self._has_threads:
            room = self._rooms[context] = CollectiveQueue(self, members)
            room.is_barred = not self._down.isdisjoint(members)
            room.introductions = Introductions(
                self.backend, context, members, b"", lambda _: self._open(room, context)
            )
        return room

    def check(self) -> list[Callable[[], None]]:
        """Bring everything further; the caller holds the lock."""
        told = self._world.check()
        for room in list(self._rooms.values()):
            told += room.check()
        return told

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone: what needs it ends, unless it has done its part."""
        with self.engine.lock:
            self._down.add(down.rank)
            rooms = [room for room in (self._world, *self._rooms.values()) if down.rank in room.members]
            for room in rooms:
                room.is_barred = True
            requests = [task.request for room in rooms for task in room.tasks]
        for request in requests:
            request.peer_down(self.backend.runtime, down)

    def close_queue(self, context: int) -> None:
        """A group has ended."""
        with self.engine.lock:
            room = self._rooms.get(context)
            if room is None or room.is_bound():
                return
            del self._rooms[context]
            comm, room.comm = room.comm, None
            if comm is not None:
                comm.Free()
        if room.introductions is not None:
            room.introductions.close()

    def is_bound(self) -> bool:
        """Whether others may still rely on this rank."""
        return any(room.is_bound() for room in (self._world, *self._rooms.values()))

    def close(self) -> None:
        """End. What others never joined stays with MPI."""
        rooms = (self._world, *self._rooms.values())
        for room in rooms:
            if room.introductions is not None:
                room.introductions.close()
            for task in list(room.tasks):
                task.request.cancel()
                if task.awaits is not None:
                    _ABANDONED.append(task)

    def _fits(self, problem: Problem, stage: Stage) -> bool:
        if foreign.is_slip(problem, stage, self._reproducible):
            return True
        if problem.counts[0] * problem.size * stage.dtype.storage.itemsize > _BYTES_MAX:
            return False
        if not reduces(problem.collective):
            return problem.collective != "scatter"
        op = stage.op
        if op is None or stage.dtype.is_half:
            return False
        if not foreign.is_exact(stage, self._reproducible):
            return False
        if op.fn is not None:
            return stage.dtype.kind is not Kind.BOOL
        return stage.dtype.name in REDUCTIONS.get(op.name, ())

    def _open(self, room: CollectiveQueue, context: int) -> None:
        """All members want a communicator: MPI makes it while nothing else waits."""

        def make() -> None:
            everyone = self._world.comm.Get_group()
            comm = self._world.comm.Create_group(everyone.Incl(room.members), context % _TAGS)
            everyone.Free()
            with self.engine.lock:
                room.comm = comm

        self.backend.runtime.start_thread(make, "unisono-mpi-group")


# What MPI may still write to although nobody waits for it.
_ABANDONED: Final[list[Task]] = []
