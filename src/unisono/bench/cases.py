"""What is measured: an operation, a way of calling it, data, a number of ranks and an amount of bytes.

Bytes and bandwidths follow nccl-tests: the bytes are those of the whole vector (all_gather: each rank's
output; reduce_scatter and all_to_all: each rank's input). The algorithm bandwidth is bytes over time; the bus
bandwidth is what each rank's link must have carried, which can be compared with the hardware for any number
of ranks.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Final

from unisono.bench.operations import FLOAT32, Operation, operation_of
from unisono.bench.ways import WAYS
from unisono.plans.units import bytes_text

__all__ = ["ITEM_BYTES", "Case"]

# Every array is float32.
ITEM_BYTES: Final = 4


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One measurement. `nbytes` is the requested length; a block has at least one element."""

    operation: str
    ranks: int
    nbytes: int = 0
    way: str = "blocking"
    data: str = FLOAT32

    @property
    def row(self) -> Operation:
        """The row of the table of operations."""
        return operation_of(self.operation, self.data)

    @property
    def label(self) -> str:
        """What is measured, without the number of ranks: operation/way/data/bytes."""
        parts = [self.operation, self.way, self.data, *([bytes_text(self.nbytes)] if self.nbytes else [])]
        return "/".join(parts)

    def matches(self, pattern: str) -> bool:
        """Whether the label contains the pattern, in which * and ? stand for anything."""
        return fnmatch.fnmatchcase(self.label, f"*{pattern}*")

    @property
    def block(self) -> int:
        """Elements of one part: a rank's block, one of many arrays, or the vector if it is not cut."""
        return max(1, self.nbytes // ITEM_BYTES // self.row.parts(self.ranks))

    @property
    def count(self) -> int:
        """Elements of the whole vector; uneven parts are longer by up to the number of ranks each."""
        if not self.row.has_sizes:
            return 0
        return self.block * self.row.parts(self.ranks)

    def algorithm_bandwidth(self, seconds: float) -> float:
        """Bytes per second of the vector."""
        return self.count * ITEM_BYTES / seconds

    def bus_bandwidth(self, seconds: float) -> float | None:
        """Bytes per second that each rank's link must have carried; None where nccl-tests defines none."""
        factor = self.row.bus
        return None if factor is None else self.algorithm_bandwidth(seconds) * factor(self.ranks)

    @property
    def way_order(self) -> int:
        """The place of the way in a table."""
        return list(WAYS).index(self.way)
