"""One send, receive or probe under way.

Knows how it ends and whom it then calls back. Does not know what carries it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from unisono.core.envelope import Any_
from unisono.errors import ClosedError, PeerLost

if TYPE_CHECKING:
    pass
from unisono.core.envelope import Envelope

__all__ = ["HeaderMismatch", "LengthMismatch", "Request", "withdrawn"]


class HeaderMismatch(Exception):
    """How a plan's request ends if a peer runs something else; whoever started it finds the words."""

    def __init__(self, peer: int, header: bytes) -> None:
        super().__init__(peer, header)
        self.peer = peer
        self.header = header


class LengthMismatch(Exception):
    """How a plan's request ends if a peer that runs the same sends a message of another length or type."""

    def __init__(self, peer: int, came: int, awaited: int) -> None:
        super().__init__(peer, came, awaited)
        self.peer = peer
        self.came = came
        self.awaited = awaited


class Request:
    """One send, receive or probe under way.

    Whoever completes it calls `complete` or `fail`, exactly once and without holding a lock: the callbacks
    run there and then. `data` holds the bytes of a receive that was started without a buffer.
    """

    __slots__ = (
        "_callbacks",
        "_envelope",
        "_error",
        "_lock",
        "_withdraw",
        "data",
        "done",
        "peer",
        "rank_here",
    )

    def __init__(self, peer: int | Any_, withdraw: Callable[[Request], bool] | None = None) -> None:
        self.peer = peer
        self.done = False
        # Turns the ranks of who ends it into those of the backend that was asked; None: they are equal.
        self.rank_here: Callable[[int], int] | None = None
        self.data: bytes | bytearray | None = None
        self._envelope: Envelope | None = None
        self._error: BaseException | None = None
        self._withdraw = withdraw
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []

    @property
    def envelope(self) -> Envelope | None:
        """What a receive or probe met or had to refuse, in the rank numbers of the backend that was asked."""
        if self._envelope is None or self.rank_here is None:
            return self._envelope
        return replace(self._envelope, source=self.rank_here(self._envelope.source))

    @property
    def error(self) -> BaseException | None:
        """What ended it, if not well; the ranks it names are those of the backend that was asked."""
        error, here = self._error, self.rank_here
        if here is None or error is None:
            return error
        match error:
            case PeerLost():
                return error.of_ranks(tuple(here(rank) for rank in error.ranks))
            case HeaderMismatch():
                return HeaderMismatch(here(error.peer), error.header)
            case LengthMismatch():
                return LengthMismatch(here(error.peer), error.came, error.awaited)
        return error

    def peers_awaited(self) -> tuple[int, ...]:
        """Whom it waits for now, as far as it is known."""
        return (self.peer,) if isinstance(self.peer, int) and not self.done else ()

    def withdraw_by(self, withdraw: Callable[[Request], bool]) -> None:
        """Say how it can be taken back."""
        self._withdraw = withdraw

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once it is done; at once if it is."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def complete(self, envelope: Envelope | None = None, data: bytes | bytearray | None = None) -> None:
        """End it well."""
        self._envelope = envelope
        self.data = data
        self._end()

    def fail(self, error: BaseException, envelope: Envelope | None = None) -> None:
        """End it with an error; the envelope is that of a message which met it and did not fit."""
        self._envelope = envelope
        self._error = error
        self._end()

    def cancel(self) -> bool:
        """Withdraw it. False if it is done or has met its counterpart: then it ends by itself, soon."""
        return not self.done and self._withdraw is not None and self._withdraw(self)

    def cancelled(self) -> None:
        """End it as withdrawn; for those who implement `cancel`."""
        self.fail(withdrawn())

    def _end(self) -> None:
        with self._lock:
            assert self._callbacks is not None, "a request ends once"
            callbacks, self._callbacks = self._callbacks, None
            self.done = True
        for callback in callbacks:
            callback()


def withdrawn() -> ClosedError:
    """The error of a request that was cancelled."""
    return ClosedError("withdrawn before it met its counterpart")
