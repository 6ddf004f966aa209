"""What follows a frame: the long parts of a value, each a message of its own.

Knows how they are sent from where they lie and received to where they stay. Does not know what they belong
to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.rpc.post import Lent, RpcTransport

__all__ = ["InboundParts", "OutboundParts"]


class OutboundParts:
    """Parts on their way out. They are lent until it is done."""

    def __init__(self, post: RpcTransport, dst: int, number: int, parts: Sequence[memoryview]) -> None:
        self._lent: list[Lent] = [post.lend(dst, number, part) for part in parts]

    def is_done(self) -> bool:
        """Whether the other side has them, or never will."""
        return all(lent.done for lent in self._lent)

    def cancel(self) -> None:
        """Take back what the other side has not begun to take."""
        for lent in self._lent:
            lent.cancel()


class InboundParts:
    """Parts on their way in; `then` hears of the first error, or that there was none."""

    def __init__(
        self,
        post: RpcTransport,
        src: int,
        number: int,
        places: Sequence[np.ndarray[Any, Any]],
        then: Callable[[BaseException | None], None],
    ) -> None:
        self._then = then
        self._lock = threading.Lock()
        self._left = len(places) + 1
        self._error: BaseException | None = None
        self._stops = [post.receive(src, number, place, self._on_part) for place in places]
        self._on_part(None)

    @property
    def is_done(self) -> bool:
        """Whether all have come, or will not."""
        return self._left == 0

    def cancel(self) -> None:
        """Take no more."""
        for stop in self._stops:
            stop()

    def _on_part(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        self._then(self._error)
