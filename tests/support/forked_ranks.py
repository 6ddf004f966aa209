"""Ranks forked from a process that has imported everything; when one fails, the others are terminated."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

__all__ = ["fork_ranks"]


def fork_ranks(size: int, be_rank: Callable[[int], None]) -> list[int]:
    """Run `be_rank(rank)` in forked processes; return their exit codes, by rank.

    A rank whose function raises exits with 1. The others are then terminated, because they may wait for it.
    """
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _run_rank(be_rank, rank)
        children.append(pid)
    codes: dict[int, int] = {}
    while len(codes) < size:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGTERM)
    return [codes[pid] for pid in children]


def _run_rank(be_rank: Callable[[int], None], rank: int) -> None:
    """Run one rank from fork to exit."""
    code = 1
    try:
        be_rank(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
