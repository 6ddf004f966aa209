"""Who may wait at the join port: strangers are few, short-lived and slowed down when they guess.

Knows addresses, counts and times. Does not know sockets. A newcomer is never turned away for strangers who
came before: one of them goes instead, drawn at random, so that no rate and no order of connections keeps a
certain one out; first one from the same address. Who has shown that it knows the token is no stranger.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from unisono.bootstrap import limits

__all__ = ["AdmissionLimiter"]


class AdmissionLimiter:
    """Connections that have not shown that they know the token, by key."""

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
        """A stranger comes; returns who has to go for it."""
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
        """A stranger has gone, or is none any more."""
        group = self._strangers.pop(key, None)
        if group is None:
            return
        same = self._by_address[group]
        del same[key]
        if not same:
            del self._by_address[group]

    def turn_away(self, key: int) -> None:
        """A stranger has to go: it crowds the port, says nothing, or what it says is wrong."""
        group = self._strangers.get(key)
        if group is None:
            return
        self._turned_away_total += 1
        if group in self._turned_away or len(self._turned_away) < limits.FAILURE_ADDRESSES_MAX:
            self._turned_away[group] += 1
        self.depart(key)

    def any(self) -> int | None:
        """One of the strangers."""
        return self._draw(list(self._strangers)) if self._strangers else None

    def fail(self, host: str, now: float) -> float:
        """Somebody there spoke garbage or did not know the token; returns how long its answer waits."""
        group = _group(host)
        times = self._failures.setdefault(group, deque(maxlen=limits.FAILURES_PER_MINUTE_MAX))
        is_guessing = len(times) == times.maxlen and now - times[0] < 60
        times.append(now)
        self._failures.move_to_end(group)
        if len(self._failures) > limits.FAILURE_ADDRESSES_MAX:
            self._failures.popitem(last=False)
        return limits.FAILURE_DELAY_S if is_guessing else 0.0

    def is_crowded(self, now: float) -> bool:
        """Whether strangers came faster than they went, a moment ago."""
        return now - self._crowded_at < limits.CROWDED_S

    def crowd(self) -> str:
        """Who crowds the port, in words; empty if few came."""
        if self._turned_away_total < limits.CROWD_MIN:
            return ""
        ((host, most),) = self._turned_away.most_common(1)
        return (
            f"strangers crowd the seed's port: {self._turned_away_total} connections that did not show the "
            f"token were dropped, {most} of them from {host}"
        )

    def __len__(self) -> int:
        return len(self._strangers)


def _group(host: str) -> str:
    """What counts as one place: an IPv4 address, or the network of an IPv6 one, of which a host has 2^64."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if number.version == 6:
        return str(ipaddress.ip_network((int(number), 64), strict=False))
    return str(number)
