"""Every verb in every way of calling it, 8 bytes on 2 ranks: cases that are much slower than the plain call.

    python bench/cliffs.py [--times 100] [--factor 5] [--only all_reduce] [--all]

The plain call of a verb takes an array and nothing else. All its other cases are divided by it: another kind
of data, dtype, operation or argument, `timeout=`, started, in a subgroup, on a second thread. A case above
`factor` is a *cliff*: it takes another path than the plain call, or does work that it need not do. The plain
call of each verb is divided by that of all_reduce.
"""

from __future__ import annotations

import argparse
import enum
import json
import logging
import pickle
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import torch

import unisono as uni
from unisono.core.dtypes import DTYPES


class Rank(enum.IntEnum):
    """Ranks by name, as programs have them."""

    one = 1


Step = Callable[[], object]
Case = tuple[str, str, Step]

TURNS = 5
OPS = {
    "float64": ("prod", "min", "max", "mean"),
    "float16": ("sum", "mean"),
    "complex128": ("prod", "mean"),
    "int64": ("band", "bor", "bxor", "land", "lor", "lxor"),
    "bool": ("min", "max", "band", "bor", "bxor", "land", "lor", "lxor"),
}
# Verbs that take one array, and so a number or anything else with memory.
ONE_ARRAY = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scan", "exscan", "all_gather_v")
# The arguments of the plain call for an array `x` of 8 bytes; root is 0.
COLLECTIVES: dict[str, Callable[[Any, bool], tuple[Any, ...]]] = {
    **dict.fromkeys((*ONE_ARRAY, "gather_v"), lambda x, is_root: (x,)),
    "reduce_scatter": lambda x, is_root: (np.stack([x, x]),),
    "all_to_all": lambda x, is_root: (np.stack([x, x]),),
    "scatter": lambda x, is_root: (np.stack([x, x]) if is_root else None,),
    "barrier": lambda x, is_root: (),
    "all_reduce_many": lambda x, is_root: ([x, x.copy()],),
    "reduce_scatter_v": lambda x, is_root: (np.concatenate([x, x]), [len(x), len(x)]),
    "all_to_all_v": lambda x, is_root: ([x, x],),
    "scatter_v": lambda x, is_root: ([x, x] if is_root else None,),
    **dict.fromkeys(("broadcast_object", "all_gather_object", "gather_object"), lambda x, is_root: (7,)),
    "scatter_object": lambda x, is_root: ([7, 8] if is_root else None,),
    "all_to_all_object": lambda x, is_root: ([7, 8],),
    "all_reduce_object": lambda x, is_root: (7, max),
}
ROOTED = ("reduce", "broadcast", "gather", "gather_v", "broadcast_object", "gather_object")
REDUCING = ("all_reduce", "reduce", "scan", "exscan", "reduce_scatter", "reduce_scatter_v")
WITH_OUT = (*REDUCING, "all_gather", "gather", "scatter", "all_to_all")
MESSAGE_WAYS: dict[str, dict[str, Any]] = {
    "with a tag": {"tag": 3},
    "tag=np.int32": {"tag": np.int32(3)},
    "tag=an IntEnum": {"tag": Rank.one},
    "timeout=60": {"timeout": 60},
    "timeout=np.float64(60)": {"timeout": np.float64(60)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--factor", type=float, default=5)
    parser.add_argument("--only", default="", help="verbs, separated by commas")
    parser.add_argument("--all", action="store_true", help="print every case")
    args = parser.parse_args()
    found, _ = uni.spawn(measured, 2, args.times, args.only, timeout=600)
    plain = {verb: us for verb, way, us in found if way == "plain"}
    first = plain.get("all_reduce", min(plain.values()))
    print(f"plain all_reduce of 8 B: {first:.2f} us; slower than {args.factor:g}x, of {len(found)} cases:")
    for verb, way, us in found:
        usual = first if way == "plain" else plain[verb]
        if args.all or us > args.factor * usual:
            print(f"{verb:>18} {us:>9.2f} us {us / usual:>7.1f}x of {usual:>6.2f}  {way}")


def measured(comm: uni.Communicator, times: int, only: str) -> list[tuple[str, str, float]]:
    """(verb, way, microseconds) of every case, in the order of the cases."""
    logging.getLogger("unisono").setLevel(logging.ERROR)  # of works that are dropped
    wanted = only.split(",") if only else None
    found = []
    for verb, way, step in cases(comm):
        if wanted is None or verb in wanted:
            try:
                found.append((verb, way, time_of(comm, step, times, way == "on a second thread")))
            except uni.UsageError as error:
                if comm.rank == 0:
                    print(f"{verb}, {way}: {error}", file=sys.stderr)
    return found


def time_of(comm: uni.Communicator, step: Step, times: int, is_elsewhere: bool) -> float:
    """Microseconds of one call: the median of some turns, after a call that may decide something."""
    step()
    calls = getattr(step, "calls", 1)
    rounds = max(1, times // calls)
    turns: list[float] = []

    def run() -> None:
        for _ in range(TURNS):
            comm.barrier()
            begun = time.perf_counter()
            for _ in range(rounds):
                step()
            turns.append((time.perf_counter() - begun) / (rounds * calls) * 1e6)

    if is_elsewhere:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    return statistics.median(turns)


def cases(comm: uni.Communicator) -> Iterator[Case]:
    for verb, arguments in COLLECTIVES.items():
        if hasattr(comm, verb):
            yield from collective(comm, verb, arguments)
    yield from messages(comm)
    yield from exchanges(comm)
    yield from many_works(comm)


def collective(
    comm: uni.Communicator, verb: str, arguments: Callable[..., tuple[Any, ...]]
) -> Iterator[Case]:
    is_root = comm.rank == 0
    given = arguments(np.ones(1), is_root)
    call = getattr(comm, verb)
    yield verb, "plain", partial(call, *given)
    yield from ways(comm, verb, given)
    if verb in ROOTED:
        rooted = partial(call, *given)
        yield verb, "root=1", partial(rooted, root=1)
        yield verb, "root=np.int64(1)", partial(rooted, root=np.int64(1))
        yield verb, "root=an IntEnum", partial(rooted, root=Rank.one)
    if verb == "barrier" or verb.endswith("_object"):
        return
    for dtype in (name for name in DTYPES if name != "bfloat16"):
        op = {"op": "max"} if dtype == "bool" and verb in (*REDUCING, "all_reduce_many") else {}
        yield verb, dtype, partial(call, *arguments(np.ones(1, dtype), is_root), **op)
    yield verb, "no elements", partial(call, *arguments(np.ones(0), is_root))
    for name, x in arrays():
        yield verb, name, partial(call, *arguments(x, is_root))
    if verb == "broadcast":
        yield verb, "read-only on root", partial(call, np.frombuffer(bytes(8)) if is_root else np.ones(1))
    if verb in ONE_ARRAY:
        for name, x in objects(is_written=verb in ("all_reduce", "reduce", "broadcast")):
            yield verb, name, partial(call, x)
    if verb in REDUCING:
        for dtype, ops in OPS.items():
            for op in ops:
                if op != "mean" or verb not in ("scan", "exscan"):
                    x = arguments(np.ones(1, dtype), is_root)
                    yield verb, f"op={op}, {dtype}", partial(call, *x, op=op)
        if verb != "reduce_scatter_v":
            pairs = cycle([arguments(np.ones((rows, 2)), is_root) for rows in range(1, 40)])
            yield verb, "op=maxloc, new sizes", lambda: call(*next(pairs), op="maxloc")
    if verb in WITH_OUT:
        result = call(*given)
        yield verb, "out=", partial(call, *given, out=None if result is None else np.empty_like(result))


def ways(comm: uni.Communicator, verb: str, given: tuple[Any, ...]) -> Iterator[Case]:
    call, start = getattr(comm, verb), getattr(comm.start, verb)
    yield verb, "timeout=60", partial(call, *given, timeout=60)
    yield verb, "timeout=np.float64(60)", partial(call, *given, timeout=np.float64(60))
    yield verb, "timeout=np.int64(60)", partial(call, *given, timeout=np.int64(60))
    yield verb, "names not interned", partial(call, *given, **json.loads('{"timeout": 60}'))
    yield verb, "started", lambda: start(*given).wait()
    yield verb, "started, timeout=np.float64(60)", lambda: start(*given).wait(np.float64(60))
    yield verb, "started and dropped", lambda: start(*given) and None
    with comm.split(0) as group:
        yield verb, "in a subgroup", partial(getattr(group, verb), *given)
    yield verb, "on a second thread", partial(call, *given)


def arrays() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Arrays that are as good as the plain one."""
    yield "two dimensions", np.ones((1, 1))
    yield "unpickled", pickle.loads(pickle.dumps(np.ones(1)))
    yield "longlong", np.ones(1, np.longlong)
    yield "a row of a matrix", np.ones((3, 1))[1]
    yield "ml_dtypes.bfloat16", np.ones(4, ml_dtypes.bfloat16)


def objects(*, is_written: bool) -> Iterator[tuple[str, Any]]:
    """What else has memory, or is a number."""
    yield "int", 7
    yield "float", 7.0
    yield "True", True
    yield "complex", 7j
    yield "np.float64", np.float64(7)
    yield "np.int32", np.int32(7)
    yield "bytearray", bytearray(8)
    yield "memoryview", memoryview(bytearray(8))
    yield "array.array", array("d", [7.0])
    if not is_written:
        yield "bytes", bytes(8)
        yield "read-only", np.frombuffer(bytes(8))
        yield "strided", np.ones(8)[::8]
    yield "torch.float64", torch.ones(1, dtype=torch.float64)
    yield "torch.bfloat16", torch.ones(4, dtype=torch.bfloat16)
    if not is_written:
        yield "torch, requires_grad", torch.ones(1, dtype=torch.float64, requires_grad=True)


def messages(comm: uni.Communicator) -> Iterator[Case]:
    """send and recv as one exchange: rank 0 sends first."""
    other, x, buf = 1 - comm.rank, np.ones(1), np.empty(1)
    yield "sendrecv", "plain", partial(comm.sendrecv, x, other, buf, other)
    yield from ways(comm, "sendrecv", (x, other, buf, other))
    there = np.int64(other)
    yield "sendrecv", "ranks np.int64", partial(comm.sendrecv, x, there, buf, there)
    for way, more in MESSAGE_WAYS.items():
        yield "sendrecv", way, partial(comm.sendrecv, x, other, buf, other, **more)
    yield "sendrecv", "src=ANY", partial(comm.sendrecv, x, other, buf, uni.ANY)
    for dtype in (name for name in DTYPES if name != "bfloat16"):
        x, buf = np.ones(1, dtype), np.empty(1, dtype)
        yield "sendrecv", dtype, partial(comm.sendrecv, x, other, buf, other)
    for name, x in (*arrays(), *objects(is_written=False)):
        yield "sendrecv", name, partial(comm.sendrecv, x, other, bytearray(16), other)
    yield "sendrecv", "to itself", partial(comm.sendrecv, np.ones(1), comm.rank, np.empty(1), comm.rank)


def exchanges(comm: uni.Communicator) -> Iterator[Case]:
    """A send and a receive, of each kind."""
    other = 1 - comm.rank

    def exchange(send: Callable[..., Any], recv: Callable[..., Any], **more: Any) -> Step:
        def step() -> None:
            works = send(dst=other, **more), recv(src=other, **more)
            if isinstance(works[0], uni.Work):
                uni.wait_all(works)

        return step

    for sends, receives, given, into in (
        ("send", "recv", (np.ones(1),), (np.empty(1),)),
        ("send", "recv_bytes", (np.ones(1),), ()),
        ("send_object", "recv_object", (7,), ()),
    ):
        for verbs, way in (comm, "plain"), (comm.start, "started"):
            both = partial(getattr(verbs, sends), *given), partial(getattr(verbs, receives), *into)
            yield receives, way, exchange(*both)
            for more, options in MESSAGE_WAYS.items():
                yield receives, f"{way}, {more}", exchange(*both, **options)


def many_works(comm: uni.Communicator) -> Iterator[Case]:
    """Per work, where many are under way."""
    other, n = 1 - comm.rank, 1000
    bufs = np.empty(n)

    def exchange(wait: Callable[[list[uni.Work]], object]) -> Step:
        def step() -> None:
            works = [comm.start.recv(bufs[i : i + 1], other, i) for i in range(n)]
            for i in range(n):
                comm.send(bufs[i : i + 1], other, i)
            wait(works)

        step.calls = n  # type: ignore[attr-defined]
        return step

    def any_by_any(works: list[uni.Work]) -> None:
        while works:
            works.pop(uni.wait_any(works))

    yield "many", "plain", exchange(uni.wait_all)
    yield "many", "as_completed", exchange(lambda works: list(uni.as_completed(works)))
    yield "many", "wait_any", exchange(any_by_any)


if __name__ == "__main__":
    main()
