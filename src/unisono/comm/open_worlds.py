"""The worlds of this process that are not closed yet, and what becomes of them when the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from typing import Protocol

from unisono.core.clock import call_before_threads_are_joined

__all__ = ["add", "remove"]

_log = logging.getLogger("unisono")


class World(Protocol):
    """The communicator of all ranks, as the end of the process sees it."""

    def _explain(self, error: BaseException) -> None:
        """Send the other ranks the error that ends this one."""

    def _leave_now(self, cause: str) -> None:
        """Leave without waiting."""


# By id. Not a WeakSet: it runs Python code where a world is dropped (see clock.Dropped).
_worlds: dict[int, weakref.ref[World]] = {}
_is_exit_watched = False


def add(world: World) -> None:
    """The world leaves when the main thread ends, unless it was removed before."""
    global _is_exit_watched
    for key, one in list(_worlds.items()):
        if one() is None:
            _worlds.pop(key, None)
    _worlds[id(world)] = weakref.ref(world)
    if not _is_exit_watched:
        _is_exit_watched = True
        # Before Python joins its threads, which may be waiting for other ranks.
        call_before_threads_are_joined(_leave_all)
    # And at the exit of the interpreter, before backends are closed: what is registered last is called first.
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)


def remove(world: World) -> None:
    """It was closed."""
    _worlds.pop(id(world), None)


def _leave_all() -> None:
    """The main thread has ended: leave all open worlds; if it ended by an exception, send that to all."""
    error = getattr(sys, "last_value", None)
    if hasattr(sys, "ps1"):  # in an interactive session it is any earlier exception
        error = None
    for world in [found for one in list(_worlds.values()) if (found := one()) is not None]:
        try:
            if error is not None:
                world._explain(error)
            world._leave_now("the main thread of this process has ended")
        except Exception:  # the other worlds must still leave
            _log.exception("%r could not leave", world)


os.register_at_fork(after_in_child=_worlds.clear)  # a forked child does not own them
