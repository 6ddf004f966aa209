"""Faults: what goes wrong in a simulation, and when.

A fault begins either at `at_s` seconds of virtual time or at `at_step`: just before the k-th operation of the
backend contract, counted from 1. Operations are sends, receives and probes, of which a collective has many;
control messages of communicators do not count. `at_step` counts the operations of `rank` or `src`. For a
Partition, which has no such rank, and a Resume, whose rank stands still, it counts those of all ranks.
`for_s=None` means for ever.
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
    "channels_cut",
    "checked_faults",
    "counted_rank",
]


@dataclass(frozen=True, slots=True)
class Kill:
    """The process of a rank dies: its program unwinds at its next operation. What it sent still arrives."""

    rank: int
    at_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_rank("rank", self.rank)
        _check_times(self, self.at_s, self.at_step)


@dataclass(frozen=True, slots=True)
class Pause:
    """The process of a rank stops; what is sent to it waits. With `for_s=None`, until a Resume."""

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
    """Nothing gets from `src` to `dst`; the other direction is not affected."""

    src: int
    dst: int
    at_s: float | None = None
    for_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_channel(self.src, self.dst)
        _check_times(self, self.at_s, self.at_step, self.for_s)


@dataclass(frozen=True, slots=True)
class Slow:
    """What is sent from `src` to `dst` takes `factor` times as long; the other direction is not affected."""

    src: int
    dst: int
    factor: float
    at_s: float | None = None
    for_s: float | None = None
    at_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_channel(self.src, self.dst)
        check_amount("factor", self.factor, above=0)
        _check_times(self, self.at_s, self.at_step, self.for_s)


Fault: TypeAlias = Kill | Pause | Resume | Partition | Drop | Slow


def checked_faults(faults: Iterable[Any], size: int) -> tuple[Fault, ...]:
    """Check the faults of a world of `size` ranks.

    Raises:
        UsageError: an entry is not a fault, or names a rank that does not exist.
    """
    checked: list[Fault] = []
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(f"faults has {fault!r}; allowed: Kill, Pause, Resume, Partition, Drop, Slow")
        for rank in _ranks_named(fault):
            check_rank(f"{fault}: rank", rank, size)
        checked.append(fault)
    return tuple(checked)


def counted_rank(fault: Fault) -> int | None:
    """The rank whose operations `at_step` counts; None: all ranks."""
    match fault:
        case Kill() | Pause():
            return fault.rank
        case Drop() | Slow():
            return fault.src
        case Partition() | Resume():
            return None


def channels_cut(fault: Partition | Drop) -> tuple[tuple[int, int], ...]:
    """The channels (src, dst) that a fault cuts."""
    if isinstance(fault, Drop):
        return ((fault.src, fault.dst),)
    pairs = [(one, other) for one in fault.groups for other in fault.groups if one is not other]
    return tuple((src, dst) for one, other in pairs for src in one for dst in other)


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


def _check_channel(src: int, dst: int) -> None:
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
        check_rank("groups: rank", rank)
    if len(checked) < 2 or not all(checked):
        raise UsageError(f"groups={groups!r}; allowed: two groups or more, none of them empty")
    twice = sorted(rank for rank in set(ranks) if ranks.count(rank) > 1)
    if twice:
        raise UsageError(f"groups={groups!r} has rank {twice[0]} twice; allowed: groups that do not overlap")
    return tuple(tuple(sorted(group)) for group in checked)
