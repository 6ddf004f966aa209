"""Signatures: what a function takes, checked before it is called with what came from afar.

Knows parameters and their annotations. Does not know calls. An annotation that msgspec understands is checked
and converted by it; an array or another class is compared by its type; anything else lets everything pass.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from unisono.core import codec

__all__ = ["Signature", "register_records"]

_NO_HINT = object()


class Signature:
    """The parameters of one function. `skip` leaves out the first ones, such as self."""

    def __init__(self, fn: Callable[..., Any], *, skip: int = 0) -> None:
        try:
            parameters = list(inspect.signature(fn).parameters.values())[skip:]
        except (TypeError, ValueError):  # some built-in functions tell nothing about themselves
            parameters = []
            self._whole = None
        else:
            self._whole = inspect.Signature(parameters)
        hints = _hints(fn)
        self._hints = {p.name: hints.get(p.name, _NO_HINT) for p in parameters}
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._is_simple = self._whole is not None and len(positional) == len(parameters)
        self._required = sum(p.default is p.empty for p in positional)
        self._checks = [(p.name, self._hints[p.name]) for p in positional]

    def checked(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """What to call the function with.

        Raises:
            TypeError: it does not take these; the text names the argument.
        """
        if self._is_simple and not kwargs and self._required <= len(args) <= len(self._checks):
            for (_, hint), value in zip(self._checks, args, strict=False):
                if hint is not _NO_HINT and type(value) is not hint:
                    return [_fit(n, h, v) for (n, h), v in zip(self._checks, args, strict=False)], kwargs
            return args, kwargs
        if self._whole is None:
            return args, kwargs
        bound = self._whole.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            hint = self._hints[name]
            match self._whole.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    fitted: Any = tuple(_fit(name, hint, one) for one in value)
                case inspect.Parameter.VAR_KEYWORD:
                    fitted = {key: _fit(key, hint, one) for key, one in value.items()}
                case _:
                    fitted = _fit(name, hint, value)
            bound.arguments[name] = fitted
        return bound.args, bound.kwargs


def register_records(fn: Callable[..., Any]) -> None:
    """Let the dataclasses and Structs travel that a function's annotations name, results included.

    Raises:
        UsageError: another class has the name of one of them.
    """
    seen: set[int] = set()
    for hint in _all_hints(fn).values():
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
        for field in _all_hints(hint).values():
            _register_records_in(field, seen)


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    hints = _all_hints(fn.__init__ if isinstance(fn, type) else fn)  # type: ignore[misc]
    return {name: hint for name, hint in hints.items() if hint is not Any and _is_checkable(hint)}


def _all_hints(of: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of if isinstance(of, type) else inspect.unwrap(of), include_extras=True)
    except Exception:  # names that only a type checker can resolve
        return {}


def _is_checkable(hint: Any) -> bool:
    return isinstance(hint, type) or _is_msgspecs(hint)


def _is_msgspecs(hint: Any) -> bool:
    """Whether msgspec knows all of a type by itself."""
    try:
        info = msgspec.inspect.type_info(hint)
    except Exception:
        return False
    return "CustomType" not in repr(info)


def _fit(name: str, hint: Any, value: Any) -> Any:
    if hint is _NO_HINT or (isinstance(hint, type) and isinstance(value, hint) and type(value) is not bool):
        return value
    if not _is_msgspecs(hint):
        raise TypeError(f"argument {name!r}: expected {hint.__name__}, got {type(value).__name__}")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise TypeError(f"argument {name!r}: {error}") from None
    except TypeError:
        raise TypeError(f"argument {name!r}: expected {hint}, got {type(value).__name__}") from None
