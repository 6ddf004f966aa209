"""Objects that live on another rank: made there, called from here, released when nobody holds them.

Knows which instances were made for whom, and what stands for one elsewhere. Does not know how a call travels.
A method is found in a table that was made when the class was exposed: there is no way to any other attribute.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from unisono.core.codec import register
from unisono.core.work import Work
from unisono.errors import UsageError
from unisono.rpc.incoming import here
from unisono.rpc.signature import Signature

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["Objects", "Proxy", "Reference"]

# Of one caller: whoever makes more has forgotten to let go.
_OBJECTS_MAX: Final = 65_536


@register
@dataclass(frozen=True)
class Reference:
    """Which object is meant; it can travel, and `agent.proxy` makes a proxy of it that owns nothing."""

    rank: int
    class_name: str
    number: int


class Proxy:
    """Stands for an object of another rank: its exposed methods can be called.

    `proxy.start.method(...)` returns a Work. The object is released with the proxy that made it.
    """

    def __init__(self, agent: Agent, reference: Reference, *, is_owner: bool) -> None:
        self._agent = agent
        self._reference = reference
        self._release = weakref.finalize(self, _release_later, agent, reference) if is_owner else None
        if self._release is not None:
            self._release.atexit = False

    @property
    def reference(self) -> Reference:
        """What others need to call it, too."""
        return self._reference

    @property
    def start(self) -> _Started:
        """The same methods, started."""
        return _Started(self._agent, self._reference)

    def release(self) -> None:
        """Let the object go now, if this proxy owns it."""
        if self._release is not None and self._release.detach() is not None:
            _release(self._agent, self._reference)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is no exposed method")
        it = self._reference
        return partial(self._agent.call, it.rank, f"{it.class_name}.{name}", it.number)

    def __repr__(self) -> str:
        it = self._reference
        return f"<Proxy of {it.class_name} #{it.number} on rank {it.rank}>"


class _Started:
    """The methods of an object, each returning a Work."""

    def __init__(self, agent: Agent, reference: Reference) -> None:
        self._agent = agent
        self._reference = reference

    def __getattr__(self, name: str) -> Callable[..., Work[Any]]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is no exposed method")
        it = self._reference
        return partial(self._agent.start, it.rank, f"{it.class_name}.{name}", it.number)


class Objects:
    """The instances that others have made on this rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, tuple[type, Any, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def handlers_of(self, cls: type, name: str) -> dict[str, tuple[Callable[..., Any], Any]]:
        """What a class is called by: a way to make an instance, its public methods, and a way to let go."""
        handlers: dict[str, tuple[Callable[..., Any], Any]] = {
            name: (partial(self._make, cls), Signature(cls)),
            f"{name}/release": (partial(self._let_go, cls), _OfObject(None)),
        }
        for method, fn in inspect.getmembers(cls, inspect.isfunction):
            if not method.startswith("_") and "__" not in method:
                handlers[f"{name}.{method}"] = (partial(self._call, cls, fn), _OfObject(fn))
        return handlers

    def on_gone(self, owner: int) -> None:
        """A rank is gone, and with it all that it owned here."""
        with self._lock:
            for number in [n for n, (_, _, whose) in self._held.items() if whose == owner]:
                del self._held[number]

    def _make(self, cls: type, *args: Any, **kwargs: Any) -> int:
        incoming = here()
        assert incoming is not None
        made, number = cls(*args, **kwargs), next(self._numbers)
        with self._lock:
            if sum(whose == incoming.source for _, _, whose in self._held.values()) >= _OBJECTS_MAX:
                raise UsageError(
                    f"rank {incoming.source} holds {_OBJECTS_MAX} objects here already",
                    next_step="drop proxies that are no longer used",
                )
            self._held[number] = (cls, made, incoming.source)
        return number

    def _call(self, cls: type, fn: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        known, it, _ = self._held.get(number, (None, None, 0))
        if known is not cls:
            raise LookupError(f"there is no {cls.__name__} #{number}; it may have been released")
        return fn(it, *args, **kwargs)

    def _let_go(self, cls: type, number: int) -> None:
        incoming = here()
        with self._lock:
            known, _, whose = self._held.get(number, (None, None, 0))
            if known is cls and incoming is not None and incoming.source == whose:
                del self._held[number]


class _OfObject:
    """What a method takes when it is called from afar: the object's number comes first."""

    def __init__(self, fn: Callable[..., Any] | None) -> None:
        self._rest = Signature(fn, skip=1) if fn is not None else Signature(lambda: None)

    def checked(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if not args or type(args[0]) is not int:
            raise TypeError("the number of an object is missing")
        rest, named = self._rest.checked(list(args[1:]), kwargs)
        return [args[0], *rest], named


def _release(agent: Agent, reference: Reference) -> None:
    agent.forget(reference.rank, f"{reference.class_name}/release", reference.number)


def _release_later(agent: Agent, reference: Reference) -> None:
    """The collector strikes anywhere: let go where no lock is held."""
    agent.runtime.call_soon(partial(_release, agent, reference))
