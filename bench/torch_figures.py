"""Figures of torch on Gloo and on unisono, kept in a JSON file: a long table is measured in slices.

The file also says of every slice when it ran, on which machine and beside which load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_groups import GLOO, OURS

from unisono.bench.machine import described

__all__ = ["ALONE", "Call", "Figures", "Model", "Seconds", "Slice", "add_arguments"]

# The turn of a training step that does not communicate.
ALONE = "no_sync"

# By backend, or ALONE: seconds of each round.
Seconds = dict[str, list[float]]


@dataclass(frozen=True, order=True)
class Call:
    """A call of torch.distributed, as a user writes it."""

    ranks: int
    form: str
    nbytes: int


@dataclass(frozen=True, order=True)
class Model:
    """A step of DistributedDataParallel."""

    ranks: int
    name: str
    millions: float  # of parameters


@dataclass
class Figures:
    """What was measured, and the slices that measured it."""

    calls: dict[Call, Seconds] = field(default_factory=dict)
    steps: dict[Model, Seconds] = field(default_factory=dict)
    slices: list[dict[str, str]] = field(default_factory=list)

    @staticmethod
    def read(path: Path | None) -> Figures:
        """Those of a file; none if there is no such file."""
        if path is None or not path.exists():
            return Figures()
        kept = json.loads(path.read_text())
        return Figures(
            {Call(**row): seconds for row, seconds in kept["calls"]},
            {Model(**row): seconds for row, seconds in kept["steps"]},
            kept["slices"],
        )

    def write(self, path: Path) -> None:
        """All of them, in the order of their cases."""
        sections = {name: sorted(getattr(self, name).items()) for name in ("calls", "steps")}
        rows = {name: [[asdict(case), s] for case, s in rows] for name, rows in sections.items()}
        path.write_text(json.dumps({**rows, "slices": self.slices}, indent=None))

    def ratio(self, case: Call | Model) -> list[float]:
        """Gloo's time over ours, round by round."""
        seconds = self.calls[case] if isinstance(case, Call) else self.steps[case]
        return [theirs / ours for theirs, ours in zip(seconds[GLOO], seconds[OURS], strict=True)]

    def exposed(self, case: Model) -> dict[str, list[float]]:
        """Seconds of communication that computing does not hide, by round; noise may make them negative."""
        seconds = self.steps[case]
        return {
            each: [a - b for a, b in zip(seconds[each], seconds[ALONE], strict=True)] for each in (GLOO, OURS)
        }

    def exposed_ratio(self, case: Model) -> float:
        """Gloo's exposed communication over ours: of medians, because single rounds may be near 0."""
        theirs, ours = (statistics.median(each) for each in self.exposed(case).values())
        return theirs / ours if ours > 0 else float("inf")


class Slice:
    """One run: which of the cases it measures, for how long, and where the figures are kept."""

    def __init__(self, args: argparse.Namespace, script: str) -> None:
        self._path: Path | None = args.keep
        self._again: bool = args.again
        self._until = time.monotonic() + args.seconds if args.seconds else None
        self.figures = Figures.read(self._path)
        self._about = {"script": script, **described()}

    def missing(self, cases: Iterable[Any]) -> list[Any]:
        """The cases that the file does not have; all of them if they are to be measured again."""
        known = {**self.figures.calls, **self.figures.steps}
        return [case for case in cases if self._again or case not in known]

    def left_s(self) -> float:
        """Seconds until no further case may begin."""
        return float("inf") if self._until is None else self._until - time.monotonic()

    def end(self) -> None:
        """Keep what was measured."""
        if self._path is not None:
            self.figures.slices.append(self._about)
            self.figures.write(self._path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every bench of torch takes."""
    parser.add_argument("-n", default=None, help="numbers of ranks (2,4)")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each (7)")
    parser.add_argument("--turn", type=float, default=None, help="seconds of a turn")
    parser.add_argument("--keep", type=Path, help="add the figures to this file, and measure what it lacks")
    parser.add_argument("--again", action="store_true", help="also what the file of --keep has")
    parser.add_argument("--seconds", type=float, default=None, help="begin no case after so many seconds")
