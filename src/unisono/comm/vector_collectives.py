"""Collectives whose ranks do not know each other's lengths: announcements, then the plan.

Each verb has one or two stages. In the first every rank sends its row (comm/announcement.py) to all or to
root, or root does to all; with the rows at hand, `finish` runs the second, unless all elements were in the
rows. In a `gather_v`, the others are sent directly to root: no other rank knows more than its own length. The
engine runs both stages by itself; calls that Python adopts go on in `finish` (comm/adoption.py).
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, Final, NamedTuple

import numpy as np

from unisono.comm.announcement import ARRAY_BYTES_MAX, Announcement, Flat, row_bytes
from unisono.comm.dispatch import CollectiveCall
from unisono.comm.fingerprint import NOTHING, Operand, fused
from unisono.comm.group import Group
from unisono.comm.object_payload import unpacked
from unisono.comm.verb_table import Fact, verbs_with
from unisono.core import buffers
from unisono.core.buffers import Array, Family
from unisono.core.call import LocalError, Steps
from unisono.core.dtypes import DTYPES, DType
from unisono.core.kernels import divide, narrow, widen
from unisono.core.ops import ReduceOp
from unisono.errors import CollectiveMismatch, Location, UnisonoError, UsageError
from unisono.plans.steps import Buf

__all__ = [
    "LISTED",
    "STRAIGHT",
    "Outs",
    "all_reduce_fused",
    "announced_operand",
    "as_list",
    "family_number",
    "finish",
    "gathered_operand",
    "lengths_of",
    "rows_algorithm",
    "rows_collective",
    "rows_here",
    "run_announced",
]

_BYTE: Final = DTYPES["uint8"]
_EXCHANGED: Final = verbs_with(Fact.EXCHANGED)
_GATHERED: Final = verbs_with(Fact.GATHERED)
_PER_RANK: Final = verbs_with(Fact.PER_RANK)
_OBJECTS: Final = verbs_with(Fact.OBJECTS)
# By which the second stage of a `gather_v` moves what was not in the rows: every rank sends to root.
STRAIGHT: Final = "flat"
# Verbs that give a list of arrays by rank; so is their `out=`.
LISTED: Final = (_EXCHANGED | _GATHERED) - _OBJECTS


class Outs(NamedTuple):
    """`out=` of a verb that gives a list: arrays by rank."""

    given: Any  # the user's list
    arrays: list[Array]

    @classmethod
    def of(cls, given: Any) -> Outs:
        """Those of a list.

        Raises:
            UsageError: one of them cannot be written to, or shares memory with another.
        """
        arrays = [buffers.view(each, f"out[{i}]", writable=True) for i, each in enumerate(given)]
        for i, array in enumerate(arrays):
            if array.is_value or not array.shape:
                raise UsageError(f"out[{i}] is no array with an axis 0; allowed: writable arrays")
        starts = [array.flat.__array_interface__["data"][0] for array in arrays]
        filled = sorted((i for i in range(len(arrays)) if arrays[i].count), key=starts.__getitem__)
        for one, next_one in itertools.pairwise(filled):
            if starts[one] + arrays[one].flat.nbytes > starts[next_one]:
                first, second = sorted((one, next_one))
                raise UsageError(f"out[{second}] overlaps out[{first}]; allowed: separate memory")
        return cls(given, arrays)

    def filled(self, flat: Flat, lengths: list[int]) -> list[Any]:
        """The user's list, with what came in its arrays; lengths that do not fit concern this rank alone."""
        for rank, (array, length) in enumerate(zip(self.arrays, lengths, strict=True)):
            if array.shape[0] != length:
                raise LocalError from UsageError(
                    f"out[{rank}] has {array.shape[0]} rows; rank {rank} sent {length}",
                    next_step="give arrays of the lengths that come, or leave out= out",
                )
        start = 0
        for array in self.arrays:
            array.flat[:] = flat[start : start + array.count]
            start += array.count
        return self.given  # type: ignore[no-any-return]


def lengths_of(verb: str, size: int) -> int:
    """How many lengths a row of the verb holds."""
    return size if verb in _PER_RANK else 1


def rows_collective(verb: str) -> str:
    """The collective that carries the rows of a verb."""
    return "all_gather" if verb in _EXCHANGED else "gather" if verb in _GATHERED else "broadcast"


def rows_here(verb: str, size: int, is_root: bool) -> int:
    """How many rows a rank gets."""
    return 1 if rows_collective(verb) == "broadcast" else size if is_root or verb in _EXCHANGED else 0


def rows_algorithm(verb: str, algorithm: str) -> str:
    """The algorithm for the rows: what the user names is for the second stage, if that has a choice."""
    return algorithm if verb in _GATHERED else "auto"


def announced_operand(verb: str, dtype: DType, shape: tuple[int, ...], root: int) -> Operand:
    """What ranks compare of a call: the arrays beyond axis 0, where every rank has one."""
    if rows_collective(verb) == "broadcast":
        return NOTHING
    text = f"{dtype}[{','.join(['*', *map(str, shape)])}]"
    return Operand(dtype, None, shape, text, root=root)


def gathered_operand(dtype: DType, root: int) -> Operand:
    """What ranks compare of the second stage of a `gather_v`."""
    return Operand(dtype, None, (), f"{dtype}[*]", root=root)


def run_announced(
    verb: str,
    one: CollectiveCall,
    group: Group,
    parts: list[Array] | None,
    *,
    root: int = 0,
    out: Array | Outs | None = None,
) -> Steps[Any]:
    """Run both stages. `parts` is what this rank announces, None if it does not."""
    size = group.backend.size
    nbytes = row_bytes(size, lengths_of(verb, size))
    collective = rows_collective(verb)
    if parts is None:
        row = np.zeros(nbytes, np.uint8)
        given = NOTHING
    else:
        said = Announcement.of(parts, family_number(parts[0].family))
        row = said.encoded(nbytes, [part.flat for part in parts])
        given = announced_operand(verb, said.dtype, said.shape, root)
    counts = (nbytes,) * (1 if collective == "broadcast" else size)
    if collective == "broadcast":
        rows, memory = row, {Buf.OUT: row}
    else:
        rows = np.empty(nbytes * rows_here(verb, size, group.backend.rank == root), np.uint8)
        memory = {Buf.IN: row} | ({Buf.OUT: rows} if rows.size else {})
    yield from one.run(
        collective,
        counts,
        _BYTE,
        memory,
        algorithm=rows_algorithm(verb, one.algorithm),
        given=given,
        root=0 if collective == "all_gather" else root,
        row_bytes=nbytes,
    )
    return (yield from finish(verb, one, group, rows, parts, root=root, out=out))


def finish(
    verb: str,
    one: CollectiveCall,
    group: Group,
    rows: Flat,
    parts: list[Array] | None,
    *,
    root: int,
    out: Array | Outs | None,
) -> Steps[Any]:
    """Run the second stage, if there is one, and make the result of a verb from the rows of the first."""
    size = group.backend.size
    lengths = lengths_of(verb, size)
    bytes_max = group.backend.config.recv_bytes_max if verb in _OBJECTS else ARRAY_BYTES_MAX
    said = [
        Announcement.decoded(row, lengths, bytes_max) for row in rows.reshape(-1, row_bytes(size, lengths))
    ]
    if said and rows_collective(verb) != "broadcast":
        assert parts is not None, "every rank announces"
        _check_alike(group, said)
    outs, out = (out, None) if isinstance(out, Outs) else (None, out)

    def made(data: Any, announced: Announcement, number: int) -> Any:
        """The object that came: part `number` of what a rank announced."""
        try:
            return unpacked(data, announced.head_of(number))
        except Exception as error:  # all ranks have what they need: this one alone is concerned
            here = Location(verb, group.name, group.epoch, one.sequence)
            raise LocalError from error.located(here) if isinstance(error, UnisonoError) else error

    match verb:
        case "all_gather_v":
            assert parts is not None
            return (yield from _all_gather(one, said, parts[0], outs))
        case "all_gather_object" | "all_reduce_object":  # of the second, every rank folds what it gets
            assert parts is not None
            came = yield from _all_gather(one, said, parts[0])
            return [made(data, each, 0) for data, each in zip(came, said, strict=True)]
        case "gather_v" | "gather_object":
            assert parts is not None
            gathered = yield from _gather(one, group, said, parts[0], root, outs)
            if gathered is None or verb == "gather_v":
                return gathered
            return [made(data, each, 0) for data, each in zip(gathered, said, strict=True)]
        case "all_to_all_v":
            assert parts is not None
            return (yield from _all_to_all(one, group, said, parts, outs))
        case "all_to_all_object":
            assert parts is not None
            came = yield from _all_to_all(one, group, said, parts)
            return [made(data, each, group.backend.rank) for data, each in zip(came, said, strict=True)]
        case "scatter":
            return (yield from _scatter(one, group, said[0], parts, out, root))
        case "scatter_v":
            return (yield from _scatter_parts(one, group, said[0], parts, out, root))
        case "scatter_object":
            part = yield from _scatter_parts(one, group, said[0], parts, None, root)
            return made(part, said[0], group.backend.rank)
        case _:
            data = yield from _broadcast(one, said[0], parts, root)
            return None if parts is not None else made(data, said[0], 0)


def _all_gather(
    one: CollectiveCall, said: list[Announcement], array: Array, outs: Outs | None = None
) -> Steps[list[Any]]:
    """Everyone's array to everyone."""
    if all(each.elements is not None for each in said):
        flat = np.concatenate([each.part(0) for each in said])
    else:
        counts = tuple(each.counts[0] for each in said)
        flat = buffers.empty(sum(counts), array.dtype)
        yield from one.run("all_gather", counts, array.dtype, {Buf.IN: array.flat, Buf.OUT: flat})
    return _listed(flat, [each.lengths[0] for each in said], said[0], array.family, outs)


def _gather(
    one: CollectiveCall,
    group: Group,
    said: list[Announcement],
    array: Array,
    root: int,
    outs: Outs | None = None,
) -> Steps[list[Any] | None]:
    """Everyone's array to root, which knows all lengths; the others know their own only."""
    size, rank = group.backend.size, group.backend.rank
    is_root = rank == root
    counts = [0] * size
    if is_root:
        counts = [each.counts[0] if each.elements is None else 0 for each in said]
    elif not Announcement.of([array], 0).fits(row_bytes(size, 1)):
        counts[rank] = array.count
    flat = buffers.empty(sum(counts) if is_root else 0, array.dtype)
    if any(counts):
        own = array.flat if counts[rank] else array.flat[:0]
        memory = {Buf.IN: own} | ({Buf.OUT: flat} if is_root else {})
        given = gathered_operand(array.dtype, root)
        yield from one.run(
            "gather", tuple(counts), array.dtype, memory, root=root, algorithm=STRAIGHT, given=given
        )
    if not is_root:
        return None
    ends = np.cumsum([0, *counts])
    whole = [
        each.part(0) if each.elements is not None else flat[ends[r] : ends[r + 1]]
        for r, each in enumerate(said)
    ]
    lengths = [each.lengths[0] for each in said]
    return _listed(np.concatenate(whole), lengths, said[0], array.family, outs)


def _all_to_all(
    one: CollectiveCall,
    group: Group,
    said: list[Announcement],
    parts: list[Array],
    outs: Outs | None = None,
) -> Steps[list[Any]]:
    """Everyone's list of arrays, one to each."""
    size, rank, dtype = group.backend.size, group.backend.rank, said[0].dtype
    if all(each.elements is not None for each in said):
        flat = np.concatenate([each.part(rank) for each in said])
    else:
        counts = tuple(itertools.chain.from_iterable(each.counts for each in said))
        flat = buffers.empty(sum(counts[rank::size]), dtype)
        given = np.concatenate([part.flat for part in parts])
        yield from one.run("all_to_all", counts, dtype, {Buf.IN: given, Buf.OUT: flat})
    return _listed(flat, [each.lengths[rank] for each in said], said[0], parts[0].family, outs)


def _scatter(
    one: CollectiveCall,
    group: Group,
    said: Announcement,
    parts: list[Array] | None,
    out: Array | None,
    root: int,
) -> Steps[Any]:
    """Root's array, cut along its leading axis, to everyone."""
    size, shape = group.backend.size, said.shape
    target = _target(said, shape, None if parts is None else parts[0], out)
    if said.elements is not None:
        start = group.backend.rank * said.step
        target.flat[:] = said.elements[start : start + said.step]
    else:
        memory = {Buf.OUT: target.flat} | ({} if parts is None else {Buf.IN: parts[0].flat})
        yield from one.run("scatter", (said.step,) * size, said.dtype, memory, root=root)
    return target.give()


def _scatter_parts(
    one: CollectiveCall,
    group: Group,
    said: Announcement,
    parts: list[Array] | None,
    out: Array | None,
    root: int,
) -> Steps[Any]:
    """Root's list of arrays, one to each."""
    rank = group.backend.rank
    target = _target(said, (said.lengths[rank], *said.shape), None if parts is None else parts[rank], out)
    if said.elements is not None:
        target.flat[:] = said.part(rank)
    else:
        memory = {Buf.OUT: target.flat}
        if parts is not None:
            memory[Buf.IN] = np.concatenate([part.flat for part in parts])
        yield from one.run("scatter", said.counts, said.dtype, memory, root=root)
    return target.give()


def _broadcast(one: CollectiveCall, said: Announcement, parts: list[Array] | None, root: int) -> Steps[Flat]:
    """Root's bytes to everyone."""
    if said.elements is not None:
        return said.part(0)
    flat = buffers.empty(said.lengths[0], _BYTE) if parts is None else parts[0].flat
    if not flat.flags.writeable:  # some algorithms give root parts of it back: not into the user's memory
        flat = flat.copy()
    yield from one.run("broadcast", (flat.size,), _BYTE, {Buf.OUT: flat}, root=root)
    return flat


def all_reduce_fused(one: CollectiveCall, arrays: list[Array], op: ReduceOp, size: int) -> Steps[None]:
    """Reduce arrays in place: those of one type travel as one."""
    by_type = [[array for array in arrays if array.dtype.name == name] for name in DTYPES]
    given = fused([(array.dtype, array.count) for array in arrays])
    if not arrays:  # nothing to reduce, but a call that the others may have made otherwise
        yield from one.run("barrier", (), _BYTE, {}, op=op, algorithm="auto", given=given)
    for same in by_type:
        if not same:
            continue
        dtype = same[0].dtype
        is_wide = op.is_mean and dtype.is_half and size > 1
        joined = np.concatenate([array.flat for array in same])
        memory = widen(joined, dtype) if is_wide else joined
        kind = DTYPES["float32"] if is_wide else dtype
        out = {Buf.OUT: memory}
        yield from one.run("all_reduce", (memory.size,), kind, out, op=op, given=given, is_part=True)
        if op.is_mean and size > 1:
            divide(memory, size, kind)
        if is_wide:
            narrow(memory, joined, dtype)
        start = 0
        for array in same:
            array.flat[:] = joined[start : start + array.count]
            start += array.count


def _check_alike(group: Group, said: list[Announcement]) -> None:
    """All ranks see the same rows, so all raise the same error or none."""
    first = said[0]
    for rank, each in enumerate(said):
        if (each.dtype, each.shape) != (first.dtype, first.shape):
            sides = ((0, first), (rank, each))
            lines = [f"rank {group.world_ranks[r]}: {a.dtype} of shape (*, {a.shape})" for r, a in sides]
            raise CollectiveMismatch(
                f"ranks {group.world_ranks[0]} and {group.world_ranks[rank]} gave different kinds of arrays",
                report="\n".join(lines),
                cause="; ".join(lines),
                next_step="give arrays of one dtype that differ along axis 0 only",
            )


def _listed(
    flat: Flat, lengths: list[int], said: Announcement, family: Family, outs: Outs | None
) -> list[Any]:
    if outs is not None:
        return outs.filled(flat, lengths)
    return as_list(flat, lengths, said.shape, said.dtype, family)


def as_list(
    flat: Flat, lengths: list[int], shape: tuple[int, ...], dtype: DType, family: Family
) -> list[Any]:
    """Arrays that follow each other in memory, of `lengths` along axis 0 and of `shape` beyond."""
    parts, start, step = [], 0, math.prod(shape)
    for length in lengths:
        stop = start + length * step
        parts.append(family.give(flat[start:stop], (length, *shape), dtype))
        start = stop
    return parts


# How root's kind of array is named to the other ranks, which have no array of their own.
_FAMILIES: Final = ("numpy", "torch", "raw")


def family_number(family: Family) -> int:
    """The number of a kind of array in a row."""
    name = "torch" if family is buffers.TORCH else "raw" if family is buffers.RAW else "numpy"
    return _FAMILIES.index(name)


def _target(said: Announcement, shape: tuple[int, ...], like: Array | None, out: Array | None) -> Array:
    """Where this rank's part of what root scatters goes."""
    if out is None:
        return _empty(said, shape, like)
    if out.dtype is not said.dtype or out.shape != shape:
        raise UsageError(
            f"out is {out.dtype} of shape {out.shape}; root scatters {said.dtype} of shape {shape}",
            next_step="give out= of that type and shape, or leave it out",
        )
    return out


def _empty(said: Announcement, shape: tuple[int, ...], like: Array | None) -> Array:
    """Memory for what root sends, of root's kind where this process can hold it."""
    if like is not None:
        return like.like(shape)
    flat = buffers.empty(int(np.prod(shape, dtype=np.int64)), said.dtype)
    name = _FAMILIES[said.family % len(_FAMILIES)]
    family = buffers.RAW if name == "raw" else buffers.numpy_family(said.dtype)
    if name == "torch" and "torch" in sys.modules:
        family = buffers.TORCH
    return Array(flat, said.dtype, shape, family, None)
