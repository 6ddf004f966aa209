"""Tensors as memory for the engine: contiguous, without gradients, of an element type that it knows.

A plain tensor is used as it is, without copying. Everything else is made readable, or gets memory that is
copied back when the operation has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from unisono._native import POOLED_BYTES_MIN
from unisono.core import buffers
from unisono.core.dtypes import DTYPES
from unisono.errors import UsageError

__all__ = [
    "TYPES",
    "CopyBack",
    "apart",
    "apart_from",
    "cut",
    "in_a_row",
    "in_rows",
    "is_plain",
    "joined",
    "readable",
    "target",
    "targets",
    "updatable",
]

# Other types, such as float8, travel as bytes; complex32 as pairs of float16, which can be added.
TYPES: Final = frozenset(getattr(torch, name) for name in DTYPES)

CopyBack = Callable[[], object]


def is_plain(tensor: Tensor) -> bool:
    """Whether the engine can use it as it is."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in TYPES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.is_cpu
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def readable(tensor: Tensor) -> Tensor:
    """Memory with its elements: its own if it is contiguous, else a copy."""
    return tensor if is_plain(tensor) else _as_typed(_resolved(_detached(tensor)))


def updatable(tensor: Tensor) -> tuple[Tensor, CopyBack | None]:
    """Memory with its elements that an operation overwrites, and what copies it back, if it is a copy."""
    if is_plain(tensor):
        return tensor, None
    own = _detached(tensor)
    memory = _resolved(own)
    return _as_typed(memory), None if memory is own else lambda: own.copy_(memory)


def target(tensor: Tensor) -> tuple[Tensor, CopyBack | None]:
    """Memory that an operation fills for it, and what copies it back."""
    if is_plain(tensor):
        return tensor, None
    own = _detached(tensor)
    if own.is_contiguous() and not own.is_neg() and not own.is_conj():
        return _as_typed(own), None
    memory = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    return _as_typed(memory), lambda: own.copy_(memory)


def targets(tensors: Sequence[Tensor]) -> tuple[list[Tensor], CopyBack | None]:
    """The same of several tensors, flat. One that is listed again keeps what comes last, as with Gloo."""
    flat: list[Tensor] = []
    backs: list[CopyBack] = []
    known: set[int] = set()
    for tensor in tensors:
        memory, back = target(tensor)
        if memory.numel() and memory.data_ptr() in known:
            listed, memory = memory, torch.empty_like(memory)
            back = partial(listed.copy_, memory)
        known.add(memory.data_ptr())
        flat.append(memory.view(-1))
        if back is not None:
            backs.append(back)
    return flat, None if not backs else lambda: [back() for back in backs]


def in_rows(parts: Sequence[Tensor]) -> list[Tensor]:
    """Flat tensors as one row each: ranks compare how long a row is, and not how many there are."""
    return [part.view(1, part.numel()) for part in parts]


def cut(memory: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Parts of a contiguous tensor, flat: `rows` are their lengths along dimension 0."""
    flat, all_rows = memory.view(-1), sum(rows)
    return list(flat.split([flat.numel() // all_rows * n if all_rows else 0 for n in rows]))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all of them in a row: their own memory if they lie in a row, else a copy."""
    own = in_a_row(tensors)
    if own is not None:
        return own
    parts = [readable(tensor).reshape(-1) for tensor in tensors]
    nbytes = sum(part.nbytes for part in parts)
    if nbytes < POOLED_BYTES_MIN:
        return torch.cat(parts)
    # Memory that is used again: the system clears new pages, which takes longer than the copy.
    memory = torch.from_numpy(buffers.empty(nbytes, DTYPES["uint8"])).view(parts[0].dtype)
    return torch.cat(parts, out=memory)


def in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat tensor in place of plain ones that follow each other in memory, as chunks do; else None."""
    first = tensors[0]
    if not is_plain(first):  # some have no memory of their own
        return None
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if not is_plain(tensor) or tensor.dtype is not first.dtype:
            return None
        if not tensor.numel():
            continue  # it lies nowhere
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.nbytes
    count = (end - first.data_ptr()) // first.itemsize
    # By DLPack it has a storage of its own: the engine's view of a tensor forbids to resize the storage, and
    # FSDP frees its parameters by that. By a capsule: given a tensor, `from_dlpack` asks ten times as long.
    return from_dlpack(to_dlpack(first.as_strided((count,), (1,)))) if count else None


def apart(x: Tensor, out: Tensor, slot: int | None = None) -> Tensor:
    """What to read in place of `x` while `out` is written; both are contiguous.

    That is a copy if they share memory, unless the smaller is exactly the slot of this number in the other:
    FSDP2 gathers from its own slice of the output.
    """
    if slot is not None:
        part, whole = (x, out) if x.nbytes <= out.nbytes else (out, x)
        if part.data_ptr() == whole.data_ptr() + slot * part.nbytes:
            return x
    begin, other = x.data_ptr(), out.data_ptr()
    is_shared = begin < other + out.nbytes and other < begin + x.nbytes
    return x.clone() if is_shared else x


def apart_from(parts: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """What to read in place of `parts` while `outs` are written."""
    written = {out.untyped_storage().data_ptr() for out in outs if out.numel()}
    return [part.clone() if part.untyped_storage().data_ptr() in written else part for part in parts]


def _detached(tensor: Tensor) -> Tensor:
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    if tensor.is_quantized:
        raise UsageError(f"a quantized tensor of {tensor.dtype}; allowed: its `int_repr()`")
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        raise UsageError(
            f"a {tensor.layout} tensor on {tensor.device}; allowed: dense tensors on the CPU"
            " (sparse COO tensors in all_reduce)"
        )
    return tensor.detach()


def _resolved(tensor: Tensor) -> Tensor:
    """The same tensor if it is contiguous and nothing about it is lazy; else a copy."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _as_typed(tensor: Tensor) -> Tensor:
    if tensor.dtype in TYPES:
        return tensor
    return tensor.reshape(-1).view(torch.float16 if tensor.dtype is torch.complex32 else torch.uint8)
