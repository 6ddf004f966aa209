"""A thread that makes one call, such as a wait, and keeps its result or exception."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.support.ranks import PATIENCE_S

__all__ = ["Waiter"]


class Waiter(threading.Thread):
    """Calls a function on a new thread, as soon as it is constructed."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._ended: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._ended = self._call()
        except BaseException as error:
            self._ended = error

    def outcome(self) -> Any:
        """The result of the call, or the exception that ended it."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the call does not return"
        return self._ended

    def result(self) -> Any:
        """The result of the call; raises what the call raised."""
        ended = self.outcome()
        if isinstance(ended, BaseException):
            raise ended
        return ended
