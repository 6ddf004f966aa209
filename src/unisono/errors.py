"""Every exception that unisono raises, each answering: what can the caller do next?

    UnisonoError
    ├─ UsageError (ValueError)         fix the call; nothing was sent
    ├─ BackendUnavailable              install what it names, or choose another backend
    ├─ RendezvousError                 the world did not form; the text says who is missing
    ├─ DeadlineExceeded (TimeoutError) .waiting_on: retry, or look at those ranks
    ├─ PeerLost                        .ranks: every rank known to be dead or gone
    ├─ PeerAborted                     .rank and its own error text: look there first
    ├─ CollectiveMismatch              .report: the ranks called different things
    ├─ Deadlock                        who waits for whom (simulator and in-process ranks)
    ├─ Revoked                         a member revoked the communicator: rebuild it
    ├─ StaleEpoch                      the others went on without this process
    ├─ QuorumLost                      this side of a partition must not go on
    ├─ ProtocolError                   a peer sent bytes that make no sense
    ├─ ClosedError                     stop using the closed thing
    └─ RemoteError                     .rank, .type_name, .traceback_text of a far exception
       ├─ BadArguments (TypeError)     a far function does not take these: the text names the argument
       └─ NotExposed (LookupError)     there is no such function there, or no agent: expose it first

Knows how an error reads and what fields it carries. Does not know who raises it.
Ranks in errors are world ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypedDict, Unpack

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
    "QuorumLost",
    "RemoteError",
    "RendezvousError",
    "Revoked",
    "StaleEpoch",
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
    """The base of all. Its text is built once, from what happened, where and what to do next.

    `usual_step` is the next step of errors of a kind that are told no better one.
    """

    usual_step: ClassVar[str] = ""

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
        self.next_step = next_step
        super().__init__(what)

    def __str__(self) -> str:
        where = str(self.where)
        text = self.what + (where if where.startswith(",") or not where else f" {where}")
        if self.cause:
            text += f": {self.cause}"
        if step := self.next_step or self.usual_step:
            text += f". Next: {step}"
        return text

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


class BackendUnavailable(UnisonoError):
    """The backend cannot run here; the text names the command that installs it."""


class RendezvousError(UnisonoError):
    """The ranks did not find each other."""


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

    def of_ranks(self, ranks: tuple[int, ...]) -> PeerLost:
        """Return a copy that names these ranks: the same ones as others number them, or more of them."""
        if ranks == self.ranks:
            return self
        return PeerLost(
            lost_text(ranks), ranks=ranks, where=self.where, cause=self.cause, next_step=self.next_step
        )


class PeerAborted(UnisonoError):
    """A rank gave up and said why; `rank` is where to look."""

    usual_step = "look at that rank first"

    def __init__(self, what: str, *, rank: int = -1, **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.rank = rank


class CollectiveMismatch(UnisonoError):
    """The ranks of a communicator called different things; `report` shows both calls."""

    def __init__(self, what: str, *, report: str = "", **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.report = report


class Deadlock(UnisonoError):
    """Every rank waits for another, so no one can go on; the text says who waits for whom."""


class Revoked(UnisonoError):
    """A member revoked this communicator."""


class StaleEpoch(UnisonoError):
    """The others formed a newer view without this process."""


class QuorumLost(UnisonoError):
    """Too few members of the previous view are reachable to go on."""


class ProtocolError(UnisonoError):
    """Bytes arrived that no correct peer sends."""

    usual_step = "check that all ranks run one version of unisono and that nobody else writes to their links"


class ClosedError(UnisonoError):
    """The communicator, backend or agent was closed."""

    usual_step = "make a new one, or close this one later"


class RemoteError(UnisonoError):
    """An exception on another rank whose type cannot be rebuilt here."""

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


class BadArguments(RemoteError, TypeError):
    """A function on another rank does not take the arguments; it was not called."""


class NotExposed(RemoteError, LookupError):
    """There is no function of this name on the other rank, or no agent."""


def lost_text(ranks: tuple[int, ...]) -> str:
    """Who is gone, in words."""
    return f"rank {ranks[0]} is gone" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are gone"


def _copy(error: UnisonoError) -> UnisonoError:
    """Copy an error without its traceback, so that each rank and thread raises its own."""
    copy = type(error).__new__(type(error))
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    return copy
