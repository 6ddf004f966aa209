"""Several backends as one: each message takes the one that a route names.

Knows which part serves which traffic, and how one wildcard receive waits on several parts without losing a
message. Does not know why a route was chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from unisono.config import Config
from unisono.contract import UNTYPED, Backend, Capabilities, Lane, PeerDown, Request
from unisono.errors import UsageError
from unisono.runtime import Runtime
from unisono.values import ANY, Any_

__all__ = ["HybridBackend", "Route"]

# (peer, tag) -> index of the part. Both ends must come to the same answer: rank a asks with peer b, b with a.
Route: TypeAlias = Callable[[int, int], int]


class HybridBackend(Backend):
    """Backends with the same ranks, chosen per message by peer or by kind of traffic (the tag)."""

    def __init__(self, parts: Sequence[Backend], route: Route) -> None:
        if not parts:
            raise UsageError("parts is empty; allowed: one or more backends")
        if len({(part.rank, part.size) for part in parts}) != 1:
            raise UsageError(f"parts disagree on rank and size: {[(part.rank, part.size) for part in parts]}")
        self._parts = tuple(parts)
        self._route = route
        self._down_lock = threading.Lock()

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
        """What all parts can do."""
        all_of = [part.capabilities for part in self._parts]
        return Capabilities(
            name="+".join(c.name for c in all_of),
            sync_send=all(c.sync_send for c in all_of),
            wildcards=all(c.wildcards for c in all_of),
            device_memory=any(c.device_memory for c in all_of),
        )

    @property
    def runtime(self) -> Runtime:
        """The first part's."""
        return self._parts[0].runtime

    @property
    def config(self) -> Config:
        """The first part's."""
        return self._parts[0].config

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
        """Send by the part that the route names."""
        self.check_peer(dst, "dst")
        part = self._parts[self._route(dst, tag)]
        return part.start_send(dst, context, tag, data, dtype=dtype, header=header, lane=lane, sync=sync)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Receive from the part that the route names; a wildcard waits on all."""
        self.check_peer(src, "src")
        if src is not ANY and tag is not ANY:
            return self._parts[self._route(src, tag)].start_recv(src, context, tag, into, dtype=dtype)
        return _Wildcard(self._parts, src, context, tag, (into, dtype)).request

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Probe the part that the route names; a wildcard waits on all."""
        self.check_peer(src, "src")
        if src is not ANY and tag is not ANY:
            return self._parts[self._route(src, tag)].probe(src, context, tag)
        return _Wildcard(self._parts, src, context, tag, None).request

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """A rank is down as soon as one part says so; it is told once."""
        told: set[int] = set()

        def once(down: PeerDown) -> None:
            with self._down_lock:
                if down.rank in told:
                    return
                told.add(down.rank)
            listener(down)

        for part in self._parts:
            part.watch(once)

    def close(self) -> None:
        """Close every part."""
        for part in self._parts:
            part.close()

    def hosts(self) -> tuple[int, ...]:
        """The first part's."""
        return self._parts[0].hosts()


class _Wildcard:
    """One receive or probe that any of several parts may serve.

    It probes all parts; where a message shows up, it is taken from that part by its exact source and tag. If
    another receive was faster, the probing begins again: nothing is taken that cannot be given.
    """

    def __init__(
        self,
        parts: Sequence[Backend],
        src: int | Any_,
        context: int,
        tag: int | Any_,
        receive: tuple[memoryview | None, int] | None,
    ) -> None:
        self._parts = parts
        self._pattern = (src, context, tag)
        self._receive = receive
        self._lock = threading.Lock()
        self._probes: list[Request] = []
        self._settled = False
        self.request = Request(src, self._withdraw)
        self._look()

    def _look(self) -> None:
        probes = [part.probe(*self._pattern) for part in self._parts]
        with self._lock:
            self._probes = probes
        for part, probe in zip(self._parts, probes, strict=True):
            probe.notify(lambda part=part, probe=probe: self._found(part, probe))  # type: ignore[misc]

    def _found(self, part: Backend, probe: Request) -> None:
        with self._lock:
            if self._settled or probe not in self._probes:
                return
            probes, self._probes = self._probes, []
        for other in probes:
            other.cancel()
        if probe.error is not None:
            self._end(lambda: self.request.fail(probe.error))  # type: ignore[arg-type]
        elif self._receive is None:
            self._end(lambda: self.request.complete(probe.envelope))
        else:
            self._take(part, probe)

    def _take(self, part: Backend, probe: Request) -> None:
        envelope = probe.envelope
        assert envelope is not None
        assert self._receive is not None
        into, dtype = self._receive
        taken = part.start_recv(envelope.source, envelope.context, envelope.tag, into, dtype=dtype)
        if not taken.done and taken.cancel():
            self._look()
            return
        taken.notify(lambda: self._end(lambda: self._pass_on(taken)))

    def _pass_on(self, taken: Request) -> None:
        if taken.error is not None:
            self.request.fail(taken.error)
        else:
            self.request.complete(taken.envelope, taken.data)

    def _end(self, tell: Callable[[], None]) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled = True
        tell()

    def _withdraw(self, request: Request) -> bool:
        with self._lock:
            if self._settled or not self._probes:
                return False
            self._settled = True
            probes, self._probes = self._probes, []
        for probe in probes:
            probe.cancel()
        request.cancelled()
        return True
