"""The trace of a simulation: what happened, when and to which rank, in an order that the seed repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from unisono.core.envelope import Tags

__all__ = ["TraceEvent", "trace_digest", "trace_text"]


class TraceEvent(NamedTuple):
    """One event of `rank`; fields that do not apply are None.

    Messages: send, arrive (the message, or only its envelope), match, data (the bytes of a message that had
    waited for its receive). Ranks: leave, return, raise, down (`rank` learns that `peer` is down). Faults:
    kill, pause, resume, and cut, heal, slow, fast for the channel from `rank` to `peer`.
    """

    time_s: float
    kind: str
    rank: int
    peer: int | None = None
    context: int | None = None
    tag: int | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        text = f"{self.time_s:.9f} s  {self.kind:<6}  rank {self.rank}"
        if self.peer is not None:
            text += f" {_ARROWS.get(self.kind, '->')} {self.peer}"
        if self.tag is not None:
            text += f"  {_tag_text(self.tag)}  {self.nbytes} B  context {self.context:x}"
        return text


# The peer is the receiver of a send, and the source in all other events of a message.
_ARROWS = {"arrive": "<-", "match": "<-", "data": "<-", "down": "lost"}


def trace_text(trace: Iterable[TraceEvent]) -> str:
    """The trace as text, one line per event."""
    return "\n".join(map(str, trace))


def trace_digest(trace: Iterable[TraceEvent]) -> str:
    """A hash of the whole trace, with times to the last bit."""
    digest = hashlib.sha256()
    for event in trace:
        digest.update((" ".join(map(repr, event)) + "\n").encode())
    return digest.hexdigest()


def _tag_text(tag: int) -> str:
    if tag & Tags.COLLECTIVE:
        sequence, stage = divmod(tag & ~Tags.COLLECTIVE, Tags.STAGES)
        return f"collective {sequence}.{stage}"
    if tag & Tags.CONTROL:
        return f"control {tag & ~Tags.CONTROL}"
    return f"tag {tag}"
