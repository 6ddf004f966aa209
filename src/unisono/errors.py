"""Every exception that unisono raises, each answering: what can the caller do next?

    UnisonoError
    ├─ UsageError (ValueError)         fix the call; nothing was sent
    ├─ BackendUnavailable              install what it names, or choose another backend
    ├─ RendezvousError                 the world did not form; the text says who is missing
    ├─ DeadlineExceeded (TimeoutError) .waiting_on: retry, or look at those ranks
    ├─ PeerLost                        .ranks: every rank known to be dead or gone
    ├─ PeerAborted                     .rank and its own error text: look there first
    ├─ CollectiveMismatch              .report: the ranks called different things; .culprits: the minority
    ├─ Deadlock                        who waits for whom; only where nobody can end it
    ├─ ProtocolError                   a peer sent bytes that make no sense
    ├─ ClosedError                     stop using the closed thing
    └─ RemoteError                     .rank, .type_name, .traceback_text of a far exception
       ├─ BadArguments (TypeError)     a far function does not take these: the text names the argument
       └─ NotExposed (LookupError)     there is no such function there, or no agent: expose it first

Knows how an error reads and what fields it carries. Does not know who raises it.
Ranks in errors are world ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Final, TypedDict, Unpack

__all__ = [
    "BackendUnavailable",
    "BadArguments",
    "ClosedError",
    "CollectiveMismatch",
    "DeadlineExceeded",
    "Deadlock",
    "Location",
    "NotExposed",
    "PeerAborted",
    "PeerLost",
    "ProtocolError",
    "RemoteError",
    "RendezvousError",
    "UnisonoError",
    "UsageError",
]


@dataclass(frozen=True, slots=True)
class Location:
    """Where an operation stood when it failed: the part of the text that every error shares."""

    operation: str | None = None
    communicator: str | None = None
    epoch: int | None = None
    sequence: int | None = None
    elapsed_s: float | None = None

    def __str__(self) -> str:
        words = []
        if self.operation is not None:
            number = "" if self.sequence is None else f" #{self.sequence}"
            words.append(f"during {self.operation}{number}")
        if self.communicator is not None:
            words.append(f'on "{self.communicator}"')
        text = " ".join(words)
        if self.epoch is not None:
            text += f", epoch {self.epoch}"
        if self.elapsed_s is not None:
            text += f", after {self.elapsed_s:.3g} s"
        return text


class _Rest(TypedDict, total=False):
    """What every error may be told besides what happened."""

    where: Location | None
    cause: str | None
    next_step: str | None


class UnisonoError(Exception):
    """The base of all. Its text says what happened, where, why, and what to do next.

    `usual_step` is the next step of errors of a kind that are told no better one: every error has one.
    """

    usual_step: ClassVar[str] = "see what the other ranks say; if that explains nothing, report it"

    def __init__(
        self,
        what: str,
        *,
        where: Location | None = None,
        cause: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where if where is not None else Location()
        self.cause = cause
        self.next_step = next_step or self.usual_step
        super().__init__(what)

    def __str__(self) -> str:
        where = str(self.where)
        text = self.what + (where if where.startswith(",") or not where else f" {where}")
        if why := self._why():
            text += f": {why}"
        return f"{text}. Next: {self.next_step}"

    def _why(self) -> str:
        """The cause in words. It may be another error's text, but that one's next step is not this one's."""
        return (self.cause or "").partition(". Next: ")[0]

    @property
    def operation(self) -> str | None:
        """The verb that failed, such as "all_reduce"."""
        return self.where.operation

    @property
    def communicator(self) -> str | None:
        """The name of the communicator it was called on."""
        return self.where.communicator

    @property
    def epoch(self) -> int | None:
        """The membership view in force."""
        return self.where.epoch

    @property
    def sequence(self) -> int | None:
        """The number of the collective on its communicator."""
        return self.where.sequence

    @property
    def elapsed_s(self) -> float | None:
        """How long the operation had run."""
        return self.where.elapsed_s

    def located(self, where: Location) -> UnisonoError:
        """Return a copy that stands at `where`, keeping what it already knows about itself."""
        copy = _copy(self)
        known = {name: getattr(self.where, name) for name in Location.__slots__}
        copy.where = replace(where, **{name: value for name, value in known.items() if value is not None})
        return copy


class UsageError(UnisonoError, ValueError):
    """The call is wrong: it says what was given and what is allowed. Nothing was sent."""

    usual_step = "correct the call; nothing was sent"


class BackendUnavailable(UnisonoError):
    """The backend cannot run here; the text names the command that installs it."""

    usual_step = "uni.list_backends() shows what can run here and how to install the rest"


class RendezvousError(UnisonoError):
    """The ranks did not find each other."""

    usual_step = "check that every rank was started, with the same size, address and ticket"


class DeadlineExceeded(UnisonoError, TimeoutError):
    """Time ran out; `waiting_on` holds the world ranks that had not answered."""

    usual_step = "see what these ranks do, or raise timeout="

    def __init__(self, what: str, *, waiting_on: tuple[int, ...] = (), **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.waiting_on = waiting_on


class PeerLost(UnisonoError):
    """One or more ranks died, fell silent or left; `ranks` holds all that are known."""

    usual_step = "see what these ranks wrote last and how they ended"

    def __init__(self, what: str, *, ranks: tuple[int, ...] = (), **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.ranks = ranks
        if self.next_step == self.usual_step and _UNREACHED in (self.cause or ""):
            self.next_step = _OPEN_PORT

    def of_ranks(self, ranks: tuple[int, ...]) -> PeerLost:
        """Return a copy that names these ranks: the same ones as others number them, or more of them."""
        if ranks == self.ranks:
            return self
        return PeerLost(
            lost_text(ranks, self.cause),
            ranks=ranks,
            where=self.where,
            cause=self.cause,
            next_step=self.next_step,
        )


class PeerAborted(UnisonoError):
    """A rank gave up and said why; `rank` is where to look."""

    usual_step = "look at that rank first"

    def __init__(self, what: str, *, rank: int = -1, **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.rank = rank


class CollectiveMismatch(UnisonoError):
    """The ranks of a communicator called different things; `report` shows each call, and who made it.

    `culprits` are the ranks whose call is not that of the majority; there are none if no call has one.
    """

    usual_step = "make all ranks of the communicator call the same, with the same arguments"

    def __init__(
        self, what: str, *, report: str = "", culprits: tuple[int, ...] = (), **rest: Unpack[_Rest]
    ) -> None:
        super().__init__(what, **rest)
        self.report = report
        self.culprits = culprits


class Deadlock(UnisonoError):
    """Every rank waits for another, so no one can go on; the text says who waits for whom."""

    usual_step = "break the cycle, or give one of these waits a timeout"


class ProtocolError(UnisonoError):
    """Bytes arrived that no correct peer sends."""

    usual_step = "check that all ranks run one version of unisono and that nobody else writes to their links"


class ClosedError(UnisonoError):
    """The communicator, backend or agent was closed."""

    usual_step = "make a new one, or close this one later"


class RemoteError(UnisonoError):
    """An exception on another rank whose type cannot be rebuilt here.

    Its text names the line there that raised it; `traceback_text` has the whole traceback.
    """

    usual_step = "see .traceback_text, the whole traceback of that rank"

    def __init__(
        self,
        what: str,
        *,
        rank: int = -1,
        type_name: str = "",
        traceback_text: str = "",
        **rest: Unpack[_Rest],
    ) -> None:
        super().__init__(what, **rest)
        self.rank = rank
        self.type_name = type_name
        self.traceback_text = traceback_text

    def _why(self) -> str:
        why, frames = super()._why(), _FRAME.findall(self.traceback_text)
        if not frames:
            return why
        file, line, function = frames[-1]
        raised_at = "".join(c for c in f"at {file}:{line} in {function}" if c.isprintable())
        return f"{why}, {raised_at}" if why else raised_at


class BadArguments(RemoteError, TypeError):
    """A function on another rank does not take the arguments; it was not called."""

    usual_step = "call it with the arguments that it takes"


class NotExposed(RemoteError, LookupError):
    """There is no function of this name on the other rank, or no agent."""

    usual_step = "expose it on that rank before it is called: agent.register(name, fn)"


# A frame of a traceback in Python's own words.
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


# So many ranks are named one by one; of more, neighbours are written as a range.
_RANKS_LISTED: Final = 8
# More ranges than this say nothing to a reader.
_RANGES_MAX: Final = 32


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0, 1, 3", of many "ranks 0-6, 8-9"."""
    numbers = sorted(set(ranks))
    is_short = len(numbers) <= _RANKS_LISTED
    listed = ", ".join(map(str, numbers)) if is_short else rank_numbers(numbers)
    return f"rank{'' if len(numbers) == 1 else 's'} {listed}"


def rank_numbers(ranks: Iterable[int]) -> str:
    """Ranks as briefly as a person writes them: "0-3, 7"."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(sorted(set(ranks))), lambda place: place[1] - place[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(parts[:_RANGES_MAX]) + (", ..." if len(parts) > _RANGES_MAX else "")


def counted(number: int, noun: str) -> str:
    """A number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def said_of(rank: int, cause: str) -> str:
    """What happened to a rank, as a sentence: a cause says it with or without "it", or names a thing."""
    if cause.startswith("it "):
        cause = cause.removeprefix("it ")
    elif cause.startswith(("its ", "no ", "the ", "data ", "too ", "cannot ")) and not cause.startswith(
        "cannot be "
    ):
        return f"rank {rank}: {cause}"
    return f"rank {rank} {cause}"


# How the engine begins the cause of a rank that does not answer: native/connect/connector.cpp.
_UNREACHED: Final = "cannot be reached from rank"
_OPEN_PORT: Final = (
    "see whether that rank still runs; if it does, let TCP and UDP through to that port of its host "
    "(--address HOST:PORT fixes the ports: PORT for the seed, those after it for the ranks of a host)"
)


def lost_text(ranks: tuple[int, ...], cause: str | None = None) -> str:
    """Who is gone, or only out of reach, in words."""
    how = "out of reach" if all(_UNREACHED in each for each in (cause or "").split("; ")) else "gone"
    return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {how}"


def _copy(error: UnisonoError) -> UnisonoError:
    """Copy an error without its traceback, so that each rank and thread raises its own."""
    copy = type(error).__new__(type(error))
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    return copy
