"""What was measured: which algorithm was fastest, by kind of link, collective, number of ranks and bytes.

Knows the table in measured.json, which `bench/tune.py` writes. Does not measure, nor know what to do where
the table has nothing to say: then the cost model decides (choose). The file belongs to the installation, so
that all ranks of a host read the same one.

    {"machine": {...}, "any": {"shm": {"all_reduce": {"2": [[4096, "doubling"], [8388608, "ring"]]}}},
     "ordered": {...}}

A row gives the fastest up to so many bytes, of the vector or of one block. The last one reaches far
beyond the longest that was measured; what is longer still is left to the cost model.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

__all__ = ["PATH", "fastest", "table"]

PATH: Final = Path(__file__).with_name("measured.json")


def fastest(kind: str, collective: str, size: int, nbytes: int, *, ordered: bool) -> str | None:
    """The algorithm that was fastest; None if this was not measured. `ordered`: among those in order."""
    rows = table()["ordered" if ordered else "any"].get(kind, {}).get(collective, {}).get(str(size), ())
    return next((name for limit, name in rows if nbytes <= limit), None)


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The whole table."""
    whole: dict[str, Any] = json.loads(PATH.read_text())
    return whole
