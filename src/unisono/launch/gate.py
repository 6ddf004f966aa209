"""Who may wait at the join port: strangers are few, short-lived and slowed down when they guess.

Knows addresses, counts and times. Does not know sockets. A newcomer is never turned away for strangers who
came before: the oldest stranger goes instead, first one from the same address.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque

from unisono.launch import limits

__all__ = ["Gate"]


class Gate:
    """Connections that have not proven the token, by key."""

    def __init__(
        self,
        pending_max: int = limits.PENDING_MAX,
        per_address_max: int = limits.PENDING_PER_ADDRESS_MAX,
    ) -> None:
        self._pending_max = pending_max
        self._per_address_max = per_address_max
        self._strangers: OrderedDict[int, str] = OrderedDict()
        self._by_address: dict[str, OrderedDict[int, None]] = {}
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def arrive(self, key: int, host: str, now: float) -> tuple[float, int | None]:
        """A stranger comes: from when on it is served, and who has to go for it."""
        group = _group(host)
        same = self._by_address.setdefault(group, OrderedDict())
        victim: int | None = None
        if len(same) >= self._per_address_max:
            victim = next(iter(same))
        elif len(self._strangers) >= self._pending_max:
            victim = next(iter(self._strangers))
        if victim is not None:
            self.depart(victim)
        self._by_address.setdefault(group, same)[key] = None
        self._strangers[key] = group
        delay = limits.FAILURE_DELAY_S if self._is_guessing(group, now) else 0.0
        return now + delay, victim

    def depart(self, key: int) -> None:
        """A stranger has gone, or is none any more."""
        group = self._strangers.pop(key, None)
        if group is None:
            return
        same = self._by_address[group]
        del same[key]
        if not same:
            del self._by_address[group]

    def oldest(self) -> int | None:
        """Who has waited longest."""
        return next(iter(self._strangers), None)

    def fail(self, host: str, now: float) -> None:
        """Somebody there spoke garbage or did not know the token."""
        group = _group(host)
        times = self._failures.setdefault(group, deque(maxlen=limits.FAILURES_PER_MINUTE_MAX))
        times.append(now)
        self._failures.move_to_end(group)
        if len(self._failures) > limits.FAILURE_ADDRESSES_MAX:
            self._failures.popitem(last=False)

    def __len__(self) -> int:
        return len(self._strangers)

    def _is_guessing(self, group: str, now: float) -> bool:
        times = self._failures.get(group)
        return times is not None and len(times) == times.maxlen and now - times[0] < 60


def _group(host: str) -> str:
    """What counts as one place: an IPv4 address, or the network of an IPv6 one, of which a host has 2^64."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if number.version == 6:
        return str(ipaddress.ip_network((int(number), 64), strict=False))
    return str(number)
