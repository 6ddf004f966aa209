"""File descriptors: how many this process may still open, and the error when they are too few."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Iterator

from unisono.errors import RendezvousError

__all__ = ["is_exhausted", "limit", "need"]

_STEP = "raise the limit of open files before the job is started: ulimit -n 4096, or RLIMIT_NOFILE"


@contextlib.contextmanager
def need(count: int, process: str) -> Iterator[None]:
    """Make sure that `count` descriptors are free before anything is started; explain if they run out later.

    Raises:
        RendezvousError: too few are free, or they ran out inside the block.
    """
    free = max(0, limit() - _used())
    if free < count:
        raise RendezvousError(
            f"{process} has too few file descriptors",
            cause=f"it needs {count}, and has {free} left of its limit of {limit()} open files",
            next_step=_STEP,
        )
    try:
        yield
    except OSError as error:
        if not is_exhausted(error):
            raise
        raise RendezvousError(
            f"{process} has no file descriptor left",
            cause=f"its limit is {limit()} open files"
            if error.errno == errno.EMFILE
            else "the host has none",
            next_step=_STEP,
        ) from error


def limit() -> int:
    """The number of files that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def is_exhausted(error: OSError) -> bool:
    """Whether the error says that this process or the host has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def _used() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # one for the listing itself
    except OSError as error:
        if is_exhausted(error):
            return limit()
        return 0  # without /proc: the error comes when they run out
