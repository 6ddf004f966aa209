"""Verdicts: which rank declares which other rank dead, and which ranks it reports this to.

A simulation has no heartbeats. A rank is silent from the moment at which its process is paused or its channel
cut, and that moment is known. So nothing moves on a quiet network, and a deadlock shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from unisono.core.envelope import Lane
from unisono.messaging.peer_down import PeerDown
from unisono.simulation.fabric import Fabric

__all__ = ["Member", "Silence", "Verdicts"]


@dataclass(slots=True)
class Silence:
    """The silence of one rank for another: it lasts while it has a reason, a pause or a cut."""

    reasons: int = 0
    since: float = 0.0

    def begin(self, now: float) -> bool:
        """Add a reason; True if it is the first."""
        self.reasons += 1
        if self.reasons == 1:
            self.since = now
        return self.reasons == 1

    def end(self) -> None:
        """Remove a reason."""
        self.reasons -= 1

    def is_fatal(self, now: float, limit_s: float) -> bool:
        """Whether it has lasted for `limit_s`, after which the rank is declared dead."""
        return self.reasons > 0 and now >= self.since + limit_s


class Member(Protocol):
    """What `Verdicts` needs of a rank."""

    @property
    def is_gone(self) -> bool:
        """Whether it has left or was killed."""

    def has_lost(self, peer: int) -> bool:
        """Whether it knows that a rank is down."""

    def peer_down(self, down: PeerDown) -> None:
        """Notify it that a rank is down."""


class Verdicts:
    """Turns silence into verdicts by the rule of the engine (Engine::on_rank_down, engine_links.cpp).

    A rank that has a link with another decides for itself: it declares the other dead after `silence_s` of
    silence, or when the other end closes the link, and ignores reports about it. A rank without a link could
    never find out, so it believes reports. A rank that declares another dead reports this on all its links.
    """

    def __init__(self, fabric: Fabric, members: Sequence[Member]) -> None:
        self._fabric = fabric
        self._members = members
        self._limit_s = fabric.config.silence_s
        self._silences: dict[tuple[int, int], Silence] = {}
        self._departed: dict[int, PeerDown] = {}
        self._unreported: dict[int, list[PeerDown]] = {}
        fabric.on_link = self._on_link

    def mute(self, src: int, dst: int) -> None:
        """`src` is silent for `dst` from now on, for one more reason."""
        scheduler = self._fabric.scheduler
        silence = self._silences.setdefault((src, dst), Silence())
        if silence.begin(scheduler.now):
            scheduler.call_at(scheduler.now + self._limit_s, partial(self._check_silence, src, dst))

    def unmute(self, src: int, dst: int) -> None:
        """One reason has gone. A silence that has lasted too long counts first."""
        self._check_silence(src, dst)
        self._silences[src, dst].end()

    def leave(self, down: PeerDown) -> None:
        """A rank has left or was killed: its links are closed after all that it sent."""
        self._departed[down.rank] = down
        for dst in range(self._fabric.size):
            if dst != down.rank and not self._members[dst].is_gone and self._has_link(down.rank, dst):
                self._fabric.channel(down.rank, dst).send_last(partial(self._lose_peer, dst, down))

    def _check_silence(self, src: int, dst: int) -> None:
        linked_since = self._fabric.linked_since(src, dst)
        if linked_since is None:
            return
        now, silence = self._fabric.scheduler.now, self._silences[src, dst]
        if now < linked_since + self._limit_s or not silence.is_fatal(now, self._limit_s):
            return
        # A paused rank declares no rank dead; it checks again when it runs.
        thread = self._fabric.scheduler.threads[dst]
        if thread.is_paused:
            thread.when_running(partial(self._check_silence, src, dst))
        else:
            self._declare_dead(dst, src)

    def _declare_dead(self, by: int, accused: int) -> None:
        """`by` declares a silent rank dead and closes the link, whose other end notices that."""
        member = self._members[by]
        if member.is_gone or member.has_lost(accused):
            return
        notice = PeerDown(by, f"gave rank {accused} up after {self._limit_s:g} s of silence")
        self._fabric.channel(accused, by).reset(None)
        self._fabric.channel(by, accused).reset(partial(self._lose_peer, accused, notice))
        self._lose_peer(by, PeerDown(accused, f"silent for {self._limit_s:g} s"))

    def _lose_peer(self, by: int, down: PeerDown) -> None:
        """A rank is down for `by`: notify its listeners, and report it on all its links."""
        member = self._members[by]
        if member.is_gone or member.has_lost(down.rank):
            return
        # Verdicts of one moment travel in one report.
        unreported = self._unreported.setdefault(by, [])
        if not unreported:
            scheduler = self._fabric.scheduler
            scheduler.call_at(scheduler.now, partial(self._report, by))
        unreported.append(down)
        self._fabric.note("down", by, down.rank)
        member.peer_down(down)

    def _report(self, by: int) -> None:
        verdicts, member = tuple(self._unreported.pop(by)), self._members[by]
        for dst in range(self._fabric.size):
            if dst == by or member.is_gone or member.has_lost(dst) or not self._has_link(by, dst):
                continue
            # A rank that has a link with the dead one decides for itself.
            unknown = tuple(d for d in verdicts if d.rank != dst and not self._has_link(dst, d.rank))
            if unknown:
                self._fabric.channel(by, dst).send(Lane.CONTROL, 0, partial(self._on_report, dst, unknown))

    def _on_report(self, dst: int, verdicts: tuple[PeerDown, ...]) -> None:
        for down in verdicts:
            if not self._has_link(dst, down.rank):
                self._lose_peer(dst, down)

    def _on_link(self, caller: int, called: int) -> None:
        """A first message opens a link. The called rank may be gone, or silent, or refuse a dead caller."""
        if (departed := self._departed.get(called)) is not None:
            self._fabric.channel(called, caller).send_last(partial(self._lose_peer, caller, departed))
        elif self._members[called].has_lost(caller):
            notice = PeerDown(called, f"refuses the link: it has declared rank {caller} dead")
            self._fabric.channel(caller, called).reset(None)
            self._fabric.channel(called, caller).reset(partial(self._lose_peer, caller, notice))
        else:
            scheduler = self._fabric.scheduler
            for src, dst in ((caller, called), (called, caller)):
                if (src, dst) in self._silences:
                    scheduler.call_at(scheduler.now + self._limit_s, partial(self._check_silence, src, dst))

    def _has_link(self, one: int, other: int) -> bool:
        return self._fabric.linked_since(one, other) is not None
