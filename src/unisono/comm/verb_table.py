"""The table of verbs: names, parameters, signatures and documentation, from the reference verbs.

From it the engine makes the type whose methods a user calls (native/python/bind_verbs.cpp): its argument
parser, the signatures that `help` and `inspect` show, and the documentation (verb_docs.py) have one source.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

from unisono import _native
from unisono.comm.fingerprint import VERBS as COLLECTIVES
from unisono.comm.verb_docs import documentation
from unisono.core.envelope import ANY
from unisono.core.ops import OP_NAMES

__all__ = ["VERBS", "make_verbs_type"]

VERBS: Final = (
    "send",
    "recv",
    "recv_bytes",
    "sendrecv",
    "send_object",
    "recv_object",
    "probe",
    *COLLECTIVES,
)


def make_verbs_type(reference: type) -> type[Any]:
    """Make the type of verbs from a class that has a method for each. Once per process."""
    rows = [_row(name, inspect.signature(getattr(reference, name)), reference) for name in VERBS]
    return _native.make_verbs_type(rows, OP_NAMES)


def _row(name: str, signature: inspect.Signature, reference: type) -> tuple[str, str, Sequence[str], int]:
    parameters = list(signature.parameters.values())[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    text = f"{name}({', '.join(['$self', *_shown(parameters)])})"
    names = [p.name for p in parameters]
    doc = documentation(name, names, getattr(reference, name).__doc__, is_collective=name in COLLECTIVES)
    return name, f"{text}\n--\n\n{doc}", names, len(positional)


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
