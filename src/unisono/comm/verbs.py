"""The verbs of a communicator as a user sees them: those that wait, and under `start` those that do not.

The reference verbs (collectives.py, point_to_point.py) are Python, and each returns a Work. From them the
engine makes the type whose methods a user calls (verb_type.py): it makes a call itself where it can, and
leaves the others to the reference verbs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, overload

from unisono import _native
from unisono.comm.adoption import Adoption
from unisono.comm.collectives import Verbs
from unisono.comm.dispatch import CollectiveCall
from unisono.comm.group import Group
from unisono.comm.split import check_request
from unisono.comm.splitter import Splitter
from unisono.comm.verb_type import make_verbs_type
from unisono.core.call import Call, Steps
from unisono.core.event_loop import warn_of_stopped_loop
from unisono.core.work import Work, wait_or_cancel

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

__all__ = ["BlockingVerbs", "ReferenceVerbs", "Start"]

P = ParamSpec("P")
R = TypeVar("R")


class ReferenceVerbs(Verbs):
    """The verbs and `split` as Python makes them, for every backend; each returns a Work."""

    def __init__(self, group: Group, splitter: Splitter[Communicator], *, timers: bool = True) -> None:
        super().__init__(group, timers=timers)
        self._splitter = splitter

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> Work[Communicator | None]:
        """Make a communicator of all ranks that pass the same color. Every rank calls it."""
        check_request(color, key)

        def steps(call: Call) -> Steps[Communicator | None]:
            return (yield from self._splitter.steps(CollectiveCall(self._group, call), color, key))

        return self._begin("split", timeout, steps, is_collective=True)


class _Blocking(Generic[P, R]):
    """How the type checker sees a verb that waits: as the reference verb, with the result of its Work."""

    def __init__(self, verb: Callable[Concatenate[Any, P], Work[R]]) -> None: ...
    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: BlockingVerbs, kind: type) -> Callable[P, R]: ...
    def __get__(self, owner: BlockingVerbs | None, kind: type) -> Self | Callable[P, R]:
        raise NotImplementedError


if TYPE_CHECKING:
    _StartedType: TypeAlias = ReferenceVerbs
    _BlockingType: TypeAlias = object
else:
    _StartedType = _BlockingType = make_verbs_type(ReferenceVerbs)


class BlockingVerbs(_BlockingType):
    """The verbs of a communicator, each of which waits and returns the result."""

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
        all_to_all_object = _Blocking(Verbs.all_to_all_object)
        all_reduce_object = _Blocking(Verbs.all_reduce_object)
        split = _Blocking(ReferenceVerbs.split)

    def _bind(self, group: Group, splitter: Splitter[Communicator]) -> None:
        """Let the verbs work on this group."""
        reference = _WaitingVerbs(group, splitter)
        _native.bind_verbs(self, group.verb_group, Adoption(group, splitter), reference, False)


class Start(_StartedType):
    """`comm.start`: the verbs, each of which returns a Work."""

    def __init__(self, group: Group, splitter: Splitter[Communicator]) -> None:
        reference = ReferenceVerbs(group, splitter)
        _native.bind_verbs(self, group.verb_group, Adoption(group, splitter), reference, True)


class _WaitingVerbs:
    """The verbs that wait, as Python makes them: a reference verb is started and waited for."""

    def __init__(self, group: Group, splitter: Splitter[Communicator]) -> None:
        self._group, self._splitter = group, splitter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = getattr(ReferenceVerbs(self._group, self._splitter, timers=False), name)
        runtime = self._group.backend.runtime

        def call(*args: Any, **named: Any) -> Any:
            warn_of_stopped_loop(name)
            with runtime.defer_signals():
                return wait_or_cancel(verb(*args, **named))

        self.__dict__[name] = blocking = self._group.backend.device_verb(update_wrapper(call, verb))
        return blocking
