"""The overloads of a process group's methods.

torch.distributed and C++ pass lists of tensors and an options object. Programs that hold a group may pass one
tensor in place of the lists, and an operation, a root or a timeout in place of the options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from torch import Tensor

__all__ = ["overloaded"]

Method = TypeVar("Method", bound=Callable[..., Any])

# By the name of an argument: the field of the options.
_FIELDS: Final = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def overloaded(
    options: type, *tensors: str, fields: tuple[str, ...] = (), are_lists: bool = True
) -> Callable[[Method], Method]:
    """Let a method that takes tensors and `options` be called in all forms.

    Args:
        options: what the last argument is, and is made of if it is not given.
        *tensors: the names of the arguments before it; callers may leave out "s" and "_tensor".
        fields: the names of the arguments in place of options, without the last, "timeout".
        are_lists: whether one tensor may stand in place of a list.
    """
    count, full = len(tensors), len(tensors) + 1

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **named: Any) -> Any:
            if len(args) == full and type(args[count]) is options:  # torch's own call
                return method(group, *args)
            given = [*args[:count], *(_taken(name, named) for name in tensors[len(args) :])]
            if are_lists and any(isinstance(each, Tensor) for each in given):
                given = [[each] for each in given]
            return method(group, *given, _options(options, fields, args[count:], named))

        return cast(Method, call)

    return decorate


def _taken(name: str, named: dict[str, Any]) -> Any:
    singular = name.removesuffix("s")
    for each in (name, singular, singular.removesuffix("_tensor")):
        if each in named:
            return named.pop(each)
    raise TypeError(f"missing argument: {name!r}")


def _options(kind: type, fields: tuple[str, ...], rest: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The options that were given, or new ones with the fields that were."""
    if rest and hasattr(rest[0], "asyncOp"):
        named, rest = {"opts": rest[0], **named}, rest[1:]
    options = named.pop("opts", None)
    if options is None:
        options = kind()
        allowed = (*fields, "timeout")
        if len(rest) > len(allowed):
            raise TypeError(f"{len(rest) - len(allowed)} arguments too many")
        given = {**dict(zip(allowed, rest, strict=False)), **named}
        for name in [name for name in given if name in allowed]:
            if (value := given.pop(name)) is not None:
                setattr(options, _FIELDS[name], value)
        rest, named = (), given
    if rest or named:
        raise TypeError(f"unexpected arguments: {', '.join([*map(repr, rest), *named])}")
    return options
