"""Collectives whose ranks do not know each other's lengths: a metadata exchange, then the plan.

*Metadata* is a row of int64: dtype code, the kind of array, the number of dimensions beyond axis 0, these
dimensions, then lengths along axis 0.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from unisono.comm.dispatch import CollectiveCall
from unisono.comm.fingerprint import NOTHING, Operand, described
from unisono.comm.group import Group
from unisono.core import buffers, codec
from unisono.core.buffers import Array, Family
from unisono.core.dtypes import DTYPES, DType
from unisono.core.kernels import divide, narrow, widen
from unisono.core.ops import ReduceOp
from unisono.core.task import Steps
from unisono.errors import CollectiveMismatch, ProtocolError, UsageError
from unisono.plans.steps import Buf

__all__ = [
    "all_gather_v",
    "all_reduce_fused",
    "all_to_all_v",
    "broadcast_bytes",
    "gather_v",
    "packed",
    "scatter",
    "scatter_v",
    "unpacked",
]

_DIMENSIONS_MAX: Final = 32  # NumPy's own limit was 32 for most of its life
_ROW: Final = 3 + _DIMENSIONS_MAX
_INT64: Final = DTYPES["int64"]
_BYTE: Final = DTYPES["uint8"]
# What a rank may announce of an array; memory for it is taken by the call that asked for it.
_ARRAY_BYTES_MAX: Final = 1 << 48
_RAISE_LIMIT: Final = "set Config(recv_bytes_max=...) or UNISONO_RECV_BYTES_MAX alike on all ranks"


@dataclass(frozen=True, slots=True)
class _Meta:
    """What one rank says about its array or list of arrays."""

    dtype: DType
    family: int
    shape: tuple[int, ...]  # beyond axis 0
    lengths: tuple[int, ...]  # along axis 0

    @property
    def row(self) -> int:
        """How many elements one step along axis 0 holds."""
        return math.prod(self.shape)

    def encoded(self) -> np.ndarray[Any, Any]:
        """As a row of numbers."""
        row = np.zeros(_ROW + len(self.lengths), np.int64)
        row[:3] = self.dtype.code, self.family, len(self.shape)
        row[3 : 3 + len(self.shape)] = self.shape
        row[_ROW:] = self.lengths
        return row

    @staticmethod
    def decoded(row: np.ndarray[Any, Any], bytes_max: int) -> _Meta:
        """From a row of numbers that another rank sent: nothing in it is taken on trust."""
        code, family, dimensions, *rest = row.tolist()
        shape, lengths = rest[:dimensions], rest[_DIMENSIONS_MAX:]
        if not (0 <= code < len(DTYPES) and 0 <= dimensions <= _DIMENSIONS_MAX):
            raise ProtocolError("malformed metadata in a collective")
        if any(n < 0 for n in (*shape, *lengths)):
            raise ProtocolError("malformed lengths in a collective")
        meta = _Meta(list(DTYPES.values())[code], family, tuple(shape), tuple(lengths))
        longest = max(lengths) * meta.row * meta.dtype.itemsize
        if longest > bytes_max:
            raise ProtocolError(
                f"a rank announced {longest} bytes; allowed: {bytes_max}",
                next_step=_RAISE_LIMIT if bytes_max < _ARRAY_BYTES_MAX else None,
            )
        return meta


def all_gather_v(
    one: CollectiveCall, group: Group, array: Array, bytes_max: int = _ARRAY_BYTES_MAX
) -> Steps[list[Any]]:
    """Everyone's array to everyone; `bytes_max` each."""
    metas = yield from _exchange(one, group, _meta_of([array]), bytes_max)
    counts = tuple(m.lengths[0] * m.row for m in metas)
    flat = np.empty(sum(counts), array.dtype.storage)
    yield from one.run("all_gather", counts, array.dtype, {Buf.IN: array.flat, Buf.OUT: flat})
    return _as_list(flat, [m.lengths[0] for m in metas], metas[0], array.family)


def gather_v(
    one: CollectiveCall, group: Group, array: Array, root: int, bytes_max: int = _ARRAY_BYTES_MAX
) -> Steps[list[Any] | None]:
    """Everyone's array to root; `bytes_max` each."""
    metas = yield from _exchange(one, group, _meta_of([array]), bytes_max, root)
    counts = tuple(m.lengths[0] * m.row for m in metas)
    is_root = group.backend.rank == root
    flat = np.empty(sum(counts) if is_root else 0, array.dtype.storage)
    memory = {Buf.IN: array.flat} | ({Buf.OUT: flat} if is_root else {})
    yield from one.run("gather", counts, array.dtype, memory, root=root)
    return _as_list(flat, [m.lengths[0] for m in metas], metas[0], array.family) if is_root else None


def scatter(
    one: CollectiveCall, group: Group, array: Array | None, out: Array | None, root: int
) -> Steps[Any]:
    """Root's array, cut along its leading axis, to everyone."""
    given = None if array is None else _meta_of([array])
    meta = yield from _announce(one, given, root, lengths=1, bytes_max=_ARRAY_BYTES_MAX)
    size, shape = group.backend.size, meta.shape
    target = out if out is not None else _empty(meta, shape, array)
    if target.dtype is not meta.dtype or target.shape != shape:
        raise UsageError(
            f"out is {target.dtype} of shape {target.shape}; root scatters {meta.dtype} of shape {shape}",
            next_step="give out= of that type and shape, or leave it out",
        )
    memory = {Buf.OUT: target.flat} | ({} if array is None else {Buf.IN: array.flat})
    yield from one.run("scatter", (meta.row,) * size, meta.dtype, memory, root=root)
    return target.give()


def scatter_v(
    one: CollectiveCall, group: Group, parts: list[Array] | None, root: int, bytes_max: int = _ARRAY_BYTES_MAX
) -> Steps[Any]:
    """Root's list of arrays, one to each; `bytes_max` each."""
    size, rank = group.backend.size, group.backend.rank
    given = None if parts is None else _meta_of(parts)
    meta = yield from _announce(one, given, root, lengths=size, bytes_max=bytes_max)
    counts = tuple(n * meta.row for n in meta.lengths)
    target = _empty(meta, (meta.lengths[rank], *meta.shape), parts[rank] if parts else None)
    memory = {Buf.OUT: target.flat}
    if parts is not None:
        memory[Buf.IN] = np.concatenate([part.flat for part in parts])
    yield from one.run("scatter", counts, meta.dtype, memory, root=root)
    return target.give()


def all_to_all_v(one: CollectiveCall, group: Group, parts: list[Array]) -> Steps[list[Any]]:
    """Everyone's list of arrays, one to each."""
    size, rank = group.backend.size, group.backend.rank
    metas = yield from _exchange(one, group, _meta_of(parts), _ARRAY_BYTES_MAX)
    row, dtype = metas[0].row, metas[0].dtype
    counts = tuple(n * row for m in metas for n in m.lengths)
    mine = tuple(counts[s * size + rank] for s in range(size))
    flat = np.empty(sum(mine), dtype.storage)
    given = np.concatenate([part.flat for part in parts])
    yield from one.run("all_to_all", counts, dtype, {Buf.IN: given, Buf.OUT: flat})
    return _as_list(flat, [m.lengths[rank] for m in metas], metas[0], parts[0].family)


def all_reduce_fused(one: CollectiveCall, arrays: list[Array], op: ReduceOp, size: int) -> Steps[None]:
    """Reduce arrays in place: those of one type travel as one."""
    by_type = [[array for array in arrays if array.dtype.name == name] for name in DTYPES]
    # In the order given: lists of the same arrays in another order would be paired by type without a word.
    runs = [list(run) for _, run in itertools.groupby(arrays, key=lambda array: array.dtype.name)]
    text = " ".join(described(run[0].dtype, _lengths(run)).text for run in runs) or "[]"
    count = sum(array.count for array in arrays)
    given = Operand(arrays[0].dtype if arrays else None, count, text=text, is_text_compared=True)
    if not arrays:  # nothing to reduce, but a call that the others may have made otherwise
        yield from one.run("barrier", (), _BYTE, {}, op=op, algorithm="auto", given=given)
    for same in by_type:
        if not same:
            continue
        dtype = same[0].dtype
        is_wide = op.is_mean and dtype.is_half and size > 1
        fused = np.concatenate([array.flat for array in same])
        memory = widen(fused, dtype) if is_wide else fused
        kind = DTYPES["float32"] if is_wide else dtype
        yield from one.run("all_reduce", (memory.size,), kind, {Buf.OUT: memory}, op=op, given=given)
        if op.is_mean and size > 1:
            divide(memory, size, kind)
        if is_wide:
            narrow(memory, fused, dtype)
        start = 0
        for array in same:
            array.flat[:] = fused[start : start + array.count]
            start += array.count


def broadcast_bytes(
    one: CollectiveCall, data: Array | None, root: int, bytes_max: int
) -> Steps[np.ndarray[Any, Any]]:
    """Root's bytes to everyone; the length is sent first."""
    length = np.array([0 if data is None else data.count], np.int64)
    yield from one.run("broadcast", (1,), _INT64, {Buf.OUT: length}, root=root, given=NOTHING)
    if not 0 <= length[0] <= bytes_max:
        raise ProtocolError(
            f"root announced an object of {length[0]} bytes; allowed: {bytes_max}", next_step=_RAISE_LIMIT
        )
    flat = np.empty(int(length[0]), np.uint8) if data is None else data.flat
    yield from one.run("broadcast", (flat.size,), _BYTE, {Buf.OUT: flat}, root=root)
    return flat


def packed(value: Any, bytes_max: int) -> Array:
    """An object as an array of bytes, of a length that the others take."""
    array = buffers.view(codec.pack_writable(value), "object")
    if array.count > bytes_max:
        raise UsageError(f"an object of {array.count} bytes; allowed: {bytes_max}", next_step=_RAISE_LIMIT)
    return array


def unpacked(data: np.ndarray[Any, Any]) -> Any:
    """The object in an array of bytes; long arrays in it are views of these."""
    return codec.unpack(data)


def _exchange(
    one: CollectiveCall, group: Group, mine: _Meta, bytes_max: int, root: int | None = None
) -> Steps[list[_Meta]]:
    """Everyone's metadata to everyone; all ranks see the same, so all raise the same error or none."""
    size, row = group.backend.size, mine.encoded()
    everyone = np.empty(row.size * size, np.int64)
    memory = {Buf.IN: row, Buf.OUT: everyone}
    text = f"{mine.dtype}[{','.join(['*', *map(str, mine.shape)])}]"
    given = Operand(mine.dtype, None, mine.shape, text, root=root)
    yield from one.run("all_gather", (row.size,) * size, _INT64, memory, algorithm="auto", given=given)
    metas = [_Meta.decoded(part, bytes_max) for part in everyone.reshape(size, -1)]
    for rank, meta in enumerate(metas):
        if (meta.dtype, meta.shape) != (metas[0].dtype, metas[0].shape):
            sides = ((0, metas[0]), (rank, meta))
            lines = [f"rank {group.world_ranks[r]}: {m.dtype} of shape (*, {m.shape})" for r, m in sides]
            raise CollectiveMismatch(
                f"ranks {group.world_ranks[0]} and {group.world_ranks[rank]} gave different kinds of arrays",
                report="\n".join(lines),
                cause="; ".join(lines),
                next_step="give arrays of one dtype that differ along axis 0 only",
            )
    return metas


def _announce(
    one: CollectiveCall, meta: _Meta | None, root: int, *, lengths: int, bytes_max: int
) -> Steps[_Meta]:
    """Root's metadata to everyone."""
    row = np.zeros(_ROW + lengths, np.int64) if meta is None else meta.encoded()
    memory = {Buf.OUT: row}
    yield from one.run("broadcast", (row.size,), _INT64, memory, root=root, algorithm="auto", given=NOTHING)
    return _Meta.decoded(row, bytes_max)


def _meta_of(arrays: list[Array]) -> _Meta:
    shape = arrays[0].shape[1:]
    if len(shape) > _DIMENSIONS_MAX:
        raise UsageError(f"an array has {len(shape) + 1} dimensions; allowed: {_DIMENSIONS_MAX + 1}")
    family = _FAMILIES.index(_family_name(arrays[0].family))
    return _Meta(arrays[0].dtype, family, shape, tuple(array.shape[0] for array in arrays))


def _as_list(flat: np.ndarray[Any, Any], lengths: list[int], meta: _Meta, family: Family) -> list[Any]:
    parts, start = [], 0
    for length in lengths:
        stop = start + length * meta.row
        parts.append(family.give(flat[start:stop], (length, *meta.shape), meta.dtype))
        start = stop
    return parts


def _lengths(arrays: list[Array]) -> tuple[int, ...]:
    return tuple(array.count for array in arrays)


# How root's kind of array is named to the others, who have no array to take it from.
_FAMILIES: Final = ("numpy", "torch", "raw")


def _family_name(family: Family) -> str:
    return "torch" if family is buffers.TORCH else "raw" if family is buffers.RAW else "numpy"


def _empty(meta: _Meta, shape: tuple[int, ...], like: Array | None) -> Array:
    """Memory for what root sends, of root's kind where this process can hold it."""
    if like is not None:
        return like.like(shape)
    flat = np.empty(int(np.prod(shape, dtype=np.int64)), meta.dtype.storage)
    name = _FAMILIES[meta.family % len(_FAMILIES)]
    family = buffers.RAW if name == "raw" else buffers.numpy_family(meta.dtype)
    if name == "torch" and "torch" in sys.modules:
        family = buffers.TORCH
    return Array(flat, meta.dtype, shape, family, None)
