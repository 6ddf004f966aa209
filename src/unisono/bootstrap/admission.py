"""Which strangers (connections that have not proven the token) may wait at the join port.

Pure: addresses and times in, decisions out. A full port never refuses a newcomer; it evicts a stranger drawn
at random, one from the newcomer's address if that address is full. So no rate and no order of connections can
keep a certain worker out. A connection that has shown a worker's tag or proven the token is no stranger.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from unisono.bootstrap import limits

__all__ = ["AdmissionLimiter"]


class AdmissionLimiter:
    """The strangers, by the key of their connection."""

    def __init__(
        self,
        pending_max: int = limits.PENDING_MAX,
        per_address_max: int = limits.PENDING_PER_ADDRESS_MAX,
        draw: Callable[[Sequence[int]], int] = secrets.choice,
    ) -> None:
        self._pending_max = pending_max
        self._per_address_max = per_address_max
        self._draw = draw
        self._strangers: dict[int, str] = {}
        self._by_address: dict[str, dict[int, None]] = {}
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._turned_away: Counter[str] = Counter()
        self._turned_away_total = 0
        self._crowded_at = float("-inf")

    def arrive(self, key: int, host: str, now: float) -> int | None:
        """A stranger arrives; returns the stranger to evict for it."""
        group = _group(host)
        same = self._by_address.get(group, {})
        victim: int | None = None
        if len(same) >= self._per_address_max:
            victim = self._draw(list(same))
        elif len(self._strangers) >= self._pending_max:
            victim = self._draw(list(self._strangers))
        if victim is not None:
            self._crowded_at = now
            self.turn_away(victim)
        self._by_address.setdefault(group, {})[key] = None
        self._strangers[key] = group
        return victim

    def depart(self, key: int) -> None:
        """A stranger has left, or is none any more."""
        group = self._strangers.pop(key, None)
        if group is None:
            return
        same = self._by_address[group]
        del same[key]
        if not same:
            del self._by_address[group]

    def turn_away(self, key: int) -> None:
        """A stranger is dropped: evicted, silent for too long, or its handshake failed."""
        group = self._strangers.get(key)
        if group is None:
            return
        self._turned_away_total += 1
        if group in self._turned_away or len(self._turned_away) < limits.FAILURE_ADDRESSES_MAX:
            self._turned_away[group] += 1
        self.depart(key)

    def any(self) -> int | None:
        """One of the strangers, drawn at random."""
        return self._draw(list(self._strangers)) if self._strangers else None

    def fail(self, host: str, now: float) -> float:
        """A handshake from `host` failed; returns by how many seconds to delay the answer."""
        group = _group(host)
        times = self._failures.setdefault(group, deque(maxlen=limits.FAILURES_PER_MINUTE_MAX))
        is_guessing = len(times) == times.maxlen and now - times[0] < 60
        times.append(now)
        self._failures.move_to_end(group)
        if len(self._failures) > limits.FAILURE_ADDRESSES_MAX:
            self._failures.popitem(last=False)
        return limits.FAILURE_DELAY_S if is_guessing else 0.0

    def is_crowded(self, now: float) -> bool:
        """Whether a stranger was evicted within the last CROWDED_S seconds."""
        return now - self._crowded_at < limits.CROWDED_S

    def crowd(self) -> str:
        """Where a crowd of strangers comes from, in words; empty if few were dropped."""
        if self._turned_away_total < limits.CROWD_MIN:
            return ""
        ((host, most),) = self._turned_away.most_common(1)
        return (
            f"the seed's port is crowded: {self._turned_away_total} connections that did not prove the token "
            f"were dropped, {most} of them from {host}"
        )

    def __len__(self) -> int:
        return len(self._strangers)


def _group(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 of an IPv6 one, which one host owns."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if number.version == 6:
        return str(ipaddress.ip_network((int(number), 64), strict=False))
    return str(number)
