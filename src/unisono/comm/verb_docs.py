"""What `help` says about the arguments and errors of every verb: one table for all of them.

The reference verbs (collectives.py, point_to_point.py, verbs.py) say what each verb does and returns.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Final

__all__ = ["documentation", "sections_of", "special"]

_PARAMETERS: Final = {
    "x": "an array, or a number.",
    "xs": "arrays, each overwritten by its result, or numbers.",
    "data": "an array, or a number.",
    "obj": "None, numbers, text, bytes, containers, arrays and instances of classes given to `uni.register`, "
    "in any nesting; no pickle.",
    "value": "an object as `send_object` takes it; of a started call, it must not change before the work has "
    "ended.",
    "values": "on root one object for each rank, which must not change before a started call has ended; "
    "elsewhere None.",
    "objects": "an object for each rank, as `send_object` takes it; of a started call, they must not change "
    "before the work has ended.",
    "fn": "a function of two objects; the same on all ranks.",
    "parts": "an array for each rank, of one type; axis 0 may differ and be 0.",
    "buf": "writable contiguous memory of the sender's element type; bytes match any type.",
    "dst": "the receiver; this rank itself is allowed.",
    "src": "the sender, or ANY.",
    "tag": "0 to 2**31 - 1.",
    "op": '"sum", "prod", "min", "max", "mean", "maxloc" or "minloc" of pairs (value, index) in the last '
    "axis, a bitwise or logical operation, or one made by `op`.",
    "root": "the rank that is named; equal on all ranks.",
    "counts": "a length for each rank; together the length of axis 0 of `x`.",
    "out": "memory for the result, of its type and shape; by default new memory is allocated.",
    "timeout": "seconds for the whole operation; None means `Config.deadline_s`, by default no limit.",
    "algorithm": '"auto", or a name that `unisono plan --list` shows; equal on all ranks.',
    "color": "a signed 64-bit integer; None makes no communicator on this rank and returns None.",
    "key": "the ranks of the new communicator are ordered by (key, rank here).",
}

# What a verb means by a parameter that others mean differently.
_OWN: Final = {
    ("all_reduce", "x"): "an array, which is overwritten by the result unless `out` is given, or a number.",
    ("reduce", "x"): "an array, on root overwritten by the result unless `out` is given, or a number.",
    ("broadcast", "x"): "an array, which ranks other than root overwrite, or a number.",
    ("scatter", "x"): "on root an array whose first axis is the rank; elsewhere None.",
    ("reduce_scatter", "x"): "an array whose first axis is the rank.",
    ("all_to_all", "x"): "an array whose first axis is the rank.",
    ("all_gather_v", "x"): "an array; axis 0 may be 0.",
    ("gather_v", "x"): "an array; axis 0 may be 0.",
    ("reduce_scatter_v", "x"): "an array whose axis 0 is cut by `counts`.",
    ("scan", "op"): "as in all_reduce, but not a mean.",
    ("exscan", "op"): "as in all_reduce, but not a mean.",
    ("scatter_v", "parts"): "on root an array for each rank; axis 0 may differ and be 0. Elsewhere None.",
    ("gather", "out"): "on root memory for the result; elsewhere it is not looked at.",
    ("reduce", "out"): "on root memory for the result; elsewhere it is not looked at.",
    (
        "all_gather_v",
        "out",
    ): "a list of arrays by rank, of the lengths that come, without common memory; it is returned. Arrays "
    "that follow each other in memory are filled where they lie.",
    (
        "gather_v",
        "out",
    ): "on root a list of arrays by rank, of the lengths that come, without common memory; elsewhere it is "
    "not looked at.",
    (
        "all_to_all_v",
        "out",
    ): "a list of arrays by rank, of the lengths that come, without common memory; it is returned. Arrays "
    "that follow each other in memory are filled where they lie.",
    ("all_reduce_object", "obj"): "an object as `send_object` takes it, which is left as it is; of a started "
    "call, it must not change before the work has ended.",
    ("recv", "tag"): "the tag, or ANY.",
    ("recv_bytes", "tag"): "the tag, or ANY.",
    ("recv_object", "tag"): "the tag, or ANY.",
    ("probe", "tag"): "the tag, or ANY.",
    ("probe", "timeout"): "seconds to wait; 0 returns at once.",
    ("recv", "timeout"): "seconds for the whole operation; a receive that times out takes no message.",
}

_ANY_VERB: Final = {
    "UsageError": "an argument is wrong. Nothing was sent.",
    "PeerLost": "a rank that the operation needs has died or left.",
    "PeerAborted": "a rank called `abort`, ended by an exception, or cancelled a collective of this group.",
    "DeadlineExceeded": "the time is over; `waiting_on` names the ranks that are missing.",
    "Deadlock": "ranks wait for each other, so none can go on.",
    "ClosedError": "the communicator is closed.",
}
_COLLECTIVE: Final = {
    "CollectiveMismatch": "ranks called different verbs, or with different arguments. Every rank gets it.",
}
_QUEUED: Final = "it stays queued."
_RECEIVING: Final = {
    "recv": {
        "UsageError": "an argument is wrong; or the message is longer than `buf` or of another type: "
        f"{_QUEUED}"
    },
    "sendrecv": {
        "UsageError": "an argument is wrong, and nothing was sent; or the message is longer than `buf` or of "
        f"another type: {_QUEUED}"
    },
    "recv_bytes": {
        "UsageError": f"an argument is wrong; or the message exceeds `Config.recv_bytes_max`: {_QUEUED}"
    },
    "recv_object": {
        "UsageError": f"an argument is wrong; or the message exceeds `Config.recv_bytes_max`: {_QUEUED}",
        "ProtocolError": "the message is no object, or names a class that is not registered here.",
    },
    "send_object": {
        "UsageError": "an argument is wrong, or the object cannot be sent or is too long. Nothing was sent."
    },
}
_STARTED: Final = (
    "Under `start`, UsageError for an argument is raised at once, the others by the work's `wait`."
)
_WIDTH: Final = 100


def documentation(verb: str, parameters: list[str], prose: str, *, is_collective: bool) -> str:
    """The whole text: what the reference verb says, its arguments, its result and its errors.

    Args:
        verb: the name of the verb.
        parameters: its parameters, without self.
        prose: the docstring of the reference verb. Arguments and errors in it take precedence over the table.
        is_collective: whether every rank of the communicator calls it.
    """
    text = inspect.cleandoc(prose)
    said = re.split(r"^(?:Args|Returns|Raises):$", text, maxsplit=1, flags=re.MULTILINE)[0]
    own = sections_of(text)
    arguments = {name: _OWN.get((verb, name), _PARAMETERS.get(name, "")) for name in parameters}
    raises = _ANY_VERB | (_COLLECTIVE if is_collective else {}) | _RECEIVING.get(verb, {})
    parts = [said.strip(), _section("Args", arguments | own.get("Args", {}))]
    if returns := re.search(r"^Returns:\n(?:    .*\n?)+", text, re.MULTILINE):
        parts.append(returns[0].rstrip())
    parts.append(_section("Raises", raises | own.get("Raises", {})))
    parts.append(_STARTED)
    return "\n\n".join(parts)


def special(text: str) -> str:
    """A documentation without the errors that every verb may raise: for a page that lists them once."""
    common = {*_ANY_VERB, *_COLLECTIVE}
    own = {
        error: said
        for error, said in sections_of(text).get("Raises", {}).items()
        if error not in common or said not in (_ANY_VERB | _COLLECTIVE).values()
    }
    before = text.partition("\n\nRaises:\n")[0]
    return f"{before}\n\n{_section('Raises', own)}" if own else before


def _section(title: str, rows: dict[str, str]) -> str:
    lines = [
        textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="    ", subsequent_indent="        ")
        for name, text in rows.items()
    ]
    return "\n".join([f"{title}:", *lines])


def sections_of(text: str) -> dict[str, dict[str, str]]:
    """The named rows of the sections Args and Raises of a documentation."""
    found: dict[str, dict[str, str]] = {}
    for title, body in re.findall(r"^(Args|Raises):\n((?:    .*\n?)+)", text, re.MULTILINE):
        rows = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", body, re.MULTILINE)
        found[title] = {name: " ".join(said.split()) for name, said in rows}
    return found
