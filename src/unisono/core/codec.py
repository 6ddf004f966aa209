"""The typed codec: plain data, arrays and registered classes to bytes and back.

The list of types is closed. There is no pickle, and decoding imports nothing: a class name on the wire is
only looked up among the classes that this process has registered. Subclasses of dict and list arrive as dict
and list; bytearray and memoryview as bytearray.

An encoded object is a *head* (msgpack) and *blobs* (the memory of arrays, out of band, not copied). `pack`
puts both into one buffer, each blob at a multiple of 64 bytes:

    magic u32 | head bytes u32 | blobs u32 | 0 u32 | blob bytes u64 ... | head | blobs
"""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from unisono.core import buffers
from unisono.core.dtypes import DTYPES, DType
from unisono.core.envelope import Status
from unisono.errors import ProtocolError, UsageError

__all__ = [
    "decode",
    "encode",
    "is_record",
    "is_registered",
    "pack",
    "place",
    "place_of_argument",
    "register",
    "unpack",
]

C = TypeVar("C", bound=type)

_MAGIC: Final = 0x316E7500  # "\0un1"
_PREFIX: Final = struct.Struct("<IIII")
_ALIGNMENT: Final = 64
_DEPTH_MAX: Final = 64  # deeper than real data, and far from the limit of Python's stack
_DIMENSIONS_MAX: Final = 64
_BLOBS_MAX: Final = 1 << 20

# Extension codes, for types that msgpack does not have.
_TUPLE, _MAP, _SET, _FROZENSET, _BIG_INT, _COMPLEX, _ARRAY, _SCALAR, _RECORD, _BYTEARRAY = range(1, 11)

_names: dict[type, str] = {}
_classes: dict[str, type] = {}


def register(cls: C) -> C:
    """Allow instances of a dataclass, a msgspec.Struct or a named tuple to be sent and received.

    Every rank that sends or receives it must register it. Usable as a decorator.

    Raises:
        UsageError: it is another kind of class, or another class has the same name.
    """
    if not is_record(cls):
        raise UsageError(
            f"register takes a dataclass, a msgspec.Struct or a named tuple, not {cls!r}",
            next_step="make it a dataclass, or send its values as plain data",
        )
    name = f"{cls.__module__.removeprefix('__mp_main__').removeprefix('__main__')}.{cls.__qualname__}"
    known = _classes.get(name)
    if known is not None and _fields(known) != _fields(cls):
        raise UsageError(
            f"another class is registered as {name!r} already", next_step="give one of the two another name"
        )
    _names[cls], _classes[name] = name, cls
    return cls


def is_record(cls: Any) -> bool:
    """Whether something is a class that `register` takes."""
    return isinstance(cls, type) and (
        dataclasses.is_dataclass(cls)
        or (issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )


def is_registered(cls: type) -> bool:
    """Whether instances of a class can be sent."""
    return cls in _names


def _fields(cls: Any) -> list[str]:
    if issubclass(cls, msgspec.Struct):
        return list(cls.__struct_fields__)
    if issubclass(cls, tuple):
        return list(cls._fields)
    return [field.name for field in dataclasses.fields(cls)]


def place(steps: Sequence[str], whole: str = "the object") -> str:
    """The place of a part, for errors: the steps to it from the whole, such as "['rows']" and "[3]"."""
    return f"{''.join(steps)[:80]} of {whole}" if steps else whole


def place_of_argument(steps: Sequence[str]) -> str:
    """The same within a list of arguments or a dict of keyword arguments: "argument 1" is the first."""
    if not steps or steps[0] == ".keys()":
        return "an argument"
    which = steps[0][1:-1]
    return place(steps[1:], f"argument {int(which) + 1 if which.isdecimal() else which}")


def encode(value: Any, place: Callable[[Sequence[str]], str] = place) -> tuple[bytes, list[memoryview]]:
    """Turn a value into its head and blobs. `place` describes the place of a part, for errors.

    Raises:
        UsageError: a part of it cannot be sent; the text says which, and its place.
    """
    blobs: list[memoryview] = []
    try:
        return msgspec.msgpack.encode(_Encoder(blobs).plain(value, 0)), blobs
    except _Unfit as unfit:
        raise unfit.refusal(place(unfit.steps[::-1])) from None
    except (UnicodeEncodeError, OverflowError) as error:
        raise UsageError(
            f"{place(())} cannot be encoded: {error}", next_step="send text that UTF-8 can hold, or bytes"
        ) from error


def decode(head: bytes | memoryview, blobs: Sequence[memoryview]) -> Any:
    """Turn head and blobs back into the value; arrays are views on the blobs.

    Raises:
        ProtocolError: the bytes are malformed, or name a class that is not registered here.
    """
    decoder = _Decoder(blobs)
    try:
        value = decoder.parse(head)
    except ProtocolError:
        raise
    except (msgspec.DecodeError, RuntimeError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise ProtocolError(f"malformed object: {error}") from error
    finally:
        decoder.forget()
    if decoder.blobs_used != len(blobs):
        raise ProtocolError(f"malformed object: {len(blobs)} arrays came, {decoder.blobs_used} are named")
    return value


def pack(value: Any, place: Callable[[Sequence[str]], str] = place) -> bytearray:
    """Encode a value into one buffer."""
    head, blobs = encode(value, place)
    lengths = [blob.nbytes for blob in blobs]
    starts, end = _layout(len(head), lengths)
    packed = bytearray(end)
    _PREFIX.pack_into(packed, 0, _MAGIC, len(head), len(blobs), 0)
    struct.pack_into(f"<{len(blobs)}Q", packed, _PREFIX.size, *lengths)
    head_start = _PREFIX.size + 8 * len(blobs)
    packed[head_start : head_start + len(head)] = head
    target = memoryview(packed)
    for start, blob in zip(starts, blobs, strict=True):
        target[start : start + blob.nbytes] = blob
    return packed


def unpack(packed: bytes | bytearray | memoryview) -> Any:
    """Decode the buffer that `pack` made; arrays are views on it."""
    data = memoryview(packed).cast("B")
    if data.nbytes < _PREFIX.size:
        raise ProtocolError(f"malformed object: {data.nbytes} bytes are too few")
    magic, head_bytes, count, zero = _PREFIX.unpack_from(data)
    if magic != _MAGIC or zero != 0 or count > _BLOBS_MAX or _PREFIX.size + 8 * count > data.nbytes:
        raise ProtocolError("malformed object: bad prefix")
    lengths = struct.unpack_from(f"<{count}Q", data, _PREFIX.size)
    starts, end = _layout(head_bytes, lengths)
    if end != data.nbytes:
        raise ProtocolError(f"malformed object: {data.nbytes} bytes came, {end} are named")
    head_start = _PREFIX.size + 8 * count
    head = data[head_start : head_start + head_bytes]
    return decode(head, [data[s : s + n] for s, n in zip(starts, lengths, strict=True)])


def _layout(head_bytes: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    end = _PREFIX.size + 8 * len(lengths) + head_bytes
    starts = []
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end


class _Unfit(Exception):
    """A part of a value cannot be sent. `refusal` makes the error, given the place of the part.

    Each container adds its step to `steps` as the exception passes through it.
    """

    def __init__(self, refusal: Callable[[str], UsageError]) -> None:
        self.refusal = refusal
        self.steps: list[str] = []


class _Encoder:
    """Converts a value to types that msgpack has, and extensions."""

    def __init__(self, blobs: list[memoryview]) -> None:
        self._blobs = blobs

    def plain(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in (str, bytes, float, bool, type(None)):
            return value
        if depth > _DEPTH_MAX:
            raise _Unfit(_too_deep)
        rewrite = _REWRITES.get(kind)
        if rewrite is not None:
            return rewrite(self, value, depth + 1)
        if kind in _names:
            return self._record(value, depth + 1)
        if isinstance(value, np.generic | buffers.Typed) or _is_array(value):
            return self._array(value)
        if isinstance(value, dict):
            return self._dict(value, depth + 1)
        if isinstance(value, list):
            return self._list(value, depth + 1)
        raise _Unfit(partial(_unknown, kind))

    def _int(self, value: int, depth: int) -> Any:
        if -(2**63) <= value < 2**64:
            return value
        return _ext(_BIG_INT, value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True))

    def _bytearray(self, value: bytearray | memoryview, depth: int) -> Any:
        return _ext(_BYTEARRAY, bytes(value))

    def _complex(self, value: complex, depth: int) -> Any:
        return _ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))

    def _list(self, value: Iterable[Any], depth: int) -> list[Any]:
        items: list[Any] = []
        try:
            for item in value:
                items.append(self.plain(item, depth))  # noqa: PERF401 - its length is the index of a failure
        except _Unfit as unfit:
            unfit.steps.append(f"[{len(items)}]")
            raise
        return items

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        return _packed(_TUPLE, self._list(value, depth))

    def _set(self, value: set[Any] | frozenset[Any], depth: int) -> Any:
        code = _SET if isinstance(value, set) else _FROZENSET
        return _packed(code, self._list(value, depth))

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        parts: list[Any] = []  # a key, its value, a key, its value
        is_text, key = True, None
        try:
            for key, item in value.items():
                is_text = is_text and type(key) is str
                parts.append(self.plain(key, depth))
                parts.append(self.plain(item, depth))
        except _Unfit as unfit:
            unfit.steps.append(f"[{key!r}]" if len(parts) % 2 else ".keys()")
            raise
        return dict(zip(parts[::2], parts[1::2], strict=True)) if is_text else _packed(_MAP, parts)

    def _record(self, value: Any, depth: int) -> Any:
        fields, parts = _fields(type(value)), []
        try:
            for name in fields:
                parts.append(self.plain(getattr(value, name), depth))  # noqa: PERF401 - as above
        except _Unfit as unfit:
            unfit.steps.append(f".{fields[len(parts)]}")
            raise
        return _packed(_RECORD, [_names[type(value)], fields, parts])

    def _array(self, value: Any) -> Any:
        try:
            array = buffers.view(value, "")
        except UsageError as error:
            raise _Unfit(partial(_no_array, error)) from None
        if array.is_value:
            return _ext(_SCALAR, bytes([array.dtype.code]) + array.flat.tobytes())
        self._blobs.append(array.bytes())
        is_torch = type(value).__module__.partition(".")[0] == "torch"
        return _packed(_ARRAY, [array.dtype.code, is_torch, list(array.shape)])


def _too_deep(place: str) -> UsageError:
    return UsageError(
        f"{place} is nested deeper than {_DEPTH_MAX} levels, or contains itself",
        next_step="send a list of parts that refer to each other by index",
    )


def _unknown(kind: type, place: str) -> UsageError:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if is_record(kind):
        step = f"uni.register({kind.__name__}) on every rank"
    elif issubclass(kind, tuple | set | frozenset | str | bytes | int | float):
        plain = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        step = f"send {plain.__name__}(...) of it"
    else:
        step = "send its values as plain data, or as a dataclass given to uni.register"
    return UsageError(
        f"{place} is {name}; allowed: plain data, bytes, arrays, and dataclasses, msgspec.Structs and named "
        f"tuples given to unisono.register",
        next_step=step,
    )


def _no_array(error: UsageError, place: str) -> UsageError:
    return UsageError(f"{place}{error.what}", next_step=error.next_step)


def _is_array(value: Any) -> bool:
    """Whether a value is an array."""
    return isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")


def _ext(code: int, data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


def _packed(code: int, parts: list[Any]) -> msgspec.msgpack.Ext:
    return _ext(code, msgspec.msgpack.encode(parts))


_REWRITES: Final[dict[type, Callable[[_Encoder, Any, int], Any]]] = {
    int: _Encoder._int,
    bytearray: _Encoder._bytearray,
    memoryview: _Encoder._bytearray,
    complex: _Encoder._complex,
    list: _Encoder._list,
    tuple: _Encoder._tuple,
    set: _Encoder._set,
    frozenset: _Encoder._set,
    dict: _Encoder._dict,
}


class _Decoder:
    """Rebuilds a value; every extension is checked before it is used."""

    def __init__(self, blobs: Sequence[memoryview]) -> None:
        self._blobs = blobs
        self._depth = 0
        self.blobs_used = 0
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)

    def forget(self) -> None:
        """Release the blobs now: this object and msgspec's decoder form a cycle, which only the GC frees."""
        self._blobs = ()
        del self._decoder

    def parse(self, data: bytes | memoryview) -> Any:
        self._depth += 1
        if self._depth > _DEPTH_MAX + 2:
            raise ProtocolError("malformed object: nested too deeply")
        value = self._decoder.decode(data)
        self._depth -= 1
        return value

    def _extension(self, code: int, data: memoryview) -> Any:
        rebuild = _REBUILDS.get(code)
        if rebuild is None:
            raise ProtocolError(f"malformed object: extension {code} is unknown")
        return rebuild(self, data)

    def _parts(self, data: memoryview) -> list[Any]:
        parts = self.parse(data)
        if type(parts) is not list:
            raise ProtocolError("malformed object: a sequence was expected")
        return parts

    def _tuple(self, data: memoryview) -> Any:
        return tuple(self._parts(data))

    def _map(self, data: memoryview) -> Any:
        parts = self._parts(data)
        if len(parts) % 2:
            raise ProtocolError("malformed object: a key without a value")
        return dict(zip(parts[::2], parts[1::2], strict=True))

    def _set(self, data: memoryview) -> Any:
        return set(self._parts(data))

    def _frozenset(self, data: memoryview) -> Any:
        return frozenset(self._parts(data))

    def _big_int(self, data: memoryview) -> Any:
        return int.from_bytes(data, "little", signed=True)

    def _bytearray(self, data: memoryview) -> Any:
        return bytearray(data)

    def _complex(self, data: memoryview) -> Any:
        return complex(*struct.unpack("<dd", data))

    def _scalar(self, data: memoryview) -> Any:
        dtype = _dtype(data[0] if data else 255)
        if len(data) - 1 != dtype.itemsize:
            raise ProtocolError("malformed object: a scalar of the wrong length")
        flat = np.frombuffer(bytes(data[1:]), dtype.storage)
        scalar = buffers.numpy_family(dtype).give(flat, (), dtype)
        return scalar[()] if isinstance(scalar, np.ndarray) else scalar

    def _record(self, data: memoryview) -> Any:
        name, fields, parts = self._parts(data)
        cls = _classes.get(name) if type(name) is str else None
        if cls is None:
            raise ProtocolError(
                f"the class {str(name)[:80]!r} is not registered here; give it to unisono.register"
            )
        declared = _fields(cls)
        if declared != fields or type(parts) is not list or len(parts) != len(fields):
            raise ProtocolError(f"the class {name!r} has other fields here: {declared}, not {fields}")
        if issubclass(cls, msgspec.Struct):
            return cls(**dict(zip(fields, parts, strict=True)))  # as msgspec itself decodes one
        if issubclass(cls, tuple):
            return tuple.__new__(cls, parts)
        # Fields are sent, not constructor arguments: __init__ may compute or check fields.
        value: Any = object.__new__(cls)
        for field, part in zip(fields, parts, strict=True):
            object.__setattr__(value, field, part)
        return value

    def _array(self, data: memoryview) -> Any:
        code, is_torch, shape = self._parts(data)
        dtype = _dtype(code)
        if (
            type(shape) is not list
            or len(shape) > _DIMENSIONS_MAX
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise ProtocolError("malformed object: a bad shape")
        count = 1
        for length in shape:
            count *= length
        if (
            self.blobs_used >= len(self._blobs)
            or self._blobs[self.blobs_used].nbytes != count * dtype.itemsize
        ):
            raise ProtocolError("malformed object: an array of the wrong length")
        blob = self._blobs[self.blobs_used]
        self.blobs_used += 1
        flat = np.frombuffer(blob, dtype.storage) if count else np.empty(0, dtype.storage)
        return _array_of(flat, tuple(shape), dtype, is_torch is True)


def _array_of(flat: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: DType, is_torch: bool) -> Any:
    flat.reshape(shape)  # NumPy refuses impossible dimensions; torch does not if one of them is 0
    if is_torch and "torch" in sys.modules and flat.flags.writeable:
        return buffers.TORCH.give(flat, shape, dtype)
    return buffers.numpy_family(dtype).give(flat, shape, dtype)


def _dtype(code: Any) -> DType:
    dtypes = list(DTYPES.values())
    if type(code) is not int or not 0 <= code < len(dtypes):
        raise ProtocolError(f"malformed object: dtype {code!r} is unknown")
    return dtypes[code]


_REBUILDS: Final[dict[int, Callable[[_Decoder, memoryview], Any]]] = {
    _TUPLE: _Decoder._tuple,
    _MAP: _Decoder._map,
    _SET: _Decoder._set,
    _FROZENSET: _Decoder._frozenset,
    _BIG_INT: _Decoder._big_int,
    _BYTEARRAY: _Decoder._bytearray,
    _COMPLEX: _Decoder._complex,
    _SCALAR: _Decoder._scalar,
    _RECORD: _Decoder._record,
    _ARRAY: _Decoder._array,
}

register(Status)
