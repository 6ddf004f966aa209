"""The collective verbs of a communicator: their arguments, and the stages of each.

Wrong arguments are refused here, before anything is sent. The blocking verbs of a Communicator start these
and wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from unisono.comm.announced_verbs import AnnouncedVerbs
from unisono.comm.argument_checks import (
    by_rank,
    check_algorithm,
    check_reduction,
    checked_counts,
    checked_out,
    is_slot,
    no_mean,
)
from unisono.comm.dispatch import CollectiveCall
from unisono.comm.fingerprint import NOTHING, described
from unisono.comm.point_to_point import receivable
from unisono.comm.vector_collectives import all_reduce_fused
from unisono.core import buffers
from unisono.core.buffers import Array
from unisono.core.call import Call, Steps
from unisono.core.dtypes import DTYPES, DType
from unisono.core.kernels import divide, narrow, widen
from unisono.core.ops import OpLike, ReduceOp, as_op
from unisono.core.work import Work
from unisono.errors import UsageError
from unisono.plans.steps import Buf

__all__ = ["Verbs"]

T = TypeVar("T")
_FLOAT32 = DTYPES["float32"]
_BYTE = DTYPES["uint8"]


class Verbs(AnnouncedVerbs):
    """`comm.start`: the verbs of a communicator, each of which returns a Work.

    A collective is called by every rank of the communicator, in the same order and with equal arguments;
    otherwise all ranks get CollectiveMismatch. Every verb takes `timeout=`: seconds for the whole operation,
    without a limit by default. Most collectives take `algorithm=`: "auto" or a name that `unisono plan
    --list` shows. Where a verb takes `out=`, it fills that memory and returns it; otherwise it returns a new
    array of the same kind as `x`. Memory that is written to must be C-contiguous; arrays that are only read
    may have any strides. A wrong argument is a UsageError, raised before anything is sent.
    """

    # What `help` says about arguments and errors is in verb_docs.py.

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
        target = array if out is None else checked_out(out, array, array.shape)
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

        The `x` of other ranks, and that of a root with `out`, is unchanged. Only root's `out` is used.
        """
        how = as_op(op)
        root = self._rank_of(root, "root")
        is_root = self._rank == root
        has_out = is_root and out is not None
        array = buffers.view(x, "x", writable=is_root and not has_out)
        target = checked_out(out, array, array.shape) if has_out else array
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
        array = by_rank(x, "x", self._size)
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
        lengths = checked_counts(array, counts, self._size)
        row = int(np.prod(array.shape[1:], dtype=np.int64))
        shape = (lengths[self._rank], *array.shape[1:])
        parts = tuple(n * row for n in lengths)
        return self._reduce_scatter(
            "reduce_scatter_v", array, parts, as_op(op), shape, out, timeout, algorithm
        )

    def all_to_all(
        self, x: Any, *, out: Any = None, timeout: float | None = None, algorithm: str = "auto"
    ) -> Work[Any]:
        """Send `x[d]` to each rank d; `result[s]` is what rank s sent to this rank, its `x[rank]`."""
        array = by_rank(x, "x", self._size)
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

    # -- shared by several verbs --------------------------------------------------------------------------

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

    def _result(self, array: Array, out: Any, shape: tuple[int, ...]) -> Array:
        return array.like(shape) if out is None else checked_out(out, array, shape)

    def _gathered(self, array: Array, out: Any) -> tuple[Array, np.ndarray[Any, Any]]:
        """The result of a gather of `array`, and what is read: x may be this rank's slot of `out`."""
        shape = (self._size, *array.shape)
        if out is None:
            return array.like(shape), array.flat
        is_own_slot = is_slot(array, receivable(out, "out"), self._rank)
        target = checked_out(out, array, shape, may_share=is_own_slot)
        return target, array.flat.copy() if is_own_slot and self._has_library else array.flat


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
