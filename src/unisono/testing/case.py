"""A case: one promise of the backend contract, as a program that every rank runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from unisono.messaging.backend import Backend
from unisono.testing.case_rank import CaseRank

__all__ = ["Case", "ConformanceError", "Suite"]

# What a case can need: fields of Capabilities, and "threads": ranks that run in real time.
_NEEDS: Final = ("sync_send", "threads", "wildcards")


class ConformanceError(AssertionError):
    """A backend breaks its contract in `case`, as seen by `rank`; the text says what was expected."""

    def __init__(self, case: str, rank: int, text: str) -> None:
        super().__init__(f"case {case!r}, rank {rank}: {text}")
        self.case = case
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Case:
    """A program for `size` ranks: each rank calls `run(backend)` with its own backend.

    `promise` says in one sentence what the case checks. `needs` are abilities without which it cannot run.
    """

    name: str
    size: int
    run: Callable[[Backend], None]
    promise: str
    needs: frozenset[str] = frozenset()

    def lacking(self, backend: Backend) -> frozenset[str]:
        """The needs of this case that the backend does not meet."""
        able = backend.capabilities
        has = {
            "sync_send": able.sync_send,
            "wildcards": able.wildcards,
            "threads": not backend.runtime.is_virtual,
        }
        return frozenset(need for need in self.needs if not has[need])


class Suite:
    """A table of cases, written as functions: the first line of the docstring is the promise."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def case(
        self, size: int, needs: Iterable[str] = ()
    ) -> Callable[[Callable[[CaseRank], None]], Callable[[CaseRank], None]]:
        """Add a function as a case for `size` ranks."""
        needed = frozenset(needs)
        assert needed <= set(_NEEDS), f"a case can need {_NEEDS}"

        def add(program: Callable[[CaseRank], None]) -> Callable[[CaseRank], None]:
            promise = (program.__doc__ or "").strip().splitlines()[0]

            def run(backend: Backend) -> None:
                program(CaseRank(backend))

            self.cases.append(Case(program.__name__, size, run, promise, needed))
            return program

        return add
