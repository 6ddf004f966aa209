"""Environment variables that a rank gets unless the user has set them."""

from __future__ import annotations

import os

__all__ = ["cores", "rank_defaults"]


def cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def rank_defaults(ranks_here: int) -> dict[str, str]:
    """Variables for each rank, with `ranks_here` ranks on this host."""
    return {
        # A crash prints the stack of every thread.
        "PYTHONFAULTHANDLER": "1",
        # Otherwise every rank starts as many threads as there are cores.
        "OMP_NUM_THREADS": str(max(1, cores() // ranks_here)),
    }
