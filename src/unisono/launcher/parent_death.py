"""A process that never outlives its parent.

Knows Linux's parent-death signal and its two traps: it must be set after the fork, when the parent may be
gone already; and it follows the thread that forked.
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
    """Prepare a function for a child of the process `parent` to call; it allocates nothing after a fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    kill = int(signal.SIGKILL)

    def leash() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked to be told
            os._exit(1)

    return leash
