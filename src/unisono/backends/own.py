"""A collective of a foreign library's own, as a request.

Knows when it may begin, on whose memory it works and how it is given up. Does not know any library.

Ranks that call different things would confuse a library that compares nothing: it hangs, or adds what should
not be added. So every collective begins with an *agreement*: all ranks show what they call. Since every rank
is there when that ends, the rest needs nobody's patience.

Libraries put the calls of a group in order by themselves, so all ranks must begin them in one order. Verbs
begin their first stage in the order of the user's calls; later stages do so when they can, and go by plans.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from unisono.contract import HEADER_BYTES_MAX, HeaderMismatch, PeerDown, Request, Stage, Tags
from unisono.plans.steps import Problem
from unisono.runtime import Runtime
from unisono.values import Kind

__all__ = [
    "DIGEST_BYTES",
    "OwnRequest",
    "digest_of",
    "disagreement",
    "is_even",
    "is_exact",
    "is_first_stage",
    "shown",
]

DIGEST_BYTES: Final = 8

# After a rank is gone, what it said last may need so long to be read by a library's threads.
_PATIENCE_S: Final = 2.0
_NOBODY: Final = -1


class OwnRequest(Request):
    """A collective under way in a library. `finish` brings its result into the user's memory.

    Given up, it ends at once: the library works on memory of its own, which stays until it is done.
    """

    __slots__ = ("_finish", "_others", "_state_lock", "_taken")

    def __init__(self, others: tuple[int, ...], finish: Callable[[], None]) -> None:
        super().__init__(_NOBODY)
        self._others = others
        self._finish = finish
        self._taken = False
        self._state_lock = threading.Lock()

    def peers_awaited(self) -> tuple[int, ...]:
        """Everybody: a library does not say whom it waits for."""
        return () if self.done else self._others

    def cancel(self) -> bool:
        """Give it up."""
        if not self._take():
            return False
        self.cancelled()
        return True

    def succeed(self) -> None:
        """The library is done."""
        if self._take():
            self._finish()
            self.complete()

    def break_off(self, error: BaseException) -> None:
        """The library or the others failed."""
        if self._take():
            self.fail(error)

    def break_off_later(self, runtime: Runtime, error: BaseException) -> None:
        """The library failed. Why is for those to say who know the ranks; if they do not, it is this."""
        runtime.call_at(runtime.now() + _PATIENCE_S, lambda: self.break_off(error))

    def peer_down(self, runtime: Runtime, down: PeerDown) -> None:
        """A rank is gone, and may have done its part before."""
        self.break_off_later(runtime, down.error())

    def _take(self) -> bool:
        """Whether the caller is the one who ends it."""
        with self._state_lock:
            is_first, self._taken = not self._taken, True
        return is_first


def is_first_stage(stage: Stage) -> bool:
    """Whether ranks begin it in the order of the user's calls."""
    return (stage.tag & ~Tags.COLLECTIVE) % Tags.STAGES == 0


def is_even(problem: Problem) -> bool:
    """Whether all blocks have one length, and there is something in them."""
    return bool(problem.counts) and problem.counts[0] > 0 and len(set(problem.counts)) == 1


def is_exact(stage: Stage, reproducible: bool) -> bool:
    """Whether the order of operands is free: nothing rounds, or nobody asked for the same bits every time."""
    return not reproducible or stage.dtype.kind in (Kind.INTEGER, Kind.BOOL)


def digest_of(stage: Stage) -> np.ndarray[Any, Any]:
    """What ranks compare first."""
    return np.frombuffer(
        hashlib.blake2b(_call_of(stage.header), digest_size=DIGEST_BYTES).digest(), np.uint8
    ).copy()


def shown(stage: Stage) -> np.ndarray[Any, Any]:
    """The whole fingerprint in a fixed length: what ranks show if they differ."""
    text = stage.header[: HEADER_BYTES_MAX - 2]
    return np.frombuffer(
        len(text).to_bytes(2, "little") + text.ljust(HEADER_BYTES_MAX - 2, b"\0"), np.uint8
    ).copy()


def disagreement(stage: Stage, everyone: np.ndarray[Any, Any], rank: int) -> HeaderMismatch:
    """The error of ranks whose calls differ, from the fingerprints of all."""
    rows = [bytes(row) for row in everyone.reshape(-1, HEADER_BYTES_MAX)]
    headers = [row[2 : 2 + int.from_bytes(row[:2], "little")] for row in rows]
    mine = _call_of(stage.header)
    # Where this rank agrees with some, those who differ show it; where with nobody, anyone does.
    peer = next(r for r, header in enumerate(headers) if r != rank and _call_of(header) != mine)
    return HeaderMismatch(peer, headers[peer])


def _call_of(header: bytes) -> bytes:
    return header.partition(b"\0")[0]
