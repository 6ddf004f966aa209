"""One rank of a measured system: waits for a case, prepares it, repeats it, and says how long that took.

Knows the clock and the socket to the referee. Does not know what else is measured. While it waits it sleeps
in a read, outside its library, so that ranks of another system have the cores to themselves.

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

SOCKET_NAME = "referee"
# One untimed call for so many timed ones.
_WARMING = 4


def main() -> None:
    """Serve until the referee hangs up."""
    library, folder, *place = sys.argv[1:]
    rank = opened(library, Path(folder), [int(number) for number in place])
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(Path(folder) / SOCKET_NAME))
        lines = sock.makefile("rw")
        _say(lines, {"rank": rank.rank})
        for line in lines:
            _say(lines, _measured(rank, **json.loads(line)))
    rank.close()


def _say(lines: Any, word: dict[str, Any]) -> None:
    lines.write(json.dumps(word) + "\n")
    lines.flush()


def _measured(
    rank: Library, operation: str, ranks: int, nbytes: int, repeats: int, check: bool
) -> dict[str, Any]:
    """Repeat one case; the seconds of all repeats together."""
    clock = RealRuntime()
    try:
        call = rank.prepared(Case(operation, ranks, nbytes), check)
    except ArithmeticError as error:
        return {"error": str(error)}
    # After a pause ranks may share a core, and caches hold what others did: a running program counts.
    for _ in range(1 + repeats // _WARMING):
        call()
    gc.disable()
    rank.barrier()
    began = clock.now()
    for _ in range(repeats):
        call()
    elapsed = clock.now() - began
    gc.enable()
    rank.barrier()  # nobody frees what another still reads
    return {"seconds": elapsed}


if __name__ == "__main__":
    main()
