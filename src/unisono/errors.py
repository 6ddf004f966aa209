"""Every exception that unisono raises. Each says what happened, where, why, and what to do next.

    UnisonoError
    ├─ UsageError (ValueError)         a wrong argument; nothing was sent
    ├─ BackendUnavailable              the backend cannot run here; names the command that installs it
    ├─ RendezvousError                 the world did not form; names the missing ranks
    ├─ DeadlineExceeded (TimeoutError) a timeout; .waiting_on: the ranks that were waited for
    ├─ PeerLost                        .ranks: every rank known to be dead or gone
    ├─ PeerAborted                     .rank gave up; the text has its error
    ├─ CollectiveMismatch              ranks called different collectives; .report, .culprits
    ├─ Deadlock                        a cycle of waits that nothing can break; the text has the cycle
    ├─ ProtocolError                   a peer sent malformed bytes
    ├─ ClosedError                     the communicator, backend or agent was closed
    └─ RemoteError                     an exception on .rank; .type_name, .traceback_text
       ├─ BadArguments (TypeError)     a remote function does not take these arguments; it was not called
       └─ NotExposed (LookupError)     no function of this name on that rank, or no agent

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
    """Which operation failed, and when: the part of the text that all errors share.

    A field is None if it is unknown, or does not apply.
    """

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


_NOWHERE = Location()


class _Rest(TypedDict, total=False):
    """The arguments that every error takes besides `what`."""

    where: Location | None
    cause: str | None
    next_step: str | None


class UnisonoError(Exception):
    """The base of all errors. Its text is "<what> <where>: <cause>. Next: <next_step>".

    Attributes:
        what: what happened.
        where: the operation, communicator, epoch, sequence number and elapsed time; also properties.
        cause: why, if known.
        next_step: what to do; `usual_step` of the class unless the place that raises knows better.
    """

    usual_step: ClassVar[str] = "see the errors of the other ranks; if they do not explain it, report a bug"

    def __init__(
        self,
        what: str,
        *,
        where: Location | None = None,
        cause: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where if where is not None else _NOWHERE
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
        """The cause. If it is the text of another error, without that error's next step."""
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
        """The number of the membership view."""
        return self.where.epoch

    @property
    def sequence(self) -> int | None:
        """The number of the collective; each communicator counts its own."""
        return self.where.sequence

    @property
    def elapsed_s(self) -> float | None:
        """How long the operation had run, in seconds."""
        return self.where.elapsed_s

    def located(self, where: Location) -> UnisonoError:
        """Return a copy with `where`; fields of its own location that are set already win."""
        copy = _copy(self)
        known = {name: getattr(self.where, name) for name in Location.__slots__}
        copy.where = replace(where, **{name: value for name, value in known.items() if value is not None})
        return copy


class UsageError(UnisonoError, ValueError):
    """A call with a wrong argument: the text says what was given and what is allowed. Nothing was sent."""

    usual_step = "correct the call; nothing was sent"


class BackendUnavailable(UnisonoError):
    """Raised by init if the backend cannot run here; the text names the command that installs it."""

    usual_step = "uni.list_backends() shows what can run here and how to install the rest"


class RendezvousError(UnisonoError):
    """Raised by init if the world did not form in time; the text says which ranks are missing, and why."""

    usual_step = "check that every rank was started, with the same size, address and ticket"


class DeadlineExceeded(UnisonoError, TimeoutError):
    """A timeout passed before an operation ended.

    Attributes:
        waiting_on: the world ranks that it was waiting for; empty if any rank could have ended it.
    """

    usual_step = "see what these ranks are doing, or raise timeout="

    def __init__(self, what: str, *, waiting_on: tuple[int, ...] = (), **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.waiting_on = waiting_on


class PeerLost(UnisonoError):
    """An operation needs a rank that died, is silent for too long, or left.

    Attributes:
        ranks: all world ranks that are known to be gone, not only those the operation needs.
    """

    usual_step = "see the last output of these ranks and how they ended"

    def __init__(self, what: str, *, ranks: tuple[int, ...] = (), **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.ranks = ranks
        if self.next_step == self.usual_step and _UNREACHED in (self.cause or ""):
            self.next_step = _OPEN_PORT

    def of_ranks(self, ranks: tuple[int, ...]) -> PeerLost:
        """Return a copy that names these ranks: the same ones in another numbering, or more of them."""
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
    """Another rank gave up: it called abort, left a `with` block by an exception, or cancelled a collective.

    Attributes:
        rank: that world rank, or -1 if it is unknown. The text has its reason.
    """

    usual_step = "see the error of that rank first"

    def __init__(self, what: str, *, rank: int = -1, **rest: Unpack[_Rest]) -> None:
        super().__init__(what, **rest)
        self.rank = rank


class CollectiveMismatch(UnisonoError):
    """Ranks of a communicator called different collectives, or the same one with different arguments.

    Attributes:
        report: one line for each call, with the ranks that made it.
        culprits: the ranks whose call is not the majority's; empty if no call has a majority.
    """

    usual_step = "call the same collective with the same arguments on all ranks of the communicator"

    def __init__(
        self, what: str, *, report: str = "", culprits: tuple[int, ...] = (), **rest: Unpack[_Rest]
    ) -> None:
        super().__init__(what, **rest)
        self.report = report
        self.culprits = culprits


class Deadlock(UnisonoError):
    """Ranks wait for each other in a cycle that nothing can break; the text shows the cycle."""

    usual_step = "break the cycle: pair every send with a receive"


class ProtocolError(UnisonoError):
    """Malformed bytes arrived, or a message that no correct peer sends."""

    usual_step = "check that all ranks run the same version of unisono and that nothing else uses their ports"


class ClosedError(UnisonoError):
    """The communicator, backend or agent was closed before or during the operation."""

    usual_step = "close it after its last use, or make a new one"


class RemoteError(UnisonoError):
    """An exception on another rank: of a remote call, or in a spawned process if its type is unknown here.

    The text names the line that raised it.

    Attributes:
        rank: the world rank where it was raised, or -1 if it is unknown.
        type_name: the name of the exception's class there.
        traceback_text: the full traceback there.
    """

    usual_step = "see .traceback_text for the full traceback on that rank"

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
    """A remote function does not take these arguments; it was not called. The text names the argument."""

    usual_step = "pass the arguments that the function takes"


class NotExposed(RemoteError, LookupError):
    """There is no function of this name on the other rank, or no agent; nothing was called."""

    usual_step = "expose it on that rank before it is called: agent.register(name, fn)"


# Errors that report what another rank has caused: they are passed on as themselves.
PASSED_ON: Final = (PeerLost, PeerAborted, CollectiveMismatch, Deadlock)


def root_cause(error: BaseException) -> BaseException:
    """What an exception group is about: the first error in it that no other rank has caused, else the first.

    A TaskGroup raises such groups. Any other error is its own root cause.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [root_cause(one) for one in error.exceptions]
    return next((one for one in causes if not isinstance(one, PASSED_ON)), causes[0])


# A line of a traceback as Python prints it.
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


# Up to this many ranks are listed one by one; more are written as ranges.
_RANKS_LISTED: Final = 8
# A text with more ranges is cut, to stay readable.
_RANGES_MAX: Final = 32


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks for a text: "rank 3", "ranks 0, 1, 3", or, if there are many, "ranks 0-6, 8-9"."""
    numbers = sorted(set(ranks))
    is_short = len(numbers) <= _RANKS_LISTED
    listed = ", ".join(map(str, numbers)) if is_short else rank_numbers(numbers)
    return f"rank{'' if len(numbers) == 1 else 's'} {listed}"


def rank_numbers(ranks: Iterable[int]) -> str:
    """Ranks as ranges: "0-3, 7"."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(sorted(set(ranks))), lambda pair: pair[1] - pair[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(parts[:_RANGES_MAX]) + (", ..." if len(parts) > _RANGES_MAX else "")


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def said_of(rank: int, cause: str) -> str:
    """A sentence about a rank from a cause, which may begin with "it", with a verb, or with a noun."""
    if cause.startswith("it "):
        cause = cause.removeprefix("it ")
    elif cause.startswith(("its ", "no ", "the ", "data ", "too ", "cannot ")) and not cause.startswith(
        "cannot be "
    ):
        return f"rank {rank}: {cause}"
    return f"rank {rank} {cause}"


# Part of the cause if a rank does not accept connections: see native/connect/stream_handshake.cpp.
_UNREACHED: Final = "cannot be reached from rank"
_OPEN_PORT: Final = (
    "see whether that rank still runs; if it does, open that port of its host for TCP and UDP "
    "(--address HOST:PORT fixes the ports: PORT for the seed, the following ones for the ranks of a host)"
)


def lost_text(ranks: tuple[int, ...], cause: str | None = None) -> str:
    """A sentence that says which ranks are gone, or only out of reach."""
    how = "out of reach" if all(_UNREACHED in each for each in (cause or "").split("; ")) else "gone"
    return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {how}"


def _copy(error: UnisonoError) -> UnisonoError:
    """Copy an error without its traceback, so that each rank and thread raises its own."""
    copy = type(error).__new__(type(error))
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    return copy
