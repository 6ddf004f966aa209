"""Several backends as one: each peer is reached by the one that a route names.

A receive from any source waits on all of them without losing a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from unisono.config import Config
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.errors import UsageError
from unisono.messaging.backend import Backend, Capabilities
from unisono.messaging.matching import Posted
from unisono.messaging.peer_down import PeerDown

__all__ = ["HybridBackend", "Route"]

# The index of the part that reaches a peer. Both ends must agree: rank a asks for b, rank b for a.
Route: TypeAlias = Callable[[int], int]


class HybridBackend(Backend):
    """Backends with the same ranks, chosen by peer."""

    def __init__(self, parts: Sequence[Backend], route: Route) -> None:
        if not parts:
            raise UsageError("parts is empty; allowed: one or more backends")
        if len({(part.rank, part.size) for part in parts}) != 1:
            raise UsageError(
                f"parts disagree on rank and size: {[(part.rank, part.size) for part in parts]}",
                next_step="give backends of the same ranks",
            )
        self._parts = tuple(parts)
        self._route = route
        self._down_lock = threading.Lock()
        self._waiting = _WaitingReceives()

    @property
    def rank(self) -> int:
        """The rank in every part."""
        return self._parts[0].rank

    @property
    def size(self) -> int:
        """The size of every part."""
        return self._parts[0].size

    @property
    def capabilities(self) -> Capabilities:
        """What all parts can do. Collectives may need several parts, so they go by messages."""
        all_of = [part.capabilities for part in self._parts]
        return Capabilities(
            name="+".join(c.name for c in all_of),
            sync_send=all(c.sync_send for c in all_of),
            wildcards=all(c.wildcards for c in all_of),
        )

    @property
    def runtime(self) -> Runtime:
        """The first part's."""
        return self._parts[0].runtime

    @property
    def config(self) -> Config:
        """The first part's."""
        return self._parts[0].config

    def hosts(self) -> tuple[int, ...]:
        """The first part's."""
        return self._parts[0].hosts()

    def start_send(
        self,
        dst: int,
        context: int,
        tag: int,
        data: memoryview,
        *,
        dtype: int = UNTYPED,
        header: bytes = b"",
        lane: Lane = Lane.BULK,
        sync: bool = False,
    ) -> Request:
        """Send by the part that reaches `dst`."""
        self.check_peer(dst, "dst")
        part = self._parts[self._route(dst)]
        return part.start_send(dst, context, tag, data, dtype=dtype, header=header, lane=lane, sync=sync)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Receive from the part that reaches `src`; from any source, wait on all parts.

        A receive that could match the same messages as an earlier one from any source waits behind it.
        """
        self.check_peer(src, "src")
        parts = self._parts
        if src is not ANY:
            parts = (self._parts[self._route(src)],)
            if not self._waiting.may_match(src, context, tag):
                return parts[0].start_recv(src, context, tag, into, dtype=dtype)
        return self._wait(parts, Posted(src, context, tag, Request(src), into, dtype))

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Probe the part that reaches `src`; from any source, all parts."""
        self.check_peer(src, "src")
        if src is not ANY:
            return self._parts[self._route(src)].probe(src, context, tag)
        return self._wait(self._parts, Posted(src, context, tag, Request(src), is_probe=True))

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener once of each rank that is down in any part."""
        notified: set[int] = set()

        def once(down: PeerDown) -> None:
            with self._down_lock:
                if down.rank in notified:
                    return
                notified.add(down.rank)
            listener(down)

        for part in self._parts:
            part.watch(once)

    def end_group(self, context: int) -> None:
        """End it in every part."""
        for part in self._parts:
            part.end_group(context)

    def close(self) -> None:
        """Close every part."""
        for part in self._parts:
            part.close()

    def _wait(self, parts: Sequence[Backend], pattern: Posted) -> Request:
        _WaitingReceive(self._waiting, parts, pattern)
        return pattern.request


class _WaitingReceives:
    """The receives of one rank that wait on several parts, or behind such a one, in posted order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: dict[_WaitingReceive, None] = {}

    def add(self, waiting: _WaitingReceive) -> None:
        with self.lock:
            self._waiting[waiting] = None

    def remove(self, waiting: _WaitingReceive) -> None:
        """Remove one; the caller holds the lock."""
        self._waiting.pop(waiting, None)

    def first_for(self, envelope: Envelope) -> _WaitingReceive:
        """The receive that gets a message which a probe has found; the caller holds the lock."""
        return next(waiting for waiting in self._waiting if waiting.pattern.meets(envelope))

    def may_match(self, src: int, context: int, tag: int | Any_) -> bool:
        """Whether an earlier receive could match a message that a new one would."""
        with self.lock:
            return any(waiting.overlaps(src, context, tag) for waiting in self._waiting)


class _WaitingReceive:
    """One receive or probe that any of several parts may serve.

    It probes all parts. When a probe finds a message, the first receive in the queue that matches it takes it
    from that part by its exact source and tag. If another receive was faster, the probing begins again, so no
    message is taken that cannot be delivered.
    """

    def __init__(self, queue: _WaitingReceives, parts: Sequence[Backend], pattern: Posted) -> None:
        self.pattern = pattern
        self._queue = queue
        self._parts = parts
        self._probes: dict[Request, Backend] = {}
        self._behind: list[tuple[_WaitingReceive, Backend]] = []
        self._is_taking = False
        self._is_unwanted = False
        self._is_over = False
        pattern.request.withdraw_by(self._withdraw)
        if not pattern.is_probe:
            queue.add(self)
        self._probe(parts)

    def overlaps(self, src: int, context: int, tag: int | Any_) -> bool:
        """Whether this receive and one with these arguments could match the same message."""
        mine = self.pattern
        is_source, is_tag = mine.source in (ANY, src), tag is ANY or mine.tag in (ANY, tag)
        return mine.context == context and is_source and is_tag

    def _probe(self, parts: Sequence[Backend]) -> None:
        pattern = self.pattern
        probes = {part.probe(pattern.source, pattern.context, pattern.tag): part for part in parts}
        with self._queue.lock:
            is_served = self._is_over or self._is_taking
            if not is_served:
                self._probes.update(probes)
        if is_served:
            for probe in probes:
                probe.cancel()
            return
        # A part with a message goes before one without any peer left: what has arrived stays receivable.
        for probe in sorted(probes, key=lambda probe: probe.done and probe.error is not None):
            probe.notify(partial(self._found, probe))

    def _found(self, probe: Request) -> None:
        with self._queue.lock:
            part = self._probes.pop(probe, None)
            if part is None:
                return
            first, rest = self, dict[Request, Backend]()
            if probe.error is not None or self.pattern.is_probe:
                rest = self._end()
            else:
                assert probe.envelope is not None
                first = self._queue.first_for(probe.envelope)
                if first._is_taking:
                    first._behind.append((self, part))
                    return
                first._is_taking = True
                rest, first._probes = first._probes, {}
        for other in rest:
            other.cancel()
        if probe.error is not None:
            self.pattern.request.fail(probe.error)
        elif self.pattern.is_probe:
            self.pattern.request.complete(probe.envelope)
        else:
            assert probe.envelope is not None
            first._take(part, probe.envelope)
            if first is not self:
                self._probe([part])

    def _take(self, part: Backend, envelope: Envelope) -> None:
        """Receive a message that a probe has found; the other probes are withdrawn."""
        pattern = self.pattern
        taken = part.start_recv(
            envelope.source, envelope.context, envelope.tag, pattern.into, dtype=pattern.dtype
        )
        is_missed = not taken.done and taken.cancel()
        with self._queue.lock:
            self._is_taking = False
            behind, self._behind = self._behind, []
            if not is_missed or self._is_unwanted:
                self._end()
        if not is_missed:
            taken.notify(lambda: _forward(taken, pattern.request))
        elif self._is_unwanted:
            pattern.request.cancelled()
        else:
            self._probe(self._parts)
        for waiting, its_part in behind:
            waiting._probe([its_part])

    def _end(self) -> dict[Request, Backend]:
        """Leave the queue and return the probes; the caller holds the lock."""
        self._is_over = True
        self._queue.remove(self)
        probes, self._probes = self._probes, {}
        return probes

    def _withdraw(self, request: Request) -> bool:
        with self._queue.lock:
            if self._is_over:
                return False
            if self._is_taking:
                # It has probably matched its message; if not, it ends instead of probing again.
                self._is_unwanted = True
                return False
            probes = self._end()
        for probe in probes:
            probe.cancel()
        request.cancelled()
        return True


def _forward(taken: Request, request: Request) -> None:
    if taken.error is not None:
        request.fail(taken.error, taken.envelope)
    else:
        request.complete(taken.envelope, taken.data)
