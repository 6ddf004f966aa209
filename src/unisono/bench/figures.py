"""Times in; medians, ratios with their spread, and their geometric mean out.

Results are kept as JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.operations import FLOAT32
from unisono.bench.systems import OURS, SYSTEMS
from unisono.errors import UsageError

__all__ = ["Ratio", "Results", "Summary"]

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Ratio:
    """A peer's time divided by ours: above 1 ours is faster. `low` and `high` are of single rounds."""

    median: float
    low: float
    high: float

    def texts(self) -> tuple[str, str]:
        """The median, and the ends: "2.00" and "(1.50-4.00)"."""
        return _digits(self.median), f"({_digits(self.low)}-{_digits(self.high)})"


@dataclass(frozen=True, slots=True)
class Summary:
    """All cases with one number of ranks that a peer has, too.

    `below` are those where it is faster, the worst first.
    """

    ours: str
    peer: str
    ranks: int
    cases: int
    geometric_mean: float
    below: tuple[tuple[Case, Ratio], ...]


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
        """The measured cases of an operation, by way of calling, data and size."""
        found = [case for case in self.times if (case.operation, case.ranks) == (operation, ranks)]
        return sorted(found, key=lambda case: (case.way_order, case.data != FLOAT32, case.data, case.nbytes))

    def sizes(self, operation: str, ranks: int) -> list[Case]:
        """The cases that differ in nothing but their size: arrays, the usual way of calling."""
        return [
            case
            for case in self.cases(operation, ranks)
            if case.nbytes and case.data == FLOAT32 and case.way == case.row.ways[0]
        ]

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
                    if cases := self.cases(operation, ranks):
                        yield ours, [name for name in peers if self._has(name, cases)], cases

    def summaries(self) -> Iterator[Summary]:
        """How each of ours does beside each peer; by link, ranks and peer."""
        for link, ours in OURS.items():
            for ranks in self.ranks():
                for peer in self.systems(link):
                    ratios = [
                        (case, ratio)
                        for case in self.times
                        if case.ranks == ranks and (ratio := self.ratio(case, ours, peer)) is not None
                    ]
                    if peer == ours or not ratios:
                        continue
                    mean = statistics.geometric_mean(ratio.median for _, ratio in ratios)
                    below = sorted(
                        ((case, ratio) for case, ratio in ratios if ratio.median < 1),
                        key=lambda pair: pair[1].median,
                    )
                    yield Summary(ours, peer, ranks, len(ratios), mean, tuple(below))

    def _has(self, system: str, cases: list[Case]) -> bool:
        return any(system in self.times[case] for case in cases)

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
                **asdict(case),
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
                case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
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


def _digits(number: float) -> str:
    """Two decimals, or two digits if that would show nothing."""
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"
