"""Objects that live on another rank: made there, called from here, released with their proxy.

A method is found in a table that was made when the class was exposed: no other attribute can be reached.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from unisono.core.codec import register
from unisono.core.runtime import Finalizer
from unisono.core.work import Work
from unisono.errors import UsageError
from unisono.rpc.registry import Parameters, Signature
from unisono.rpc.server import here
from unisono.rpc.streams import Stream

__all__ = ["Objects", "Proxy", "Reference"]

T = TypeVar("T")

# Objects of one caller: a program that makes more forgets to release them.
_OBJECTS_MAX: Final = 65_536


@register
@dataclass(frozen=True)
class Reference:
    """Names an object. On the rank that it is sent to, `agent.proxy` makes a proxy that owns nothing."""

    rank: int
    class_name: str
    number: int

    @property
    def release_name(self) -> str:
        """The function that releases the object; no user's function has a name like this."""
        return f"{self.class_name}/release"


class Caller(Protocol):
    """What a proxy needs of an agent."""

    def call(self, dst: int | str, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of another rank."""

    def start(self, dst: int | str, name: str, /, *args: Any, **kwargs: Any) -> Work[Any]:
        """Begin such a call."""

    def stream(self, dst: int | str, name: str, /, *args: Any, **kwargs: Any) -> Stream:
        """Read the items of a generator of another rank."""


class Proxy:
    """Stands for an object of another rank: its exposed methods can be called.

    `proxy.start.method(...)` returns a Work, and `proxy.stream.method(...)` the items of a method that is a
    generator. All take `timeout=`, as the calls of an agent do. The object is released with the proxy that
    made it; a method, a stream and a call under way keep that.
    """

    def __init__(
        self,
        agent: Caller,
        reference: Reference,
        release: Callable[[], None] | None = None,
        finalizer: Callable[[object, Callable[[], None]], Finalizer] | None = None,
    ) -> None:
        """With `release`, the proxy owns the object; `finalizer` calls it once the proxy was dropped."""
        self._agent = agent
        self._reference = reference
        self._release = release
        self._finalizer = finalizer(self, release) if release is not None and finalizer is not None else None

    @property
    def reference(self) -> Reference:
        """What another rank needs to call the object, too."""
        return self._reference

    @property
    def start(self) -> _Methods[Work[Any]]:
        """The same methods, started."""
        return _Methods(self._reference, self._start)

    @property
    def stream(self) -> _Methods[Stream]:
        """The methods that are generators, each giving its items."""
        return _Methods(self._reference, self._stream)

    def release(self) -> None:
        """Release the object now, if this proxy owns it."""
        if self._release is None:
            return
        self._release()
        self._release = None
        if self._finalizer is not None:  # not earlier: a signal may have come before the release was sent
            self._finalizer.detach()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, _method_name(self, name))

    def __reduce__(self) -> str:
        raise TypeError(
            "a proxy cannot be copied or pickled; pass proxy.reference, and agent.proxy makes a proxy of it"
        )

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A frame of this refers to the proxy until the answer is here."""
        return self._agent.call(self._reference.rank, method, self._reference.number, *args, **kwargs)

    def _start(self, method: str, *args: Any, **kwargs: Any) -> Work[Any]:
        work = self._agent.start(self._reference.rank, method, self._reference.number, *args, **kwargs)
        work._on_end(partial(_let_go, self))  # the work refers to the proxy until it ends
        return work

    def _stream(self, method: str, *args: Any, **kwargs: Any) -> Stream:
        stream = self._agent.stream(self._reference.rank, method, self._reference.number, *args, **kwargs)
        stream.owner = self
        return stream

    def __repr__(self) -> str:
        it = self._reference
        return f"<Proxy of {it.class_name} #{it.number} on rank {it.rank}>"


class _Methods(Generic[T]):
    """The methods of an object, called in one way."""

    def __init__(self, reference: Reference, call: Callable[..., T]) -> None:
        self._reference = reference
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., T]:
        return partial(self._call, _method_name(self, name))


# What a proxy has itself: a method of this name could not be called by it.
_OF_PROXIES: Final = tuple(name for name in vars(Proxy) if not name.startswith("_"))


def _method_name(proxy: Proxy | _Methods[Any], name: str) -> str:
    if name.startswith("_"):
        raise AttributeError(f"{name!r} is not an exposed method")
    return f"{proxy._reference.class_name}.{name}"


def _let_go(proxy: Proxy) -> None:
    """Drop the proxy, with the last reference to the caller's callback."""


class _Instance(NamedTuple):
    """An instance that another rank has made."""

    cls: type
    instance: Any
    owner: int
    call: int  # that has made it


class Objects:
    """The instances that other ranks have made on this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, _Instance] = {}
        # The numbers of those that a rank owns, by the call that made them.
        self._owned: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def handlers_of(self, cls: type, name: str) -> dict[str, tuple[Callable[..., Any], Parameters]]:
        """The functions of an exposed class, by name: make an instance, call its methods, release it.

        Raises:
            UsageError: a method has the name of something that every proxy has.
        """
        handlers: dict[str, tuple[Callable[..., Any], Parameters]] = {
            name: (partial(self._make, cls), Signature(cls)),
            f"{name}/release": (partial(self._release, cls), _MethodParameters(lambda: None, skip=0)),
        }
        for method, fn in inspect.getmembers(cls, inspect.isfunction):
            if method in _OF_PROXIES:
                raise UsageError(
                    f"class {cls.__name__} has a method {method!r}, which a proxy has itself",
                    next_step=f"give it another name than {', '.join(_OF_PROXIES)}",
                )
            if not method.startswith("_") and "__" not in method:
                is_static = isinstance(inspect.getattr_static(cls, method), staticmethod)
                handlers[f"{name}.{method}"] = (
                    partial(self._call, cls, fn, is_static),
                    _MethodParameters(fn, skip=0 if is_static else 1),
                )
        return handlers

    def on_lost(self, owner: int) -> None:
        """A rank is gone: release all that it owned."""
        with self._lock:
            dropped = [self._held.pop(number) for number in self._owned.pop(owner, {}).values()]
        del dropped  # without the lock: what an instance does when it is dropped is the user's

    def on_cancelled(self, owner: int, call: int) -> None:
        """A rank has given up a call, and will never know of the instance that the call may have made."""
        with self._lock:
            number = self._owned.get(owner, {}).pop(call, None)
            dropped = None if number is None else self._held.pop(number)
        del dropped

    def clear(self) -> None:
        """Release all."""
        with self._lock:
            dropped, self._held = self._held, {}
            self._owned.clear()
        del dropped

    def _make(self, cls: type, *args: Any, **kwargs: Any) -> int:
        incoming = here()
        assert incoming is not None
        owner, call = incoming.source, incoming.call
        made, number = cls(*args, **kwargs), next(self._numbers)
        if not call:  # a notification: no rank will ever know the number
            return number
        with self._lock:
            owned = self._owned.setdefault(owner, {})
            if len(owned) >= _OBJECTS_MAX:
                raise UsageError(
                    f"rank {owner} holds {_OBJECTS_MAX} objects here already",
                    next_step="drop proxies that are no longer used",
                )
            owned[call] = number
            self._held[number] = _Instance(cls, made, owner, call)
        if incoming.is_cancelled:  # by now: the cancellation may not have found the instance
            self.on_cancelled(owner, call)
        return number

    def _call(
        self, cls: type, fn: Callable[..., Any], is_static: bool, number: int, *args: Any, **kwargs: Any
    ) -> Any:
        held = self._held.get(number)
        if held is None or held.cls is not cls:
            raise LookupError(f"there is no {cls.__name__} #{number}; it may have been released")
        return fn(*args, **kwargs) if is_static else fn(held.instance, *args, **kwargs)

    def _release(self, cls: type, number: int) -> None:
        incoming = here()
        assert incoming is not None
        held = self._held.get(number)
        if held is not None and held.cls is cls and held.owner == incoming.source:
            self.on_cancelled(held.owner, held.call)


class _MethodParameters:
    """The parameters of a method that is called from another rank: the object's number comes first."""

    def __init__(self, fn: Callable[..., Any], *, skip: int) -> None:
        self._rest = Signature(fn, skip=skip)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if not args or type(args[0]) is not int:
            raise TypeError("the number of an object is missing")
        rest, named = self._rest.bind(list(args[1:]), kwargs)
        return [args[0], *rest], named
