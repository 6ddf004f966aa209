"""Verdicts: who takes whom for dead, and who hears of it.

Knows since when a rank has not been heard, and what follows from it. Does not know faults or messages: it is
told that a way is mute, and tells the backends who is down.

There are no heartbeats in a simulation: a rank is silent from the moment its process stands still or its way
is cut, and that moment is known. So nothing moves on a quiet network, and a deadlock shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from unisono.contract import Lane, PeerDown
from unisono.simulation.fabric import Fabric

__all__ = ["Member", "Silence", "Verdicts"]


@dataclass(slots=True)
class Silence:
    """Why one rank is not heard by another; it is heard again when every reason has gone."""

    reasons: int = 0
    since: float = 0.0

    def begin(self, now: float) -> bool:
        """Add a reason; True if it was heard until now."""
        self.reasons += 1
        if self.reasons == 1:
            self.since = now
        return self.reasons == 1

    def end(self) -> None:
        """Take a reason away."""
        self.reasons -= 1

    def is_fatal(self, now: float, limit_s: float) -> bool:
        """Whether it has lasted so long that the rank is taken for dead."""
        return self.reasons > 0 and now >= self.since + limit_s


class Member(Protocol):
    """What verdicts need of a rank."""

    @property
    def is_gone(self) -> bool:
        """Whether it takes no more news."""

    def has_lost(self, peer: int) -> bool:
        """Whether it knows that a rank is down."""

    def peer_down(self, down: PeerDown) -> None:
        """Tell it that a rank is down."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rank is taken for dead; `accuser` is who did not hear it."""

    rank: int
    accuser: int
    silence_s: float

    def to_others(self) -> PeerDown:
        """What the other ranks are told."""
        return PeerDown(self.rank, f"silent for {self.silence_s:g} s")

    def to_accused(self, by: int) -> PeerDown:
        """What the rank finds when it comes back: the others hung up."""
        if by == self.accuser:
            return PeerDown(by, f"gave this rank up after {self.silence_s:g} s of silence")
        return PeerDown(
            by, f"gave this rank up, because rank {self.accuser} had not heard it for {self.silence_s:g} s"
        )


class Verdicts:
    """Turns silence into verdicts and takes them to everybody."""

    def __init__(self, fabric: Fabric, members: Sequence[Member]) -> None:
        self._fabric = fabric
        self._members = members
        self._limit_s = fabric.config.silence_s
        self._silences: dict[tuple[int, int], Silence] = {}
        self._news: dict[int, list[Verdict]] = {}

    def mute(self, src: int, dst: int) -> None:
        """From now on `dst` does not hear `src`, for one more reason."""
        scheduler = self._fabric.scheduler
        silence = self._silences.setdefault((src, dst), Silence())
        if silence.begin(scheduler.now):
            scheduler.call_at(scheduler.now + self._limit_s, partial(self._judge, src, dst))

    def unmute(self, src: int, dst: int) -> None:
        """One reason has gone. Who was silent for too long is judged first: its next word comes too late."""
        self._judge(src, dst)
        self._silences[src, dst].end()

    def part(self, down: PeerDown) -> None:
        """A rank has left or was killed: its links tell the others, after all that it sent."""
        for dst in range(self._fabric.size):
            if dst != down.rank and not self._members[dst].is_gone:
                self._fabric.way(down.rank, dst).send_last(partial(self._hear, dst, down))

    def _judge(self, src: int, dst: int) -> None:
        now = self._fabric.scheduler.now
        if not self._silences[src, dst].is_fatal(now, self._limit_s):
            return
        # A rank that stands still judges nobody; it looks again when it runs.
        thread = self._fabric.scheduler.threads[dst]
        if thread.is_paused:
            thread.when_awake(partial(self._judge, src, dst))
        else:
            self._declare(dst, Verdict(src, dst, self._limit_s))

    def _declare(self, by: int, verdict: Verdict) -> None:
        """`by` takes a rank for dead: it hangs up, tells its own, and everybody it still reaches."""
        member, accused = self._members[by], verdict.rank
        if member.is_gone or member.has_lost(accused):
            return
        self._fabric.way(accused, by).hang_up(None)
        self._fabric.way(by, accused).hang_up(partial(self._hear, accused, verdict.to_accused(by)))
        # Verdicts of one moment travel together.
        news = self._news.setdefault(by, [])
        if not news:
            scheduler = self._fabric.scheduler
            scheduler.call_at(scheduler.now, partial(self._spread, by))
        news.append(verdict)
        self._hear(by, verdict.to_others())

    def _spread(self, by: int) -> None:
        news, member = tuple(self._news.pop(by)), self._members[by]
        for dst in range(self._fabric.size):
            if dst != by and not member.is_gone and not member.has_lost(dst):
                self._fabric.way(by, dst).send(Lane.CONTROL, 0, partial(self._learn, dst, news))

    def _learn(self, dst: int, news: tuple[Verdict, ...]) -> None:
        for verdict in news:
            self._declare(dst, verdict)

    def _hear(self, dst: int, down: PeerDown) -> None:
        member = self._members[dst]
        if not member.is_gone and not member.has_lost(down.rank):
            self._fabric.note("down", dst, down.rank)
            member.peer_down(down)
