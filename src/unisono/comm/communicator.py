"""The communicator, which a user holds: its lifetime, its verbs and how it is split into groups.

collectives.py and point_to_point.py implement the verbs, group.py the state of a group.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, overload

import numpy as np

from unisono import _native
from unisono.backends.sub import SubBackend
from unisono.comm.adoption import Adoption
from unisono.comm.collectives import Verbs
from unisono.comm.control import WORLD_CONTEXT, Control, Service
from unisono.comm.dispatch import CollectiveCall
from unisono.comm.group import Group, context_of, descriptor_of
from unisono.comm.mesh import Grid, Mesh
from unisono.comm.split import (
    ATTEMPTS_MAX,
    ROW_BYTES,
    ROW_OPERAND,
    Row,
    check_request,
    identity_of,
    members_of,
)
from unisono.comm.verb_table import make_verbs_type
from unisono.core.clock import Killed, call_before_threads_are_joined
from unisono.core.dtypes import DTYPES
from unisono.core.task import Call, Steps
from unisono.core.work import Work, wait_or_cancel
from unisono.errors import (
    CollectiveMismatch,
    Deadlock,
    PeerAborted,
    PeerLost,
    ProtocolError,
    UnisonoError,
    UsageError,
)
from unisono.messaging.backend import Backend
from unisono.plans.steps import Buf

__all__ = ["Communicator", "Start"]

_log = logging.getLogger("unisono")

P = ParamSpec("P")
R = TypeVar("R")
_UINT8 = DTYPES["uint8"]


class ReferenceVerbs(Verbs):
    """The verbs and `split` as Python makes them, for every backend; each returns a Work."""

    def __init__(
        self, communicator: Callable[[], Communicator | None], group: Group, *, timers: bool = True
    ) -> None:
        super().__init__(group, timers=timers)
        self._communicator = communicator

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> Work[Communicator | None]:
        """Make a communicator of all ranks that pass the same color. Every rank calls it.

        Args:
            color: a signed 64-bit integer; None makes no communicator on this rank and returns None.
            key: the ranks of the new communicator are ordered by (key, rank here).
            timeout: seconds until DeadlineExceeded; None means no limit.
        """
        check_request(color, key)
        parent = self._communicator()
        assert parent is not None, "its method is being called"

        def steps(call: Call) -> Steps[Communicator | None]:
            return (yield from parent._split(CollectiveCall(self._group, call), color, key))

        return self._begin("split", timeout, steps, is_collective=True)


class _BlockingVerbs:
    """The verbs of a communicator that wait, as Python makes them."""

    def __init__(self, communicator: Callable[[], Communicator | None], group: Group) -> None:
        self._communicator, self._group = communicator, group

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = getattr(ReferenceVerbs(self._communicator, self._group, timers=False), name)
        runtime = self._group.backend.runtime

        def call(*args: Any, **named: Any) -> Any:
            with runtime.defer_signals():
                return wait_or_cancel(verb(*args, **named))

        self.__dict__[name] = blocking = self._group.backend.device_verb(update_wrapper(call, verb))
        return blocking


class _Blocking(Generic[P, R]):
    """How the type checker sees a verb that waits."""

    def __init__(self, verb: Callable[Concatenate[Any, P], Work[R]]) -> None: ...
    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: Communicator, kind: type) -> Callable[P, R]: ...
    def __get__(self, owner: Communicator | None, kind: type) -> Self | Callable[P, R]:
        raise NotImplementedError


if TYPE_CHECKING:
    _Started: TypeAlias = ReferenceVerbs
    _Verbs: TypeAlias = object
else:
    _Started = _Verbs = make_verbs_type(ReferenceVerbs)


class Start(_Started):
    """`comm.start`: the verbs, each of which returns a Work."""

    def __init__(self, communicator: Communicator, group: Group) -> None:
        # What is started keeps the communicator.
        def owner() -> Communicator:
            return communicator

        _native.bind_verbs(self, group.verb_group, Adoption(group, owner), ReferenceVerbs(owner, group), True)


class Communicator(_Verbs):
    """A set of ranks that exchange messages and call collectives: the world, or a part of it.

    Use it as a context manager. The end of the block closes it. If the block ends by an exception, operations
    of the other ranks end with PeerAborted, instead of waiting for this rank.
    """

    if TYPE_CHECKING:
        send = _Blocking(Verbs.send)
        recv = _Blocking(Verbs.recv)
        recv_bytes = _Blocking(Verbs.recv_bytes)
        sendrecv = _Blocking(Verbs.sendrecv)
        send_object = _Blocking(Verbs.send_object)
        recv_object = _Blocking(Verbs.recv_object)
        probe = _Blocking(Verbs.probe)
        all_reduce = _Blocking(Verbs.all_reduce)
        all_reduce_many = _Blocking(Verbs.all_reduce_many)
        reduce = _Blocking(Verbs.reduce)
        broadcast = _Blocking(Verbs.broadcast)
        all_gather = _Blocking(Verbs.all_gather)
        gather = _Blocking(Verbs.gather)
        scatter = _Blocking(Verbs.scatter)
        reduce_scatter = _Blocking(Verbs.reduce_scatter)
        all_to_all = _Blocking(Verbs.all_to_all)
        scan = _Blocking(Verbs.scan)
        exscan = _Blocking(Verbs.exscan)
        barrier = _Blocking(Verbs.barrier)
        all_gather_v = _Blocking(Verbs.all_gather_v)
        gather_v = _Blocking(Verbs.gather_v)
        scatter_v = _Blocking(Verbs.scatter_v)
        all_to_all_v = _Blocking(Verbs.all_to_all_v)
        reduce_scatter_v = _Blocking(Verbs.reduce_scatter_v)
        broadcast_object = _Blocking(Verbs.broadcast_object)
        all_gather_object = _Blocking(Verbs.all_gather_object)
        gather_object = _Blocking(Verbs.gather_object)
        scatter_object = _Blocking(Verbs.scatter_object)
        split = _Blocking(ReferenceVerbs.split)

    def __init__(self, group: Group, parent: Communicator | None) -> None:
        self._group = group
        self._parent = parent
        # By context, in the order they were made, until they are closed or dropped. In virtual time they are
        # kept: a simulation must not depend on when the garbage collector runs.
        is_virtual = group.backend.runtime.is_virtual
        self._children: dict[int, Callable[[], Communicator | None]] = {}
        self._subs: dict[tuple[int, ...], int] = {}
        self._start: Start | None = None
        # Weak: a communicator that is closed and dropped is freed without the garbage collector.
        here = weakref.ref(self)
        adoption = Adoption(group, here)
        _native.bind_verbs(self, group.verb_group, adoption, _BlockingVerbs(here, group), False)
        self._finalizer: weakref.finalize[..., Communicator] | None = None
        if parent is None:
            # The other ranks must not wait for a world that was dropped without being closed.
            self._finalizer = weakref.finalize(self, _close_later, group.backend)
            self._finalizer.atexit = False
            if not is_virtual:
                _worlds.add(self)
                _watch_exit()
            return
        parent._children[group.context] = (lambda: self) if is_virtual else here

    def __del__(self) -> None:
        """The same for a group. Operations under way on it, and its agent, keep the communicator alive."""
        group = self._group
        if self._parent is not None and not group.is_closed and not sys.is_finalizing():
            group.control.leave_later(partial(_leave, group, self._parent._children))

    @classmethod
    def world(cls, backend: Backend) -> Communicator:
        """The communicator of all ranks of a backend; it owns the backend, and closes it."""
        descriptor = descriptor_of("world", backend.size)
        ranks = tuple(range(backend.size))
        group = Group(
            backend, Control(backend), WORLD_CONTEXT, "world", descriptor, ranks, is_introduced=True
        )
        group.control.add_group(group)
        return cls(group, None)

    # -- properties ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The position of this process in the communicator, 0 to size - 1."""
        return self._group.backend.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.backend.size

    @property
    def name(self) -> str:
        """The name that errors show."""
        return self._group.name

    @property
    def epoch(self) -> int:
        """The number of the membership view."""
        return self._group.epoch

    @property
    def backend(self) -> Backend:
        """The backend that moves the bytes."""
        return self._group.backend

    @property
    def start(self) -> Start:
        """The same verbs, without waiting: each returns a Work."""
        if self._start is None:
            self._start = Start(self, self._group)
        return self._start

    def __repr__(self) -> str:
        state = ", closed" if self._group.is_closed else ""
        position = f"rank {self.rank} of {self.size}"
        return f"<Communicator {self.name!r} {position}, {self.backend.capabilities.name}{state}>"

    # -- groups within ------------------------------------------------------------------------------------

    def sub(self, ranks: Sequence[int]) -> Communicator:
        """Make a communicator of the given ranks. Only these call it, and no message is exchanged.

        Args:
            ranks: ranks of this communicator, this one included. They are sorted, and duplicates removed.

        A set of ranks may be used several times; all its members must then call `sub` the same number of
        times.
        """
        chosen = _listed(ranks, "ranks")
        SubBackend(self.backend, chosen)  # refuses what is wrong
        return self._sub(tuple(sorted(set(chosen))))

    def _sub(self, members: tuple[int, ...], purpose: str | None = None) -> Communicator:
        """Make a communicator of the given ranks, in this order.

        Without a `purpose` the members count how often they have made it. For each purpose it is made once,
        by each member when it needs it.
        """
        self._group.check_usable(is_collective=False)
        backend = SubBackend(self.backend, members, ordered=True)
        uses = 1
        if purpose is None:
            uses = self._subs[members] = self._subs.get(members, 0) + 1
        identity = (self._group.descriptor.hex(), self.epoch, purpose or "sub", members, uses)
        context = context_of(self._group.context, *identity)
        if self._group.control.has_context(context):
            raise ProtocolError(
                f"the context id of sub({list(members)}) is in use", next_step="call sub again on all members"
            )
        name = f"{self.name}.{purpose or 'sub'}({','.join(map(str, members))})"
        name += "" if uses == 1 else f"#{uses}"
        return self._child(backend, members, context, name, descriptor_of(*identity), is_introduced=False)

    def _let_works_go(self) -> None:
        """Do not warn of works that are dropped, or never waited for: the user's program may do that."""
        self._group.loose_ends.is_lenient = True

    def mesh(self, shape: Sequence[int], names: Sequence[str] | None = None) -> Mesh:
        """Arrange the ranks in a grid with a communicator along each axis. Every rank calls it.

        Args:
            shape: the length of each axis; their product is the size. Ranks are in row-major order.
            names: the name of each axis, such as ("dp", "tp"); by default axis0, axis1 and so on.
        """
        grid = Grid(
            tuple(_listed(shape, "shape")), tuple(_listed(names, "names")) if names is not None else None
        )
        grid.check_size(self.size)
        axes: dict[str, Communicator] = {}
        for axis, name in enumerate(grid.names):
            group = grid.groups_along(axis)
            color = next(i for i, ranks in enumerate(group) if self.rank in ranks)
            child = self.split(color, self.rank)
            assert child is not None
            child._group.state.name = name
            axes[name] = child
        return Mesh(grid, self.rank, axes)

    def _attach(self, service: Service, purpose: str) -> tuple[Group, int]:
        """Attach a service until the communicator is closed; returns the group, and the service's context."""
        return self._group, self._group.attach(service, purpose)

    # -- endings ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush sends and leave, with all groups made from this communicator.

        Blocks up to `Config.flush_s` seconds for sends whose receive was not posted yet. Operations of other
        ranks that wait for this rank end with PeerLost. A second call does nothing.

        Raises:
            CollectiveMismatch: a collective that ended here turns out to be a mismatch, which no call has
                raised yet. The communicator is closed all the same.
        """
        unseen: CollectiveMismatch | None = None
        ending: list[Communicator | Group] = [*self._open_children(), self._group]
        for one in ending:
            try:
                one.close()
            except CollectiveMismatch as mismatch:
                unseen = unseen or mismatch
        for late in self._open_children():  # made by another thread meanwhile
            late.close()
        if self._parent is None:
            _worlds.discard(self)
            self._group.control.leave_dropped()
            if self._finalizer is not None and self._finalizer.detach() is not None:
                self._group.backend.close()
        else:
            self._parent._children.pop(self._group.context, None)
            self._group.backend.end_group(self._group.context)
        if unseen is not None:
            raise unseen

    def abort(self, reason: str) -> None:
        """Give up: the operations of all ranks on this communicator end with PeerAborted and the reason."""
        rank = self._group.world_rank
        self._end_by(PeerAborted(f"rank {rank} aborted", rank=rank, cause=str(reason)))

    def __enter__(self) -> Self:
        self._group.check_usable(is_collective=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Killed):
            return  # a crash says no goodbye
        if error is not None:
            self._explain(error)
        self.close()

    def _explain(self, error: BaseException) -> None:
        """Send the other ranks the error that ends this one."""
        if isinstance(error, PeerLost | PeerAborted | CollectiveMismatch | Deadlock):
            self._end_by(error)  # the root cause, passed on as itself
        elif not (isinstance(error, SystemExit) and not error.code):
            first_line = (str(error).splitlines() or [""])[0]
            self.abort(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)

    def _leave_now(self, cause: str) -> None:
        """Leave without waiting, with all groups made from this communicator."""
        for child in self._open_children():
            child._leave_now(cause)
        self._group.loose_ends.warn(lambda: "")
        self._group.leave(cause)
        if self._parent is None:
            _worlds.discard(self)
            self._group.control.leave_dropped()
            if self._finalizer is not None and self._finalizer.detach() is not None:
                self._group.backend.close()

    def _end_by(self, error: UnisonoError) -> None:
        for child in self._open_children():
            child._end_by(error)
        self._group.abort(error)

    def _open_children(self) -> list[Communicator]:
        """The open groups made from this communicator, in the order they were made."""
        known = [child() for child in list(self._children.values())]
        return [child for child in known if child is not None]

    # -- making children ----------------------------------------------------------------------------------

    def _split_row(self, color: int | None, key: int) -> bytes:
        """What this rank contributes to a split that the engine is about to begin."""
        check_request(color, key)
        return self._row(self._group.next_sequence, 0, color, key).pack()

    def _make_group(
        self,
        sequence: int,
        mine: bytes,
        everyone: np.ndarray[Any, Any],
        timeout: float | None,
        is_started: bool,
    ) -> Communicator | Work[Communicator | None] | None:
        """What a split gives whose rows the engine has gathered."""
        rows = Row.unpack_all(everyone)
        if not any(row.is_taken for row in rows):
            return self._part(rows, sequence, 0, Row.unpack(mine).asked)
        runtime = self.backend.runtime

        def steps(call: Call) -> Steps[Communicator | None]:
            return self._finish_split(call, mine, everyone)

        with runtime.defer_signals():
            again = self._group.resume(
                *("split", sequence, runtime.now(), runtime.deadline(timeout), steps),
                timers=is_started,
                is_send=False,
            )
            return again if is_started else wait_or_cancel(again)

    def _finish_split(
        self, call: Call, mine: bytes, everyone: np.ndarray[Any, Any]
    ) -> Steps[Communicator | None]:
        """Make the group from the rows, or try again where the context id was in use."""
        own, rows = Row.unpack(mine), Row.unpack_all(everyone)
        if not any(row.is_taken for row in rows):
            assert call.sequence is not None
            return self._part(rows, call.sequence, 0, own.asked)
        one = CollectiveCall(self._group, call, first_stage=1)
        return (yield from self._split(one, own.asked, own.key, first_attempt=1))

    def _split(
        self, one: CollectiveCall, color: int | None, key: int, first_attempt: int = 0
    ) -> Steps[Communicator | None]:
        for attempt in range(first_attempt, ATTEMPTS_MAX):
            mine = np.frombuffer(self._row(one.sequence, attempt, color, key).pack(), np.uint8)
            everyone = np.empty(ROW_BYTES * self.size, np.uint8)
            memory = {Buf.IN: mine, Buf.OUT: everyone}
            counts = (ROW_BYTES,) * self.size
            yield from one.run("all_gather", counts, _UINT8, memory, given=ROW_OPERAND)
            rows = Row.unpack_all(everyone)
            if not any(row.is_taken for row in rows):
                return self._part(rows, one.sequence, attempt, color)
        raise ProtocolError(f"no free context id in {ATTEMPTS_MAX} attempts")

    def _row(self, sequence: int, attempt: int, color: int | None, key: int) -> Row:
        if color is None:
            return Row(0, 0, int(key), False)
        context, _ = identity_of(self._group.descriptor, self.epoch, sequence, attempt, color)
        return Row(1, int(color), int(key), self._group.control.has_context(context))

    def _part(self, rows: list[Row], sequence: int, attempt: int, color: int | None) -> Communicator | None:
        """The communicator of the ranks with this color."""
        if color is None:
            return None
        members = members_of(rows, color)
        context, descriptor = identity_of(self._group.descriptor, self.epoch, sequence, attempt, color)
        backend = SubBackend.of(self.backend, members)
        name = f"{self.name}.split#{sequence}({color})"
        return self._child(backend, members, context, name, descriptor, is_introduced=True)

    def _child(
        self,
        backend: Backend,
        members: tuple[int, ...],
        context: int,
        name: str,
        descriptor: bytes,
        *,
        is_introduced: bool,
    ) -> Communicator:
        control, world_ranks = self._group.control, self._group.world_ranks
        ranks = tuple([world_ranks[rank] for rank in members])
        group = Group(
            backend,
            control,
            context,
            name,
            descriptor,
            ranks,
            is_introduced=is_introduced,
            epoch=self.epoch,
            parent=self._group,
        )
        control.add_group(group)
        child = Communicator(group, self)
        if self._group.is_closed:  # by another thread, since the members agreed: they must not wait for us
            child.close()
        return child


def _listed(given: Any, what: str) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise UsageError(f"{what}={given!r}; allowed: a list") from None


# Worlds that are not closed yet; at the end of the process these leave.
_worlds: weakref.WeakSet[Communicator] = weakref.WeakSet()


_is_exit_watched = False


def _watch_exit() -> None:
    """Let _end_all run when the main thread ends, and at interpreter exit before backends are closed."""
    global _is_exit_watched
    if not _is_exit_watched:
        _is_exit_watched = True
        # Before Python joins its threads, which may be waiting for other ranks.
        call_before_threads_are_joined(_end_all)
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    """The main thread has ended: leave all open worlds; if it ended by an exception, send that to all."""
    error = getattr(sys, "last_value", None)
    if hasattr(sys, "ps1"):  # in an interactive session it is any earlier exception
        error = None
    for world in list(_worlds):
        try:
            if error is not None:
                world._explain(error)
            world._leave_now("the main thread of this process has ended")
        except Exception:  # the other worlds must still leave
            _log.exception("rank %d could not leave", world._group.world_rank)


os.register_at_fork(after_in_child=_worlds.clear)  # a forked child does not own them


def _close_later(backend: Backend) -> None:
    """Close a dropped backend on another thread: the garbage collector may run while its locks are held."""
    backend.runtime.call_soon(backend.close)


def _leave(group: Group, siblings: dict[int, Callable[[], Communicator | None]]) -> None:
    """Leave a dropped group."""
    siblings.pop(group.context, None)
    group.leave()
    group.backend.end_group(group.context)
