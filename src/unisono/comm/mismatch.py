"""A mismatch: ranks called different collectives under one number. Which ranks differ, and in what argument?

Pure: reports of calls by world rank in, a CollectiveMismatch out. mismatch_collector.py collects them. A
fingerprint alone says enough to tell calls apart; a rank that lives adds more words, and its line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Final

from unisono.comm.control_messages import CallReport
from unisono.comm.fingerprint import FORGOTTEN, verb_of, words_of
from unisono.errors import CollectiveMismatch, Location, ranks_text

__all__ = ["Mismatch"]


class Mismatch:
    """The calls of members by world rank, under one sequence number."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.calls: dict[int, CallReport] = {}

    def add(self, calls: Mapping[int, CallReport]) -> None:
        """Add calls of members. A member's first fingerprint counts; words and line may come later."""
        for rank, call in calls.items():
            known = self.calls.get(rank, call)
            words = call.words if call.fingerprint == known.fingerprint else ""
            line = call.line if known.line is None else known.line
            self.calls[rank] = CallReport(known.fingerprint, known.words or words, line)

    def ranks_reported(self) -> set[int]:
        """The members that have reported their calls themselves."""
        return {rank for rank, call in self.calls.items() if call.line is not None}

    def evidence(self, rank: int) -> dict[int, CallReport]:
        """The calls that a rank sends to the others: its own, and two that differ."""
        lowest = {self.calls[each].fingerprint: each for each in sorted(self.calls, reverse=True)}
        differing = sorted(lowest.values())[:2]
        return {each: self.calls[each] for each in (rank, *differing) if each in self.calls}

    def error(self, members: tuple[int, ...], rank: int, communicator: str, epoch: int) -> CollectiveMismatch:
        """The error as rank `rank` raises it, from the calls that are known."""
        sides = self._sides()
        lines = [f"{ranks_text(side)}: {_shown(self._call_of(side))}" for side in sorted(sides)]
        unknown = tuple(member for member in members if member not in self.calls)
        missing = [f"{ranks_text(unknown)} did not report in time"] if unknown else []
        mine = self.calls.get(rank)
        culprits = self._culprits(sides)
        return CollectiveMismatch(
            self._difference(sides, culprits),
            report="\n".join(lines),
            culprits=culprits,
            where=Location(
                verb_of(mine.fingerprint) if mine else "collective", communicator, epoch, self.sequence
            ),
            cause="; ".join([*lines, *missing]),
            next_step="make every rank call the same collectives in the same order",
        )

    def _sides(self) -> list[tuple[int, ...]]:
        """Sets of ranks that made the same call, the largest first."""
        sides: dict[bytes, list[int]] = {}
        for rank in sorted(self.calls):
            sides.setdefault(self.calls[rank].fingerprint, []).append(rank)
        return sorted(map(tuple, sides.values()), key=lambda side: (-len(side), side))

    def _call_of(self, side: tuple[int, ...]) -> CallReport:
        """The call of a side, as the first member shows it that says most of it."""
        calls = [self.calls[rank] for rank in side]
        return max(calls, key=lambda call: (bool(call.words), bool(call.line)))

    def _culprits(self, sides: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The ranks outside the majority, if more than half of the known calls are equal."""
        if not sides or 2 * len(sides[0]) <= len(self.calls):
            return ()
        return tuple(sorted(rank for side in sides[1:] for rank in side))

    def _difference(self, sides: list[tuple[int, ...]], culprits: tuple[int, ...]) -> str:
        if len(sides) < 2:
            return "ranks called different things"
        usual = self._call_of(sides[0])
        if culprits:
            most = ranks_text(sides[0])
            differences = [
                f"{ranks_text(side)} differ{'s' if len(side) == 1 else ''} from {most} in "
                + _aspects(self._call_of(side), usual, ", they ")
                for side in sides[1:]
            ]
            return f"ranks called different things: {'; '.join(differences)}"
        sides = sorted(sides)
        names = (
            f"ranks {' and '.join(str(rank) for (rank,) in sides)}"
            if all(len(side) == 1 for side in sides) and len(sides) == 2
            else " and ".join(map(ranks_text, sides))
        )
        if len(sides) != 2:
            return f"{names} called different things"
        aspects = _aspects(self._call_of(sides[0]), self._call_of(sides[1]), " against ")
        return f"{names} called different things: {aspects}"


# Arguments of the user are named first. Derived ones, such as the algorithm that was chosen by the count, are
# named only if nothing else differs.
_CHOSEN: Final = ("dtype", "count", "shape", "arrays", "op", "commutative", "identity", "root")
_DERIVED: Final = ("algorithm", "segment", "stage", "group", "arguments")
_ARRAY: Final = re.compile(r"(\w+)\[([^\]]*)\]")


# What the hash in a fingerprint stands for.
_HASHED: Final = "shape, uneven counts, segment size, group or user op"


def _aspects(mine: CallReport, theirs: CallReport, between: str) -> str:
    """The arguments in which two calls differ, in words."""
    is_known = bool(mine.words and theirs.words)
    here, there = (
        _parsed(call.words if is_known else words_of(call.fingerprint), call.fingerprint == FORGOTTEN)
        for call in (mine, theirs)
    )
    if here["verb"] != there["verb"]:
        differing = ["verb"]
    elif "arguments" in here or "arguments" in there:
        differing = ["arguments"]
    else:
        if (shapes := _ARRAY.fullmatch(here["arrays"])) and (others := _ARRAY.fullmatch(there["arrays"])):
            name = "shape" if "," in shapes[2] + others[2] else "count"
            here |= {"arrays": "", "dtype": shapes[1], name: shapes[2]}
            there |= {"arrays": "", "dtype": others[1], name: others[2]}
        differing = [name for name in _CHOSEN if here.get(name) != there.get(name)]
        differing = differing or [name for name in _DERIVED if here.get(name) != there.get(name)]
    if not differing:
        return _HASHED
    texts = [f"{name}: {here.get(name) or 'none'}{between}{there.get(name) or 'none'}" for name in differing]
    return _printable(" and ".join(texts))


def _parsed(text: str, is_forgotten: bool) -> dict[str, str]:
    """The arguments of a call by name."""
    if is_forgotten:
        return {"verb": text}
    if "~" in text:  # a long call ends in a digest
        return {"verb": text.partition(" ")[0], "arguments": text.rpartition("~")[2]}
    verb, *words = text.split(" ")
    given = list(takewhile(lambda word: "=" not in word, words))
    parts = {"verb": verb, "arrays": " ".join(given)}
    name = ""
    for word in words[len(given) :]:
        if "=" in word and word.partition("=")[0] in (*_CHOSEN, *_DERIVED):
            name, _, parts[name] = word.partition("=")
        else:  # an operation's name may have spaces
            parts[name] = f"{parts.get(name, '')} {word}"
    return parts


def _shown(call: CallReport) -> str:
    words = (call.words or words_of(call.fingerprint)).partition(" group=")[0]
    return _printable(words + (f" at {call.line}" if call.line else ""))


def _printable(text: str) -> str:
    """What another rank sent, for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
