"""Measurements: which algorithm was fastest, by kind of link, collective, number of ranks and bytes.

The table is measured.json, written by `bench/tune.py`; where it has no entry the cost model decides (choose).
The file is a part of the installation, so all ranks of a host read the same one.

    {"machine": {...}, "any": {"shm": {"all_reduce": {"2": [[4096, "doubling"], [8388608, "ring"]]}}},
     "ordered": {...}}

A row [bytes, algorithm] names the fastest one up to that length, of the vector or of one block. The last row
reaches far beyond the longest length that was measured; beyond it the cost model decides.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

__all__ = ["PATH", "fastest", "table"]

PATH: Final = Path(__file__).with_name("measured.json")


def fastest(kind: str, collective: str, size: int, nbytes: int, *, ordered: bool) -> str | None:
    """The fastest algorithm; None if this was not measured. `ordered`: among those in canonical order."""
    rows = table()["ordered" if ordered else "any"].get(kind, {}).get(collective, {}).get(str(size), ())
    return next((name for limit, name in rows if nbytes <= limit), None)


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    """The whole table."""
    whole: dict[str, Any] = json.loads(PATH.read_text())
    return whole
