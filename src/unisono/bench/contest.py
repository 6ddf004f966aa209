"""The contest: systems take turns at every case, round after round, never two at the same time.

Turns are short and systems alternate within a case, so that a slow minute of the machine affects all alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from unisono.bench.cases import Case
from unisono.bench.figures import Results
from unisono.bench.machine import described
from unisono.bench.operations import FLOAT32, OBJECTS, OPERATIONS, Operation
from unisono.bench.running_system import RunningSystem, SystemFailed
from unisono.bench.systems import OURS, PEERS, SYSTEMS
from unisono.bench.ways import WAYS
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError

__all__ = ["Options", "contest", "left_out", "missing_verbs"]

_MIB: Final = 1 << 20
# At most this many calls in one turn, however short they are.
_REPEATS_MAX: Final = 2000
# Results of longer vectors are not checked: computing the right answer would take longer than the rest.
_CHECKED_BYTES_MAX: Final = 16 * _MIB
_QUICK_CHECKED_BYTES_MAX: Final = _MIB
# Every operation is measured in every way of calling. These three differ in what a library may keep from
# one call to the next, which is the same for all operations: the quick mode takes one of each kind.
_SAMPLED_WAYS: Final = ("new view", "new array", "1000 lines")
_SAMPLES: Final = ("all_reduce", "all_gather", "ping", "sendrecv")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `turn_s`: how long one system works on one case before the next has its turn.

    `sizes` are for the usual way of calling, `way_sizes` for all others. `only`: patterns of which a case's
    label must match one (`Case.matches`).
    """

    ranks: Sequence[int] = (2, 4)
    only: Sequence[str] = ()
    sizes: Sequence[int] = (8, 64, 1 << 10, 8 << 10, 64 << 10, _MIB, 16 * _MIB, 128 * _MIB)
    way_sizes: Sequence[int] = (8, 64 << 10)
    links: Sequence[str] = tuple(OURS)
    peers: Sequence[str] = PEERS
    rounds: int = 5
    turn_s: float = 0.05
    quick: bool = False

    def __post_init__(self) -> None:
        _check("link", self.links, OURS)
        _check("peer", self.peers, PEERS)
        if any(n < 2 for n in self.ranks) or not self.ranks:
            raise UsageError(f"ranks={list(self.ranks)}; allowed: 2 or more each")
        if any(nbytes < 1 for nbytes in (*self.sizes, *self.way_sizes)) or not self.sizes:
            raise UsageError(f"sizes={list(self.sizes)}; allowed: 1 byte or more each")
        if self.rounds < 1 or self.turn_s <= 0:
            raise UsageError(f"rounds={self.rounds}, turn_s={self.turn_s}; allowed: 1 or more, above 0")
        if not self.cases(self.ranks[0]):
            raise UsageError(
                f"no case matches {', '.join(self.only)}; allowed: parts of a label such as"
                f" {Case('all_reduce', 2, 8, 'started').label}"
            )

    def cases(self, ranks: int) -> list[Case]:
        """The cases with this number of ranks, in order."""
        found = [
            Case(row.name, ranks, nbytes, way, data)
            for row in OPERATIONS
            if not missing_verbs(row)
            for data in row.data
            for way in self._ways(row, data)
            for nbytes in self._sizes(row, data, way)
        ]
        return [case for case in found if not self.only or any(map(case.matches, self.only))]

    def systems(self) -> list[str]:
        """The systems that take part: ours, and the peers that share a kind of link with them."""
        ours = [OURS[link] for link in self.links]
        return ours + [name for name in self.peers if SYSTEMS[name].link in (*self.links, "any")]

    def _ways(self, row: Operation, data: str) -> Iterator[str]:
        is_sampled = row.name in _SAMPLES and data == FLOAT32
        for way in row.ways:
            if WAYS[way].lines > 1 and data in OBJECTS[1:]:
                continue  # a turn of a thousand long calls
            if self.quick and way in _SAMPLED_WAYS and not is_sampled:
                continue
            if self.quick and data in ("torch", "number", *OBJECTS[1:]) and way != row.ways[0]:
                continue
            yield way

    def _sizes(self, row: Operation, data: str, way: str) -> Sequence[int]:
        if not row.has_sizes:
            return (0,)
        if way == row.ways[0] and data == FLOAT32:
            return self.sizes
        return self.way_sizes if WAYS[way].lines == 1 else self.way_sizes[:1]


def missing_verbs(row: Operation) -> set[str]:
    """The verbs of an operation that this version does not have."""
    return {verb for verb in row.lines["unisono"].verbs() if not hasattr(Communicator, verb)}


def left_out(options: Options, systems: Sequence[str]) -> dict[str, str]:
    """What is not measured, and why: operations without a verb of ours, and those that a peer lacks."""
    found = {}
    rows = [row for row in OPERATIONS if not options.only or any(_is_meant(row, p) for p in options.only)]
    if names := sorted({row.name for row in rows if missing_verbs(row)}):
        found["not measured"] = f"{', '.join(names)}: unisono has no such verb"
    for library in dict.fromkeys(SYSTEMS[name].library for name in systems):
        measured = [row for row in rows if not missing_verbs(row)]
        lacking = {row.name for row in measured if library not in row.lines}
        # An operation that it has for some kind of data has rows.
        if names := sorted(lacking - {row.name for row in measured if library in row.lines}):
            found[f"without {library}"] = f"{', '.join(names)}: it has no such call"
    return found


def _is_meant(row: Operation, pattern: str) -> bool:
    return any(Case(row.name, 2, 0, way, data).matches(pattern) for way in row.ways for data in row.data)


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
    absent |= left_out(options, [name for name in options.systems() if name not in absent])
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
        cases = options.cases(ranks)
        for number, case in enumerate(cases, 1):
            progress(f"{ranks} ranks, {number} of {len(cases)}: {case.label}")
            repeats = {}
            for name, system in list(running.items()):
                if not _takes_part(system, case):
                    continue
                try:
                    repeats[name] = _repeats(system, case, options)
                except SystemFailed as error:
                    drop(name, error)
            for round_ in range(options.rounds):
                # The order rotates, so that no system always follows the same one.
                order = [name for name in running if name in repeats]
                first = round_ % len(order)
                for name in order[first:] + order[:first]:
                    try:
                        seconds = running[name].measure(case, repeats[name])
                    except SystemFailed as error:
                        drop(name, error)
                    else:
                        results.add(case, name, seconds)


def _takes_part(system: RunningSystem, case: Case) -> bool:
    library = system.system.library
    return library in case.row.lines and (library != "gloo" or WAYS[case.way].for_gloo)


def _repeats(system: RunningSystem, case: Case, options: Options) -> int:
    """The number of calls in one turn, from a first try, which also checks the result."""
    checked_bytes_max = _QUICK_CHECKED_BYTES_MAX if options.quick else _CHECKED_BYTES_MAX
    seconds = system.measure(case, 3, check=case.nbytes <= checked_bytes_max)
    fixed = WAYS[case.way].repeats
    return fixed or max(2, min(_REPEATS_MAX, round(options.turn_s / seconds)))


def _check(what: str, given: Sequence[str], known: object) -> None:
    names = list(known)  # type: ignore[call-overload]
    for name in given:
        if name not in names:
            raise UsageError(f"{what} {name!r} is unknown; allowed: {', '.join(names)}")
