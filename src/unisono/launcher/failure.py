"""How a rank ended: its exception as plain data and back, and which rank's end caused the others'.

The name of an exception is looked up among the built-in and unisono ones only, never imported.
"""

from __future__ import annotations

import builtins
import dataclasses
import signal
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from unisono import errors
from unisono.core import codec
from unisono.errors import Location, PeerLost, RemoteError, UnisonoError, UsageError

__all__ = ["VICTIM_TYPES", "End", "blamed", "culprit", "describe", "exit_words", "rebuild"]

# A rank that ends with one of these is a victim: another rank ended first.
VICTIM_TYPES: Final = ("PeerLost", "PeerAborted", "CollectiveMismatch")

_FIELDS: Final = ("waiting_on", "ranks", "rank", "report", "culprits", "type_name", "traceback_text")


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain data; of a group that reports what another rank has caused, that."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(cause := errors.root_cause(error), errors.PASSED_ON):
        error = cause
    kind = type(error)
    described: dict[str, Any] = {
        "family": "unisono" if kind.__module__ == errors.__name__ else kind.__module__,
        "name": kind.__qualname__,
        "text": _text(error),
        "traceback": trace,
    }
    if isinstance(error, UnisonoError):
        described["unisono"] = {
            "what": error.what,
            "where": [getattr(error.where, f.name) for f in dataclasses.fields(Location)],
            "cause": error.cause,
            "next_step": error.next_step,
            **{name: getattr(error, name) for name in _FIELDS if hasattr(error, name)},
        }
    elif described["family"] == "builtins":
        try:
            codec.pack_parts(list(error.args))
            described["args"] = list(error.args)
        except UsageError:
            pass  # an argument that cannot be sent: the text must do
    return described


def blamed(described: dict[str, Any]) -> tuple[int, ...]:
    """The ranks whose end a described exception reports."""
    if described["name"] not in VICTIM_TYPES:
        return ()
    fields = described.get("unisono", {})
    return (
        tuple(fields.get("culprits", ()))
        or tuple(fields.get("ranks", ()))
        or tuple(rank for rank in (fields.get("rank", -1),) if rank >= 0)
    )


def rebuild(described: dict[str, Any], rank: int) -> Exception:
    """The exception again, with the rank's traceback as a note; a RemoteError if its type is neither kind."""
    error = _rebuilt(described)
    if error is None:
        error = RemoteError(
            f"rank {rank} raised {described['name']}",
            rank=rank,
            type_name=described["name"],
            traceback_text=described["traceback"],
            cause=described["text"],
        )
    error.add_note(f"On rank {rank}:\n{described['traceback'].rstrip()}")
    return error


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """How a failed rank ended. A victim failed because other ranks ended; `blames` are those it names."""

    rank: int
    is_victim: bool = False
    blames: tuple[int, ...] = ()


def culprit(ends: Sequence[End]) -> int:
    """The rank whose end caused the others', from all failed ends in their order.

    A victim may end before its cause, and a cause may have ended with exit code 0, so what victims name
    counts first. Among the named ranks, one that failed by itself comes before one that only left. Without
    any named rank, the first one that is no victim counts.
    """
    named = Counter(rank for end in ends if end.is_victim for rank in end.blames)
    alone = [end.rank for end in ends if not end.is_victim]
    for rank in alone:
        if rank in named:
            return rank
    if named:
        most = max(named.values())
        return next(rank for rank, votes in named.items() if votes == most)
    return alone[0] if alone else ends[0].rank


def exit_words(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def lost(rank: int, pid: int, code: int) -> PeerLost:
    """The error for a rank whose process ended without a report."""
    return PeerLost(f"rank {rank} (pid {pid}) ended without a result", ranks=(rank,), cause=exit_words(code))


def _rebuilt(described: dict[str, Any]) -> Exception | None:
    name, family = described["name"], described["family"]
    if family == "unisono" and name in errors.__all__:
        fields = dict(described["unisono"])
        what, where = fields.pop("what"), Location(*fields.pop("where"))
        made: Exception = getattr(errors, name)(what, where=where, **fields)
        return made
    if family != "builtins" or "args" not in described:
        return None
    cls = getattr(builtins, name, None)
    # SystemExit or KeyboardInterrupt of a rank must not end this process.
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        return None
    try:
        return cls(*described["args"])
    except Exception:  # a constructor may require other arguments
        return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may fail
        return "(its text could not be made)"
