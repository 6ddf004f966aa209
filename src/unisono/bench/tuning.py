"""Which algorithm is fastest: all algorithms at every size, in turns; thresholds from the times.

`bench/tune.py` writes the table, `plans/measured.py` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

import unisono as uni
from unisono.bench.arrays import array_of
from unisono.core.clock import RealRuntime
from unisono.plans import CATALOG, LINKS, Problem, choose, entry_of
from unisono.plans.catalog import reduces
from unisono.plans.choose import fitting

__all__ = ["REACH_BYTES", "SIZES", "Times", "links_measured", "measured", "thresholds"]

# Collective: bytes: algorithm: seconds.
Times = Mapping[str, Mapping[int, Mapping[str, float]]]

# Bytes of the vector, or of one block. Closer where caches end: there the winners change. The last exceeds
# every cache; its winner also serves longer ones.
SIZES: Final = (8, 128, 1 << 10, 8 << 10, *(64 << 10 + 2 * step for step in range(6)), 128 << 20)
_BLOCK_BYTES_MAX: Final = 16 << 20
REACH_BYTES: Final = 1 << 30
# From here on a call takes milliseconds, and fewer rounds suffice.
_LONG_BYTES: Final = 16 << 20
_VECTORS: Final = ("all_reduce", "reduce", "broadcast", "scan", "exscan")
_ITEM_BYTES: Final = 4
# An algorithm that is three times slower than the best in a first try is not measured further. Where calls
# are short, a first try is the best of _TRIES.
_HOPELESS: Final = 3.0
_TRIES: Final = 4
# An algorithm must be faster by this factor to replace another one: less is noise.
_GAIN: Final = 1.1


def measured(comm: uni.Communicator, rounds: int, turn_s: float, budget_s: float) -> list[list[Any]]:
    """Measure on this rank; rows of collective, bytes, algorithm, seconds on the slowest rank.

    Small sizes come first; when `budget_s` is used up all ranks leave out the rest.
    """
    clock = RealRuntime()
    began = clock.now()
    rows: list[list[Any]] = []
    for nbytes in SIZES:
        for collective in CATALOG:
            if nbytes > _last_size(collective):
                continue
            if comm.all_reduce(clock.now() - began, "max") > budget_s:
                return rows
            rows += [
                [collective, nbytes, name, seconds]
                for name, seconds in _compared(comm, collective, nbytes, rounds, turn_s).items()
            ]
    return rows


def _compared(
    comm: uni.Communicator, collective: str, nbytes: int, rounds: int, turn_s: float
) -> dict[str, float]:
    """Seconds per call of the promising algorithms: the best of several rounds, in which they take turns.

    The best and not the median: other load on the machine can only add to a time.
    """
    count = nbytes // _ITEM_BYTES
    names = fitting(_problem(collective, comm.size, count))
    # One block or vector, and two arrays of all ranks' blocks: the same memory for every algorithm.
    arrays = _zeros(count), _zeros(comm.size, count), _zeros(comm.size, count)
    calls = {name: _call(comm, collective, arrays, name) for name in names}
    calls_each, tries = (1, 1) if nbytes > 1 << 20 else (5, _TRIES)
    tried = [
        _slowest(comm, [_timed(comm, call, calls_each) for call in calls.values()]) for _ in range(tries)
    ]
    first = {name: min(column) for name, column in zip(names, zip(*tried, strict=True), strict=True)}
    best = min(first.values())
    repeats = {name: max(1, min(500, round(turn_s / seconds))) for name, seconds in first.items()}
    kept = [name for name, seconds in first.items() if seconds <= _HOPELESS * best]
    rounds = min(rounds, 4) if nbytes >= _LONG_BYTES else rounds
    times = [[_timed(comm, calls[name], repeats[name]) for name in kept] for _ in range(rounds)]
    slowest = [_slowest(comm, row) for row in times]
    return {name: min(column) for name, column in zip(kept, zip(*slowest, strict=True), strict=True)}


def _last_size(collective: str) -> int:
    if collective == "barrier":
        return SIZES[0]
    return SIZES[-1] if collective in _VECTORS else _BLOCK_BYTES_MAX


def _problem(collective: str, size: int, count: int) -> Problem:
    held = {**dict.fromkeys(_VECTORS, 1), "barrier": 0, "all_to_all": size * size}.get(collective, size)
    return Problem(collective, size, (count,) * held)


def _timed(comm: uni.Communicator, call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call on this rank, after a first call that builds plans and opens links."""
    clock = RealRuntime()
    call()
    comm.barrier()
    began = clock.now()
    for _ in range(repeats):
        call()
    return (clock.now() - began) / repeats


def _slowest(comm: uni.Communicator, seconds: Sequence[float]) -> list[float]:
    return [float(each) for each in comm.all_reduce(np.array(seconds, np.float64), "max")]


def _call(
    comm: uni.Communicator, collective: str, arrays: tuple[Any, Any, Any], algorithm: str
) -> Callable[[], Any]:
    """A call of the collective on these arrays."""
    how: dict[str, Any] = {"algorithm": algorithm}
    if collective == "barrier":
        return lambda: comm.barrier(**how)
    x, rows, target = arrays
    is_root = comm.rank == 0
    match collective:
        case "all_reduce":
            return lambda: comm.all_reduce(x, **how)
        case "reduce":
            return lambda: comm.reduce(x, 0, **how)
        case "broadcast":
            return lambda: comm.broadcast(x, 0, **how)
        case "all_gather":
            return lambda: comm.all_gather(x, out=rows, **how)
        case "gather":
            return lambda: comm.gather(x, 0, out=rows if is_root else None, **how)
        case "scatter":
            return lambda: comm.scatter(rows if is_root else None, 0, out=x, **how)
        case "reduce_scatter":
            return lambda: comm.reduce_scatter(rows, out=x, **how)
        case "all_to_all":
            return lambda: comm.all_to_all(rows, out=target, **how)
        case "scan":
            return lambda: comm.scan(x, out=target[0], **how)
        case _:
            return lambda: comm.exscan(x, out=target[0], **how)


def _zeros(*shape: int) -> Any:
    array = array_of(shape)
    array.fill(0)
    return array


def thresholds(times: Times, size: int, kind: str, *, ordered: bool) -> dict[str, list[list[Any]]]:
    """The table of one kind of link and number of ranks: collective: rows of (up to bytes, algorithm).

    Among the algorithms that are not clearly slower than the best, the winner of the size before is
    preferred, then the one that the cost model predicts. Between two sizes with different winners the
    threshold is their geometric mean. The last row reaches REACH_BYTES, or twice the longest size if the
    measurement stopped early.
    """
    found: dict[str, list[list[Any]]] = {}
    for collective, by_size in times.items():
        if ordered and not reduces(collective):
            continue
        rows: list[list[Any]] = []
        before = 0
        for nbytes, by_name in sorted(by_size.items()):
            fit = {
                name: seconds
                for name, seconds in by_name.items()
                if not ordered or entry_of(collective, name).ordered
            }
            if not fit:
                continue
            best = min(fit, key=lambda name: fit[name])
            good = [name for name, seconds in fit.items() if seconds <= _GAIN * fit[best]]
            last = rows[-1][1] if rows else None
            predicted = _predicted(collective, size, nbytes, kind, ordered)
            winner = next((name for name in (last, predicted) if name in good), best)
            if last is None:
                rows.append([REACH_BYTES, winner])
            elif winner != last:
                rows[-1][0] = round(math.sqrt(before * nbytes))
                rows.append([REACH_BYTES, winner])
            before = nbytes
        if rows:
            rows[-1][0] = REACH_BYTES if before >= _last_size(collective) else 2 * before
            found[collective] = rows
    return found


def _predicted(collective: str, size: int, nbytes: int, kind: str, ordered: bool) -> str:
    problem = _problem(collective, size, nbytes // _ITEM_BYTES)
    return choose(problem, _ITEM_BYTES, replace(LINKS[kind], kind=""), ordered=ordered)[0]


def links_measured(comm: uni.Communicator) -> dict[str, float]:
    """The cost model's figures for the link between ranks 0 and 1, and for reductions."""
    from unisono.core.dtypes import DTYPES
    from unisono.core.kernels import reduce_into
    from unisono.core.ops import as_op

    def flow(nbytes: int, many: int) -> Callable[[], Any]:
        x = np.zeros(nbytes, np.uint8)
        if comm.rank == 0:
            return lambda: ([comm.send(x, 1) for _ in range(many)], comm.recv(x[:1], 1))
        if comm.rank == 1:
            return lambda: ([comm.recv(x, 0) for _ in range(many)], comm.send(x[:1], 0))
        return lambda: None

    def seconds(call: Callable[[], Any], repeats: int) -> float:
        return min(_slowest(comm, [_timed(comm, call, repeats) for _ in range(5)]))

    one, many = seconds(flow(8, 1), 200) / 2, seconds(flow(8, 64), 20)
    long = seconds(flow(16 << 20, 1), 3)
    x, y = np.zeros(1 << 18, np.float32), np.zeros(1 << 18, np.float32)
    reducing = seconds(lambda: reduce_into(x, y, as_op("sum"), DTYPES["float32"]), 20)
    message = (many - 2 * one) / 63
    return {
        "latency_s": max(0.0, one - message),
        "message_s": message,
        "bytes_per_s": (16 << 20) / (long - one),
        "reduce_bytes_per_s": x.nbytes / reducing,
    }
