"""The simulated network: what is sent arrives later and in order, unless a fault holds it.

A *link* joins two ranks from their first message on. A *channel* leads from one rank to another and has two
lanes. A *delivery* is a callback that the channel makes at the far end. A channel that is cut, or that leads
to a paused rank, holds its deliveries: as on a TCP connection, nothing is lost until one end resets it.

The fabric knows neither what a message means nor which ranks are declared dead.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from unisono.config import Config
from unisono.core.envelope import Envelope, Lane
from unisono.simulation.network import Network, Pace
from unisono.simulation.scheduler import Scheduler, SimThread, TimedCall
from unisono.simulation.trace import TraceEvent

__all__ = ["Channel", "Delivery", "Fabric"]

Delivery: TypeAlias = Callable[[], None]


class Fabric:
    """All channels, and the trace of the simulation."""

    def __init__(self, scheduler: Scheduler, network: Network, config: Config, seed: int) -> None:
        self.scheduler = scheduler
        self.config = config
        self.trace: list[TraceEvent] = []
        self._network = network
        self._jitter = random.Random(f"jitter {seed}").random
        self._channels: dict[tuple[int, int], Channel] = {}
        # When a message first opened the link of two ranks, the lower one first; see `linked_since`.
        self._opened: dict[tuple[int, int], float] = {}
        self.on_link: Callable[[int, int], None] = lambda caller, called: None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.scheduler.threads)

    def channel(self, src: int, dst: int) -> Channel:
        """The channel from one rank to another."""
        channel = self._channels.get((src, dst))
        if channel is None:
            pace = self._network.pace(src, dst)
            channel = Channel(self.scheduler, self.scheduler.threads[dst], pace, self._jitter)
            self._channels[src, dst] = channel
        return channel

    def carry(self, src: int, dst: int, lane: Lane, nbytes: int, delivery: Delivery) -> None:
        """Make a delivery of `nbytes` at another rank; at the same rank it takes no time."""
        if src == dst:
            delivery()
            return
        if self.linked_since(src, dst) is None:
            self._opened[min(src, dst), max(src, dst)] = self.scheduler.now
            self.on_link(src, dst)
        self.channel(src, dst).send(lane, nbytes, delivery)

    def linked_since(self, one: int, other: int) -> float | None:
        """Since when two ranks have a link; None if they have none.

        As in the engine: ranks at a distance of 2^k have one from the start, others from their first message.
        """
        distance = (one - other) % self.size
        if distance & (distance - 1) == 0 or (self.size - distance) & (self.size - distance - 1) == 0:
            return 0.0
        return self._opened.get((min(one, other), max(one, other)))

    def release_to(self, rank: int) -> None:
        """A rank runs again: what has arrived for it meanwhile is delivered at once."""
        for src in range(self.size):
            if (src, rank) in self._channels:
                self._channels[src, rank].release(self.scheduler.now)

    def note(self, kind: str, rank: int, peer: int | None = None, envelope: Envelope | None = None) -> None:
        """Add an event to the trace."""
        now = self.scheduler.now
        if envelope is None:
            self.trace.append(TraceEvent(now, kind, rank, peer))
        else:
            self.trace.append(
                TraceEvent(now, kind, rank, peer, envelope.context, envelope.tag, envelope.nbytes)
            )


class Channel:
    """From one rank to another. Its lanes share the pace and the faults, and nothing else.

    There are n * n channels, and most carry only a goodbye, so a lane is made when it is first used.
    """

    __slots__ = (
        "_cuts",
        "_factors",
        "_is_over",
        "_jitter",
        "_lanes",
        "_receiver",
        "_scheduler",
        "pace",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        receiver: SimThread,
        pace: Pace,
        jitter: Callable[[], float],
    ) -> None:
        self.pace = pace
        self._scheduler = scheduler
        self._receiver = receiver
        self._jitter = jitter
        self._lanes: dict[Lane, _Lane] = {}
        self._cuts = 0
        self._factors: tuple[float, ...] = ()
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether deliveries get through now."""
        return not self._cuts and not self._receiver.is_paused

    @property
    def latency_s(self) -> float:
        """The time of the shortest message, with the present slowness."""
        return self.pace.latency_s * self._slowness()

    def send(self, lane: Lane, nbytes: int, delivery: Delivery) -> None:
        """Make a delivery at the other end after the time that `nbytes` take; nothing after a reset."""
        if self._is_over:
            return
        pace, factor = self.pace, self._slowness()
        extra = pace.latency_s + (self._jitter() * pace.jitter_s if pace.jitter_s else 0.0)
        self._lane(lane).add(nbytes / pace.bytes_per_s * factor, extra * factor, delivery)

    def send_last(self, delivery: Delivery) -> None:
        """Make a last delivery, after everything that was sent on either lane."""
        busy = [lane for lane, queue in self._lanes.items() if queue.is_busy] or [Lane.CONTROL]
        lanes_left = len(busy)

        def on_lane() -> None:
            nonlocal lanes_left
            lanes_left -= 1
            if not lanes_left:
                delivery()

        for lane in busy:
            self.send(lane, 0, on_lane)
        self._is_over = True

    def reset(self, notice: Delivery | None) -> None:
        """Drop what is in flight; only `notice` still arrives."""
        for lane in self._lanes.values():
            lane.clear()
        self._is_over = notice is None
        if notice is not None:
            self.send_last(notice)

    def cut(self) -> None:
        """Add a cut: nothing gets through."""
        self._cuts += 1

    def heal(self) -> None:
        """Remove a cut; after the last, what was held arrives within one latency, as if sent again."""
        self._cuts -= 1
        if not self._cuts:
            self.release(self._scheduler.now + self.latency_s)

    def slow(self, factor: float) -> None:
        """Multiply the time of what is sent from now on."""
        self._factors += (factor,)

    def unslow(self, factor: float) -> None:
        """Remove one slowness."""
        i = self._factors.index(factor)
        self._factors = self._factors[:i] + self._factors[i + 1 :]

    def release(self, earliest: float) -> None:
        """Deliver what was held, no sooner than `earliest`."""
        if self.is_open:
            for lane in self._lanes.values():
                lane.release(earliest)

    def _lane(self, lane: Lane) -> _Lane:
        found = self._lanes.get(lane)
        if found is None:
            found = self._lanes[lane] = _Lane(self._scheduler, self)
        return found

    def _slowness(self) -> float:
        return math.prod(self._factors)


class _Lane:
    """What is in flight on one lane, in order. Only the first has a timed call."""

    __slots__ = ("_call", "_channel", "_free_at", "_is_delivering", "_queue", "_scheduler")

    def __init__(self, scheduler: Scheduler, channel: Channel) -> None:
        self._scheduler = scheduler
        self._channel = channel
        self._queue: deque[tuple[float, Delivery]] = deque()
        self._free_at = 0.0
        self._call: TimedCall | None = None
        self._is_delivering = False

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._queue) or self._is_delivering

    def add(self, sending_s: float, travel_s: float, delivery: Delivery) -> None:
        """Queue a delivery: it occupies the lane for `sending_s`, then travels for `travel_s`."""
        self._free_at = max(self._free_at, self._scheduler.now) + sending_s
        self._queue.append((self._free_at + travel_s, delivery))
        if len(self._queue) == 1 and not self._is_delivering:
            self._schedule()

    def release(self, earliest: float) -> None:
        """Go on after a hold."""
        if self._queue and self._call is None:
            self._schedule(earliest)

    def clear(self) -> None:
        """Drop everything in flight."""
        self._queue.clear()
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _schedule(self, earliest: float = 0.0) -> None:
        self._call = self._scheduler.call_at(max(self._queue[0][0], earliest), self._arrive)

    def _arrive(self) -> None:
        """Deliver what has arrived; if the channel is not open, hold it until `release`."""
        self._call = None
        queue, now = self._queue, self._scheduler.now
        self._is_delivering = True
        while queue and queue[0][0] <= now and self._channel.is_open:
            queue.popleft()[1]()
        self._is_delivering = False
        if queue and queue[0][0] > now:
            self._schedule()
