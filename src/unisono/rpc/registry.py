"""The registry: which functions may be called from afar, by which names.

Knows names and handlers. Does not know calls. A name from the wire is looked up in a table and nowhere else:
there are no paths, attributes or modules behind it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol

from unisono.errors import UsageError
from unisono.rpc.frames import NAME_CHARS_MAX
from unisono.rpc.signature import Signature, register_records

__all__ = ["Handler", "Kind", "Registry", "Takes", "check_name"]

_SHOWN_MAX: Final = 20  # of names in an error
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]*")


class Kind(Enum):
    """How a handler is run."""

    PLAIN = "a function, on a thread"
    ASYNC = "a coroutine function, on the loop"
    STREAM = "a generator function, on a thread"
    ASYNC_STREAM = "an async generator function, on the loop"

    @property
    def is_stream(self) -> bool:
        """Whether it gives items."""
        return self in (Kind.STREAM, Kind.ASYNC_STREAM)

    @property
    def is_async(self) -> bool:
        """Whether it runs on the loop."""
        return self in (Kind.ASYNC, Kind.ASYNC_STREAM)


class Takes(Protocol):
    """What a function can be called with: signature.Signature."""

    def checked(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What to call it with, or a TypeError."""


@dataclass(frozen=True, slots=True)
class Handler:
    """A function that may be called from afar."""

    name: str
    fn: Callable[..., Any]
    kind: Kind
    signature: Takes


class Registry:
    """The handlers of one agent, by name."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        # Who looks up a name; a method of the table itself, because every call passes here.
        self.find: Callable[[str], Handler | None] = self._handlers.get

    def shown(self) -> str:
        """What may be called, in words."""
        names = sorted(name for name in self._handlers if not name.endswith("/release"))
        more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
        return f"it exposes {', '.join(names[:_SHOWN_MAX]) or 'nothing'}{more}"

    def add(self, name: str, fn: Callable[..., Any], takes: Takes | None = None) -> Handler:
        """Let a function be called; `takes` stands in for its own signature.

        Raises:
            UsageError: the name is none, or is taken.
        """
        check_name(name)
        if not callable(fn):
            raise UsageError(f"{fn!r} cannot be called; allowed: a function")
        if name in self._handlers and self._handlers[name].fn is not fn:
            raise UsageError(
                f"another function is exposed as {name!r} already",
                next_step="agent.register(name, fn) with another name",
            )
        register_records(_written(fn))
        if takes is None:
            takes = Signature(fn)
        handler = self._handlers[name] = Handler(name, fn, _kind_of(fn), takes)
        return handler


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of a function: a dunder name, for one."""
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None and "__" not in name
    if not is_name or len(name) > NAME_CHARS_MAX:
        raise UsageError(
            f"name={str(name)[:80]!r}; allowed: a letter, then letters, digits and _ . : / -, without '__', "
            f"up to {NAME_CHARS_MAX} characters"
        )


def _written(fn: Callable[..., Any]) -> Any:
    """What a user has written: a partial may stand in for it."""
    target = inspect.unwrap(fn)
    while isinstance(target, partial):
        # What stands in for a method: the last function given.
        inner = [one for one in (target.func, *target.args) if inspect.isfunction(one)]
        target = inner[-1] if inner else target.func
    return target


def _kind_of(fn: Callable[..., Any]) -> Kind:
    target = _written(fn)
    is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
    if inspect.isgeneratorfunction(target):
        return Kind.STREAM
    if inspect.isasyncgenfunction(target):
        return Kind.ASYNC_STREAM
    return Kind.ASYNC if is_async else Kind.PLAIN
