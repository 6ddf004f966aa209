"""Memory that operations read and write: NumPy, torch, DLPack, the buffer protocol, plain numbers.

`view` shows a user's object as a flat array without copying it; `Array.give` returns a result in the same
kind. torch is never imported here: a program that passes a tensor has imported it.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono._native import POOLED_BYTES_MIN, Arguments, result_memory
from unisono.core.dtypes import BFLOAT16, DTYPES, DType, dtype_named
from unisono.errors import UsageError

__all__ = [
    "RAW",
    "TORCH",
    "Array",
    "Family",
    "Typed",
    "arguments",
    "as_bytes",
    "empty",
    "numpy_family",
    "typed",
    "view",
]


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """A NumPy array with an element type that NumPy may not have, such as bfloat16 in a uint16 array."""

    data: np.ndarray[Any, Any]
    dtype: DType


def typed(data: np.ndarray[Any, Any], dtype: str) -> Typed:
    """Declare that a NumPy array holds elements of `dtype`, such as bfloat16 bits in uint16.

    Args:
        data: the array, which verbs then take in this form.
        dtype: the name of the type.

    Raises:
        UsageError: it is no plain NumPy array, or its elements have another size.
    """
    kind = dtype_named(dtype)
    if (
        not isinstance(data, np.ndarray)
        or _is_masked(data)
        or data.dtype.itemsize != kind.itemsize
        or data.dtype.hasobject
        or not data.dtype.isnative
    ):
        given = f"an array of {data.dtype}" if isinstance(data, np.ndarray) else _describe(data)
        raise UsageError(
            f"typed(..., {dtype!r}) got {given}; allowed: a NumPy array of {kind.itemsize}-byte elements"
        )
    return Typed(data, kind)


class Family:
    """The kind of object that a user passed; results are of the same kind."""

    def give(self, flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType) -> Any:
        """Convert a flat result to the user's kind."""
        return flat.reshape(shape)


class _Numpy(Family):
    pass


@dataclass(frozen=True)
class _NumpyAs(Family):
    """A NumPy array of an element type from another package, such as ml_dtypes.bfloat16."""

    kind: np.dtype[Any]

    def give(self, flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType) -> Any:
        return flat.view(self.kind).reshape(shape)


class _Number(Family):
    """A Python number: a single one is returned as a number, several as an array."""

    def give(self, flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType) -> Any:
        return flat.item() if shape == () else flat.reshape(shape)


class _NumpyScalar(Family):
    """A NumPy scalar, which is immutable: a new scalar is returned."""

    def give(self, flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType) -> Any:
        return flat[0] if shape == () else flat.reshape(shape)


@dataclass(frozen=True)
class _ScalarAs(_NumpyScalar):
    """A NumPy scalar of an element type from another package."""

    kind: np.dtype[Any]

    def give(self, flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType) -> Any:
        return super().give(flat.view(self.kind), shape, dtype)


class _Raw(Family):
    def give(self, flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType) -> Any:
        return Typed(flat.reshape(shape), dtype)


class _Torch(Family):
    def give(self, flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType) -> Any:
        torch = sys.modules["torch"]
        if dtype is BFLOAT16:
            return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).reshape(shape)
        return torch.from_numpy(flat).reshape(shape)


_NUMPY, _NUMBER, _SCALAR, RAW, TORCH = _Numpy(), _Number(), _NumpyScalar(), _Raw(), _Torch()


def numpy_family(dtype: DType) -> Family:
    """The kind of array for a type: bfloat16 needs ml_dtypes, and is Typed without it."""
    if dtype is not BFLOAT16:
        return _NUMPY
    ml_dtypes = sys.modules.get("ml_dtypes")
    return RAW if ml_dtypes is None else _NumpyAs(np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A user's memory as a flat array, with its element type, shape and kind.

    `given` is the user's object; None if the memory is new.
    """

    flat: np.ndarray[Any, Any]
    dtype: DType
    shape: tuple[int, ...]
    family: Family
    given: Any

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.flat.size

    @property
    def is_value(self) -> bool:
        """Whether the user passed a number, which is immutable and cannot be filled in place."""
        return isinstance(self.family, _Number | _NumpyScalar)

    def bytes(self) -> memoryview:
        """Its memory as bytes."""
        return as_bytes(self.flat)

    def like(self, shape: tuple[int, ...]) -> Array:
        """New memory of the same type and kind."""
        count = int(np.prod(shape, dtype=np.int64))
        return Array(empty(count, self.dtype), self.dtype, shape, self.family, None)

    def copy(self) -> Array:
        """The same content in new memory."""
        return Array(self.flat.copy(), self.dtype, self.shape, self.family, None)

    def give(self) -> Any:
        """The result for the user: the object that was passed, or a new one of its kind."""
        if self.given is not None and not self.is_value:
            return self.given
        return self.family.give(self.flat, self.shape, self.dtype)

    def overlaps(self, other: Array) -> bool:
        """Whether both share memory."""
        return bool(self.count and other.count and np.may_share_memory(self.flat, other.flat))

    def is_same_memory(self, other: Array) -> bool:
        """Whether both are all of the same memory."""
        return self.flat.ctypes.data == other.flat.ctypes.data and self.flat.nbytes == other.flat.nbytes


def empty(count: int, dtype: DType) -> np.ndarray[Any, Any]:
    """Memory for a result. Long memory is used again when no object refers to it any more."""
    nbytes = count * dtype.itemsize
    if nbytes < POOLED_BYTES_MIN:
        return np.empty(count, dtype.storage)
    memory: Any = result_memory(nbytes)
    return np.ndarray(count, dtype.storage, memory)


def as_bytes(flat: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a flat contiguous array."""
    raw: Any = flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)
    return memoryview(raw)


def view(given: Any, what: str, *, writable: bool = False) -> Array:
    """View a user's object as an array, without copying it if it is contiguous.

    Args:
        given: the object.
        what: the name of the argument, for errors.
        writable: the memory will be written to; then it must be contiguous.

    Raises:
        UsageError: the object has no memory, its element type is not supported, or it cannot be written to.
    """
    storage, dtype, family = _storage_of(given, what)
    if writable:
        if not isinstance(family, _Number | _NumpyScalar) and not storage.flags.writeable:
            raise UsageError(f"{what} is read-only; allowed: writable memory", next_step="pass a copy")
        if not storage.flags.c_contiguous:
            raise UsageError(
                f"{what} is not contiguous (strides {storage.strides}); allowed: C-contiguous memory",
                next_step="pass np.ascontiguousarray(x), and copy the result back into x",
            )
    shape = storage.shape
    flat = np.ascontiguousarray(storage).reshape(-1)
    return Array(flat, dtype, shape, family, given)


@functools.cache
def arguments(*, leaves_tensors: bool = False) -> Arguments:
    """How the parser of calls sees arguments, for all groups of the process.

    With `leaves_tensors` it does not refuse tensors of a device: the reference path does.
    """
    return Arguments(
        array_type=np.ndarray,
        empty=np.empty,
        view=view,
        # NumPy has no bfloat16 of its own.
        dtypes=[None if dtype is BFLOAT16 else dtype.storage for dtype in DTYPES.values()],
        leaves_tensors=leaves_tensors,
    )


def _storage_of(given: Any, what: str) -> tuple[np.ndarray[Any, Any], DType, Family]:
    if isinstance(given, np.ndarray):
        return _view_numpy(given, what, _NUMPY)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, getattr(torch, "Tensor", ())):
        return _view_torch(given, what, torch)
    if isinstance(given, np.generic):
        return _view_numpy(np.array(given), what, _SCALAR)
    if isinstance(given, bool | int | float | complex):
        return _view_number(given, what)
    if isinstance(given, Typed):
        return given.data.view(given.dtype.storage), given.dtype, RAW
    if hasattr(given, "__dlpack__"):
        return _view_dlpack(given, what, torch)
    try:
        array = np.asarray(memoryview(given))
    except (TypeError, ValueError, NotImplementedError, BufferError):
        raise UsageError(
            f"{what} is {_describe(given)}; "
            "allowed: an array with the buffer protocol or DLPack, or a number",
            next_step="pass an array, or use a verb for objects, such as send_object or all_gather_object",
        ) from None
    return _view_numpy(array, what, _NUMPY)


def _is_masked(array: np.ndarray[Any, Any]) -> bool:
    """Whether it has a mask. A program that has one has imported `np.ma`, which takes 10 ms."""
    masked = sys.modules.get("numpy.ma.core")
    return masked is not None and isinstance(array, masked.MaskedArray)


def _view_numpy(
    array: np.ndarray[Any, Any], what: str, family: Family
) -> tuple[np.ndarray[Any, Any], DType, Family]:
    kind = array.dtype
    if _is_masked(array):
        raise UsageError(f"{what} is a masked array, and masks cannot be sent; allowed: plain arrays")
    if not kind.isnative:
        raise UsageError(f"{what} has foreign byte order ({kind.str}); allowed: the machine's byte order")
    dtype = DTYPES.get(kind.name)
    if dtype is None:
        raise UsageError(f"{what} has dtype {kind}; allowed: {', '.join(DTYPES)}")
    if dtype is BFLOAT16:
        return array.view(np.uint16), dtype, _ScalarAs(kind) if family is _SCALAR else _NumpyAs(kind)
    return array, dtype, family


def _view_number(number: complex, what: str) -> tuple[np.ndarray[Any, Any], DType, Family]:
    kinds = ((bool, "bool"), (int, "int64"), (float, "float64"), (complex, "complex128"))
    name = next(name for kind, name in kinds if isinstance(number, kind))
    if name == "int64" and not -(2**63) <= int(number.real) < 2**63:
        raise UsageError(f"{what} is an integer beyond 64 bits; allowed: -2**63 to 2**63 - 1")
    return np.array(number, DTYPES[name].storage), DTYPES[name], _NUMBER


def _view_torch(tensor: Any, what: str, torch: Any) -> tuple[np.ndarray[Any, Any], DType, Family]:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UsageError(
            f"{what} is a {tensor.layout} tensor on {tensor.device}; allowed: dense tensors on the CPU"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(f"{what} is a lazily conjugated view; allowed: x.resolve_conj().resolve_neg()")
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = DTYPES.get(name)
    if dtype is None:
        raise UsageError(f"{what} has dtype {tensor.dtype}; allowed: {', '.join(DTYPES)}")
    tensor = tensor.detach()
    if dtype is BFLOAT16:
        return tensor.view(torch.int16).numpy().view(np.uint16), dtype, TORCH
    return tensor.numpy(), dtype, TORCH


def _view_dlpack(given: Any, what: str, torch: Any) -> tuple[np.ndarray[Any, Any], DType, Family]:
    device = given.__dlpack_device__()
    if device[0] != 1:  # kDLCPU
        raise UsageError(
            f"{what} is on DLPack device {tuple(map(int, device))}; allowed: CPU memory, device (1, 0)"
        )
    try:
        return _view_numpy(np.from_dlpack(given), what, _NUMPY)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        if torch is not None:  # NumPy's DLPack has no bfloat16, torch's has
            storage, dtype, _ = _view_torch(torch.from_dlpack(given), what, torch)
            return storage, dtype, RAW
        raise UsageError(
            f"{what} offers DLPack that NumPy cannot read: {error}", next_step="convert it to a NumPy array"
        ) from error


def _describe(given: Any) -> str:
    kind = type(given)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
