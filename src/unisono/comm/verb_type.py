"""The type whose methods are the verbs: parameters from the reference verbs, facts from the table of verbs.

The engine makes it (native/python/bind_verbs.cpp). Its argument parser, the signatures that `help` and
`inspect` show, and the documentation (verb_docs.py) have one source.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

from unisono import _native
from unisono.comm.verb_docs import documentation
from unisono.comm.verb_table import VERBS
from unisono.core.envelope import ANY
from unisono.core.ops import OP_NAMES

__all__ = ["make_verbs_type"]


def make_verbs_type(reference: type) -> type[Any]:
    """Make the type of verbs from a class that has a method for each. Once per process."""
    rows = [_row(name, inspect.signature(getattr(reference, name)), reference) for name in VERBS]
    return _native.make_verbs_type(rows, OP_NAMES)


# Name, signature and documentation, facts, names of parameters, how many of them may be given by position.
_Row: TypeAlias = tuple[str, str, int, Sequence[str], int]


def _row(name: str, signature: inspect.Signature, reference: type) -> _Row:
    parameters = list(signature.parameters.values())[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    text = f"{name}({', '.join(['$self', *_shown(parameters)])})"
    names = [p.name for p in parameters]
    verb, prose = VERBS[name], getattr(reference, name).__doc__
    doc = documentation(name, names, prose, is_collective=verb.is_collective)
    return name, f"{text}\n--\n\n{doc}", verb.facts.value, names, len(positional)


def _shown(parameters: list[inspect.Parameter]) -> list[str]:
    shown: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = parameter.default
        if default is parameter.empty:
            shown.append(parameter.name)
        else:
            shown.append(f"{parameter.name}={'unisono.ANY' if default is ANY else repr(default)}")
    return shown
