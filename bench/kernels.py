"""How fast the reduce kernels are beside NumPy and ml_dtypes: `python bench/kernels.py`.

Ours and the peer take turns in one run on the same arrays, so that a slow moment of the machine affects both.
The ratio is peer time / our time (above 1 we are faster), per pair of neighbouring rounds; the table shows
its median and quartiles. Goals: float32 never below 1, bfloat16 at least 5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import ml_dtypes
import numpy as np

from unisono import _native
from unisono.core.dtypes import DTYPES, DType
from unisono.core.kernels import reduce_into
from unisono.core.ops import as_op

SIZES_BYTES = [1 << n for n in range(10, 27, 2)]
# Long enough for the clock, short enough that the load of the machine does not change within a round.
ROUND_S = 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--isa", choices=_native.isas(), default=_native.isa())
    parser.add_argument("--op", choices=["sum", "prod", "min", "max"], default="sum")
    args = parser.parse_args()
    _native.use_isa(args.isa)
    print(f"dst = dst {args.op} src; isa {_native.isa()}; numpy {np.__version__}, {args.rounds} rounds")
    print(f"{'dtype':<9} {'bytes':>10} {'ours':>11} {'peer':>11} {'ratio':>6}  quartiles")
    peer = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[args.op]
    for name in ("float32", "bfloat16", "float16"):
        for size_bytes in SIZES_BYTES:
            row(DTYPES[name], size_bytes, args.op, peer, args.rounds)


def row(dtype: DType, size_bytes: int, op_name: str, peer: Any, rounds: int) -> None:
    op = as_op(op_name)
    # Ones: any number of products, minima or maxima of them has no subnormals, infinities or NaN, and a sum
    # that reaches infinity takes no longer than others.
    kind = ml_dtypes.bfloat16 if dtype.name == "bfloat16" else dtype.storage
    dst, src = (np.ones(size_bytes // dtype.itemsize, kind) for _ in range(2))
    dst_bits, src_bits = dst.view(dtype.storage), src.view(dtype.storage)

    def ours(repeat: int) -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            reduce_into(dst_bits, src_bits, op, dtype)
        return (time.perf_counter() - start) / repeat

    def theirs(repeat: int) -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            peer(dst, src, out=dst)
        return (time.perf_counter() - start) / repeat

    with np.errstate(all="ignore"):
        repeat = max(1, int(ROUND_S / min(ours(3), theirs(3))))
        pairs = [(ours(repeat), theirs(repeat)) for _ in range(rounds)]
    ratios = [peer_s / our_s for our_s, peer_s in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    our_us, peer_us = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    times = f"{our_us:>8.2f} us {peer_us:>8.2f} us"
    print(f"{dtype!s:<9} {size_bytes:>10} {times} {middle:>6.2f}  {low:.2f}-{high:.2f}")


if __name__ == "__main__":
    main()
