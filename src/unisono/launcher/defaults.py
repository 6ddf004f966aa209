"""What a rank gets unless the user has set it: threads that fit the cores, a stack when it crashes.

Knows names and numbers. Does not know how the environment of a rank is made.
"""

from __future__ import annotations

import os

__all__ = ["cores", "rank_defaults"]


def cores() -> int:
    """On how many cores this process may run."""
    return len(os.sched_getaffinity(0))


def rank_defaults(ranks_here: int) -> dict[str, str]:
    """Variables for each of so many ranks on this host."""
    return {
        # A crash prints where every thread was.
        "PYTHONFAULTHANDLER": "1",
        # Else every rank starts as many threads as there are cores.
        "OMP_NUM_THREADS": str(max(1, cores() // ranks_here)),
    }
