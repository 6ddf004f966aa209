"""The payload of an object: a Python object as the bytes that travel, and back.

The twin of native/python/object_payload.hpp.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from unisono.core import buffers, codec
from unisono.core.buffers import Array
from unisono.errors import ProtocolError, UsageError

__all__ = ["RAISE_LIMIT", "ObjectHead", "heads_in", "packed", "unpacked"]

RAISE_LIMIT: Final = "set Config(recv_bytes_max=...) or UNISONO_RECV_BYTES_MAX alike on all ranks"


# The last of the kinds of blobs (BlobKind in native/python/blob_memory.hpp): several of them in one piece.
_SEVERAL: Final = 4


class ObjectHead(NamedTuple):
    """The head of an object whose blobs travel beside it."""

    kind: int
    head: bytes


def heads_in(data: bytes, count: int) -> tuple[ObjectHead, ...]:
    """The heads that follow each other in a row of another rank.

    Raises:
        ProtocolError: there are fewer.
    """
    found: list[ObjectHead] = []
    for _ in range(count):
        length = codec.head_bytes_at(data[1:]) if data and data[0] <= _SEVERAL else 0
        if length == 0:
            raise ProtocolError("malformed head of an object in a collective")
        found.append(ObjectHead(data[0], data[1 : 1 + length]))
        data = data[1 + length :]
    return tuple(found)


def packed(value: Any, bytes_max: int) -> Array:
    """An object as an array of bytes, of a length that the others take.

    Raises:
        UsageError: it cannot be sent, or is longer.
    """
    array = buffers.view(codec.pack_writable(value), "object")
    if array.count > bytes_max:
        raise UsageError(f"an object of {array.count} bytes; allowed: {bytes_max}", next_step=RAISE_LIMIT)
    return array


def as_no_object(error: ProtocolError) -> ProtocolError:
    """The error for what was received as an object and cannot be one, with what the user may do about it."""
    if error.next_step == error.usual_step:
        error.next_step = "receive by recv_object only what send_object has sent, and the rest by recv"
    return error


def unpacked(data: Any, beside: ObjectHead | None = None) -> Any:
    """The object in bytes or an array of bytes, or in what travelled `beside` its head.

    Long arrays in it are views of memory that may be written to.

    Raises:
        ProtocolError: there is none in it.
    """
    if beside is None:
        return codec.unpack(data)
    if beside.kind == _SEVERAL:
        return codec.unpack_beside(beside.head, data)
    return codec.unpack_parts(beside.head, [data] if len(data) else [])
