"""Cases of collectives by type, operation and length, with segments so short that every path is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.support.oracle import Notes, counts_for, dtype_of
from tests.support.ranks import run_ranks

import unisono as uni

__all__ = ["CONFIGS", "SEGMENT", "cases", "found", "some"]

SEGMENT = 64
# Segments so short that every message has several, a window of one, nothing eager: every path of a transfer.
CONFIGS = {
    "short": {"segment_bytes": SEGMENT},
    "narrow": {"segment_bytes": SEGMENT, "window_segments": 1, "eager_bytes": 0},
    "page": {"segment_bytes": 4096, "eager_bytes": 256},
}


def found(program: Callable[..., Notes], size: int, *args: Any, config: str = "short") -> list[str]:
    """All notes of all ranks."""
    ended = run_ranks(program, size, *args, config=uni.Config(**CONFIGS[config]))
    return [f"rank {rank}: {note}" for rank, notes in enumerate(ended.values()) for note in notes]


def some(all_counts: list[int], turn: int, how_many: int = 3) -> list[int]:
    """A few of the counts, different at every turn, so that all turns together use all counts."""
    return [all_counts[(turn * how_many + k) % len(all_counts)] for k in range(how_many)]


def cases(size: int, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    for turn, (name, op) in enumerate(pairs):
        for count in some(counts_for(size, dtype_of(name).itemsize, SEGMENT), turn, 3 if size < 8 else 2):
            yield name, op, count
