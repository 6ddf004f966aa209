"""The collective verbs of a communicator: their arguments, and the stages of each.

Wrong arguments are refused here, before anything is sent. The blocking verbs of a Communicator start these
and wait for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeVar

import numpy as np

from unisono.comm.dispatch import CollectiveCall, check_order
from unisono.comm.fingerprint import NOTHING, described
from unisono.comm.object_payload import packed
from unisono.comm.point_to_point import Messages, receivable
from unisono.comm.vector_collectives import all_reduce_fused, run_announced
from unisono.core import buffers
from unisono.core.buffers import Array
from unisono.core.dtypes import DTYPES, DType
from unisono.core.kernels import divide, narrow, widen
from unisono.core.ops import OpLike, ReduceOp, as_op
from unisono.core.task import Call, LocalError, Steps
from unisono.core.work import Work
from unisono.errors import UsageError
from unisono.plans import algorithms, entry_of
from unisono.plans.steps import Buf

__all__ = ["Verbs", "check_algorithm", "check_reduction", "no_mean"]

T = TypeVar("T")
_FLOAT32 = DTYPES["float32"]
_BYTE = DTYPES["uint8"]


class Verbs(Messages):
    """`comm.start`: the verbs of a communicator, each of which returns a Work.

    A collective is called by every rank of the communicator, in the same order and with equal arguments;
    otherwise all ranks get CollectiveMismatch. Every verb takes `timeout=`: seconds for the whole operation,
    without a limit by default. Most collectives take `algorithm=`: "auto" or a name that `unisono plan
    --list` shows. Where a verb takes `out=`, it fills that memory and returns it; otherwise it returns a new
    array of the same kind as `x`. A wrong argument is a UsageError, raised before anything is sent. Arguments
    and errors: verb_docs.py.
    """

    # -- collectives --------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Reduce the `x` of all ranks; every rank gets the result.

        Returns:
            `x` itself, or `out`; for a number, a number.
        """
        how = as_op(op)
        array = buffers.view(x, "x", writable=out is None)
        target = array if out is None else self._out(out, array, array.shape)
        self._check_reduction("all_reduce", how, array, algorithm)

        def steps(call: Call) -> Steps[Any]:
            if target is not array:
                target.flat[:] = array.flat
            one = CollectiveCall(self._group, call, algorithm)
            memory, dtype = _operand(target, how, self._size)
            given = described(array.dtype, (array.count,))
            yield from one.run("all_reduce", (array.count,), dtype, {Buf.OUT: memory}, op=how, given=given)
            _conclude(memory, dtype, target, how, self._size)
            return target.give()

        return self._begin("all_reduce", timeout, steps, is_collective=True)

    def all_reduce_many(
        self, xs: Sequence[Any], op: OpLike = "sum", *, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[Sequence[Any]]:
        """Reduce each array of a list over all ranks, in place, as one operation.

        Arrays of one type travel together: many small arrays cost little more than one. Returns `xs`; if
        it holds numbers, a new list.
        """
        how = as_op(op)
        if not isinstance(xs, Sequence):
            raise UsageError(
                f"all_reduce_many takes a list of arrays, not {type(xs).__name__}",
                next_step="all_reduce_many([x, y])",
            )
        arrays = [buffers.view(x, f"xs[{i}]", writable=True) for i, x in enumerate(xs)]
        for array in arrays:
            self._check_reduction("all_reduce", how, array, algorithm)

        def steps(call: Call) -> Steps[Sequence[Any]]:
            one = CollectiveCall(self._group, call, algorithm)
            yield from all_reduce_fused(one, arrays, how, self._size)
            # In place: the list itself, unless it holds numbers, which are immutable.
            return [array.give() for array in arrays] if any(a.is_value for a in arrays) else xs

        return self._begin("all_reduce_many", timeout, steps, is_collective=True)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: OpLike = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Reduce the `x` of all ranks into the `x` of `root`, or its `out`. Root returns it, others None.

        The `x` of the others, and that of a root with `out`, is unchanged. Only root's `out` is looked at.
        """
        how = as_op(op)
        root = self._rank_of(root, "root")
        is_root = self._rank == root
        has_out = is_root and out is not None
        array = buffers.view(x, "x", writable=is_root and not has_out)
        target = self._out(out, array, array.shape) if has_out else array
        self._check_reduction("reduce", how, array, algorithm)

        def steps(call: Call) -> Steps[Any]:
            if target is not array:
                target.flat[:] = array.flat
            one = CollectiveCall(self._group, call, algorithm)
            memory, dtype = _operand(target, how, self._size)
            place = {Buf.OUT if is_root else Buf.IN: memory}
            given = described(array.dtype, (array.count,))
            yield from one.run("reduce", (array.count,), dtype, place, root=root, op=how, given=given)
            if not is_root:
                return None
            _conclude(memory, dtype, target, how, self._size)
            return target.give()

        return self._begin("reduce", timeout, steps, is_collective=True)

    def broadcast(
        self, x: Any, root: int = 0, *, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[Any]:
        """Copy the `x` of `root` into the `x` of every other rank, of the same type and length. Returns x."""
        root = self._rank_of(root, "root")
        array = buffers.view(x, "x", writable=self._rank != root)
        check_algorithm("broadcast", algorithm)

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call, algorithm)
            # The memory of root is only read, but the engine takes writable memory only.
            memory = array.flat if array.flat.flags.writeable else array.flat.copy()
            yield from one.run("broadcast", (array.count,), array.dtype, {Buf.OUT: memory}, root=root)
            return array.give()

        return self._begin("broadcast", timeout, steps, is_collective=True)

    def all_gather(
        self, x: Any, *, out: Any = None, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[Any]:
        """Gather the `x` of all ranks, of equal shape, on every rank: `result[r]` is the x of rank r."""
        array = buffers.view(x, "x")
        target, given = self._gathered(array, out)
        check_algorithm("all_gather", algorithm)

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call, algorithm)
            memory = {Buf.IN: given, Buf.OUT: target.flat}
            yield from one.run(
                "all_gather", (array.count,) * self._size, array.dtype, memory, shape=array.shape
            )
            return target.give()

        return self._begin("all_gather", timeout, steps, is_collective=True)

    def gather(
        self, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[Any]:
        """Gather the `x` of all ranks, of equal shape, on `root`: `result[r]` is rank r's; else None."""
        array = buffers.view(x, "x")
        root = self._rank_of(root, "root")
        is_root = self._rank == root
        target, given = self._gathered(array, out) if is_root else (None, array.flat)
        check_algorithm("gather", algorithm)

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call, algorithm)
            memory = {Buf.IN: given} | ({} if target is None else {Buf.OUT: target.flat})
            counts = (array.count,) * self._size
            yield from one.run("gather", counts, array.dtype, memory, root=root, shape=array.shape)
            return None if target is None else target.give()

        return self._begin("gather", timeout, steps, is_collective=True)

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Send `x[r]` of `root` to each rank r, which returns it. Ranks other than root pass no x."""
        root = self._rank_of(root, "root")
        check_algorithm("scatter", algorithm)
        if self._rank == root and x is None:
            raise UsageError(
                "scatter needs x on root; elsewhere it is None", next_step="pass x on root, a row per rank"
            )
        array = self._by_rank(x, "x") if self._rank == root else None
        filled = None if out is None else receivable(out, "out")
        if array is not None and filled is not None:
            is_own_slot = _is_slot(filled, array, self._rank)
            self._out(out, array, array.shape[1:], may_share=is_own_slot)
            array = array.copy() if is_own_slot and self._has_library else array
        parts = None if array is None else [array]
        return self._announced("scatter", parts, timeout, algorithm, root=root, out=filled)

    def reduce_scatter(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Reduce the `x` of all ranks; rank r gets `result[r]`. The first axis of x is the rank."""
        array = self._by_rank(x, "x")
        part = array.count // self._size
        return self._reduce_scatter(
            "reduce_scatter", array, (part,) * self._size, as_op(op), array.shape[1:], out, timeout, algorithm
        )

    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        op: OpLike = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Reduce the `x` of all ranks, cut axis 0 of the result by `counts`, and give rank r part r.

        `counts` has one length for each rank, and adds up to the length of axis 0.
        """
        array = buffers.view(x, "x")
        rows = self._check_counts(array, counts)
        row = int(np.prod(array.shape[1:], dtype=np.int64))
        shape = (rows[self._rank], *array.shape[1:])
        parts = tuple(n * row for n in rows)
        return self._reduce_scatter(
            "reduce_scatter_v", array, parts, as_op(op), shape, out, timeout, algorithm
        )

    def all_to_all(
        self, x: Any, *, out: Any = None, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[Any]:
        """Send `x[d]` to each rank d; `result[s]` is what rank s sent to this rank, its `x[rank]`."""
        array = self._by_rank(x, "x")
        target = self._result(array, out, array.shape)
        check_algorithm("all_to_all", algorithm)

        def steps(call: Call) -> Steps[Any]:
            # Without any element all algorithms are equal, also those that do not take uneven parts.
            one = CollectiveCall(self._group, call, algorithm if array.count else "auto")
            counts = (array.count // self._size,) * self._size**2
            memory = {Buf.IN: array.flat, Buf.OUT: target.flat}
            yield from one.run("all_to_all", counts, array.dtype, memory, shape=array.shape)
            return target.give()

        return self._begin("all_to_all", timeout, steps, is_collective=True)

    def scan(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Reduce the `x` of ranks 0 to this one, this one included; not with op "mean"."""
        return self._prefix("scan", x, as_op(op), out, timeout, algorithm)

    def exscan(
        self,
        x: Any,
        op: OpLike = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Reduce the `x` of the ranks below this one; rank 0 gets the identity of the operation."""
        return self._prefix("exscan", x, as_op(op), out, timeout, algorithm)

    def barrier(self, *, timeout: float | None = None, algorithm: str = "auto") -> Work[None]:
        """Wait until every rank has called it."""
        check_algorithm("barrier", algorithm)

        def steps(call: Call) -> Steps[None]:
            yield from CollectiveCall(self._group, call, algorithm).run(
                "barrier", (), _BYTE, {}, given=NOTHING
            )

        return self._begin("barrier", timeout, steps, is_collective=True)

    # -- vector variants: lists of arrays by rank ---------------------------------------------------------

    def all_gather_v(
        self, x: Any, *, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[list[Any]]:
        """Gather the `x` of all ranks on every rank, as a list by rank. Axis 0 may differ."""
        array = _rows(x, "x")
        check_algorithm("all_gather", algorithm)
        return self._announced("all_gather_v", [array], timeout, algorithm)

    def gather_v(
        self, x: Any, root: int = 0, *, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[list[Any] | None]:
        """Gather the `x` of all ranks on `root`, as a list by rank; else None. Axis 0 may differ.

        `algorithm` is for arrays that are short; longer ones go straight to root. Ranks other than root do
        not wait for each other.
        """
        array = _rows(x, "x")
        root = self._rank_of(root, "root")
        check_algorithm("gather", algorithm)
        return self._announced("gather_v", [array], timeout, algorithm, root=root)

    def scatter_v(
        self,
        parts: Sequence[Any] | None = None,
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Send `parts[r]` of `root` to each rank r, which returns it. Ranks other than root pass no parts.

        The arrays may differ in the length of axis 0 only.
        """
        root = self._rank_of(root, "root")
        check_algorithm("scatter", algorithm)
        arrays = self._parts(parts) if self._rank == root else None
        filled = None if out is None else receivable(out, "out")
        if arrays is not None and filled is not None:
            self._out(out, arrays[self._rank], arrays[self._rank].shape)
            if any(filled.overlaps(part) for part in arrays):
                raise UsageError("out overlaps a part; allowed: separate memory")
        return self._announced("scatter_v", arrays, timeout, algorithm, root=root, out=filled)

    def all_to_all_v(
        self, parts: Sequence[Any], *, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[list[Any]]:
        """Send `parts[d]` to each rank d; `result[s]` is what rank s sent to this rank.

        The arrays may differ in the length of axis 0 only, which may be 0.
        """
        arrays = self._parts(parts)
        check_algorithm("all_to_all", algorithm, is_uneven=True)
        return self._announced("all_to_all_v", arrays, timeout, algorithm)

    # -- objects: plain data, arrays and registered classes -----------------------------------------------

    def broadcast_object(
        self, value: Any = None, root: int = 0, *, timeout: float | None = None
    ) -> Work[Any]:
        """Send the object of `root` to every rank, which returns it. Ranks other than root pass none."""
        root = self._rank_of(root, "root")
        parts = [packed(value, self._object_bytes_max)] if self._rank == root else None

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call)
            got = yield from run_announced("broadcast_object", one, self._group, parts, root=root)
            return value if self._rank == root else got

        return self._begin("broadcast_object", timeout, steps, is_collective=True)

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> Work[list[Any]]:
        """Gather the objects of all ranks on every rank, as a list by rank."""
        return self._announced("all_gather_object", [packed(value, self._object_bytes_max)], timeout)

    def gather_object(
        self, value: Any, root: int = 0, *, timeout: float | None = None
    ) -> Work[list[Any] | None]:
        """Gather the objects of all ranks on `root`, as a list by rank; else None."""
        root = self._rank_of(root, "root")
        return self._announced("gather_object", [packed(value, self._object_bytes_max)], timeout, root=root)

    def scatter_object(
        self, values: Sequence[Any] | None = None, root: int = 0, *, timeout: float | None = None
    ) -> Work[Any]:
        """Send `values[r]` of `root` to each rank r, which returns it. Ranks other than root pass none."""
        root = self._rank_of(root, "root")
        arrays = self._packed_by_rank("scatter_object", values, " on root") if self._rank == root else None
        return self._announced("scatter_object", arrays, timeout, root=root)

    def all_to_all_object(self, objects: Sequence[Any], *, timeout: float | None = None) -> Work[list[Any]]:
        """Send `objects[d]` to each rank d; `result[s]` is what rank s sent to this rank.

        Returns:
            A list of objects by the rank that sent them. All are copies, also what this rank sent to itself.
        """
        arrays = self._packed_by_rank("all_to_all_object", objects)
        return self._announced("all_to_all_object", arrays, timeout)

    def all_reduce_object(
        self, obj: Any, fn: Callable[[Any, Any], Any], *, timeout: float | None = None
    ) -> Work[Any]:
        """Fold the objects of all ranks in the order of ranks: `fn(fn(obj of 0, obj of 1), obj of 2)`, ...

        Every rank gets copies of all objects and folds them itself, so `fn` may change its first argument,
        and what it returns belongs to this rank. All ranks return equal objects if they pass the same `fn`
        and it depends on its arguments only; ranks do not compare it. It need not be associative. It must not
        call verbs: others may be further. What it raises is raised here: by then all objects have been
        exchanged, so other ranks get their result or their own error, and the communicator can be used
        further.
        """
        if not callable(fn):
            raise UsageError(f"fn={fn!r} cannot be called; allowed: a function of two objects")
        parts = [packed(obj, self._object_bytes_max)]

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call)
            objects = yield from run_announced("all_reduce_object", one, self._group, parts)
            try:
                return functools.reduce(fn, objects)
            except Exception as error:
                raise LocalError from error

        return self._begin("all_reduce_object", timeout, steps, is_collective=True)

    def _packed_by_rank(self, verb: str, values: Any, where: str = "") -> list[Array]:
        """Objects of which each rank gets one."""
        if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) != self._size:
            raise UsageError(
                f"{verb} takes a list of {self._size} objects{where}: one per rank",
                next_step=f"pass a list of that many objects{where}",
            )
        return [packed(value, self._object_bytes_max) for value in values]

    @property
    def _object_bytes_max(self) -> int:
        return self._group.backend.config.recv_bytes_max

    # -- shared by several verbs --------------------------------------------------------------------------

    def _announced(
        self,
        verb: str,
        parts: list[Array] | None,
        timeout: float | None,
        algorithm: str = "auto",
        *,
        root: int = 0,
        out: Array | None = None,
    ) -> Work[Any]:
        """A collective whose ranks do not know each other's lengths: see vector_collectives.py."""

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call, algorithm)
            return (yield from run_announced(verb, one, self._group, parts, root=root, out=out))

        return self._begin(verb, timeout, steps, is_collective=True)

    def _reduce_scatter(
        self,
        operation: str,
        array: Array,
        counts: tuple[int, ...],
        how: ReduceOp,
        shape: tuple[int, ...],
        out: Any,
        timeout: float | None,
        algorithm: str,
    ) -> Work[Any]:
        target = self._result(array, out, shape)
        self._check_reduction("reduce_scatter", how, array, algorithm, counts)

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call, algorithm)
            given, dtype = _operand(array, how, self._size)
            part = target.flat if dtype is array.dtype else np.empty(target.count, dtype.storage)
            memory = {Buf.IN: given, Buf.OUT: part}
            words = described(array.dtype, counts)
            yield from one.run("reduce_scatter", counts, dtype, memory, op=how, given=words)
            _conclude(part, dtype, target, how, self._size)
            return target.give()

        return self._begin(operation, timeout, steps, is_collective=True)

    def _prefix(
        self, operation: str, x: Any, how: ReduceOp, out: Any, timeout: float | None, algorithm: str
    ) -> Work[Any]:
        if how.is_mean:
            raise no_mean(operation)
        array = buffers.view(x, "x")
        target = self._result(array, out, array.shape)
        self._check_reduction(operation, how, array, algorithm)
        identity = how.identity_for(array.dtype) if operation == "exscan" else None

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call, algorithm)
            memory = {Buf.IN: array.flat, Buf.OUT: target.flat}
            yield from one.run(operation, (array.count,), array.dtype, memory, op=how)
            if operation == "exscan" and self._rank == 0:
                _fill(target, identity, how.width)
            return target.give()

        return self._begin(operation, timeout, steps, is_collective=True)

    def _check_reduction(
        self, collective: str, op: ReduceOp, array: Array, algorithm: str, parts: Sequence[int] = ()
    ) -> None:
        op.check_shape(array.shape, parts)
        check_reduction(collective, op, array.dtype, algorithm, self._group.backend.config.reproducible)

    def _by_rank(self, x: Any, what: str) -> Array:
        array = buffers.view(x, what)
        if not array.shape or array.shape[0] != self._size:
            raise UsageError(
                f"{what} has shape {array.shape}; allowed: a leading axis of {self._size}, one per rank"
            )
        return array

    def _parts(self, parts: Any) -> list[Array]:
        if isinstance(parts, str | bytes) or not isinstance(parts, Sequence) or len(parts) != self._size:
            raise UsageError(
                f"parts must be a list of length {self._size}: one array per rank",
                next_step="pass a list of that many arrays, empty ones too",
            )
        arrays = [_rows(part, f"parts[{i}]") for i, part in enumerate(parts)]
        if len({(a.dtype.name, a.shape[1:]) for a in arrays}) > 1:
            raise UsageError(
                "parts differ in dtype or in shape beyond axis 0; allowed: the same for all ranks"
            )
        return arrays

    def _check_counts(self, array: Array, counts: Sequence[int]) -> tuple[int, ...]:
        try:
            rows = tuple(index(n) for n in counts)
        except TypeError:
            raise UsageError(f"counts={counts!r}; allowed: a list of {self._size} lengths") from None
        total = array.shape[0] if array.shape else None
        if len(rows) != self._size or any(n < 0 for n in rows) or sum(rows) != total:
            raise UsageError(
                f"counts={list(rows)} do not cut axis 0 of x, shape {array.shape}; allowed: {self._size} "
                f"lengths >= 0 that add up to {total}"
            )
        return rows

    def _result(self, array: Array, out: Any, shape: tuple[int, ...]) -> Array:
        return array.like(shape) if out is None else self._out(out, array, shape)

    def _gathered(self, array: Array, out: Any) -> tuple[Array, np.ndarray[Any, Any]]:
        """The result of a gather of `array`, and what is read: x may be this rank's slot of `out`."""
        shape = (self._size, *array.shape)
        if out is None:
            return array.like(shape), array.flat
        is_own_slot = _is_slot(array, receivable(out, "out"), self._rank)
        target = self._out(out, array, shape, may_share=is_own_slot)
        return target, array.flat.copy() if is_own_slot and self._has_library else array.flat

    @property
    def _has_library(self) -> bool:
        """Whether a library may run collectives: it takes no memory that is read and written."""
        return self._group.backend.capabilities.run_collective

    def _out(self, out: Any, array: Array, shape: tuple[int, ...], *, may_share: bool = False) -> Array:
        target = receivable(out, "out")
        if target.dtype is not array.dtype or target.shape != shape:
            raise UsageError(
                f"out is {target.dtype} of shape {target.shape}; allowed: {array.dtype} of shape {shape}"
            )
        if not may_share and target.overlaps(array):
            raise UsageError("out overlaps x; allowed: separate memory")
        return target


def _is_slot(part: Array, whole: Array, rank: int) -> bool:
    """Whether `part` is exactly the part of `whole` that belongs to a rank."""
    return (
        part.dtype is whole.dtype
        and part.shape == whole.shape[1:]
        and part.flat.ctypes.data == whole.flat.ctypes.data + rank * part.flat.nbytes
    )


def _rows(x: Any, what: str) -> Array:
    array = buffers.view(x, what)
    if not array.shape:
        raise UsageError(f"{what} has no axis 0; allowed: arrays of one dimension or more")
    return array


def check_reduction(collective: str, op: ReduceOp, dtype: DType, algorithm: str, reproducible: bool) -> None:
    """Refuse a reduction that is not defined for the type, or an algorithm that does not keep its order."""
    op.check(dtype)
    check_algorithm(collective, algorithm)
    if algorithm != "auto":
        check_order(collective, op, algorithm, reproducible)


def no_mean(operation: str) -> UsageError:
    """The error of a scan with op "mean"."""
    return UsageError(
        f"{operation} has no mean: the contributions of a prefix differ in number; allowed: sum"
    )


def check_algorithm(collective: str, algorithm: str, *, is_uneven: bool = False) -> None:
    """Refuse an algorithm that the collective does not have."""
    if algorithm == "auto":
        return
    fit = [n for n in algorithms(collective) if not is_uneven or entry_of(collective, n).takes_uneven]
    if algorithm not in fit:
        kind = f"an uneven {collective}" if is_uneven else collective
        raise UsageError(
            f"algorithm={algorithm!r} is unknown for {kind}; allowed: {', '.join(['auto', *fit])}"
        )


def _operand(array: Array, op: ReduceOp, size: int) -> tuple[np.ndarray[Any, Any], DType]:
    """The memory that is reduced. For a mean of 16-bit floats a float32 copy, because their sum overflows."""
    if op.is_mean and array.dtype.is_half and size > 1:
        return widen(array.flat, array.dtype), _FLOAT32
    return array.flat, array.dtype


def _conclude(memory: np.ndarray[Any, Any], dtype: DType, target: Array, op: ReduceOp, size: int) -> None:
    """Finish a mean: divide the sum, and round it back to 16-bit floats if it was computed in float32."""
    if not op.is_mean or size == 1:
        return
    divide(memory, size, dtype)
    if dtype is not target.dtype:
        narrow(memory, target.flat, target.dtype)


def _fill(target: Array, value: Any, width: int) -> None:
    shape = (target.count // width, width)
    if target.dtype.name == "bfloat16":
        narrow(np.full(shape, value, np.float32).reshape(-1), target.flat, target.dtype)
    else:
        target.flat.reshape(shape)[:] = value
