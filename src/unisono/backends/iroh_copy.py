"""The copy of outgoing bytes in iroh's Python bindings, replaced by one that is not done byte by byte.

Knows the one method of the generated code that is slow (5 MB/s), what it looked like when this was written,
and how to do the same with one memmove. Where the code is another, it stays as it is, and a warning says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import inspect
import textwrap
import warnings
from types import ModuleType
from typing import Any, Final

import numpy as np

__all__ = ["quicken"]

# The release whose bindings were read; later ones of the same series are judged by the code alone.
_SERIES: Final = "1.2."
_BUILDER: Final = "_UniffiRustBufferBuilder"
_METHODS: Final = {
    "write": "1dc5c39048caed57",
    "_reserve": "676a487dca237f79",
}
_FIELDS: Final = (("capacity", ctypes.c_uint64), ("len", ctypes.c_uint64))
_SAMPLE: Final = bytes(range(256)) * 5


def quicken(bindings: ModuleType | None = None, version: str | None = None) -> bool:
    """Replace the slow copy, once. False, after a warning, if the bindings are not those that are known."""
    if bindings is None:
        from iroh import iroh_ffi

        bindings = iroh_ffi
    builder = getattr(bindings, _BUILDER, None)
    if getattr(builder, "write", None) is _write:
        return True
    reason = _strangeness(bindings, importlib.metadata.version("iroh") if version is None else version)
    if reason is None:
        assert builder is not None
        slow, builder.write = builder.write, _write
        if (reason := _failure(bindings)) is None:
            return True
        builder.write = slow
    warnings.warn(
        f"iroh's slow copy of outgoing bytes stays in place, and QUIC sends some MB/s only: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _write(self: Any, value: Any) -> None:
    """What the builder's `write` does, in one piece."""
    count = len(value)
    if not count:
        return
    with self._reserve(count):
        target = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
        # The address of memory that may be read-only: ctypes itself gives that of writable memory only.
        ctypes.memmove(target, np.frombuffer(value, np.uint8).ctypes.data, count)


def _strangeness(bindings: ModuleType, version: str) -> str | None:
    """Why these bindings are not the known ones, if so."""
    if not version.startswith(_SERIES):
        return f"iroh {version} is not of the series {_SERIES}x"
    builder = getattr(bindings, _BUILDER, None)
    for name, known in _METHODS.items():
        try:
            source = textwrap.dedent(inspect.getsource(getattr(builder, name)))
        except (AttributeError, TypeError, OSError):
            return f"its bindings have no readable {_BUILDER}.{name}"
        if _digest(source) != known:
            return f"its {_BUILDER}.{name} is another than the known one"
    fields = tuple(getattr(getattr(bindings, "_UniffiRustBuffer", None), "_fields_", ()))
    if fields[:2] != _FIELDS or [name for name, _ in fields[2:]] != ["data"]:
        return "its buffers are laid out in another way"
    return None


def _failure(bindings: Any) -> str | None:
    """Whether bytes come back as they went in: through iroh's own memory, and without any network."""
    converter = bindings._UniffiFfiConverterBytes
    for sample in (b"", _SAMPLE, memoryview(_SAMPLE)):
        if converter.lift(converter.lower(sample)) != bytes(sample):
            return "the replacement did not keep the bytes"
    return None


def _digest(source: str) -> str:
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
