"""The payload of an object: a Python object as the bytes that travel, and back.

The twin of native/python/object_payload.hpp.
"""

from __future__ import annotations

from typing import Any, Final

from unisono.core import buffers, codec
from unisono.core.buffers import Array
from unisono.errors import UsageError

__all__ = ["RAISE_LIMIT", "packed", "unpacked"]

RAISE_LIMIT: Final = "set Config(recv_bytes_max=...) or UNISONO_RECV_BYTES_MAX alike on all ranks"


def packed(value: Any, bytes_max: int) -> Array:
    """An object as an array of bytes, of a length that the others take.

    Raises:
        UsageError: it cannot be sent, or is longer.
    """
    array = buffers.view(codec.pack_writable(value), "object")
    if array.count > bytes_max:
        raise UsageError(f"an object of {array.count} bytes; allowed: {bytes_max}", next_step=RAISE_LIMIT)
    return array


def unpacked(data: Any) -> Any:
    """The object in bytes or an array of bytes; long arrays in it are views of writable ones.

    Raises:
        ProtocolError: there is none in it.
    """
    return codec.unpack(data)
