"""Sums that are compared bit by bit: one program, whose results must be equal on all backends."""

from __future__ import annotations

import hashlib

import numpy as np

from unisono.comm.communicator import Communicator

__all__ = ["SUMS", "sums"]

# Odd counts. The sums of the numbers differ with every order of the operands.
_COUNTS = (1, 37, 9_001)
_TYPES = ("float16", "float32", "float64", "complex64", "int32")
SUMS = len(_COUNTS) * len(_TYPES) + 2


def sums(comm: Communicator) -> list[str]:
    """Digests of the results of a rank."""
    found = []
    for count in _COUNTS:
        for name in _TYPES:
            rng = np.random.default_rng(1000 * count + comm.rank)
            x = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(name)
            found.append(comm.all_reduce(x))
    rows = np.random.default_rng(comm.rank).standard_normal((comm.size, 501)).astype(np.float32)
    every = np.stack(comm.all_gather(comm.reduce_scatter(rows)))
    found += [every, comm.all_gather(comm.scan(rows, "sum"))]
    return [hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16] for x in found]
