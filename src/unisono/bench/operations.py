"""The operations that are measured, as a table: the same service as a line of Python for each library.

A line holds one or more calls, separated by "; ". Names in it are the operands of the layout (operands.py),
and what libraries.py provides: rank, size, left, right. Where lengths are not known beforehand, MPI's line
exchanges them first, as its users must and as ours does inside. An operation without a line for Gloo has no
such call there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["FLOAT32", "MANY", "OBJECTS", "OPERATIONS", "Line", "Operation", "operation_of"]

FLOAT32: Final = "float32"
_NUMBER: Final = ("number",)
_ARRAYS: Final = (FLOAT32, "torch")
# Arrays of all_reduce_many.
MANY: Final = 8
OBJECTS: Final = ("100 B dict", "200 dicts", "1,000 floats", "1 MiB of bytes")
# Every way of calling of ways.py, the usual one first.
_ALL_WAYS: Final = (
    "blocking", "timeout", "started", "polled", "new size", "seen size", "new view", "new array",
    "1000 lines",
)  # fmt: skip
_WITHOUT_ARRAYS: Final = ("blocking", "timeout", "started", "polled", "1000 lines")


@dataclass(frozen=True, slots=True)
class Line:
    """What a user of one library writes. `answer` is where the result is then found.

    `odd` is the line of rank 1 where two ranks do different things; `then` follows on the last call's result.
    """

    text: str
    answer: str = "out"
    odd: str = ""
    then: str = ""

    def verbs(self) -> set[str]:
        """The names that are called."""
        return set(re.findall(r"(?:^|; )(\w+)\(", self.text)) | set(re.findall(r"(?:^|; )(\w+)\(", self.odd))


@dataclass(frozen=True, slots=True)
class Operation:
    """One row: a line for each library, the layout of its operands, and what can be varied.

    `is_pair`: ranks above 1 do nothing. `is_posted`: all calls are started before the first is waited for.
    `bus` is the bus bandwidth over the algorithm bandwidth, by the number of ranks (nccl-tests).
    """

    name: str
    layout: str
    lines: Mapping[str, Line]
    data: tuple[str, ...] = (FLOAT32,)
    ways: tuple[str, ...] = _ALL_WAYS
    is_pair: bool = False
    is_posted: bool = False
    calls_per_repeat: int = 1
    bus: Callable[[int], float] | None = field(default=None, compare=False)

    @property
    def has_sizes(self) -> bool:
        """Whether its length is a matter of choice."""
        return self.layout not in ("none", "number", "object", "objects")

    def parts(self, ranks: int) -> int:
        """How many equal parts the bytes are cut into; uneven ones are a little longer."""
        return {"vector": 1, "pair": 1, "many": MANY}.get(self.layout, ranks)


def _row(
    name: str,
    layout: str,
    ours: Line | str,
    mpi: Line | str,
    gloo: Line | str | None = None,
    **more: object,
) -> Operation:
    given = {"unisono": ours, "mpi": mpi, "gloo": gloo}
    lines = {
        library: line if isinstance(line, Line) else Line(line)
        for library, line in given.items()
        if line is not None
    }
    return Operation(name, layout, lines, **more)  # type: ignore[arg-type]


def _result(text: str, **more: str) -> Line:
    return Line(text, "result", **more)


def _in_place(text: str, **more: str) -> Line:
    return Line(text, "x", **more)


OPERATIONS: Final = (
    # Collectives of even parts.
    _row(
        "all_reduce",
        "vector",
        _in_place("all_reduce(x)"),
        _in_place("Allreduce(IN_PLACE, x)"),
        _in_place("all_reduce(x)"),
        data=_ARRAYS,
        bus=lambda n: 2 * (n - 1) / n,
    ),
    _row(
        "broadcast",
        "vector",
        _in_place("broadcast(x)"),
        _in_place("Bcast(x)"),
        _in_place("broadcast(x, 0)"),
        data=_ARRAYS,
        bus=lambda n: 1.0,
    ),
    _row(
        "all_gather",
        "gather",
        "all_gather(x, out=out)",
        "Allgather(x, out)",
        "all_gather_into_tensor(out, x)",
        data=_ARRAYS,
        bus=lambda n: (n - 1) / n,
    ),
    _row(
        "reduce_scatter",
        "scatter",
        "reduce_scatter(x, out=out)",
        "Reduce_scatter_block(x, out)",
        "reduce_scatter_tensor(out, x)",
        bus=lambda n: (n - 1) / n,
    ),
    _row(
        "all_to_all",
        "exchange",
        "all_to_all(x, out=out)",
        "Alltoall(x, out)",
        "all_to_all_single(out, x)",
        bus=lambda n: (n - 1) / n,
    ),
    _row("barrier", "none", "barrier()", "Barrier()", "barrier()", ways=_WITHOUT_ARRAYS),
    _row(
        "reduce",
        "vector",
        _in_place("reduce(x)"),
        _in_place("Reduce(IN_PLACE if rank == 0 else x, x)"),
        _in_place("reduce(x, 0)"),
        bus=lambda n: 1.0,
    ),
    _row(
        "gather",
        "gather to root",
        "gather(x, out=out)",
        "Gather(x, out)",
        "gather(x, rows)",
        bus=lambda n: (n - 1) / n,
    ),
    _row(
        "scatter",
        "scatter from root",
        "scatter(x, out=out)",
        "Scatter(x, out)",
        "scatter(out, rows)",
        bus=lambda n: (n - 1) / n,
    ),
    _row("scan", "vector", "scan(x, out=out)", "Scan(x, out)"),
    _row("exscan", "vector", "exscan(x, out=out)", "Exscan(x, out)"),
    _row(
        "all_reduce_many",
        "many",
        Line("all_reduce_many(xs)", "xs"),
        Line("; ".join(f"Allreduce(IN_PLACE, xs[{i}])" for i in range(MANY)), "xs"),
        Line("; ".join(f"all_reduce(xs[{i}])" for i in range(MANY)), "xs"),
    ),
    # What is usual in other programs: another root, another operation.
    *(
        _row(name, "vector", _in_place(ours), _in_place(mpi), data=(variant,), ways=("blocking",))
        for name, variant, ours, mpi in (
            ("broadcast", "root 1", "broadcast(x, 1)", "Bcast(x, 1)"),
            ("reduce", "root 1", "reduce(x, 1)", "Reduce(IN_PLACE if rank == 1 else x, x, root=1)"),
            ("all_reduce", "max", 'all_reduce(x, "max")', "Allreduce(IN_PLACE, x, MAX)"),
        )
    ),
    # Collectives of uneven parts.
    _row(
        "all_gather_v",
        "uneven gather",
        _result("all_gather_v(x)"),
        "Allgather(n, counts); Allgatherv(x, vector_out)",
    ),
    _row(
        "gather_v",
        "uneven gather to root",
        _result("gather_v(x)"),
        "Gather(n, counts); Gatherv(x, vector_out)",
    ),
    _row(
        "scatter_v",
        "uneven scatter from root",
        _result("scatter_v(parts)"),
        "Scatter(counts, n); Scatterv(vector_x, out[:n[0]])",
    ),
    _row(
        "all_to_all_v",
        "uneven exchange",
        _result("all_to_all_v(parts)"),
        "Alltoall(counts, theirs); Alltoallv(vector_x, vector_out)",
    ),
    _row(
        "reduce_scatter_v",
        "uneven reduce",
        _result("reduce_scatter_v(x, counts)"),
        "Reduce_scatter(x, out, counts)",
    ),
    # Messages.
    _row(
        "ping",
        "pair",
        _in_place("send(x, 1); recv(x, 1)", odd="recv(x, 0); send(x, 0)"),
        _in_place("Send(x, 1); Recv(x, 1)", odd="Recv(x, 0); Send(x, 0)"),
        _in_place("send(x, 1); recv(x, 1)", odd="recv(x, 0); send(x, 0)"),
        data=_ARRAYS,
        is_pair=True,
        calls_per_repeat=2,
        bus=lambda n: 1.0,
    ),
    _row(
        "sendrecv",
        "vector",
        "sendrecv(x, right, out, left)",
        "Sendrecv(x, right, 0, out, left)",
        data=_ARRAYS,
        bus=lambda n: 1.0,
    ),
    _row(
        "isend_irecv",
        "vector",
        "recv(out, left); send(x, right)",
        "Recv(out, left); Send(x, right)",
        "recv(out, left); send(x, right)",
        ways=("started", "polled", "new size", "seen size", "new view", "new array", "1000 lines"),
        is_posted=True,
        bus=lambda n: 1.0,
    ),
    _row(
        "probe",
        "pair",
        _in_place("send(x, 1); probe(1); recv(x, 1)", odd="probe(0); recv(x, 0); send(x, 0)"),
        _in_place("Send(x, 1); Probe(1); Recv(x, 1)", odd="Probe(0); Recv(x, 0); Send(x, 0)"),
        is_pair=True,
        calls_per_repeat=2,
    ),
    _row(
        "recv_bytes",
        "pair",
        _result("send(x, 1); recv_bytes(1)", odd="recv_bytes(0); send(x, 0)"),
        _in_place(
            "Send(x, 1); Probe(1, 0, status); Recv(bytearray(status.Get_count()), 1)",
            odd="Probe(0, 0, status); Recv(bytearray(status.Get_count()), 0); Send(x, 0)",
        ),
        is_pair=True,
        calls_per_repeat=2,
    ),
    # Python numbers.
    *(
        _row(name, "number", _result(ours), _result(mpi), data=_NUMBER, ways=_WITHOUT_ARRAYS)
        for name, ours, mpi in (
            ("all_reduce", "all_reduce(x)", "allreduce(x)"),
            ("broadcast", "broadcast(x)", "bcast(x)"),
            ("all_gather", "all_gather(x)", "allgather(x)"),
            ("reduce", "reduce(x)", "reduce(x)"),
            ("scan", "scan(x)", "scan(x)"),
        )
    ),
    # Objects.
    *(
        _row(name, layout, _result(ours), _result(mpi), gloo, data=OBJECTS, ways=_WITHOUT_ARRAYS)
        for name, layout, ours, mpi, gloo in (
            (
                "broadcast_object",
                "object",
                "broadcast_object(value)",
                "bcast(value)",
                Line("broadcast_object_list(holder)", "holder[0]"),
            ),
            (
                "all_gather_object",
                "object",
                "all_gather_object(value)",
                "allgather(value)",
                Line("all_gather_object(outputs, value)", "outputs"),
            ),
            (
                "gather_object",
                "object",
                "gather_object(value)",
                "gather(value)",
                Line("gather_object(value, outputs if rank == 0 else None)", "outputs"),
            ),
            (
                "scatter_object",
                "objects",
                "scatter_object(values)",
                "scatter(values)",
                Line("scatter_object_list(holder, values)", "holder[0]"),
            ),
            ("all_to_all_object", "objects", "all_to_all_object(values)", "alltoall(values)", None),
            (
                "all_reduce_object",
                "object",
                "all_reduce_object(value, first)",
                "allreduce(value, first)",
                None,
            ),
        )
    ),
    _row(
        "ping_object",
        "object",
        _result("send_object(value, 1); recv_object(1)", odd="recv_object(0); send_object(value, 0)"),
        _result("send(value, 1); recv(None, 1)", odd="recv(None, 0); send(value, 0)"),
        data=OBJECTS,
        ways=_WITHOUT_ARRAYS,
        is_pair=True,
        calls_per_repeat=2,
    ),
    # Groups.
    *(
        _row(
            f"{name}_close",
            "none",
            _result(ours, then=".close()"),
            _result(mpi, then=".Free()"),
            ways=ways,
        )
        for name, ours, mpi, ways in (
            ("split", "split(rank % 2, rank)", "Split(rank % 2, rank)", ("blocking", "timeout", "started")),
            ("sub", "sub(range(size))", "Create_group(group)", ("blocking",)),
            ("dup", "dup()", "Dup()", ("blocking",)),
            ("split_by_host", "split_by_host()", "Split_type(SHARED)", ("blocking",)),
        )
    ),
    _row(
        "mesh_close",
        "none",
        _result("mesh((size,))", then="[0].close()"),
        _result("Create_cart((size,))", then=".Free()"),
        ways=("blocking",),
    ),
)


def operation_of(name: str, data: str) -> Operation:
    """The row of an operation for a kind of data.

    Raises:
        KeyError: there is none.
    """
    for row in OPERATIONS:
        if row.name == name and data in row.data:
            return row
    raise KeyError(f"no operation {name!r} with {data!r}")
