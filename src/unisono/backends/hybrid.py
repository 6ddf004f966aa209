"""Several backends as one: each message takes the one that a route names.

Knows which part serves which traffic, and how one wildcard receive waits on several parts without losing a
message. Does not know why a route was chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from unisono._native import CallLog, FastMessages
from unisono.backends.devices.verbs import DeviceCalls, DevicePart
from unisono.backends.registry import Closable
from unisono.config import Config
from unisono.core.clock import Runtime
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.errors import UsageError
from unisono.messaging.backend import Backend, Capabilities, PeerDown, Stage
from unisono.messaging.fast_path import FastPath, Mailbox
from unisono.messaging.matching import Posted

__all__ = ["HybridBackend", "Route"]

# (peer, tag) -> index of the part. Both ends must come to the same answer: rank a asks with peer b, b with a.
Route: TypeAlias = Callable[[int, int], int]


class HybridBackend(Closable):
    """Backends with the same ranks, chosen per message by peer or by kind of traffic (the tag).

    A single part keeps its short ways. With a `device`, collectives of the world on memory of devices go by
    that library, in the order of the calls.
    """

    def __init__(
        self, parts: Sequence[Backend], route: Route, *, device: DevicePart | None = None, name: str = ""
    ) -> None:
        if not parts:
            raise UsageError("parts is empty; allowed: one or more backends")
        if len({(part.rank, part.size) for part in parts}) != 1:
            raise UsageError(
                f"parts disagree on rank and size: {[(part.rank, part.size) for part in parts]}",
                next_step="give backends of the same ranks",
            )
        self._parts = tuple(parts)
        self._route = route
        self._device = device
        self._name = name or "+".join(part.capabilities.name for part in parts)
        self._only = self._parts[0] if len(parts) == 1 else None
        self._has_world = False
        self._after_close: list[Callable[[], None]] = []
        self._down_lock = threading.Lock()
        self._line = _Line()

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
            name=self._name,
            run_plan=self._only is not None and all_of[0].run_plan,
            run_collective=self._only is not None and all_of[0].run_collective,
            sync_send=all(c.sync_send for c in all_of),
            wildcards=all(c.wildcards for c in all_of),
            device_memory=self._device is not None or any(c.device_memory for c in all_of),
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
        """Receive from the part that the route names; a wildcard waits on all.

        Behind a wildcard that waits for the same messages, every receive has to wait its turn.
        """
        self.check_peer(src, "src")
        parts = self._parts
        if src is not ANY and tag is not ANY:
            parts = (self._parts[self._route(src, tag)],)
            if not self._line.may_take(src, context, tag):
                return parts[0].start_recv(src, context, tag, into, dtype=dtype)
        return self._wait(parts, Posted(src, context, tag, Request(src), into, dtype))

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Probe the part that the route names; a wildcard waits on all."""
        self.check_peer(src, "src")
        if src is not ANY and tag is not ANY:
            return self._parts[self._route(src, tag)].probe(src, context, tag)
        return self._wait(self._parts, Posted(src, context, tag, Request(src), is_probe=True))

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
        if self._device is not None:
            self._device.close()
        for part in self._parts:
            part.close()
        calls, self._after_close = self._after_close, []
        for call in calls:
            call()

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once all parts are closed."""
        self._after_close.append(call)

    def link_kind(self) -> str:
        """The only part's; else unknown: different peers may be reached in different ways."""
        return "" if self._only is None else self._only.link_kind()

    # -- the short ways, which only one part can have -----------------------------------------------------

    def run_plan(self, plan: Any, stage: Stage) -> Request:
        """By the only part."""
        return super().run_plan(plan, stage) if self._only is None else self._only.run_plan(plan, stage)

    def run_collective(self, problem: Any, stage: Stage) -> Request | None:
        """By the only part."""
        return None if self._only is None else self._only.run_collective(problem, stage)

    def end_group(self, context: int) -> None:
        """Tell the parts."""
        for part in self._parts:
            part.end_group(context)

    def fast_path(
        self, context: int, size: int, call_log: CallLog, on_unclaimed: Callable[[int, int, bytes], bool]
    ) -> FastPath | None:
        """The only part's; in the world, whose group is made first, the device's stand in front of them."""
        inner = None if self._only is None else self._only.fast_path(context, size, call_log, on_unclaimed)
        if self._device is None or self._has_world:
            return inner
        self._has_world = True
        return DeviceCalls(self._device, size, inner)

    def fast_messages(
        self, context: int, members: tuple[int, ...], call_log: CallLog, *, is_introduced: bool
    ) -> FastMessages | None:
        """The only part's."""
        if self._only is None:
            return None
        return self._only.fast_messages(context, members, call_log, is_introduced=is_introduced)

    def mailbox(self, context: int, tag: int) -> Mailbox | None:
        """The only part's."""
        return None if self._only is None else self._only.mailbox(context, tag)

    def adopt_run(self, handle: int, memory: tuple[Any, ...]) -> Request:
        """By the only part."""
        return (
            super().adopt_run(handle, memory) if self._only is None else self._only.adopt_run(handle, memory)
        )

    def hosts(self) -> tuple[int, ...]:
        """The first part's."""
        return self._parts[0].hosts()

    def _wait(self, parts: Sequence[Backend], pattern: Posted) -> Request:
        _Waiting(self._line, parts, pattern)
        return pattern.request


class _Line:
    """The receives of one rank that wait on several parts, in the order they were posted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: dict[_Waiting, None] = {}

    def add(self, waiting: _Waiting) -> None:
        with self.lock:
            self._waiting[waiting] = None

    def remove(self, waiting: _Waiting) -> None:
        """Take one out; the caller holds the lock."""
        self._waiting.pop(waiting, None)

    def first_for(self, envelope: Envelope) -> _Waiting:
        """Who is to get a message that one of those waiting has seen; the caller holds the lock."""
        return next(waiting for waiting in self._waiting if waiting.pattern.meets(envelope))

    def may_take(self, src: int, context: int, tag: int) -> bool:
        """Whether somebody waits for what such messages could be: then later receives stand behind."""
        envelope = Envelope(src, context, tag, 0)
        with self.lock:
            return any(waiting.pattern.meets(envelope) for waiting in self._waiting)


class _Waiting:
    """One receive or probe that any of several parts may serve.

    It probes all parts. Where a message shows up, whoever stands first in line for it takes it from that
    part by its exact source and tag. If another receive was faster, the probing begins again: nothing is
    taken that cannot be given.
    """

    def __init__(self, line: _Line, parts: Sequence[Backend], pattern: Posted) -> None:
        self.pattern = pattern
        self._line = line
        self._parts = parts
        self._probes: dict[Request, Backend] = {}
        self._behind: list[tuple[_Waiting, Backend]] = []
        self._is_taking = False
        self._is_unwanted = False
        self._is_over = False
        pattern.request.withdraw_by(self._withdraw)
        if not pattern.is_probe:
            line.add(self)
        self._look(parts)

    def _look(self, parts: Sequence[Backend]) -> None:
        pattern = self.pattern
        probes = {part.probe(pattern.source, pattern.context, pattern.tag): part for part in parts}
        with self._line.lock:
            is_served = self._is_over or self._is_taking
            if not is_served:
                self._probes.update(probes)
        if is_served:
            for probe in probes:
                probe.cancel()
            return
        # A part that has a message goes before one whose peer is gone: what arrived stays receivable.
        for probe in sorted(probes, key=lambda probe: probe.done and probe.error is not None):
            probe.notify(partial(self._found, probe))

    def _found(self, probe: Request) -> None:
        with self._line.lock:
            part = self._probes.pop(probe, None)
            if part is None:
                return
            first, rest = self, dict[Request, Backend]()
            if probe.error is not None or self.pattern.is_probe:
                rest = self._end()
            else:
                assert probe.envelope is not None
                first = self._line.first_for(probe.envelope)
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
                self._look([part])

    def _take(self, part: Backend, envelope: Envelope) -> None:
        """Take a message that was seen; the probes are withdrawn."""
        pattern = self.pattern
        taken = part.start_recv(
            envelope.source, envelope.context, envelope.tag, pattern.into, dtype=pattern.dtype
        )
        is_missed = not taken.done and taken.cancel()
        with self._line.lock:
            self._is_taking = False
            behind, self._behind = self._behind, []
            if not is_missed or self._is_unwanted:
                self._end()
        if not is_missed:
            taken.notify(lambda: _pass_on(taken, pattern.request))
        elif self._is_unwanted:
            pattern.request.cancelled()
        else:
            self._look(self._parts)
        for waiting, its_part in behind:
            waiting._look([its_part])

    def _end(self) -> dict[Request, Backend]:
        """Leave the line, and give back the probes; the caller holds the lock."""
        self._is_over = True
        self._line.remove(self)
        probes, self._probes = self._probes, {}
        return probes

    def _withdraw(self, request: Request) -> bool:
        with self._line.lock:
            if self._is_over:
                return False
            if self._is_taking:
                # It has probably met its message; if not, it ends instead of looking again.
                self._is_unwanted = True
                return False
            probes = self._end()
        for probe in probes:
            probe.cancel()
        request.cancelled()
        return True


def _pass_on(taken: Request, request: Request) -> None:
    if taken.error is not None:
        request.fail(taken.error, taken.envelope)
    else:
        request.complete(taken.envelope, taken.data)
