"""The injector begins each fault at its time or step, and ends it.

What follows from a fault is decided elsewhere: channels hold deliveries, `Verdicts` declares ranks dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from unisono.messaging.peer_down import PeerDown
from unisono.simulation.fabric import Fabric
from unisono.simulation.faults import (
    Drop,
    Fault,
    Kill,
    Partition,
    Pause,
    Resume,
    Slow,
    channels_cut,
    counted_rank,
)
from unisono.simulation.verdicts import Verdicts

__all__ = ["Injector"]


class Injector:
    """Holds the faults until they are due."""

    def __init__(self, fabric: Fabric, verdicts: Verdicts, faults: Sequence[Fault]) -> None:
        self._fabric = fabric
        self._verdicts = verdicts
        self._steps_of_all = 0
        # By (rank, step); a rank of None stands for all ranks.
        self._at_step: dict[tuple[int | None, int], list[Fault]] = {}
        for fault in faults:
            if fault.at_s is not None:
                fabric.scheduler.call_at(fault.at_s, partial(self._inject, fault))
            else:
                assert fault.at_step is not None
                self._at_step.setdefault((counted_rank(fault), fault.at_step), []).append(fault)

    def on_step(self, rank: int, step: int) -> None:
        """Begin the faults that wait for this operation."""
        self._steps_of_all += 1
        if self._at_step:
            for key in ((rank, step), (None, self._steps_of_all)):
                for fault in self._at_step.pop(key, ()):
                    self._inject(fault)

    def on_close(self, rank: int) -> None:
        """A rank leaves: the others learn of it after all that it sent."""
        self._fabric.note("leave", rank)
        self._verdicts.leave(PeerDown(rank, "left", left=True))

    def _inject(self, fault: Fault) -> None:
        match fault:
            case Kill():
                self._kill(fault.rank)
            case Pause():
                self._pause(fault)
            case Resume():
                self._resume(fault.rank, None)
            case Partition() | Drop():
                self._cut(fault)
            case Slow():
                self._slow(fault)

    def _kill(self, rank: int) -> None:
        thread = self._fabric.scheduler.threads[rank]
        if thread.has_ended or thread.killed is not None:
            return
        self._fabric.note("kill", rank)
        cause = f"killed at {self._fabric.scheduler.now:g} s (simulated)"
        thread.kill(cause)
        self._verdicts.leave(PeerDown(rank, cause))

    def _pause(self, fault: Pause) -> None:
        thread = self._fabric.scheduler.threads[fault.rank]
        if thread.has_ended or thread.killed is not None:
            return
        self._fabric.note("pause", fault.rank)
        if not thread.is_paused:
            for dst in self._others(fault.rank):
                self._verdicts.mute(fault.rank, dst)
        thread.pause(fault)
        self._later(fault.for_s, partial(self._resume, fault.rank, fault))

    def _resume(self, rank: int, fault: Pause | None) -> None:
        if self._fabric.scheduler.threads[rank].resume(fault):
            self._fabric.note("resume", rank)
            for dst in self._others(rank):
                self._verdicts.unmute(rank, dst)
            self._fabric.release_to(rank)

    def _cut(self, fault: Partition | Drop) -> None:
        for src, dst in channels_cut(fault):
            self._fabric.note("cut", src, dst)
            self._fabric.channel(src, dst).cut()
            self._verdicts.mute(src, dst)
        self._later(fault.for_s, partial(self._heal, fault))

    def _heal(self, fault: Partition | Drop) -> None:
        for src, dst in channels_cut(fault):
            self._fabric.note("heal", src, dst)
            self._verdicts.unmute(src, dst)
            self._fabric.channel(src, dst).heal()

    def _slow(self, fault: Slow) -> None:
        self._fabric.note("slow", fault.src, fault.dst)
        self._fabric.channel(fault.src, fault.dst).slow(fault.factor)
        self._later(fault.for_s, partial(self._unslow, fault))

    def _unslow(self, fault: Slow) -> None:
        self._fabric.note("fast", fault.src, fault.dst)
        self._fabric.channel(fault.src, fault.dst).unslow(fault.factor)

    def _later(self, seconds: float | None, fn: Callable[[], None]) -> None:
        if seconds is not None:
            scheduler = self._fabric.scheduler
            scheduler.call_at(scheduler.now + seconds, fn)

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self._fabric.size) if other != rank]
