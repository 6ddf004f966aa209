"""What follows a frame: the long parts of a value, each a message of its own.

Knows how they are sent from where they lie and received to where they stay. Does not know what they belong
to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.contract import Backend, Request, Tags
from unisono.errors import ProtocolError

__all__ = ["Sending", "Taking"]


class Sending:
    """Parts on their way out. They are lent until it is done."""

    def __init__(
        self, backend: Backend, dst: int, context: int, number: int, parts: Sequence[memoryview]
    ) -> None:
        self._requests = [backend.start_send(dst, context, Tags.RPC | number, part) for part in parts]

    def is_done(self) -> bool:
        """Whether the other side has them, or never will."""
        return all(request.done for request in self._requests)

    def cancel(self) -> None:
        """Take back what the other side has not begun to take."""
        for request in self._requests:
            request.cancel()


class Taking:
    """Parts on their way in."""

    def __init__(
        self,
        backend: Backend,
        src: int,
        context: int,
        number: int,
        places: Sequence[np.ndarray[Any, Any]],
        then: Callable[[BaseException | None], None],
    ) -> None:
        self._then = then
        self._places = places
        self._lock = threading.Lock()
        self._left = len(places) + 1
        self._requests: list[Request] = []
        for place in places:
            request = backend.start_recv(src, context, Tags.RPC | number, place.data)
            self._requests.append(request)
            request.notify(self._on_part)
        self._on_part()

    @property
    def is_done(self) -> bool:
        """Whether all have come, or will not."""
        return self._left == 0

    def cancel(self) -> None:
        """Take no more."""
        for request in self._requests:
            request.cancel()

    def _on_part(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._then(next(filter(None, (self._fault(i) for i in range(len(self._requests)))), None))

    def _fault(self, index: int) -> BaseException | None:
        request = self._requests[index]
        if request.error is not None:
            return request.error
        envelope = request.envelope
        if envelope is None or envelope.nbytes != self._places[index].nbytes:
            return ProtocolError("a part of a message is shorter than was said")
        return None
