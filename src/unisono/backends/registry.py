"""Which backends there are: ours, and those that outside packages register.

Knows names, whether each can run here and how to install what is missing. Does not know how any of them
works. An outside package points the entry-point group `unisono.backends` at a BackendInfo of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from unisono.config import Config
from unisono.errors import BackendUnavailable, UsageError
from unisono.messaging.backend import Backend, Capabilities

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BackendInfo",
    "BackendStatus",
    "BindSpec",
    "Closable",
    "UnconnectedBackend",
    "backend_named",
    "statuses",
]

GROUP = "unisono.backends"


@dataclass(frozen=True, slots=True)
class BindSpec:
    """What a rank is told before it knows the others: where to listen, and whether links need encryption.

    Port 0 is any. `advertise` is host:port for others, if it is not what is listened on; `secret` is known to
    the job's ranks only.
    """

    rank: int
    size: int
    host: str
    is_encrypted: bool
    config: Config
    port: int = 0
    advertise: str = ""
    secret: bytes = field(default=b"", repr=False)


class Closable(Backend):
    """A backend that tells when it was closed."""

    @abstractmethod
    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once it is closed: for what must outlive it."""


class UnconnectedBackend(Protocol):
    """A rank that does not know the others yet."""

    def card(self) -> bytes:
        """What the others need to reach this rank."""

    def connect(self, cards: Sequence[bytes]) -> Closable:
        """Make the backend, from everybody's cards by rank."""

    def close(self) -> None:
        """Give up."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """How a backend introduces itself. `check` returns why it cannot run here, or None.

    There are three ways to begin a rank for `uni.init`. `bind` makes one that shows its card at our own
    seed; `wrap` takes a rank of the native backend, and stands in its place; `join(config, timeout)` joins
    by means of the library's own launcher, which `launcher` names. With none of them, ranks of this kind are
    begun in another way.
    """

    name: str
    summary: str
    check: Callable[[], str | None]
    install: str
    capabilities: Capabilities | None = None
    bind: Callable[[BindSpec], UnconnectedBackend] | None = None
    wrap: Callable[[Closable], Closable] | None = None
    join: Callable[[Config, float | None], Backend] | None = None
    launcher: str = ""

    @property
    def has_processes(self) -> bool:
        """Whether `uni.init` can begin its ranks, each in a process of its own."""
        return any(way is not None for way in (self.bind, self.wrap, self.join))


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One row of `uni.list_backends()`."""

    name: str
    available: bool
    reason: str
    install: str
    summary: str = ""


def backend_named(name: str) -> BackendInfo:
    """Find a backend and make sure that it can run; "auto" is the native one.

    Raises:
        UsageError: no backend has this name.
        BackendUnavailable: it cannot run here; the text says why and what to install.
    """
    for point in _points():
        if point.name == ("native" if name == "auto" else name):
            return _loaded(point)
    known = [point.name for point in _points()]
    raise UsageError(f"backend {name!r} is unknown; allowed: {', '.join(['auto', *known])}")


def statuses() -> list[BackendStatus]:
    """Every registered backend, whether it can run here or not."""
    return [_status(point.name) for point in _points()]


def _points() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # a quarter of the package's import time, and rarely needed

    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _loaded(point: EntryPoint) -> BackendInfo:
    try:
        info: BackendInfo = point.load()
        reason, install = info.check(), info.install
    except Exception as error:  # an outside package that does not even load must not take others down
        reason, install = f"{type(error).__name__}: {error}", "reinstall the package that provides it"
    if reason is not None:
        raise BackendUnavailable(f"backend {point.name!r}", cause=reason, next_step=install)
    return info


def _status(name: str) -> BackendStatus:
    try:
        info = backend_named(name)
    except BackendUnavailable as error:
        return BackendStatus(name, False, error.cause or "", error.next_step or "")
    return BackendStatus(name, True, "available", info.install, info.summary)
