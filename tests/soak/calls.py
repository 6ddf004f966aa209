"""The large mixed run of calls, in every form and with any value: 8 ranks, 64 threads, 10^5 calls each.

python -m tests.soak.calls [calls] [kinds...]
"""

from __future__ import annotations

import sys
import threading
import time

from tests.process.test_rpc_failure import crowd
from tests.support.processes import Failed, run_processes
from tests.support.ranks import run_ranks

RANKS, THREADS = 8, 8


def main(calls: int = 100_000, kinds: tuple[str, ...] = ("local", "shm", "tcp", "tls")) -> None:
    each = -(-calls // (RANKS * THREADS))
    for kind in kinds:
        began, before = time.monotonic(), threading.active_count()
        if kind == "local":
            run_ranks(crowd, RANKS, THREADS, each).values()
            patience = time.monotonic() + 5
            while threading.active_count() > before + 1 and time.monotonic() < patience:
                time.sleep(0.01)
            assert threading.active_count() <= before + 1, threading.enumerate()
        else:
            for result in run_processes(crowd, RANKS, THREADS, each, kind=kind):
                if isinstance(result, Failed):
                    raise result
        took = time.monotonic() - began
        print(f"{kind}: {each * RANKS * THREADS} calls of {RANKS * THREADS} threads in {took:.0f} s")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:2]), *([tuple(sys.argv[2:])] if sys.argv[2:] else []))
