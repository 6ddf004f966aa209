"""One rank of a measured system: waits for a case, prepares it, repeats it and reports the time.

While it waits it sleeps in a read of the coordinator's socket, outside its library, so that the ranks of
another system have the cores to themselves.

    python -m unisono.bench.worker <library> <folder> [<rank> <size>]
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from pathlib import Path
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.libraries import Library, opened
from unisono.core.clock import RealRuntime

__all__ = ["SOCKET_NAME", "main"]

SOCKET_NAME = "coordinator"
# One untimed call for every four timed ones.
_CALLS_PER_WARM_UP = 4


def main() -> None:
    """Serve until the coordinator closes the socket."""
    library, folder, *rank_and_size = sys.argv[1:]
    rank = opened(library, Path(folder), [int(number) for number in rank_and_size])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(Path(folder) / SOCKET_NAME))
        lines = sock.makefile("rw")
        _send(lines, {"rank": rank.rank})
        for line in lines:
            _send(lines, _measured(rank, **json.loads(line)))
    rank.close()


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _measured(rank: Library, case: dict[str, Any], repeats: int, check: bool) -> dict[str, Any]:
    """Repeat one case; the seconds per repeat, or an error."""
    clock = RealRuntime()
    try:
        ready = rank.prepared(Case(**case), check)
    except ArithmeticError as error:
        return {"error": str(error)}
    # After a pause ranks may share a core and caches are cold; a program in steady state is measured.
    warm_up, _ = ready.items(1 + repeats // _CALLS_PER_WARM_UP)
    ready.run(warm_up)
    items, calls = ready.items(repeats)
    if ready.is_seen:
        ready.run(items)
    gc.disable()
    rank.barrier()
    began = clock.now()
    ready.run(items)
    elapsed = clock.now() - began
    gc.enable()
    rank.barrier()  # no rank frees memory that another still reads
    return {"seconds": elapsed / calls}


if __name__ == "__main__":
    main()
