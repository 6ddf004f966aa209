"""The registry: which functions other ranks may call, by which names, with which arguments.

A name from the wire is looked up in one table and nowhere else: it cannot reach a path, attribute or module.
Arguments are checked before the function is called: msgspec checks and converts what it understands of an
annotation, an array or another class is compared by type, and anything else is accepted.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from unisono.core import codec
from unisono.errors import UsageError
from unisono.rpc.frame import NAME_CHARS_MAX

__all__ = ["Handler", "Parameters", "Registry", "Signature", "check_name"]

_SHOWN_MAX: Final = 20  # names in an error
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.:/-]*")
_NO_HINT = object()
# A text is none of these: without this, msgspec would take it for base64.
_BYTES: Final = (bytes, bytearray, memoryview)


class Parameters(Protocol):
    """What a function can be called with: a Signature, for example."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments to call the function with, converted where that is needed.

        Raises:
            TypeError: it does not take these; the text names the argument.
        """


@dataclass(frozen=True, slots=True)
class Handler:
    """A function that other ranks may call."""

    fn: Callable[..., Any]
    parameters: Parameters
    is_async: bool  # it runs on the event loop, not on a thread of the pool
    is_stream: bool  # it is a generator function
    is_inline: bool  # a thread that waits for an answer of its own may run it


class Registry:
    """The handlers of one agent, by name."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        # The table's own method, because every call passes here.
        self.find: Callable[[str], Handler | None] = self._handlers.get

    def describe(self) -> str:
        """What is exposed, for an error text."""
        names = sorted(name for name in self._handlers if not name.endswith("/release"))
        more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
        return f"it exposes {', '.join(names[:_SHOWN_MAX]) or 'nothing'}{more}"

    def add(
        self,
        name: str,
        fn: Callable[..., Any],
        parameters: Parameters | None = None,
        *,
        is_inline: bool = False,
    ) -> None:
        """Expose a function; `parameters` replaces its own signature.

        Raises:
            UsageError: the name is invalid or taken, `fn` cannot be called, or it cannot be inline.
        """
        self._handlers[name] = self._made(name, fn, parameters, is_inline)

    def add_all(
        self, functions: Mapping[str, tuple[Callable[..., Any], Parameters | None]], *, is_inline: bool
    ) -> None:
        """As `add`, for several functions: all of them or, with an error, none."""
        made = {
            name: self._made(name, fn, parameters, is_inline) for name, (fn, parameters) in functions.items()
        }
        self._handlers.update(made)

    def _made(
        self, name: str, fn: Callable[..., Any], parameters: Parameters | None, is_inline: bool
    ) -> Handler:
        check_name(name)
        if not callable(fn):
            raise UsageError(f"{fn!r} cannot be called; allowed: a function")
        known = self._handlers.get(name)
        if known is not None and (known.fn is not fn or known.is_inline is not is_inline):
            raise UsageError(
                f"another function is exposed as {name!r} already",
                next_step="agent.register(name, fn) with another name",
            )
        target = _user_function(fn)
        _register_records(target)
        is_async_stream = inspect.isasyncgenfunction(target)
        is_async = (
            is_async_stream
            or inspect.iscoroutinefunction(target)
            or inspect.iscoroutinefunction(type(target).__call__)
        )
        is_stream = is_async_stream or inspect.isgeneratorfunction(target)
        if is_inline and (is_async or is_stream):
            raise UsageError(
                f"{name!r} is {'async' if is_async else 'a generator'}; allowed with inline=True: a function "
                f"that returns at once",
                next_step="expose it without inline=True",
            )
        return Handler(fn, parameters or Signature(fn), is_async, is_stream, is_inline)


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of a function, such as a dunder name.

    Raises:
        UsageError: always says what is allowed.
    """
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None and "__" not in name
    if not is_name or len(name) > NAME_CHARS_MAX:
        raise UsageError(
            f"name={str(name)[:80]!r}; allowed: a letter, then letters, digits and _ . : / -, without '__', "
            f"up to {NAME_CHARS_MAX} characters"
        )


class Signature:
    """The parameters of one function. `skip` leaves out the first ones, such as self."""

    def __init__(self, fn: Callable[..., Any], *, skip: int = 0) -> None:
        try:
            parameters = list(inspect.signature(fn).parameters.values())[skip:]
        except (TypeError, ValueError):  # some built-in functions have no signature
            parameters = []
            self._signature = None
        else:
            self._signature = inspect.Signature(parameters)
        hints = _checkable_hints(fn)
        self._hints = {p.name: hints.get(p.name, _NO_HINT) for p in parameters}
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        # Without *args, **kwargs and the like, a few tables say what `inspect` would find out for each call.
        self._is_plain = self._signature is not None and len(positional) + len(keywords) == len(parameters)
        self._positional = [(p.name, self._hints[p.name]) for p in positional]
        # Where each parameter stands among the positional ones; one that is keyword-only, behind all of them.
        self._places = {p.name: place for place, p in enumerate(positional + keywords)}
        self._by_name = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
        self._required = [p.name for p in positional + keywords if p.default is p.empty]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments to call the function with: see Parameters."""
        if self._is_plain and self._takes(len(args), kwargs):
            for (_, hint), value in zip(self._positional, args, strict=False):
                if hint is not _NO_HINT and type(value) is not hint:
                    named = zip(self._positional, args, strict=False)
                    args = [_convert(name, hint, value) for (name, hint), value in named]
                    break
            if kwargs:
                kwargs = {name: _convert(name, self._hints[name], value) for name, value in kwargs.items()}
            return args, kwargs
        if self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            hint = self._hints[name]
            match self._signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    converted: Any = tuple(_convert(name, hint, one) for one in value)
                case inspect.Parameter.VAR_KEYWORD:
                    converted = {key: _convert(key, hint, one) for key, one in value.items()}
                case _:
                    converted = _convert(name, hint, value)
            bound.arguments[name] = converted
        return bound.args, bound.kwargs

    def _takes(self, count: int, kwargs: Mapping[str, Any]) -> bool:
        """Whether the function takes this number of positional arguments and these by keyword."""
        if count > len(self._positional):
            return False
        places = self._places
        for name in kwargs:
            if name not in self._by_name or places[name] < count:
                return False
        return all(places[name] < count or name in kwargs for name in self._required)


def _convert(name: str, hint: Any, value: Any) -> Any:
    if hint is _NO_HINT or (isinstance(hint, type) and isinstance(value, hint) and type(value) is not bool):
        return value
    if not _is_known_to_msgspec(hint):
        raise TypeError(f"argument {name!r}: expected {hint.__name__}, got {type(value).__name__}")
    if isinstance(value, np.generic):
        value = value.item()
    try:
        return msgspec.convert(value, hint, builtin_types=_BYTES)
    except msgspec.ValidationError as error:
        raise TypeError(f"argument {name!r}: {error}") from None
    except TypeError:
        raise TypeError(f"argument {name!r}: expected {hint}, got {type(value).__name__}") from None


# -- annotations ------------------------------------------------------------------------------------------


def _register_records(fn: Callable[..., Any]) -> None:
    """Let the dataclasses and Structs travel that a function's annotations name, results included.

    Raises:
        UsageError: another class has the name of one of them.
    """
    seen: set[int] = set()
    for hint in _hints(fn).values():
        _register_records_in(hint, seen)


def _register_records_in(hint: Any, seen: set[int]) -> None:
    if id(hint) in seen:
        return
    seen.add(id(hint))
    for part in typing.get_args(hint):
        _register_records_in(part, seen)
    if codec.is_record(hint):
        if not codec.is_registered(hint):
            codec.register(hint)
        for field in _hints(hint).values():
            _register_records_in(field, seen)


def _checkable_hints(fn: Callable[..., Any]) -> dict[str, Any]:
    hints = _hints(fn.__init__ if isinstance(fn, type) else fn)  # type: ignore[misc]
    return {
        name: hint
        for name, hint in hints.items()
        if hint is not Any and (isinstance(hint, type) or _is_known_to_msgspec(hint))
    }


def _hints(of: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of if isinstance(of, type) else inspect.unwrap(of), include_extras=True)
    except Exception:  # names that only a type checker can resolve
        return {}


def _is_known_to_msgspec(hint: Any) -> bool:
    """Whether msgspec can check all of a type by itself."""
    try:
        info = msgspec.inspect.type_info(hint)
    except Exception:
        return False
    return "CustomType" not in repr(info)


def _user_function(fn: Callable[..., Any]) -> Any:
    """The function that a user has written, if a partial wraps it."""
    target = inspect.unwrap(fn)
    while isinstance(target, partial):
        # Objects wraps a method as partial(call, cls, method): the last function is the user's.
        inner = [one for one in (target.func, *target.args) if inspect.isfunction(one)]
        target = inner[-1] if inner else target.func
    return target
