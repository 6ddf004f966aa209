"""The verbs whose ranks do not know each other's lengths: `scatter`, the uneven verbs and those for objects.

Arguments are checked here. vector_collectives.py runs the stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from unisono.comm.argument_checks import by_rank, check_algorithm, checked_out, is_slot, parts_by_rank, rows
from unisono.comm.dispatch import CollectiveCall
from unisono.comm.object_payload import packed
from unisono.comm.point_to_point import Messages, receivable
from unisono.comm.vector_collectives import Outs, run_announced
from unisono.core.buffers import Array
from unisono.core.call import Call, LocalError, Steps
from unisono.core.work import Work
from unisono.errors import UsageError

__all__ = ["AnnouncedVerbs"]


class AnnouncedVerbs(Messages):
    """The verbs that begin with an announcement of lengths, each of which returns a Work."""

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
        array = by_rank(x, "x", self._size) if self._rank == root else None
        filled = None if out is None else receivable(out, "out")
        if array is not None and filled is not None:
            is_own_slot = is_slot(filled, array, self._rank)
            checked_out(out, array, array.shape[1:], may_share=is_own_slot)
            array = array.copy() if is_own_slot and self._has_library else array
        parts = None if array is None else [array]
        return self._announced("scatter", parts, timeout, algorithm, root=root, out=filled)

    # -- vector variants: lists of arrays by rank ---------------------------------------------------------

    def all_gather_v(
        self,
        x: Any,
        *,
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Gather the `x` of all ranks on every rank, as a list by rank. Axis 0 may differ."""
        array = rows(x, "x")
        check_algorithm("all_gather", algorithm)
        outs = self._outs(out, [array])
        return self._announced("all_gather_v", [array], timeout, algorithm, out=outs)

    def gather_v(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Gather the `x` of all ranks on `root`, as a list by rank; else None. Axis 0 may differ.

        `algorithm` is for short arrays; longer ones are sent directly to root. Ranks other than root do
        not wait for each other.
        """
        array = rows(x, "x")
        root = self._rank_of(root, "root")
        check_algorithm("gather", algorithm)
        outs = self._outs(out, [array]) if self._rank == root else None
        return self._announced("gather_v", [array], timeout, algorithm, root=root, out=outs)

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
        arrays = parts_by_rank(parts, self._size) if self._rank == root else None
        filled = None if out is None else receivable(out, "out")
        if arrays is not None and filled is not None:
            checked_out(out, arrays[self._rank], arrays[self._rank].shape)
            if any(filled.overlaps(part) for part in arrays):
                raise UsageError("out overlaps a part; allowed: separate memory")
        return self._announced("scatter_v", arrays, timeout, algorithm, root=root, out=filled)

    def all_to_all_v(
        self,
        parts: Sequence[Any],
        *,
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Send `parts[d]` to each rank d; `result[s]` is what rank s sent to this rank.

        The arrays may differ in the length of axis 0 only, which may be 0.
        """
        arrays = parts_by_rank(parts, self._size)
        check_algorithm("all_to_all", algorithm, is_uneven=True)
        outs = self._outs(out, arrays)
        return self._announced("all_to_all_v", arrays, timeout, algorithm, out=outs)

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
        call verbs: other ranks may be further.

        If `fn` raises on this rank, the verb raises the same exception here. By then all objects have been
        exchanged: other ranks get their result or their own error, and the communicator can be used further.
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
        out: Array | Outs | None = None,
    ) -> Work[Any]:
        """A collective whose ranks do not know each other's lengths."""

        def steps(call: Call) -> Steps[Any]:
            one = CollectiveCall(self._group, call, algorithm)
            return (yield from run_announced(verb, one, self._group, parts, root=root, out=out))

        return self._begin(verb, timeout, steps, is_collective=True)

    def _outs(self, out: Any, given: list[Array]) -> Outs | None:
        """Where the parts that come are to go, by rank."""
        if out is None:
            return None
        if isinstance(out, str | bytes) or not isinstance(out, Sequence) or len(out) != self._size:
            raise UsageError(
                f"out must be a list of length {self._size}: one array per rank",
                next_step="pass a list of that many arrays, of the lengths that come",
            )
        outs = Outs.of(out)
        kind = given[0]
        for i, array in enumerate(outs.arrays):
            if array.dtype is not kind.dtype or array.shape[1:] != kind.shape[1:]:
                raise UsageError(
                    f"out[{i}] is {array.dtype} of shape {array.shape}; allowed: {kind.dtype} of shape "
                    f"(*, {', '.join(map(str, kind.shape[1:]))})"
                )
            is_sent = len(given) == 1 and i == self._rank and array.is_same_memory(given[0])
            if not is_sent and any(array.overlaps(part) for part in given):
                raise UsageError(f"out[{i}] overlaps what is sent; allowed: separate memory")
        return outs

    @property
    def _has_library(self) -> bool:
        """Whether a library may run collectives: it takes no memory that is read and written."""
        return self._group.backend.capabilities.run_collective
