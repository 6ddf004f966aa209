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

from unisono.core.envelope import Lane
from unisono.messaging.backend import PeerDown
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


class Verdicts:
    """Turns silence into verdicts, by the engine's rule (native/engine/engine.cpp, Engine::on_news).

    Who has a link with a rank judges for itself: it gives the rank up after `silence_s` without a word, or
    when the link is closed at the other end, and what others say of the rank changes nothing. Who has no link
    would never know, and believes what it is told. Whoever gives a rank up tells all it has links with.
    """

    def __init__(self, fabric: Fabric, members: Sequence[Member]) -> None:
        self._fabric = fabric
        self._members = members
        self._limit_s = fabric.config.silence_s
        self._silences: dict[tuple[int, int], Silence] = {}
        self._parted: dict[int, PeerDown] = {}
        self._news: dict[int, list[PeerDown]] = {}
        fabric.on_link = self._on_link

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
        self._parted[down.rank] = down
        for dst in range(self._fabric.size):
            if dst != down.rank and not self._members[dst].is_gone and self._has_link(down.rank, dst):
                self._fabric.way(down.rank, dst).send_last(partial(self._lose, dst, down))

    def _judge(self, src: int, dst: int) -> None:
        linked_since = self._fabric.linked_since(src, dst)
        if linked_since is None:
            return
        now, silence = self._fabric.scheduler.now, self._silences[src, dst]
        if now < linked_since + self._limit_s or not silence.is_fatal(now, self._limit_s):
            return
        # A rank that stands still judges nobody; it looks again when it runs.
        thread = self._fabric.scheduler.threads[dst]
        if thread.is_paused:
            thread.when_awake(partial(self._judge, src, dst))
        else:
            self._give_up(dst, src)

    def _give_up(self, by: int, accused: int) -> None:
        """`by` has not heard a rank for too long: it closes the link, whose other end finds it closed."""
        member = self._members[by]
        if member.is_gone or member.has_lost(accused):
            return
        notice = PeerDown(by, f"gave rank {accused} up after {self._limit_s:g} s of silence")
        self._fabric.way(accused, by).hang_up(None)
        self._fabric.way(by, accused).hang_up(partial(self._lose, accused, notice))
        self._lose(by, PeerDown(accused, f"silent for {self._limit_s:g} s"))

    def _lose(self, by: int, down: PeerDown) -> None:
        """A rank is down for `by`, who tells its own, and everybody it has a link with."""
        member = self._members[by]
        if member.is_gone or member.has_lost(down.rank):
            return
        # Verdicts of one moment travel together.
        news = self._news.setdefault(by, [])
        if not news:
            scheduler = self._fabric.scheduler
            scheduler.call_at(scheduler.now, partial(self._spread, by))
        news.append(down)
        self._fabric.note("down", by, down.rank)
        member.peer_down(down)

    def _spread(self, by: int) -> None:
        news, member = tuple(self._news.pop(by)), self._members[by]
        for dst in range(self._fabric.size):
            if dst == by or member.is_gone or member.has_lost(dst) or not self._has_link(by, dst):
                continue
            # To those who have a link with it themselves it would be no news.
            unknown = tuple(d for d in news if d.rank != dst and not self._has_link(dst, d.rank))
            if unknown:
                self._fabric.way(by, dst).send(Lane.CONTROL, 0, partial(self._learn, dst, unknown))

    def _learn(self, dst: int, news: tuple[PeerDown, ...]) -> None:
        for down in news:
            if not self._has_link(dst, down.rank):
                self._lose(dst, down)

    def _on_link(self, caller: int, called: int) -> None:
        """A first message opens a link: who is called may be gone, silent, or take the caller for dead."""
        if (parted := self._parted.get(called)) is not None:
            self._fabric.way(called, caller).send_last(partial(self._lose, caller, parted))
        elif self._members[called].has_lost(caller):
            notice = PeerDown(called, f"refuses the link: it takes rank {caller} for dead")
            self._fabric.way(caller, called).hang_up(None)
            self._fabric.way(called, caller).hang_up(partial(self._lose, caller, notice))
        else:
            scheduler = self._fabric.scheduler
            for src, dst in ((caller, called), (called, caller)):
                if (src, dst) in self._silences:
                    scheduler.call_at(scheduler.now + self._limit_s, partial(self._judge, src, dst))

    def _has_link(self, one: int, other: int) -> bool:
        return self._fabric.linked_since(one, other) is not None
