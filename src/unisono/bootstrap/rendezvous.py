"""Forming a world: joins in; a membership, or the reason why there is none yet, out.

Pure, and used only for processes that have proven the token. A bad join is refused alone and never ends the
formation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from unisono.bootstrap.limits import CARD_BYTES_MAX, printable
from unisono.bootstrap.protocol import Refusal
from unisono.errors import rank_numbers

__all__ = ["Formation", "Join", "Member", "Membership"]

# Refusals that an error lists; the rest is counted.
_REFUSALS_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Join:
    """What a process says about itself. `address` is the source address that the seed saw."""

    rank: int
    size: int
    version: str
    config_digest: str
    settings: dict[str, str] = field(default_factory=dict)
    card: bytes = field(default=b"", repr=False)
    host: str = ""
    pid: int = 0
    address: str = ""
    instance: str = ""
    """The same when a process reconnects; it differs for another process with the same rank."""

    def __str__(self) -> str:
        origin = ", ".join(
            part
            for part in (
                f"host {printable(self.host, 64)}" if self.host else "",
                f"pid {self.pid}" if self.pid else "",
                f"from {self.address}" if self.address else "",
            )
            if part
        )
        return f"rank {self.rank} ({origin})" if origin else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of the formed world. `card` is its business card, made and read by the backend only."""

    rank: int
    incarnation: int
    card: bytes = field(repr=False)
    host: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True)
class Membership:
    """The members: the part of a view that is the same for every rank."""

    size: int
    members: tuple[Member, ...]


class Formation:
    """The state of one formation. A join is known by the key of its connection."""

    def __init__(self, size: int, version: str) -> None:
        self.size = size
        self._version = version
        self._joined: dict[int, tuple[int, Join]] = {}  # rank: key and join
        self._incarnations: dict[int, int] = {}
        self._refused: list[str] = []
        self._refusals = 0
        self._ended = ""  # why this world cannot form any more
        self._membership: Membership | None = None

    def offer(self, key: int, join: Join) -> str | None:
        """Admit a join, or say why not. After rank 0 was admitted, `misfits` lists the joins to refuse."""
        reason = self._objection(join)
        if reason is not None:
            self.note_refusal(join, reason)
            return reason
        self._incarnations[join.rank] = self._incarnations.get(join.rank, -1) + 1
        self._joined[join.rank] = (key, join)
        return None

    def on_rank_ended(self, rank: int, how: str) -> str | None:
        """The process of a rank has ended: returns why the world cannot form, None if it has formed."""
        if self.is_formed or not 0 <= rank < self.size:
            return None
        if not self._ended:  # later ones may have ended because of the first
            self._ended = f"rank {rank} has ended ({printable(how)}) before this world had formed"
        return self._ended

    def refusal(self, join: Join) -> Refusal:
        """The kind of refusal, for a join that `offer` has just refused."""
        _, holder = self._joined.get(join.rank, (0, join))
        is_own = (holder.host, holder.pid) == (join.host, join.pid)
        if self.is_formed:
            return "own late" if is_own else "taken late"
        if self._ended:
            return "over"
        return "misfit" if is_own else "taken"

    def incarnation(self, rank: int) -> int:
        """How many times this rank was admitted before."""
        return self._incarnations[rank]

    def misfits(self) -> list[tuple[int, str]]:
        """Take out joins whose settings differ from rank 0's: the key and the reason of each.

        Rank 0's settings count, whatever the order of arrival; before it has joined, all settings are
        accepted.
        """
        if 0 not in self._joined:
            return []
        first = self._joined[0][1]
        found = []
        for rank, (key, join) in list(self._joined.items()):
            if join.config_digest != first.config_digest:
                reason = _difference(join, first)
                self.note_refusal(join, reason)
                del self._joined[rank]
                found.append((key, reason))
        return found

    def leave(self, key: int) -> None:
        """Forget a join whose connection was closed before the world was formed."""
        if self._membership is None:
            self._joined = {rank: held for rank, held in self._joined.items() if held[0] != key}

    def note_refusal(self, process: object, reason: str) -> None:
        """Remember a refusal for the report."""
        self._refusals += 1
        if len(self._refused) < _REFUSALS_SHOWN:
            self._refused.append(f"{process}: {reason}")

    def membership(self) -> tuple[Membership | None, str]:
        """The membership once every rank has joined, and the state of the formation in one sentence."""
        missing = self.ranks_missing()
        if missing:
            return None, self.report()
        if self._membership is None:
            self._membership = Membership(
                self.size,
                tuple(
                    Member(rank, self._incarnations[rank], join.card, join.host, join.pid, join.address)
                    for rank, (_, join) in sorted(self._joined.items())
                ),
            )
        return self._membership, f"all {self.size} ranks joined"

    @property
    def is_formed(self) -> bool:
        """Whether the world is complete; then no rank can join or leave any more."""
        return self._membership is not None

    @property
    def why_over(self) -> str:
        """Why this world cannot form any more; empty if it can, or has formed."""
        return "" if self.is_formed else self._ended

    def ranks_joined(self) -> list[int]:
        """Ranks that have joined."""
        return sorted(self._joined)

    def ranks_missing(self) -> list[int]:
        """Ranks that have not."""
        return [rank for rank in range(self.size) if rank not in self._joined]

    def report(self) -> str:
        """Which ranks joined, are missing and were refused."""
        joined, missing = self.ranks_joined(), self.ranks_missing()
        text = f"{len(joined)} of {self.size} ranks joined"
        if joined:
            text += f" ({rank_numbers(joined)})"
        if missing:
            text += f"; missing: {rank_numbers(missing)}"
        if self._ended and not self.is_formed:
            text += f"; {self._ended}"
        if self._refused:
            text += f"; refused: {'; '.join(self._refused)}"
            if self._refusals > len(self._refused):
                text += f" and {self._refusals - len(self._refused)} more"
        return text

    def _objection(self, join: Join) -> str | None:
        if join.version != self._version:
            return (
                f"unisono {printable(join.version, 40)} cannot join a world of unisono {self._version}; "
                "install the same version everywhere"
            )
        if join.size != self.size:
            return f"it was started with size {join.size}, this world has {self.size} ranks"
        if not 0 <= join.rank < self.size:
            return f"rank {join.rank}; allowed: 0 to {self.size - 1}"
        if len(join.card) > CARD_BYTES_MAX:
            return f"its card has {len(join.card)} bytes; allowed: {CARD_BYTES_MAX}"
        holder = self._joined.get(join.rank)
        if self.is_formed:
            assert holder is not None
            return f"this world of {self.size} ranks is complete, and {holder[1]} is in it"
        if self._ended:
            return self._ended
        if holder is not None and not (join.instance and join.instance == holder[1].instance):
            return f"rank {join.rank} is taken by {holder[1]}"
        first = self._joined.get(0)
        if first is not None and join.config_digest != first[1].config_digest:
            return _difference(join, first[1])
        return None


def _difference(join: Join, first: Join) -> str:
    names = sorted(join.settings.keys() | first.settings.keys())
    shown = [
        f"{printable(name, 40)}={printable(join.settings.get(name, 'absent'), 40)} "
        f"(rank 0: {printable(first.settings.get(name, 'absent'), 40)})"
        for name in names
        if join.settings.get(name) != first.settings.get(name)
    ]
    detail = ", ".join(shown[:4]) or f"digest {printable(join.config_digest, 40)}"
    return f"its settings differ from rank 0's: {detail}"
