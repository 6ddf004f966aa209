"""A process that never outlives its parent, by Linux's parent-death signal.

The signal must be set after the fork, when the parent may be gone already, and it is sent when the *thread*
that forked ends, not only when its process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> Callable[[], None]:
    """A function for a child of process `parent` to call after its fork; it allocates nothing."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    kill = int(signal.SIGKILL)

    def set_parent_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the signal was set
            os._exit(1)

    return set_parent_death_signal
