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

__all__ = ["Signature"]

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


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        source = fn.__init__ if isinstance(fn, type) else inspect.unwrap(fn)  # type: ignore[misc]
        hints = typing.get_type_hints(source, include_extras=True)
    except Exception:  # names that only a type checker can resolve
        return {}
    return {name: hint for name, hint in hints.items() if hint is not Any and _is_checkable(hint)}


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
