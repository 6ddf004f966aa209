"""A call that came in, as its handler sees it.

Knows who calls, until when, and whether the caller still waits. Does not know how it is run or answered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from unisono.core.clock import Deadline, Runtime

__all__ = ["Incoming", "current", "here"]

current: ContextVar[Incoming | None] = ContextVar("unisono-rpc-incoming", default=None)


def here() -> Incoming | None:
    """The call that the calling code serves; None outside of handlers."""
    return current.get()


class Incoming:
    """One call from another rank. `source` is the caller's rank in the agent's communicator."""

    __slots__ = (
        "args",
        "call",
        "credit",
        "deadline",
        "handler",
        "held_bytes",
        "is_cancelled",
        "kwargs",
        "name",
        "on_cancel",
        "runtime",
        "server",
        "source",
    )

    def __init__(self, server: Any, source: int, call: int, name: str, deadline: Deadline) -> None:
        self.server = server
        self.runtime: Runtime = server.runtime
        self.source = source
        self.call = call
        self.name = name
        self.deadline = deadline
        self.handler: Any = None
        self.args: Any = ()
        self.kwargs: Any = {}
        self.credit: Any = None  # of a stream
        self.is_cancelled = False
        self.held_bytes = 0
        # What to call if the caller gives up; those whose answer this handler waits for, for example.
        self.on_cancel: dict[Any, Callable[[], object]] = {}

    def remaining(self) -> float | None:
        """Seconds until the caller gives up; None if it never does."""
        return self.deadline.remaining(self.runtime.now())

    def cancel(self) -> None:
        """The caller no longer waits."""
        self.is_cancelled = True
        for call in list(self.on_cancel.values()):
            call()

    def __repr__(self) -> str:
        return f"<Incoming {self.name!r} from rank {self.source}>"
