"""The fabric between the ranks: what is sent arrives later, in order, unless something stands in between.

Knows ways, lanes, times and cuts. Does not know what a message means, or who is taken for dead.

The nouns. A *link* joins two ranks once they have something to say to each other. A *way* leads from one rank
to another and has two lanes. A *delivery* is a call that the way makes at the far end. A way that is cut, or
leads to a paused rank, holds its deliveries: nothing is lost on it, as on a TCP connection, until somebody
hangs up.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from unisono.config import Config
from unisono.core.envelope import Envelope, Lane
from unisono.messaging.credit import ENVELOPE_BYTES, eager_limits
from unisono.simulation.network import Network, Pace
from unisono.simulation.scheduler import Due, Scheduler, SimThread
from unisono.simulation.trace import TraceEvent

__all__ = ["Delivery", "Fabric", "Way"]

Delivery: TypeAlias = Callable[[], None]


class Fabric:
    """All ways, and the trace of what happened on them."""

    def __init__(self, scheduler: Scheduler, network: Network, config: Config, seed: int) -> None:
        self.scheduler = scheduler
        self.config = config
        self.trace: list[TraceEvent] = []
        self._network = network
        self._jitter = random.Random(f"jitter {seed}").random
        self._ways: dict[tuple[int, int], Way] = {}
        # When a message first opened the link of two ranks, the lower one first; see `linked_since`.
        self._opened: dict[tuple[int, int], float] = {}
        self.on_link: Callable[[int, int], None] = lambda caller, called: None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.scheduler.threads)

    def way(self, src: int, dst: int) -> Way:
        """The way from one rank to another."""
        way = self._ways.get((src, dst))
        if way is None:
            pace = self._network.pace(src, dst)
            way = Way(self.scheduler, self.scheduler.threads[dst], pace, self._jitter, self.config)
            self._ways[src, dst] = way
        return way

    def carry(self, src: int, dst: int, lane: Lane, nbytes: int, delivery: Delivery) -> None:
        """Take something to another rank, or to the same one, which takes no time."""
        if src == dst:
            delivery()
            return
        if self.linked_since(src, dst) is None:
            self._opened[min(src, dst), max(src, dst)] = self.scheduler.now
            self.on_link(src, dst)
        self.way(src, dst).send(lane, nbytes, delivery)

    def linked_since(self, one: int, other: int) -> float | None:
        """Since when two ranks have a link; None if they have none.

        As in the engine: ranks +-2^k have one from the start, others from the first message between them.
        """
        apart = (one - other) % self.size
        if apart & (apart - 1) == 0 or (self.size - apart) & (self.size - apart - 1) == 0:
            return 0.0
        return self._opened.get((min(one, other), max(one, other)))

    def release_to(self, rank: int) -> None:
        """A rank runs again: what came for it meanwhile is there at once."""
        for src in range(self.size):
            if (src, rank) in self._ways:
                self._ways[src, rank].release(self.scheduler.now)

    def note(self, kind: str, rank: int, peer: int | None = None, envelope: Envelope | None = None) -> None:
        """Write down what happened."""
        now = self.scheduler.now
        if envelope is None:
            self.trace.append(TraceEvent(now, kind, rank, peer))
        else:
            self.trace.append(
                TraceEvent(now, kind, rank, peer, envelope.context, envelope.tag, envelope.nbytes)
            )


class Way:
    """From one rank to another. Its lanes share nothing but the pace and what stands in the way.

    There are n * n of them, and most carry only a goodbye: a lane is made when it is used.
    """

    __slots__ = (
        "_config",
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
        config: Config,
    ) -> None:
        self.pace = pace
        self._config = config
        self._scheduler = scheduler
        self._receiver = receiver
        self._jitter = jitter
        self._lanes: dict[Lane, _Lane] = {}
        self._cuts = 0
        self._factors: tuple[float, ...] = ()
        self._is_over = False

    @property
    def is_cut(self) -> bool:
        """Whether a fault closes it."""
        return self._cuts > 0

    @property
    def is_open(self) -> bool:
        """Whether deliveries get through now."""
        return not self._cuts and not self._receiver.is_paused

    @property
    def latency_s(self) -> float:
        """How long the shortest message takes now."""
        return self.pace.latency_s * self._slowness()

    def send(self, lane: Lane, nbytes: int, delivery: Delivery) -> None:
        """Let something of a length arrive at the other end; nothing does once somebody hung up."""
        if self._is_over:
            return
        pace, factor = self.pace, self._slowness()
        extra = pace.latency_s + (self._jitter() * pace.jitter_s if pace.jitter_s else 0.0)
        self._lane(lane).add(nbytes / pace.bytes_per_s * factor, extra * factor, delivery)

    def send_last(self, delivery: Delivery) -> None:
        """Let something arrive after everything that was sent on either lane; no more is taken."""
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

    def hang_up(self, notice: Delivery | None) -> None:
        """Forget what is under way; only the notice still arrives."""
        for lane in self._lanes.values():
            lane.clear()
        self._is_over = notice is None
        if notice is not None:
            self.send_last(notice)

    def cut(self) -> None:
        """Let nothing through, beside other cuts."""
        self._cuts += 1

    def heal(self) -> None:
        """Take one cut away: what would have arrived meanwhile is sent again."""
        self._cuts -= 1
        if not self._cuts:
            self.release(self._scheduler.now + self.latency_s)

    def slow(self, factor: float) -> None:
        """Make what is sent from now on take longer."""
        self._factors += (factor,)

    def unslow(self, factor: float) -> None:
        """Take one slowness away."""
        i = self._factors.index(factor)
        self._factors = self._factors[:i] + self._factors[i + 1 :]

    def release(self, earliest: float) -> None:
        """Let what was held arrive, no sooner than `earliest`."""
        if self.is_open:
            for lane in self._lanes.values():
                lane.release(earliest)

    def credit(self, lane: Lane) -> Credit:
        """What may be sent on a lane before it is asked for."""
        return self._lane(lane).credit

    def _lane(self, lane: Lane) -> _Lane:
        found = self._lanes.get(lane)
        if found is None:
            credit = Credit(*eager_limits(self._config, lane))
            found = self._lanes[lane] = _Lane(self._scheduler, self, credit)
        return found

    def _slowness(self) -> float:
        return math.prod(self._factors)


class _Lane:
    """What is under way on one lane, in order. Only the first has a call due."""

    __slots__ = ("_due", "_free_at", "_is_delivering", "_queue", "_scheduler", "_way", "credit")

    def __init__(self, scheduler: Scheduler, way: Way, credit: Credit) -> None:
        self.credit = credit
        self._scheduler = scheduler
        self._way = way
        self._queue: deque[tuple[float, Delivery]] = deque()
        self._free_at = 0.0
        self._due: Due | None = None
        self._is_delivering = False

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._queue) or self._is_delivering

    def add(self, sending_s: float, travel_s: float, delivery: Delivery) -> None:
        """One leaves after the other: `sending_s` is how long it keeps the lane busy."""
        self._free_at = max(self._free_at, self._scheduler.now) + sending_s
        self._queue.append((self._free_at + travel_s, delivery))
        if len(self._queue) == 1 and not self._is_delivering:
            self._expect()

    def release(self, earliest: float) -> None:
        """Go on after having been held."""
        if self._queue and self._due is None:
            self._expect(earliest)

    def clear(self) -> None:
        """Forget everything under way."""
        self._queue.clear()
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _expect(self, earliest: float = 0.0) -> None:
        self._due = self._scheduler.call_at(max(self._queue[0][0], earliest), self._arrive)

    def _arrive(self) -> None:
        """Deliver what has arrived; if the way is not open, it stays until it is released."""
        self._due = None
        queue, now = self._queue, self._scheduler.now
        self._is_delivering = True
        while queue and queue[0][0] <= now and self._way.is_open:
            queue.popleft()[1]()
        self._is_delivering = False
        if queue and queue[0][0] > now:
            self._expect()


class Credit:
    """How much one rank may send another on a lane before it is asked for.

    Credit comes back when a message has met its receive and the news of it has travelled back.
    """

    __slots__ = ("_eager_bytes", "_left", "_returns")

    def __init__(self, eager_bytes: int, limit: int) -> None:
        self._eager_bytes = eager_bytes
        self._left = limit
        self._returns: deque[tuple[float, int]] | None = None

    def take(self, nbytes: int, now: float, way_back: Way) -> bool:
        """Use credit for a message; False if it must wait for its receive instead."""
        while self._returns and self._returns[0][0] <= now and not way_back.is_cut:
            self._left += self._returns.popleft()[1]
        cost = nbytes + ENVELOPE_BYTES
        if nbytes > self._eager_bytes or cost > self._left:
            return False
        self._left -= cost
        return True

    def give_back(self, nbytes: int, when: float) -> None:
        """Let the sender know at a time that a message was received."""
        if self._returns is None:
            self._returns = deque()
        self._returns.append((when, nbytes + ENVELOPE_BYTES))
