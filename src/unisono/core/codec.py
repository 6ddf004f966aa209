"""The typed codec: plain data, arrays and registered classes to bytes and back.

The list of types is closed. There is no pickle, and decoding imports nothing: a class name on the wire is
only looked up among the classes that this process has registered. Subclasses of dict and list arrive as dict
and list; bytearray and memoryview as bytearray.

The core packs and unpacks plain data, NumPy arrays and scalars, and instances of registered classes:
native/python/codec.hpp describes the bytes. Here are the rare kinds, one call for each value: what `_reduce`
turns into plain data, `_rebuild` makes of it again.

- `pack(value, path_text)` gives one bytes object, `unpack` takes it: arrays of some KiB and more are views of
  the memory if it is writable, shorter ones and those in read-only memory get their own. `pack_writable`
  gives the same bytes as a buffer that may be written to.
- `pack_parts(value, path_text, blob_bytes)` gives a head and *blobs*: the memory of bytes, text and arrays of
  at least `blob_bytes`, not copied. `unpack_parts` uses a bytes object, a bytearray or writable memory as it
  is for a value of that kind. `unpack_beside` takes the blobs in one piece, each at a multiple of 64 bytes.
  `head_bytes_at` gives the length of a head that begins there, 0 if none does.

`path_text` names a part of the value in errors. A value that cannot be sent raises UsageError with the path
and the next step; bytes that no codec makes, or that name a class which is not registered here, raise
ProtocolError.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinMethodType
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from unisono import _native
from unisono._native import (
    head_bytes_at,
    pack,
    pack_parts,
    pack_writable,
    unpack,
    unpack_beside,
    unpack_parts,
)
from unisono.core import buffers
from unisono.core.dtypes import BFLOAT16, DTYPES, DType
from unisono.core.envelope import Status
from unisono.errors import ProtocolError, UsageError

__all__ = [
    "head_bytes_at",
    "is_record",
    "is_registered",
    "pack",
    "pack_parts",
    "pack_writable",
    "path_of",
    "path_of_argument",
    "register",
    "unpack",
    "unpack_beside",
    "unpack_parts",
]

C = TypeVar("C", bound=type)

# What a rare value is turned into: a code of the list below and a plain value, or a plain value that travels
# in its place (code None).
_Reduced: TypeAlias = tuple[int | None, Any]

# Before the head of what `pack` makes: codec.hpp.
_PREFIX_BYTES: Final = 8
# Codes of extensions.
_SET, _FROZENSET, _BIG_INT, _COMPLEX, _SCALAR, _ARRAY = range(6)

_classes: dict[str, type] = {}
# The same for the core: how name and fields are packed, by class, and how an instance is made, by that.
_records: dict[type, tuple[bytes, tuple[str, ...]]] = {}
_makers: dict[bytes, tuple[int, type, tuple[str, ...]]] = {}
# How: see Instance in codec.hpp.
_STRUCT, _TUPLE, _DATACLASS = range(3)


def register(cls: C) -> C:
    """Allow instances of a dataclass, a msgspec.Struct or a named tuple to be sent and received.

    Every rank that sends or receives it must register it, as a rule by `@uni.register` on the class.

    Args:
        cls: the class, which is returned.

    Raises:
        UsageError: it is another kind of class, or another class has the same name.
    """
    if not is_record(cls):
        is_dataclass = isinstance(cls, type) and dataclasses.is_dataclass(cls)
        why, change = "", "make it a dataclass"
        if is_dataclass:
            why = f": it inherits from {_builtin_bases(cls)[0].__name__}, whose content is in no field"
            change = "make it a dataclass without this base"
        raise UsageError(
            f"register takes a dataclass, a msgspec.Struct or a named tuple, not {cls!r}{why}",
            next_step=f"{change}, or send its values as plain data",
        )
    name = f"{cls.__module__.removeprefix('__mp_main__').removeprefix('__main__')}.{cls.__qualname__}"
    known = _classes.get(name)
    if known is not None and _fields(known) != _fields(cls):
        raise UsageError(
            f"another class is registered as {name!r} already", next_step="give one of the two another name"
        )
    fields = _fields(cls)
    shape = pack(name)[_PREFIX_BYTES:] + pack(fields)[_PREFIX_BYTES:]
    how = _STRUCT if issubclass(cls, msgspec.Struct) else _TUPLE if issubclass(cls, tuple) else _DATACLASS
    _classes[name], _records[cls], _makers[shape] = cls, (shape, fields), (how, cls, fields)
    return cls


def is_record(cls: Any) -> bool:
    """Whether something is a class that `register` takes."""
    return isinstance(cls, type) and (
        (dataclasses.is_dataclass(cls) and not _builtin_bases(cls))
        or (issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )


def _builtin_bases(cls: type) -> list[type]:
    """Bases of a dataclass whose content is in no field, such as dict and Exception."""
    return [base for base in cls.__mro__[:-1] if isinstance(vars(base).get("__new__"), BuiltinMethodType)]


def is_registered(cls: type) -> bool:
    """Whether instances of a class can be sent."""
    return cls in _records


def _fields(cls: Any) -> tuple[str, ...]:
    if issubclass(cls, msgspec.Struct):
        return tuple(cls.__struct_fields__)
    if issubclass(cls, tuple):
        return tuple(cls._fields)
    return tuple(field.name for field in dataclasses.fields(cls))


def path_of(steps: Sequence[str], whole: str = "the object") -> str:
    """The path of a part, for errors: the steps to it from the whole, such as "['rows']" and "[3]"."""
    return f"{''.join(steps)[:80]} of {whole}" if steps else whole


def path_of_argument(steps: Sequence[str]) -> str:
    """The same within a list of arguments or a dict of keyword arguments: "argument 1" is the first."""
    if not steps or steps[0] == ".keys()":
        return "an argument"
    which = steps[0][1:-1]
    return path_of(steps[1:], f"argument {int(which) + 1 if which.isdecimal() else which}")


# -- packing ----------------------------------------------------------------------------------------------


class _Unfit(Exception):
    """A value cannot be sent. `refusal` makes the error, given its path."""

    def __init__(self, refusal: Callable[[str], UsageError]) -> None:
        self.refusal = refusal


def _reduce(value: Any) -> _Reduced:
    """Turn a value that the core does not know into what it knows; its parts may be rare again."""
    kind = type(value)
    reduce = _REDUCTIONS.get(kind)
    if reduce is not None:
        return reduce(value)
    if isinstance(value, np.ndarray | np.generic | buffers.Typed) or hasattr(value, "__dlpack__"):
        return _reduce_array(value)
    if isinstance(value, dict):
        return None, dict(value.items())
    if isinstance(value, list):
        return None, list(value)
    raise _Unfit(partial(_unknown, kind))


def _reduce_array(value: Any) -> _Reduced:
    try:
        array = buffers.view(value, "")
    except UsageError as error:
        raise _Unfit(partial(_no_array, error)) from None
    if array.is_value:
        return _SCALAR, (array.dtype.code, array.flat.tobytes())
    plain = array.flat.view(array.dtype.storage).reshape(array.shape)
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    if array.dtype is BFLOAT16 or is_torch:
        return _ARRAY, (array.dtype.code, is_torch, plain)
    return None, plain


_REDUCTIONS: Final[dict[type, Callable[[Any], _Reduced]]] = {
    int: lambda value: (_BIG_INT, value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)),
    complex: lambda value: (_COMPLEX, (value.real, value.imag)),
    memoryview: lambda value: (None, bytearray(value)),  # one that is not contiguous
    set: lambda value: (_SET, list(value)),
    frozenset: lambda value: (_FROZENSET, list(value)),
}


def _refusal(
    error: BaseException, steps: list[str] | None, describe: Callable[[Sequence[str]], str] | None
) -> BaseException:
    """What to raise if packing failed; the steps lead from the part that failed to the whole."""
    where = (describe or path_of)((steps or [])[::-1])
    if isinstance(error, _Unfit):
        return error.refusal(where)
    if isinstance(error, UnicodeEncodeError):
        refused = UsageError(
            f"{where} cannot be encoded: {error}", next_step="send text that UTF-8 can hold, or bytes"
        )
        refused.__cause__ = error
        return refused
    return error


def _refuse_depth() -> None:
    raise _Unfit(_too_deep)


def _too_deep(path: str) -> UsageError:
    return UsageError(
        f"{path} is nested deeper than {_native.DEPTH_MAX} levels, or contains itself",
        next_step="send a list of parts that refer to each other by index",
    )


def _unknown(kind: type, path: str) -> UsageError:
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if is_record(kind):
        step = f"uni.register({kind.__name__}) on every rank"
    elif issubclass(kind, tuple | set | frozenset | str | bytes | bytearray | int | float):
        plain = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        step = f"send {plain.__name__}(...) of it"
    else:
        step = "send its values as plain data, or as a dataclass given to uni.register"
    return UsageError(
        f"{path} is {name}; allowed: plain data, bytes, arrays, and dataclasses, msgspec.Structs and named "
        f"tuples given to unisono.register",
        next_step=step,
    )


def _no_array(error: UsageError, path: str) -> UsageError:
    return UsageError(f"{path}{error.what}", next_step=error.next_step)


# -- unpacking --------------------------------------------------------------------------------------------


def _rebuild(code: int | None, value: Any) -> Any:
    """Make a value from what `_reduce` turned it into. That `value` is plain is all that is certain."""
    rebuild = _refuse_record if code is None else _REBUILDS.get(code)
    if rebuild is None:
        raise ProtocolError(f"malformed object: extension {code} is unknown")
    return rebuild(value)


def _refuse_record(record: tuple[str, tuple[str, ...], list[Any]]) -> Any:
    """Say what is wrong with a record that the core does not know."""
    name, fields, _ = record
    cls = _classes.get(name)
    if cls is None:
        raise ProtocolError(
            f"the class {name[:80]!r} is not registered here",
            next_step="give it to uni.register on every rank that receives it",
        )
    declared = _fields(cls)
    if declared != fields:
        raise ProtocolError(
            f"the class {name!r} has other fields here: {declared}, not {fields}",
            next_step="use the same definition of the class on every rank",
        )
    raise ProtocolError("malformed object: a record of other parts")


def _rebuild_scalar(parts: Any) -> Any:
    code, data = _tuple_of(parts, 2)
    dtype = _dtype(code)
    if type(data) is not bytes or len(data) != dtype.itemsize:
        raise ProtocolError("malformed object: a scalar of the wrong length")
    scalar = buffers.numpy_family(dtype).give(np.frombuffer(data, dtype.storage), (), dtype)
    return scalar[()] if isinstance(scalar, np.ndarray) else scalar


def _rebuild_array(parts: Any) -> Any:
    code, is_torch, plain = _tuple_of(parts, 3)
    dtype = _dtype(code)
    if type(plain) is not np.ndarray or plain.dtype != dtype.storage:
        raise ProtocolError("malformed object: an array of another type")
    family = buffers.TORCH if is_torch is True and "torch" in sys.modules else buffers.numpy_family(dtype)
    return family.give(plain.reshape(-1), plain.shape, dtype)


def _rebuild_set(kind: type) -> Callable[[Any], Any]:
    def rebuild(parts: Any) -> Any:
        if type(parts) is not list:
            raise ProtocolError("malformed object: a sequence was expected")
        return kind(parts)

    return rebuild


def _rebuild_big_int(data: Any) -> int:
    if type(data) is not bytes:
        raise ProtocolError("malformed object: an integer without bytes")
    return int.from_bytes(data, "little", signed=True)


def _rebuild_complex(parts: Any) -> complex:
    real, imag = _tuple_of(parts, 2)
    if type(real) is not float or type(imag) is not float:
        raise ProtocolError("malformed object: a complex number of other parts")
    return complex(real, imag)


def _tuple_of(parts: Any, count: int) -> tuple[Any, ...]:
    if type(parts) is not tuple or len(parts) != count:
        raise ProtocolError(f"malformed object: {count} parts were expected")
    return parts


def _dtype(code: Any) -> DType:
    dtypes = list(DTYPES.values())
    if type(code) is not int or not 0 <= code < len(dtypes):
        raise ProtocolError(f"malformed object: dtype {code!r} is unknown")
    return dtypes[code]


_REBUILDS: Final[dict[int, Callable[[Any], Any]]] = {
    _SET: _rebuild_set(set),
    _FROZENSET: _rebuild_set(frozenset),
    _BIG_INT: _rebuild_big_int,
    _COMPLEX: _rebuild_complex,
    _SCALAR: _rebuild_scalar,
    _ARRAY: _rebuild_array,
}


def _malformed(error: BaseException) -> BaseException:
    """What to raise if a value could not be made of its parts, such as a dict of a list for a key."""
    if not isinstance(error, msgspec.MsgspecError | RuntimeError | ValueError | TypeError | OverflowError):
        return error
    malformed = ProtocolError(f"malformed object: {error}")
    malformed.__cause__ = error
    return malformed


_native.set_kinds(
    {
        "reduce": _reduce,
        "rebuild": _rebuild,
        "too_deep": _refuse_depth,
        "refusal": _refusal,
        "malformed": _malformed,
        "protocol_error": ProtocolError,
        "status_type": Status,
        "array_type": np.ndarray,
        "empty": np.empty,
        "object_new": object.__new__,
        "dtypes": [None if dtype is BFLOAT16 else dtype.storage for dtype in DTYPES.values()],
        "records": _records,
        "makers": _makers,
        "scalars": {dtype.storage.type: dtype.code for dtype in DTYPES.values() if dtype is not BFLOAT16},
        "one_element": [
            None if dtype is BFLOAT16 else np.zeros(1, dtype.storage) for dtype in DTYPES.values()
        ],
        "scalar_extension": _SCALAR,
    }
)
register(Status)
