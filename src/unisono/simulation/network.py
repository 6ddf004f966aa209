"""The network of a simulation: how long a message takes from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.errors import UsageError
from unisono.simulation.checks import check_amount, check_rank

__all__ = ["Link", "Network", "Pace"]


@dataclass(frozen=True, slots=True)
class Link:
    """What is different from one rank to another; None: the same as in the rest of the network."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    jitter_s: float | None = None

    def __post_init__(self) -> None:
        _check_pace(self.latency_s, self.bytes_per_s, self.jitter_s)


@dataclass(frozen=True, slots=True)
class Network:
    """Every rank reaches every other: b bytes take `latency_s + b / bytes_per_s`, and up to `jitter_s` more.

    The messages of one lane from one rank to another leave one after the other and arrive in order. `links`
    says what is different between single ranks: `links={(0, 1): Link(latency_s=0.1)}` concerns messages from
    0 to 1, not those from 1 to 0. The defaults are those of TCP within a rack, at 10 Gbit/s.
    """

    latency_s: float = 50e-6
    bytes_per_s: float = 1.25e9
    jitter_s: float = 0.0
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_pace(self.latency_s, self.bytes_per_s, self.jitter_s)
        if not isinstance(self.links, Mapping):
            raise UsageError(f"links is {type(self.links).__name__}; allowed: a dict of (src, dst) to Link")
        for key, link in self.links.items():
            if not isinstance(key, tuple) or len(key) != 2 or key[0] == key[1]:
                raise UsageError(f"links has the key {key!r}; allowed: (src, dst) of two different ranks")
            if not isinstance(link, Link):
                raise UsageError(f"links[{key}] is {type(link).__name__}; allowed: unisono.simulation.Link")
        object.__setattr__(self, "links", dict(self.links))

    def check(self, size: int) -> None:
        """Refuse links between ranks that do not exist."""
        for key in self.links:
            for rank in key:
                check_rank(f"links[{key}]: rank", rank, size)

    def pace(self, src: int, dst: int) -> Pace:
        """The pace from one rank to another."""
        link = self.links.get((src, dst), _SAME)
        return Pace(
            self.latency_s if link.latency_s is None else link.latency_s,
            self.bytes_per_s if link.bytes_per_s is None else link.bytes_per_s,
            self.jitter_s if link.jitter_s is None else link.jitter_s,
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast messages travel from one rank to another."""

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
