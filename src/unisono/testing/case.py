"""A case: one promise of the backend contract, as a program that every rank runs.

Knows what a case is, and whether a backend has what it needs. Does not know any case, nor how ranks are
brought to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from unisono.messaging.backend import Backend
from unisono.testing.case_rank import CaseRank

__all__ = ["Case", "ConformanceError", "Suite"]

# What a case can need: abilities of the backend by their names in Capabilities, and threads of its own.
_NEEDS: Final = ("sync_send", "threads", "wildcards")


class ConformanceError(AssertionError):
    """A backend breaks its contract: in which `case`, seen by which `rank`, and what was expected."""

    def __init__(self, case: str, rank: int, text: str) -> None:
        super().__init__(f"case {case!r}, rank {rank}: {text}")
        self.case = case
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Case:
    """A program for `size` ranks: each calls `run` with its own backend, on any kind of rank."""

    name: str
    size: int
    run: Callable[[Backend], None]
    promise: str
    needs: frozenset[str] = frozenset()

    def lacking(self, backend: Backend) -> frozenset[str]:
        """What the backend does not have of what the case needs."""
        able = backend.capabilities
        has = {
            "sync_send": able.sync_send,
            "wildcards": able.wildcards,
            "threads": not backend.runtime.is_virtual,
        }
        return frozenset(need for need in self.needs if not has[need])


class Suite:
    """A table of cases, written as functions: a name, and a first line that says the promise."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def case(
        self, size: int, needs: Iterable[str] = ()
    ) -> Callable[[Callable[[CaseRank], None]], Callable[[CaseRank], None]]:
        """Enter a function as a case for `size` ranks."""
        needed = frozenset(needs)
        assert needed <= set(_NEEDS), f"a case can need {_NEEDS}"

        def enter(program: Callable[[CaseRank], None]) -> Callable[[CaseRank], None]:
            promise = (program.__doc__ or "").strip().splitlines()[0]

            def run(backend: Backend) -> None:
                program(CaseRank(backend))

            self.cases.append(Case(program.__name__, size, run, promise, needed))
            return program

        return enter
