"""The cases of cliffs.py: every verb, with every kind of argument and in every way of calling it.

A case is (verb, way, step). All ranks run the same steps in the same order. `step.calls` is the number of
calls that a step makes, if they are several.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import fractions
import json
import pickle
import tempfile
import threading
from array import array
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch

import unisono as uni
from unisono.core.dtypes import DTYPES

__all__ = ["ELSEWHERE", "Case", "Step", "cases"]

Step: TypeAlias = Callable[[], object]
Case: TypeAlias = tuple[str, str, Step]

ELSEWHERE = "on a second thread"


class Rank(enum.IntEnum):
    """Ranks by name, as programs have them."""

    one = 1


@uni.register
@dataclasses.dataclass
class Point:
    """A registered class."""

    x: float
    label: str


Pair = namedtuple("Pair", "left right")  # noqa: PYI024

OPS = {
    "float64": ("prod", "min", "max", "mean"),
    "float16": ("sum", "mean"),
    "complex128": ("prod", "mean"),
    "int64": ("band", "bor", "bxor", "land", "lor", "lxor"),
    "bool": ("min", "max", "band", "bor", "bxor", "land", "lor", "lxor"),
}
# Verbs that take one array, and so a number or anything else with memory.
ONE_ARRAY = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scan", "exscan", "all_gather_v")
# The arguments of the plain call for an array `x` of 8 bytes and `n` ranks; root is 0.
COLLECTIVES: dict[str, Callable[[Any, bool, int], tuple[Any, ...]]] = {
    **dict.fromkeys((*ONE_ARRAY, "gather_v"), lambda x, is_root, n: (x,)),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), lambda x, is_root, n: (np.stack([x] * n),)),
    "scatter": lambda x, is_root, n: (np.stack([x] * n) if is_root else None,),
    "barrier": lambda x, is_root, n: (),
    "all_reduce_many": lambda x, is_root, n: ([x, x.copy()],),
    "reduce_scatter_v": lambda x, is_root, n: (np.concatenate([x] * n), [len(x)] * n),
    "all_to_all_v": lambda x, is_root, n: ([x] * n,),
    "scatter_v": lambda x, is_root, n: ([x] * n if is_root else None,),
    **dict.fromkeys(
        ("broadcast_object", "all_gather_object", "gather_object"), lambda x, is_root, n: (x[0],)
    ),
    "scatter_object": lambda x, is_root, n: ([x[0]] * n if is_root else None,),
    "all_to_all_object": lambda x, is_root, n: ([x[0]] * n,),
    "all_reduce_object": lambda x, is_root, n: (x[0], lambda left, right: left),
}
OBJECTS = tuple(verb for verb in COLLECTIVES if verb.endswith("_object"))
ROOTED = ("reduce", "broadcast", "gather", "gather_v", "broadcast_object", "gather_object")
REDUCING = ("all_reduce", "reduce", "scan", "exscan", "reduce_scatter", "reduce_scatter_v")
WITH_OUT = (*REDUCING, "all_gather", "gather", "scatter", "all_to_all", "scatter_v")
LISTED = ("all_gather_v", "gather_v", "all_to_all_v")
MESSAGE_WAYS: dict[str, dict[str, Any]] = {
    "with a tag": {"tag": 3},
    "tag=np.int32": {"tag": np.int32(3)},
    "tag=an IntEnum": {"tag": Rank.one},
    "timeout=60": {"timeout": 60},
    "timeout=np.float64(60)": {"timeout": np.float64(60)},
}


def cases(comm: uni.Communicator) -> Iterator[Case]:
    """All of them, for a world of two ranks or more."""
    for verb, arguments in COLLECTIVES.items():
        yield from collective(comm, verb, arguments)
    yield from lists(comm)
    yield from messages(comm)
    yield from exchanges(comm)
    yield from probes(comm)
    yield from groups(comm)
    yield from many_works(comm)


def collective(
    comm: uni.Communicator, verb: str, arguments: Callable[..., tuple[Any, ...]]
) -> Iterator[Case]:
    is_root, n = comm.rank == 0, comm.size
    is_object = verb in OBJECTS
    given = arguments([7] if is_object else np.ones(1), is_root, n)
    call = getattr(comm, verb)
    yield verb, "plain", partial(call, *given)
    yield from ways(comm, verb, given)
    if verb in ROOTED:
        rooted = partial(call, *given)
        yield verb, "root=1", partial(rooted, root=1)
        yield verb, "root=np.int64(1)", partial(rooted, root=np.int64(1))
        yield verb, "root=an IntEnum", partial(rooted, root=Rank.one)
    if is_object:
        for name, value in objects():
            yield verb, name, partial(call, *arguments([value], is_root, n))
    if verb == "barrier" or is_object:
        return
    for dtype in (name for name in DTYPES if name != "bfloat16"):
        op = {"op": "max"} if dtype == "bool" and verb in (*REDUCING, "all_reduce_many") else {}
        yield verb, dtype, partial(call, *arguments(np.ones(1, dtype), is_root, n), **op)
    yield verb, "no elements", partial(call, *arguments(np.ones(0), is_root, n))
    for name, x in arrays():
        yield verb, name, partial(call, *arguments(x, is_root, n))
    if verb == "broadcast":
        yield verb, "read-only on root", partial(call, np.frombuffer(bytes(8)) if is_root else np.ones(1))
    if verb in ONE_ARRAY:
        for name, x in memory(is_written=verb in ("all_reduce", "reduce", "broadcast")):
            is_refused = (verb == "all_gather_v" and is_single(x)) or (x is True and verb in REDUCING)
            if not is_refused:
                yield verb, name, partial(call, x)
    if verb in (*REDUCING, "all_reduce_many"):
        yield from operations(verb, call, arguments, is_root, n)
    if verb in WITH_OUT:
        result = call(*given)
        yield verb, "out=", partial(call, *given, out=None if result is None else np.empty_like(result))
    if verb in LISTED:
        result = call(*given)
        out = None if result is None else [np.empty_like(x) for x in result]
        yield verb, "out=", partial(call, *given, out=out)


def operations(
    verb: str, call: Callable[..., Any], arguments: Callable[..., tuple[Any, ...]], is_root: bool, n: int
) -> Iterator[Case]:
    for dtype, ops in OPS.items():
        for op in ops:
            if op != "mean" or verb not in ("scan", "exscan"):
                x = arguments(np.ones(1, dtype), is_root, n)
                yield verb, f"op={op}, {dtype}", partial(call, *x, op=op)
    yield verb, "op from data", partial(call, *arguments(np.ones(1), is_root, n), op=json.loads('"sum"'))
    algorithm = json.loads('"ordered"') if verb in ("scan", "exscan") else json.loads('"ring"')
    if verb != "reduce":
        x = arguments(np.ones(1), is_root, n)
        yield verb, "algorithm= from data", partial(call, *x, algorithm=algorithm)
    if verb not in ("reduce_scatter_v", "all_reduce_many"):
        pairs = cycle([arguments(np.ones((rows, 2)), is_root, n) for rows in range(1, 40)])
        yield verb, "op=maxloc, new sizes", lambda: call(*next(pairs), op="maxloc")


def ways(comm: uni.Communicator, verb: str, given: tuple[Any, ...]) -> Iterator[Case]:
    """Ways of calling that do not depend on the arguments."""
    call, start = getattr(comm, verb), getattr(comm.start, verb)
    yield verb, "timeout=60", partial(call, *given, timeout=60)
    yield verb, "timeout=np.float64(60)", partial(call, *given, timeout=np.float64(60))
    yield verb, "timeout=np.int64(60)", partial(call, *given, timeout=np.int64(60))
    yield verb, "timeout=Fraction(60)", partial(call, *given, timeout=fractions.Fraction(60))
    yield verb, "names not interned", partial(call, *given, **json.loads('{"timeout": 60}'))
    yield verb, "started", lambda: start(*given).wait()
    yield verb, "started, timeout=np.float64(60)", lambda: start(*given).wait(np.float64(60))
    yield verb, "started with timeout=60", lambda: start(*given, timeout=60).wait(timeout=60)
    yield verb, "started, wait_all of two", lambda: uni.wait_all([start(*given), start(*given)])
    yield verb, "started, wait_any", lambda: uni.wait_any([start(*given)])
    yield verb, "started and dropped", lambda: start(*given) and None

    def poll() -> None:
        work = start(*given)
        while not work.done():
            pass

    yield verb, "started and polled", poll
    with comm.split(0) as group:
        yield verb, "in a subgroup", partial(getattr(group, verb), *given)
    with comm.mesh([comm.size, 1], ["a", "b"])["a"] as group:
        yield verb, "along an axis of a mesh", partial(getattr(group, verb), *given)
    with comm.sub(range(comm.size)) as group:
        yield verb, "in a group of sub", partial(getattr(group, verb), *given)
    yield verb, ELSEWHERE, partial(call, *given)
    yield from beside(comm, verb, partial(call, *given))


def beside(comm: uni.Communicator, verb: str, step: Step) -> Iterator[Case]:
    """While something else is under way in this process."""
    other, buf = comm.rank ^ 1, np.empty(1)
    thread = threading.Thread(target=comm.recv, args=(buf, other, 99))
    thread.start()
    yield verb, "beside a thread that receives", step
    comm.send(buf, other, 99)
    thread.join()
    for way in ("a receive under way", "a receive with a callback"):
        work = comm.start.recv(buf, other, 99)
        if way == "a receive with a callback":
            work.add_done_callback(lambda _: None)
        yield verb, f"beside {way}", step
        comm.send(buf, other, 99)
        work.wait()
    with comm.split(0) as group, uni.rpc.Agent(group):
        yield verb, "beside an agent", step


def arrays() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Arrays that are as good as the plain one."""
    yield "two dimensions", np.ones((1, 1))
    yield "nine dimensions", np.ones((1,) * 9)
    yield "unpickled", pickle.loads(pickle.dumps(np.ones(1)))
    yield "longlong", np.ones(1, np.longlong)
    yield "a row of a matrix", np.ones((3, 1))[1]
    yield "ml_dtypes.bfloat16", np.ones(4, ml_dtypes.bfloat16)


def memory(*, is_written: bool) -> Iterator[tuple[str, Any]]:
    """What else has memory, or is a number."""
    yield "int", 7
    yield "float", 7.0
    yield "True", True
    yield "complex", 7j
    yield "an IntEnum", Rank.one
    yield "np.float64", np.float64(7)
    yield "np.int32", np.int32(7)
    yield "ml_dtypes scalar", ml_dtypes.bfloat16(7)
    yield "no dimensions", np.array(7.0)
    yield "torch, no dimensions", torch.tensor(7.0)
    yield "bytearray", bytearray(8)
    yield "memoryview", memoryview(bytearray(8))
    yield "memoryview of doubles", memoryview(array("d", [7.0]))
    yield "array.array", array("d", [7.0])
    yield "np.memmap", np.memmap(tempfile.TemporaryFile(), shape=1, dtype=float)  # noqa: SIM115
    yield "np.recarray", np.ones(1).view(np.recarray)
    if not is_written:
        yield "bytes", bytes(8)
        yield "read-only", np.frombuffer(bytes(8))
        yield "strided", np.ones(8)[::8]
        yield "transposed", np.ones((2, 2)).T
        yield "torch, strided", torch.ones(8, dtype=torch.float64)[::8]
    yield "torch.float64", torch.ones(1, dtype=torch.float64)
    yield "torch.bfloat16", torch.ones(4, dtype=torch.bfloat16)
    yield "torch, inference mode", inference_tensor()
    yield "torch.nn.Parameter", torch.nn.Parameter(torch.ones(1), requires_grad=not is_written)
    if not is_written:
        yield "torch, requires_grad", torch.ones(1, dtype=torch.float64, requires_grad=True)


def is_single(x: Any) -> bool:
    """Whether it is a number, or has no dimensions."""
    return isinstance(x, int | float | complex | np.generic) or getattr(x, "ndim", 1) == 0


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(1)


def objects() -> Iterator[tuple[str, Any]]:
    """What objects may be; the plain one is a small int."""
    yield "None", None
    yield "True", True
    yield "float", 7.5
    yield "a long int", 1 << 100
    yield "text", "seven"
    yield "text beyond ASCII", "sieben €"
    yield "bytes", b"seven"
    yield "a tuple", (1, "two", 3.0)
    yield "a named tuple", uni.Status(0, 1, 2)
    yield "a list", [1, 2, 3]
    yield "a dict", {"a": 1, "b": [2.0, None]}
    yield "a set", {1, 2}
    yield "an array", np.ones(3)
    yield "a tensor", torch.ones(3)
    yield "np.float64", np.float64(7)
    yield "a dataclass", Point(1.0, "here")
    yield "100 floats", [float(i) for i in range(100)]


def lists(comm: uni.Communicator) -> Iterator[Case]:
    """Lists of arrays of other kinds, and counts."""
    n, is_root, x = comm.size, comm.rank == 0, np.ones(1)
    many = partial(partial, comm.all_reduce_many)
    yield "all_reduce_many", "a tuple", many((x, x))
    yield "all_reduce_many", "a named tuple", many(Pair(x, x))
    yield "all_reduce_many", "one array", many([x])
    yield "all_reduce_many", "tensors", many([torch.ones(1), torch.ones(1)])
    yield "all_reduce_many", "numbers", many([1.0, 2.0])
    yield "all_reduce_many", "two types", many([x, np.ones(1, np.float32)])
    yield "all_reduce_many", "five types", many([np.ones(1, t) for t in "bhifd"])
    yield "all_reduce_many", "means of two types", many([x, np.ones(1, np.float16)], "mean")
    yield (
        "all_reduce_many",
        "started, two types",
        lambda: comm.start.all_reduce_many([x, np.ones(1, np.float32)]).wait(),
    )
    whole = np.ones(n)
    for name, counts in (
        ("a tuple", (1,) * n),
        ("an array", np.ones(n, int)),
        ("an array of int32", np.ones(n, np.int32)),
        ("an array of uint8", np.ones(n, np.uint8)),
        ("a range", range(1, 2)),
        ("a tensor", torch.ones(n, dtype=torch.int64)),
        ("np.int64", [np.int64(1)] * n),
    ):
        if len(counts) == n:
            yield "reduce_scatter_v", f"counts are {name}", partial(comm.reduce_scatter_v, whole, counts)
    for verb in "all_to_all_v", "scatter_v":
        call = getattr(comm, verb)
        for name, parts in (
            ("a tuple", (x,) * n),
            ("tensors", list(torch.ones(n).split(1))),
            ("arrays of int8", [np.ones(3, np.int8)] * n),
        ):
            yield verb, f"parts are {name}", partial(call, parts if verb != "scatter_v" or is_root else None)
    yield "all_to_all_object", "a tuple", partial(comm.all_to_all_object, (7,) * n)


def messages(comm: uni.Communicator) -> Iterator[Case]:
    """send and recv as one exchange between neighbours."""
    other, x, buf = comm.rank ^ 1, np.ones(1), np.empty(1)
    yield "sendrecv", "plain", partial(comm.sendrecv, x, other, buf, other)
    yield from ways(comm, "sendrecv", (x, other, buf, other))
    there = np.int64(other)
    yield "sendrecv", "ranks np.int64", partial(comm.sendrecv, x, there, buf, there)
    for way, more in MESSAGE_WAYS.items():
        yield "sendrecv", way, partial(comm.sendrecv, x, other, buf, other, **more)
    yield "sendrecv", "src=ANY", partial(comm.sendrecv, x, other, buf, uni.ANY)
    yield "sendrecv", "no elements", partial(comm.sendrecv, np.ones(0), other, np.ones(0), other)
    yield "sendrecv", "into a longer buffer", partial(comm.sendrecv, x, other, np.ones(9), other)
    for dtype in (name for name in DTYPES if name != "bfloat16"):
        given, into = np.ones(1, dtype), np.empty(1, dtype)
        yield "sendrecv", dtype, partial(comm.sendrecv, given, other, into, other)
    for name, given in (*arrays(), *memory(is_written=False)):
        yield "sendrecv", name, partial(comm.sendrecv, given, other, bytearray(32), other)
    for name, into in memory(is_written=True):
        if not isinstance(into, int | float | complex | np.generic):
            yield "sendrecv", f"into {name}", partial(comm.sendrecv, bytes(1), other, into, other)
    yield "sendrecv", "to itself", partial(comm.sendrecv, x, comm.rank, buf, comm.rank)
    if comm.size > 2:
        group = comm.split(0)
        assert group is not None
        if comm.rank == comm.size - 1:
            group.close()
        comm.barrier()
        is_alive = comm.rank < 2  # the two that go on
        yield (
            "sendrecv",
            "after a member left",
            partial(group.sendrecv, x, other, buf, other) if is_alive else lambda: None,
        )
        group.close()


def exchanges(comm: uni.Communicator) -> Iterator[Case]:
    """A send and a receive, of each kind."""
    other = comm.rank ^ 1

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
    for name, value in objects():
        yield "recv_object", name, exchange(partial(comm.send_object, value), comm.recv_object)


def probes(comm: uni.Communicator) -> Iterator[Case]:
    """A message that is looked at before it is received."""
    other, x, buf = comm.rank ^ 1, np.ones(1), np.empty(1)

    def probe(*args: Any, **more: Any) -> Step:
        def step() -> None:
            comm.send(x, other)
            while comm.probe(*args, **more) is None:
                pass
            comm.recv(buf, other)

        return step

    yield "probe", "plain", probe(other)
    yield "probe", "src=ANY", probe()
    yield "probe", "timeout=60", probe(other, timeout=60)
    yield "probe", "timeout=0", probe(other, timeout=0)
    yield "probe", "nothing there", partial(comm.probe, other, timeout=0)


def groups(comm: uni.Communicator) -> Iterator[Case]:
    """Communicators that are made, used once and closed."""

    def used(make: Callable[[], uni.Communicator | None]) -> Step:
        def step() -> None:
            with make() as group:  # type: ignore[union-attr]
                group.barrier()

        return step

    yield "split", "plain", lambda: comm.split(0).close()  # type: ignore[union-attr]
    yield "split", "color and key np.int64", lambda: comm.split(np.int64(0), np.int64(1)).close()  # type: ignore[union-attr]
    yield "split", "started", lambda: comm.start.split(0).wait().close()
    yield "split", "sub", lambda: comm.sub(range(comm.size)).close()
    yield "split", "a mesh", lambda: comm.mesh([comm.size])[0].close()
    yield "split", "used once", used(lambda: comm.split(0))
    yield "split", "sub, used once", used(lambda: comm.sub(range(comm.size)))


def many_works(comm: uni.Communicator) -> Iterator[Case]:
    """Per work, where many are under way."""
    other, n = comm.rank ^ 1, 1000
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

    def some_by_some(works: list[uni.Work]) -> None:
        while works:
            ended = set(uni.wait_some(works))
            works = [work for i, work in enumerate(works) if i not in ended]

    async def awaited(works: list[uni.Work]) -> None:
        await asyncio.gather(*works)

    yield "many", "plain", exchange(uni.wait_all)
    yield "many", "one after the other", exchange(lambda works: [work.wait() for work in works])
    yield "many", "as_completed", exchange(lambda works: list(uni.as_completed(works)))
    yield "many", "wait_any", exchange(any_by_any)
    yield "many", "wait_some", exchange(some_by_some)
    yield "many", "awaited", exchange(lambda works: asyncio.run(awaited(works)))
    yield "many", "called back", exchange(lambda works: called_back(works))


def called_back(works: list[uni.Work]) -> None:
    left = len(works)
    have_ended = threading.Event()

    def end(_: uni.Work) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            have_ended.set()

    for work in works:
        work.add_done_callback(end)
    have_ended.wait()
