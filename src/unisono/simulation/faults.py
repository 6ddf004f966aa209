"""Faults: what goes wrong in a simulation, and when.

Knows what a user may ask for. Does not know how it is done.

Each begins `at_s` seconds of virtual time after the start, or `at_step`: just before the k-th operation of
the backend contract, counted from 1: a send, a receive or a probe, of which a collective has many; what
communicators tell each other by themselves does not count. The operations of `rank` or `src` are meant. A
Partition has no such rank, and that of a Resume stands still: there the operations of all ranks count.
`for_s` None means for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from unisono.errors import UsageError
from unisono.simulation.checks import check_amount, check_rank, check_step

__all__ = [
    "Drop",
    "Fault",
    "Kill",
    "Partition",
    "Pause",
    "Resume",
    "Slow",
    "checked_faults",
    "counted_rank",
    "ways_cut",
]


@dataclass(frozen=True, slots=True)
class Kill:
    """The process of a rank ends: it unwinds at its next operation. What it sent still arrives."""

    rank: int
    at_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_rank("rank", self.rank)
        _check_times(self, self.at_s, self.at_step)


@dataclass(frozen=True, slots=True)
class Pause:
    """The process of a rank stands still; what is sent to it waits. `for_s` None: until a Resume."""

    rank: int
    at_s: float | None = None
    for_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_rank("rank", self.rank)
        _check_times(self, self.at_s, self.at_step, self.for_s)


@dataclass(frozen=True, slots=True)
class Resume:
    """Every pause of a rank ends."""

    rank: int
    at_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_rank("rank", self.rank)
        _check_times(self, self.at_s, self.at_step)


@dataclass(frozen=True, slots=True)
class Partition:
    """Ranks of different groups do not reach each other. A rank in no group reaches all."""

    groups: Iterable[Iterable[int]]
    at_s: float | None = None
    for_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _checked_groups(self.groups))
        _check_times(self, self.at_s, self.at_step, self.for_s)


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing gets from `src` to `dst`; the way back is open."""

    src: int
    dst: int
    at_s: float | None = None
    for_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_way(self.src, self.dst)
        _check_times(self, self.at_s, self.at_step, self.for_s)


@dataclass(frozen=True, slots=True)
class Slow:
    """What is sent from `src` to `dst` takes `factor` times as long; the way back is as it was."""

    src: int
    dst: int
    factor: float
    at_s: float | None = None
    for_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_way(self.src, self.dst)
        check_amount("factor", self.factor, above=0)
        _check_times(self, self.at_s, self.at_step, self.for_s)


Fault: TypeAlias = Kill | Pause | Resume | Partition | Drop | Slow


def checked_faults(faults: Iterable[Any], size: int) -> tuple[Fault, ...]:
    """The faults of a world of `size` ranks; what is no fault, or strikes nobody, is refused."""
    checked: list[Fault] = []
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(f"faults has {fault!r}; allowed: Kill, Pause, Resume, Partition, Drop, Slow")
        for rank in _ranks_named(fault):
            check_rank(f"rank in {fault}", rank, size)
        checked.append(fault)
    return tuple(checked)


def counted_rank(fault: Fault) -> int | None:
    """Whose operations `at_step` counts; None: everybody's."""
    match fault:
        case Kill() | Pause():
            return fault.rank
        case Drop() | Slow():
            return fault.src
        case Partition() | Resume():
            return None


def ways_cut(fault: Partition | Drop) -> tuple[tuple[int, int], ...]:
    """The ways (src, dst) that are closed."""
    if isinstance(fault, Drop):
        return ((fault.src, fault.dst),)
    sides = [(here, there) for here in fault.groups for there in fault.groups if here is not there]
    return tuple((src, dst) for here, there in sides for src in here for dst in there)


def _ranks_named(fault: Fault) -> tuple[int, ...]:
    match fault:
        case Kill() | Pause() | Resume():
            return (fault.rank,)
        case Drop() | Slow():
            return (fault.src, fault.dst)
        case Partition():
            return tuple(rank for group in fault.groups for rank in group)


def _check_times(fault: object, at_s: float | None, at_step: int | None, for_s: float | None = None) -> None:
    if (at_s is None) == (at_step is None):
        raise UsageError(
            f"{type(fault).__name__} needs at_s or at_step, and not both", next_step="give one of the two"
        )
    if at_s is not None:
        check_amount("at_s", at_s)
    else:
        check_step("at_step", at_step)
    if for_s is not None:
        check_amount("for_s", for_s)


def _check_way(src: int, dst: int) -> None:
    check_rank("src", src)
    check_rank("dst", dst)
    if src == dst:
        raise UsageError(f"src=dst={src}; allowed: two different ranks")


def _checked_groups(groups: Any) -> tuple[tuple[int, ...], ...]:
    try:
        checked = tuple(tuple(group) for group in groups)
    except TypeError:
        raise UsageError(f"groups={groups!r}; allowed: groups of ranks, such as [[0, 1], [2, 3]]") from None
    ranks = [rank for group in checked for rank in group]
    for rank in ranks:
        check_rank("rank in groups", rank)
    if len(checked) < 2 or not all(checked):
        raise UsageError(f"groups={groups!r}; allowed: two groups or more, none of them empty")
    twice = sorted(rank for rank in set(ranks) if ranks.count(rank) > 1)
    if twice:
        raise UsageError(f"groups={groups!r} has rank {twice[0]} twice; allowed: groups that do not overlap")
    return tuple(tuple(sorted(group)) for group in checked)
