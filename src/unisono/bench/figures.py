"""Times in; medians, ratios and their spread out.

Results are kept as JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.systems import OURS, SYSTEMS
from unisono.errors import UsageError

__all__ = ["Ratio", "Results"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Ratio:
    """A peer's time divided by ours: above 1 ours is faster. `low` and `high` are of single rounds."""

    median: float
    low: float
    high: float


@dataclass(slots=True)
class Results:
    """Seconds per call of every case and system, one figure per round."""

    machine: Mapping[str, str]
    times: dict[Case, dict[str, list[float]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, case: Case, system: str, seconds: float) -> None:
        """Add the time of one round."""
        self.times.setdefault(case, {}).setdefault(system, []).append(seconds)

    def cases(self, operation: str, ranks: int) -> list[Case]:
        """The measured cases of an operation, by size."""
        return sorted(case for case in self.times if (case.operation, case.ranks) == (operation, ranks))

    def operations(self) -> list[str]:
        """The operations, in the order of measurement."""
        return list(dict.fromkeys(case.operation for case in self.times))

    def ranks(self) -> list[int]:
        """The numbers of ranks."""
        return sorted({case.ranks for case in self.times})

    def systems(self, link: str) -> list[str]:
        """The systems that were measured on a link, ours first."""
        names = list(dict.fromkeys(name for systems in self.times.values() for name in systems))
        return [name for name in SYSTEMS if name in names and SYSTEMS[name].link in (link, "any")]

    def tables(self) -> Iterator[tuple[str, list[str], list[Case]]]:
        """For each table our system, its peers and the cases; by link, ranks and operation."""
        for link, ours in OURS.items():
            systems = self.systems(link)
            if ours not in systems:
                continue
            peers = [name for name in systems if name != ours]
            for ranks in self.ranks():
                for operation in self.operations():
                    yield ours, peers, self.cases(operation, ranks)

    def seconds(self, case: Case, system: str) -> float | None:
        """The median; None if it was not measured."""
        times = self.times.get(case, {}).get(system)
        return statistics.median(times) if times else None

    def ratio(self, case: Case, ours: str, peer: str) -> Ratio | None:
        """The peer's time over ours, from the rounds that both have."""
        mine, theirs = (self.times.get(case, {}).get(name, []) for name in (ours, peer))
        each = [their / my for my, their in zip(mine, theirs, strict=False)]
        return Ratio(statistics.median(each), min(each), max(each)) if each else None

    def as_json(self) -> str:
        """Everything, as JSON."""
        rows = [
            {
                "operation": case.operation,
                "ranks": case.ranks,
                "bytes": case.nbytes,
                "system": system,
                "seconds": times,
                "median_s": statistics.median(times),
                "algbw_bytes_per_s": case.algorithm_bandwidth(statistics.median(times)),
                "busbw_bytes_per_s": case.bus_bandwidth(statistics.median(times)),
            }
            for case, systems in self.times.items()
            for system, times in systems.items()
        ]
        whole = {"format": _FORMAT, "machine": dict(self.machine), "absent": self.absent, "rows": rows}
        return json.dumps(whole, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read what `as_json` has written.

        Raises:
            UsageError: the text is not from `as_json`.
        """
        try:
            whole: dict[str, Any] = json.loads(text)
            if whole["format"] != _FORMAT:
                raise UsageError(f"results of format {whole['format']!r}; allowed: {_FORMAT}")
            results = cls(whole["machine"], absent=dict(whole["absent"]))
            for row in whole["rows"]:
                case = Case(row["operation"], row["ranks"], row["bytes"])
                for seconds in row["seconds"]:
                    results.add(case, row["system"], float(seconds))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                "these are no results of `unisono bench --json`",
                cause=str(error),
                next_step="give a file that it has written",
            ) from None
        return results
