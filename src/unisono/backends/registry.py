"""The registered backends: ours, and those of outside packages.

An outside package points the entry-point group `unisono.backends` at a BackendInfo of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from unisono.config import Config
from unisono.errors import BackendUnavailable, ProtocolError, UsageError
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
    "decoded_card",
    "statuses",
]

GROUP = "unisono.backends"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BindSpec:
    """What a rank knows before it can reach the others: its argument to `BackendInfo.bind`.

    Args:
        rank: this rank.
        size: the number of ranks.
        host: the address to listen on.
        is_encrypted: whether links must be encrypted; a backend that cannot do so raises UsageError.
        config: the settings, the same on all ranks.
        port: the port to listen on; 0 is any.
        advertise: host:port that other ranks should use, if it differs from where this rank listens.
        secret: bytes that only the ranks of this job know.
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
    """A backend that reports when it is closed."""

    @abstractmethod
    def when_closed(self, call: Callable[[], None]) -> None:
        """Register a callback for resources that must outlive the backend.

        Args:
            call: called once, at the end of `close`, on the thread that closes.
        """


class UnconnectedBackend(Protocol):
    """A rank that listens, but cannot reach the others yet.

    `close` is called if joining fails: in place of `connect`, after it has raised, or after it has returned.
    """

    def card(self) -> bytes:
        """What other ranks need to reach this one: addresses and keys, no secrets. The seed passes it on."""

    def connect(self, cards: Sequence[bytes]) -> Closable:
        """Make the backend.

        Args:
            cards: the cards of all ranks, this one included, in the order of ranks.

        Raises:
            ProtocolError: a card is malformed.
            RendezvousError: a rank could not be reached.
        """

    def close(self) -> None:
        """Release everything: the world was not formed."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend's entry in the registry.

    `uni.init` begins a rank by one of `bind`, `wrap` and `join`; a backend with none of them has no ranks in
    processes of their own.

    Args:
        name: the name for `backend=`, equal to the entry point's.
        summary: one line for `uni.list_backends()`.
        check: returns why the backend cannot run here, or None. It must be cheap: no heavy import.
        install: what to do if it cannot run, such as a pip command.
        capabilities: what its ranks can do, for the table of backends.
        bind: makes a rank that the job's seed connects with the others. May raise UsageError or
            BackendUnavailable.
        wrap: takes a connected rank of the native backend, and returns the backend to use in its place.
        join: `join(config, timeout)` joins by the library's own launcher. May raise BackendUnavailable or
            RendezvousError.
        launcher: the name of that launcher.
        adapt: the settings of its ranks, made of those that were given. May raise UsageError.
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
    adapt: Callable[[Config], Config] = lambda config: config

    @property
    def has_processes(self) -> bool:
        """Whether `uni.init` can begin ranks, each in a process of its own."""
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
    """Find a backend that can run here; "auto" is the native one.

    Raises:
        UsageError: no backend has this name.
        BackendUnavailable: it cannot run here; the text says why and what to install.
    """
    for point in _points():
        if point.name == ("native" if name == "auto" else name):
            return _loaded(point)
    known = [point.name for point in _points()]
    raise UsageError(f"backend {name!r} is unknown; allowed: {', '.join(['auto', *known])}")


def decoded_card(data: bytes, kind: type[T]) -> T:
    """The card of a rank, from bytes of another rank.

    Raises:
        ProtocolError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("a rank's card is malformed", cause=str(error)) from None


def statuses() -> list[BackendStatus]:
    """All registered backends, also those that cannot run here."""
    return [_status(point.name) for point in _points()]


def _points() -> list[EntryPoint]:
    from importlib.metadata import (
        entry_points,
    )  # it would be a quarter of the import time of unisono, and is rarely needed

    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _loaded(point: EntryPoint) -> BackendInfo:
    try:
        info: BackendInfo = point.load()
        reason, install = info.check(), info.install
    except Exception as error:  # a broken outside package must not affect the other backends
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
