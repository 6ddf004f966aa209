"""The contest: systems take turns at every case, round after round, never two at the same time.

Turns are short and systems alternate within a case, so that a slow minute of the machine affects all alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from unisono.bench.cases import OPERATIONS, Case
from unisono.bench.figures import Results
from unisono.bench.machine import described
from unisono.bench.running_system import RunningSystem, SystemFailed
from unisono.bench.systems import OURS, PEERS, SYSTEMS
from unisono.errors import UsageError

__all__ = ["Options", "contest"]

_MIB: Final = 1 << 20
# At most this many calls in one turn, however short they are.
_REPEATS_MAX: Final = 2000
# Results of longer vectors are not checked: computing the right answer would take longer than the rest.
_CHECKED_BYTES_MAX: Final = 16 * _MIB


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `turn_s`: how long one system works on one case before the next has its turn."""

    ranks: Sequence[int] = (2, 4)
    operations: Sequence[str] = tuple(OPERATIONS)
    sizes: Sequence[int] = (8, 64, 1 << 10, 8 << 10, 64 << 10, _MIB, 16 * _MIB, 128 * _MIB)
    links: Sequence[str] = tuple(OURS)
    peers: Sequence[str] = PEERS
    rounds: int = 5
    turn_s: float = 0.05

    def __post_init__(self) -> None:
        _check("operation", self.operations, OPERATIONS)
        _check("link", self.links, OURS)
        _check("peer", self.peers, PEERS)
        if any(n < 2 for n in self.ranks) or not self.ranks:
            raise UsageError(f"ranks={list(self.ranks)}; allowed: 2 or more each")
        if any(nbytes < 1 for nbytes in self.sizes) or not self.sizes:
            raise UsageError(f"sizes={list(self.sizes)}; allowed: 1 byte or more each")
        if self.rounds < 1 or self.turn_s <= 0:
            raise UsageError(f"rounds={self.rounds}, turn_s={self.turn_s}; allowed: 1 or more, above 0")

    def cases(self, ranks: int) -> list[Case]:
        """The cases with this number of ranks, in order; a barrier has one only."""
        return [
            Case(operation, ranks, nbytes)
            for operation in self.operations
            for nbytes in ((0,) if operation == "barrier" else self.sizes)
        ]

    def systems(self) -> list[str]:
        """The systems that take part: ours, and the peers that share a kind of link with them."""
        ours = [OURS[link] for link in self.links]
        return ours + [name for name in self.peers if SYSTEMS[name].link in (*self.links, "any")]


def contest(options: Options, progress: Callable[[str], None] = lambda _: None) -> Results:
    """Measure. A peer that is not installed or fails is left out, and the results say why.

    `progress` gets a line of text before each step.

    Raises:
        SystemFailed: one of our own systems failed.
    """
    absent: dict[str, str] = {}
    for name in options.systems():
        if (why := SYSTEMS[name].missing()) is not None:
            absent[name] = why
    results = Results(described(), absent=absent)
    for ranks in options.ranks:
        _compete(options, ranks, results, progress)
    return results


def _compete(options: Options, ranks: int, results: Results, progress: Callable[[str], None]) -> None:
    with contextlib.ExitStack() as stack:
        running: dict[str, RunningSystem] = {}

        def drop(name: str, error: SystemFailed) -> None:
            if name in OURS.values():
                raise error
            results.absent[f"{name}, {ranks} ranks"] = str(error)
            if name in running:
                running.pop(name).close()

        for name in options.systems():
            if name not in results.absent:
                progress(f"starting {ranks} ranks of {name}")
                try:
                    running[name] = stack.enter_context(RunningSystem(SYSTEMS[name], ranks))
                except SystemFailed as error:
                    drop(name, error)
        for case in options.cases(ranks):
            progress(f"{case.operation} on {ranks} ranks, {case.nbytes:,} bytes")
            repeats = {}
            for name, system in list(running.items()):
                try:
                    repeats[name] = _repeats(system, case, options.turn_s)
                except SystemFailed as error:
                    drop(name, error)
            for round_ in range(options.rounds):
                # The order rotates, so that no system always follows the same one.
                order = list(running)
                for name in order[round_ % len(order) :] + order[: round_ % len(order)]:
                    try:
                        seconds = running[name].measure(case, repeats[name])
                    except SystemFailed as error:
                        drop(name, error)
                    else:
                        results.add(case, name, seconds)


def _repeats(system: RunningSystem, case: Case, turn_s: float) -> int:
    """The number of calls in one turn, from a first try, which also checks the result."""
    tries = 20 if case.nbytes < _MIB else 3 if case.nbytes <= _CHECKED_BYTES_MAX else 1
    seconds = system.measure(case, tries, check=case.nbytes <= _CHECKED_BYTES_MAX)
    return max(2, min(_REPEATS_MAX, round(turn_s / seconds)))


def _check(what: str, given: Sequence[str], known: object) -> None:
    names = list(known)  # type: ignore[call-overload]
    for name in given:
        if name not in names:
            raise UsageError(f"{what} {name!r} is unknown; allowed: {', '.join(names)}")
