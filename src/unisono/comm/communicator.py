"""The communicator, which a user holds: its lifetime, and the groups that are made from it.

verbs.py has its verbs, group.py the state of a group, splitter.py its splits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from unisono.backends.sub import SubBackend
from unisono.comm import open_worlds
from unisono.comm.control import WORLD_CONTEXT, Control, Service
from unisono.comm.group import Group, descriptor_of
from unisono.comm.group_plan import GroupPlan
from unisono.comm.mesh import Grid, Mesh
from unisono.comm.split import named_identity
from unisono.comm.splitter import Splitter
from unisono.comm.verbs import BlockingVerbs, Start
from unisono.core.call_site import on_behalf
from unisono.core.clock import Dropped
from unisono.core.runtime import Finalizer, Killed, refuse_blocking
from unisono.errors import (
    PASSED_ON,
    CollectiveMismatch,
    Location,
    PeerAborted,
    ProtocolError,
    UnisonoError,
    UsageError,
    root_cause,
)
from unisono.messaging.backend import Backend

__all__ = ["Communicator", "Start"]

# Held while a communicator gets its group, or is closed without one. No other lock is taken for long then.
_making = threading.RLock()


class Communicator(BlockingVerbs):
    """A set of ranks that exchange messages and call collectives: the world, or a part of it.

    Use it as a context manager, by `with` or `async with`. The end of the block closes it. If the block ends
    by an exception, operations of the other ranks end with PeerAborted, instead of waiting for this rank.
    """

    # Of a communicator that was not used: what its group is made from, and whether it was closed.
    _plan: GroupPlan | None = None
    _is_left = False
    _made: Group | None = None
    _start: Start | None = None
    _keeps_children = False
    _finalizer: Finalizer | None = None

    def __init__(self, parent: Communicator | None) -> None:
        self._parent = parent
        # By context, in the order they were made, until they are closed or dropped.
        self._children: dict[int, Callable[[], Communicator | None]] = {}
        self._subs: dict[tuple[int, ...], int] = {}

    @classmethod
    def world(cls, backend: Backend) -> Communicator:
        """The communicator of all ranks of a backend; it owns the backend, and closes it."""
        descriptor = descriptor_of("world", backend.size)
        group = Group(backend, Control(backend), WORLD_CONTEXT, "world", descriptor, is_introduced=True)
        group.control.add_group(group)
        world = cls(None)
        world._take(group)
        # The other ranks must not wait for a world that was dropped without being closed.
        world._finalizer = backend.runtime.finalizer(world, backend.close)
        if not backend.runtime.is_virtual:
            open_worlds.add(world)
        return world

    @property
    def _group(self) -> Group:
        """The state of the group, which is made at its first use."""
        return self._made if self._made is not None else self._make()

    def _bind_verbs(self) -> None:
        """A verb is called for the first time."""
        self._make()

    def _make(self) -> Group:
        plan, parent = self._plan, self._parent
        assert plan is not None, "the world has its group from the start"
        assert parent is not None
        with _making:
            is_new = self._made is None
            group = self._made if self._made is not None else plan.make(parent._group)
            if is_new and self._is_left:
                group.state.close()
                group.backend.end_group(plan.context)
            if is_new:
                self._take(group)
                if isinstance(watched := parent._children.get(plan.context), Dropped):
                    watched.act = partial(_leave, parent._group, plan, weakref.ref(parent), group)
        if is_new and not self._is_left:
            group.control.add_group(group)
        return group

    def _take(self, group: Group) -> None:
        # Weak: a communicator that is closed and dropped is freed without the garbage collector.
        self._bind(group, Splitter(group, weakref.ref(self)))
        self._made = group
        # In virtual time: a simulation must not depend on when the garbage collector runs.
        self._keeps_children = group.backend.runtime.is_virtual

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
    def local_rank(self) -> int:
        """The position of this process among the ranks of the communicator that are on its host."""
        return self._ranks_of_this_host().index(self.rank)

    @property
    def local_size(self) -> int:
        """The number of ranks of the communicator that are on this host."""
        return len(self._ranks_of_this_host())

    def _ranks_of_this_host(self) -> list[int]:
        hosts = self.backend.hosts()
        return [rank for rank in range(self.size) if not hosts or hosts[rank] == hosts[self.rank]]

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
            # What is started keeps the communicator.
            self._start = Start(self._group, Splitter(self._group, lambda: self))
        return self._start

    def __repr__(self) -> str:
        state = ", closed" if self._group.is_closed else ""
        position = f"rank {self.rank} of {self.size}"
        return f"<Communicator {self.name!r} {position}, {self.backend.capabilities.name}{state}>"

    # -- groups within ------------------------------------------------------------------------------------

    def sub(self, ranks: Sequence[int]) -> Communicator:
        """Make a communicator of the given ranks. Only these ranks call it, and no message is exchanged.

        Args:
            ranks: ranks of this communicator, this one included. They are sorted, and duplicates removed.

        A set of ranks may be used several times; all its members must then call `sub` the same number of
        times.
        """
        return self._sub(SubBackend.check(self.backend, _listed(ranks, "ranks")))

    def _sub(self, members: tuple[int, ...], purpose: str | None = None) -> Communicator:
        """Make a communicator of the given ranks, in this order.

        Without a `purpose` the members count how often they have made it. For each purpose it is made once,
        by each member when it needs it.
        """
        self._group.check_usable(is_collective=False)
        uses = 1
        if purpose is None:
            uses = self._subs[members] = self._subs.get(members, 0) + 1
        listed = ",".join(map(str, members))
        unique = f"{purpose or 'sub'}/{self.epoch}/{uses}/{listed}"
        context, descriptor = named_identity(self._group.descriptor, unique.encode())
        if self._group.control.has_context(context):
            raise ProtocolError(
                f"the context id of sub({list(members)}) is in use", next_step="call sub again on all members"
            )
        name = f"{self.name}.{purpose or 'sub'}({listed})" + ("" if uses == 1 else f"#{uses}")
        return self._child(members, context, descriptor, name, is_introduced=False)

    def _let_works_go(self) -> None:
        """Do not warn of works that are dropped, or never waited for: the user's program may do that."""
        self._group.loose_ends.is_lenient = True

    def mesh(self, shape: Sequence[int], names: Sequence[str] | None = None) -> Mesh:
        """Arrange the ranks in a grid with a communicator along each axis. Every rank calls it.

        `mesh["col"]` holds the ranks that differ only in their coordinate along `col`. So in a grid of 2 rows
        and 3 columns it is a row of it, and `mesh["row"]` is a column:

                   col 0   col 1   col 2
            row 0    0       1       2       on rank 1: mesh["col"] has ranks 0, 1, 2
            row 1    3       4       5                  mesh["row"] has ranks 1, 4

        Args:
            shape: the length of each axis; their product is the size. Ranks are in row-major order.
            names: the name of each axis, such as ("dp", "tp"); by default axis0, axis1 and so on.
        """
        grid = Grid(
            tuple(_listed(shape, "shape")), tuple(_listed(names, "names")) if names is not None else None
        )
        grid.check_size(self.size)
        agreed = self.split(grid.number)
        assert agreed is not None
        assert agreed._plan is not None
        shared = agreed._plan
        agreed.close()
        if len(shared.members) != self.size:
            raise self._differing_mesh(grid, shared.members)
        axes: dict[str, Communicator] = {}
        for axis, name in enumerate(grid.names):
            # Every rank knows the members of every axis: nothing more is exchanged.
            members = grid.ranks_along(axis, self.rank)
            context, descriptor = named_identity(shared.descriptor, b"mesh/%d/%d" % (axis, members[0]))
            axes[name] = self._child(members, context, descriptor, name, is_introduced=False)
        return Mesh(grid, self.rank, axes)

    def _differing_mesh(self, grid: Grid, alike: tuple[int, ...]) -> CollectiveMismatch:
        ranks = self._group.world_ranks
        others = tuple(rank for rank in ranks if rank not in alike)
        return CollectiveMismatch(
            f"ranks {list(others)} called mesh with another shape than rank {self._group.world_rank}",
            report=f"rank {self._group.world_rank}: mesh{grid.shape}; ranks {list(others)}: another shape",
            culprits=others if 2 * len(others) < self.size else (),
            where=Location("mesh", self.name, self.epoch),
            next_step="pass the same shape on every rank",
        )

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
            UsageError: an inline handler of a remote call must not wait.
        """
        if self._is_left or (self._made is None and self._leave_unused()):
            return
        refuse_blocking()
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
            open_worlds.remove(self)
            self._group.control.leave_dropped()
            if self._finalizer is not None and self._finalizer.detach():
                self._group.backend.close()
        else:
            self._parent._children.pop(self._group.context, None)
            self._group.backend.end_group(self._group.context)
        if unseen is not None:
            raise unseen

    def _leave_unused(self) -> bool:
        """Close a communicator that was never used; False if it has a group, or messages wait for it."""
        plan, parent = self._plan, self._parent
        assert plan is not None, "the world has its group from the start"
        assert parent is not None
        with _making:
            self._is_left = self._made is None and plan.leave_unused(parent._group)
        if self._is_left:
            parent._children.pop(plan.context, None)
        return self._is_left

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

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.backend.runtime.is_virtual:
            self.__exit__(kind, error, trace)
            return
        import asyncio  # a third of the package's import time, and only needed here

        # `close` may wait for sends: not on the thread of the event loop.
        with on_behalf():
            await asyncio.to_thread(self.__exit__, kind, error, trace)

    def _explain(self, error: BaseException) -> None:
        """Send the other ranks the error that ends this one."""
        error = root_cause(error)
        if isinstance(error, PASSED_ON):
            self._end_by(error)
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
            open_worlds.remove(self)
            self._group.control.leave_dropped()
            if self._finalizer is not None and self._finalizer.detach():
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

    def _child(
        self, members: tuple[int, ...], context: int, descriptor: bytes, name: str, *, is_introduced: bool
    ) -> Communicator:
        group = self._group
        child = Communicator(self)
        peers = group.state.rank_map.peers_of(members)
        child._plan = GroupPlan(peers, context, descriptor, name, is_introduced)
        group.control.reserve(context)
        # Operations under way on it, and its agent, keep the communicator alive.
        leave = partial(_leave, group, child._plan, weakref.ref(self))
        watched = None if self._keeps_children else group.control.watch(child, leave)
        self._children[context] = watched if watched is not None else lambda: child
        if group.is_closed:  # by another thread, since the members agreed: they must not wait for us
            child.close()
        return child


def _listed(given: Any, what: str) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise UsageError(f"{what}={given!r}; allowed: a list") from None


def _leave(
    above: Group, plan: GroupPlan, parent: Callable[[], Communicator | None], made: Group | None = None
) -> None:
    """Leave a dropped group."""
    if (communicator := parent()) is not None:
        communicator._children.pop(plan.context, None)
    if (made is None and plan.leave_unused(above)) or (made is not None and made.is_closed):
        return
    group = made if made is not None else plan.make(above)
    group.leave()
    group.backend.end_group(plan.context)
