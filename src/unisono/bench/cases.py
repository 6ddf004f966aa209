"""What is measured: an operation, a number of ranks and an amount of bytes, and what a time means for it.

Bytes and bandwidths follow nccl-tests: the bytes are those of the whole vector (all_gather: each rank's
output; reduce_scatter and all_to_all: each rank's input). The algorithm bandwidth is bytes over time; the bus
bandwidth is what each rank's link must have carried, which can be compared with the hardware for any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["ITEM_BYTES", "OPERATIONS", "Case"]

# Everything is float32.
ITEM_BYTES: Final = 4

# Bus bandwidth over algorithm bandwidth, by the number of ranks; from nccl-tests, doc/PERFORMANCE.md.
OPERATIONS: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "barrier": lambda n: 0.0,
    "ping": lambda n: 1.0,
}
_OF_BLOCKS: Final = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One measurement. `nbytes` is the requested length; a block has at least one element."""

    operation: str
    ranks: int
    nbytes: int

    @property
    def count(self) -> int:
        """Elements of the whole vector."""
        if self.operation == "barrier":
            return 0
        parts = self.ranks if self.operation in _OF_BLOCKS else 1
        return max(1, self.nbytes // ITEM_BYTES // parts) * parts

    @property
    def block(self) -> int:
        """Elements of one rank's block."""
        return self.count // self.ranks

    def algorithm_bandwidth(self, seconds: float) -> float:
        """Bytes per second of the vector."""
        return self.count * ITEM_BYTES / seconds

    def bus_bandwidth(self, seconds: float) -> float:
        """Bytes per second that each rank's link must have carried."""
        return self.algorithm_bandwidth(seconds) * OPERATIONS[self.operation](self.ranks)
