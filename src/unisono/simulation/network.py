"""The network of a simulation: how long a message takes from rank to rank.

Knows latency, speed and jitter. Does not know faults, messages or the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.errors import UsageError
from unisono.simulation.checks import check_amount, check_rank

__all__ = ["Link", "Network", "Pace"]


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one rank to another, where it differs from the rest of the network; None: it does not."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    jitter_s: float | None = None

    def __post_init__(self) -> None:
        _check_pace(self.latency_s, self.bytes_per_s, self.jitter_s)


@dataclass(frozen=True, slots=True)
class Network:
    """Every rank reaches every other: b bytes take `latency_s + b / bytes_per_s`, and up to `jitter_s` more.

    The messages of one lane from one rank to another leave one after the other and arrive in order. `links`
    says what is different on single ways: `links={(0, 1): Link(latency_s=0.1)}` is the way from 0 to 1, not
    back. By default: TCP between the hosts of a rack, at 10 Gbit/s.
    """

    latency_s: float = 50e-6
    bytes_per_s: float = 1.25e9
    jitter_s: float = 0.0
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_pace(self.latency_s, self.bytes_per_s, self.jitter_s)
        if not isinstance(self.links, Mapping):
            raise UsageError(f"links is {type(self.links).__name__}; allowed: a dict of (src, dst) to Link")
        for way, link in self.links.items():
            if not isinstance(way, tuple) or len(way) != 2 or way[0] == way[1]:
                raise UsageError(f"links has the key {way!r}; allowed: (src, dst) of two different ranks")
            if not isinstance(link, Link):
                raise UsageError(f"links[{way}] is {type(link).__name__}; allowed: unisono.simulation.Link")
        object.__setattr__(self, "links", dict(self.links))

    def check(self, size: int) -> None:
        """Refuse links between ranks that do not exist."""
        for way in self.links:
            for rank in way:
                check_rank(f"rank in links[{way}]", rank, size)

    def pace(self, src: int, dst: int) -> Pace:
        """What holds on one way."""
        link = self.links.get((src, dst), _SAME)
        return Pace(
            self.latency_s if link.latency_s is None else link.latency_s,
            self.bytes_per_s if link.bytes_per_s is None else link.bytes_per_s,
            self.jitter_s if link.jitter_s is None else link.jitter_s,
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one way is."""

    latency_s: float
    bytes_per_s: float
    jitter_s: float


def _check_pace(latency_s: float | None, bytes_per_s: float | None, jitter_s: float | None) -> None:
    if latency_s is not None:
        check_amount("latency_s", latency_s)
    if bytes_per_s is not None:
        check_amount("bytes_per_s", bytes_per_s, above=0, finite=False)
    if jitter_s is not None:
        check_amount("jitter_s", jitter_s)


_SAME = Link()
