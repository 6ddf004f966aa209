"""A backend with a library for the memory of devices in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unisono._native import NativeGroup, RankMap
from unisono.backends.devices.calls import DeviceCalls, DeviceLibrary
from unisono.backends.registry import Closable
from unisono.config import Config
from unisono.core.envelope import Any_
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.messaging.backend import Backend, Capabilities
from unisono.messaging.fast_path import Mailbox
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import Stage

__all__ = ["DeviceBackend"]


class DeviceBackend(Closable):
    """The world's collectives on tensors of a device go to `library`, everything else to `inner`."""

    def __init__(self, inner: Backend, library: DeviceLibrary, name: str) -> None:
        self._inner = inner
        self._library = library
        self._capabilities = replace(inner.capabilities, name=name, device_memory=True)
        self._calls = DeviceCalls(library, inner.size, inner.config.deadline_s)
        self._after_close: list[Callable[[], None]] = []

    @property
    def capabilities(self) -> Capabilities:
        """Those of `inner`, and memory of devices."""
        return self._capabilities

    def device_verb(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """The verb, whose calls on tensors of the device go to the library."""
        return self._calls.verb(reference)

    def close(self) -> None:
        """Close the library, then `inner`."""
        self._library.close()
        self._inner.close()
        calls, self._after_close = self._after_close, []
        for call in calls:
            call()

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once both are closed."""
        self._after_close.append(call)

    # -- the rest is the inner backend's ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Its rank."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Its size."""
        return self._inner.size

    @property
    def runtime(self) -> Runtime:
        """Its clock."""
        return self._inner.runtime

    @property
    def config(self) -> Config:
        """Its settings."""
        return self._inner.config

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **options: Any) -> Request:
        """Send by it."""
        return self._inner.start_send(dst, context, tag, data, **options)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, **options: Any
    ) -> Request:
        """Receive by it."""
        return self._inner.start_recv(src, context, tag, into, **options)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Probe it."""
        return self._inner.probe(src, context, tag)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Watch its ranks."""
        self._inner.watch(listener)

    def hosts(self) -> tuple[int, ...]:
        """Its hosts."""
        return self._inner.hosts()

    def link_kind(self) -> str:
        """Its kind of links."""
        return self._inner.link_kind()

    def run_plan(self, plan: Any, counts: tuple[int, ...], stage: Stage) -> Request:
        """Run a plan in it."""
        return self._inner.run_plan(plan, counts, stage)

    def run_collective(self, problem: Any, stage: Stage) -> Request | None:
        """Run a collective of its library."""
        return self._inner.run_collective(problem, stage)

    def end_group(self, context: int) -> None:
        """End a group in it."""
        self._inner.end_group(context)

    def end_unused(self, context: int) -> bool:
        """The same for one that was not used."""
        return self._inner.end_unused(context)

    def native_group(self, *group: Any, **options: Any) -> NativeGroup | None:
        """Its group in the engine."""
        return self._inner.native_group(*group, **{**options, "leaves_tensors": True})

    def compile_plan(self, plan: Any, itemsize: int) -> tuple[Any, int]:
        """Compile for it."""
        return self._inner.compile_plan(plan, itemsize)

    def mailbox(self, context: int, tag: int, rank_map: RankMap | None = None) -> Mailbox | None:
        """Its mailbox."""
        return self._inner.mailbox(context, tag, rank_map)

    def adopt(self, handle: int, *operation: Any) -> Request:
        """Adopt an operation of its engine."""
        return self._inner.adopt(handle, *operation)
