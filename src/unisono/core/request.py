"""Requests: one send, receive or probe under way, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from unisono.core.envelope import Any_, Envelope
from unisono.errors import ClosedError, PeerLost

if TYPE_CHECKING:
    from unisono._native import RankMap

__all__ = ["HeaderMismatch", "JointRequest", "LengthMismatch", "Request", "withdrawn"]


class HeaderMismatch(Exception):
    """Ends the request of a plan if a peer runs another collective; the caller makes the error for users."""

    def __init__(self, peer: int, header: bytes) -> None:
        super().__init__(peer, header)
        self.peer = peer
        self.header = header


class LengthMismatch(Exception):
    """Ends the request of a plan if a peer that runs the same one sends another length or type."""

    def __init__(self, peer: int, came: int, awaited: int) -> None:
        super().__init__(peer, came, awaited)
        self.peer = peer
        self.came = came
        self.awaited = awaited


class Request:
    """One send, receive or probe under way.

    The backend ends it by `complete` or `fail`, exactly once, on any thread and without holding a lock: the
    callbacks run within that call. `data` holds the bytes of a receive that was started without a buffer.
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
        "rank_map",
    )

    def __init__(self, peer: int | Any_, withdraw: Callable[[Request], bool] | None = None) -> None:
        self.peer = peer
        self.done = False
        # Between the ranks of a view that was called and those of the backend that ends it; None: the same.
        self.rank_map: RankMap | None = None
        self.data: bytes | bytearray | None = None
        self._envelope: Envelope | None = None
        self._error: BaseException | None = None
        self._withdraw = withdraw
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []

    @property
    def envelope(self) -> Envelope | None:
        """The envelope that a receive or probe matched or refused, in ranks of the called backend."""
        if self._envelope is None or self.rank_map is None:
            return self._envelope
        return replace(self._envelope, source=self.rank_here(self._envelope.source))

    def rank_here(self, peer: int) -> int:
        """The rank, in the backend that was called, of a rank of the backend that ends it."""
        rank = peer if self.rank_map is None else self.rank_map.to_local(peer)
        assert rank is not None, "only members take part"
        return rank

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if any, in ranks of the backend that was called."""
        error, here = self._error, self.rank_here
        if self.rank_map is None or error is None:
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
        """The ranks that it waits for now, as far as they are known."""
        return (self.peer,) if isinstance(self.peer, int) and not self.done else ()

    def withdraw_by(self, withdraw: Callable[[Request], bool]) -> None:
        """Set the function that cancels it; the function returns False if it was matched already."""
        with self._lock:
            if not self.done:
                self._withdraw = withdraw

    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is done; at once if it is done already."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def complete(self, envelope: Envelope | None = None, data: bytes | bytearray | None = None) -> None:
        """End it successfully."""
        self._envelope = envelope
        self.data = data
        self._end()

    def fail(self, error: BaseException, envelope: Envelope | None = None) -> None:
        """End it with an error; the envelope is that of a matching message that did not fit."""
        self._envelope = envelope
        self._error = error
        self._end()

    def cancel(self) -> bool:
        """Withdraw it. False if it is done or was matched: then it ends by itself, soon."""
        withdraw = self._withdraw
        return not self.done and withdraw is not None and withdraw(self)

    def cancelled(self) -> None:
        """End it as withdrawn; called by the function of `withdraw_by`."""
        self.fail(withdrawn())

    def _end(self) -> None:
        with self._lock:
            assert self._callbacks is not None, "a request ends once"
            callbacks, self._callbacks = self._callbacks, None
            self.done = True
            # It refers to the backend's record with the buffer, which refers to the request.
            self._withdraw = None
        for callback in callbacks:
            callback()


class JointRequest(Request):
    """Several requests as one. It ends when all have ended; an error of one withdraws the others."""

    __slots__ = ("_first_error", "_left", "_parts")

    def __init__(self, parts: Sequence[Request]) -> None:
        super().__init__(parts[0].peer, lambda _: [part.cancel() for part in parts].count(True) > 0)
        self._parts = parts
        self._left = len(parts)
        self._first_error: BaseException | None = None
        for part in parts:
            part.notify(partial(self._on_end, part))

    def peers_awaited(self) -> tuple[int, ...]:
        """The ranks that any of them waits for."""
        return tuple({peer for part in self._parts for peer in part.peers_awaited()})

    def _on_end(self, ended: Request) -> None:
        error = ended.error
        with self._lock:
            self._left -= 1
            is_last, is_first_error = self._left == 0, error is not None and self._first_error is None
            if is_first_error:
                self._first_error = error
        if is_last:
            if self._first_error is None:
                self.complete()
            else:
                self.fail(self._first_error)
        elif is_first_error:
            for part in self._parts:
                part.cancel()


def withdrawn() -> ClosedError:
    """The error of a request that was cancelled."""
    return ClosedError("withdrawn before it was matched")
