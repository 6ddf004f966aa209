"""The result of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unisono.core.runtime import Killed
from unisono.simulation.trace import TraceEvent, trace_text

__all__ = ["SimResult"]


@dataclass(frozen=True)
class SimResult:
    """How a simulation went. `results[r]` is what rank r returned, or the exception that ended it."""

    results: list[Any]
    time_s: float
    """The virtual time at which the last rank ended."""

    seed: int
    trace_hash: str
    """Equal for equal traces, in any process."""

    trace: tuple[TraceEvent, ...] = field(repr=False)

    def raise_first(self) -> SimResult:
        """Raise the first error that ended a rank, if any. A rank that a Kill ended does not count."""
        for event in self.trace:
            if event.kind == "raise" and not isinstance(self.results[event.rank], Killed):
                raise self.results[event.rank]
        return self

    def trace_text(self) -> str:
        """The trace as text, one line per event."""
        return trace_text(self.trace)
