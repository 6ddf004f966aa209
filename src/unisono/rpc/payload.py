"""Payload: values as what travels in a frame, and what follows it.

Knows the codec and what is short. Does not know calls. Large arrays are never copied here: they are sent from
where they lie, and received to where they stay.

What follows a frame, in order: the short blobs in one piece, if there are any, then each long one; or the
whole value in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from unisono.core import codec
from unisono.errors import ProtocolError, UsageError
from unisono.rpc import memory
from unisono.rpc.frames import MESSAGE_BYTES_MAX, Packed

__all__ = ["is_plain", "pack", "places", "unpack"]

# A frame is short: so much of a value may be in one.
_FRAME_BYTES: Final = 2048
_SIZES_MAX: Final = 256
# A message of its own costs more than copying this much.
_SHORT_BYTES: Final = 16 * 1024

_PLAIN: Final = frozenset({int, float, str, bytes, bool, type(None)})
_PLAIN_VALUES_MAX: Final = 16
_PLAIN_LENGTH_MAX: Final = 128


def is_plain(values: Sequence[Any]) -> bool:
    """Whether the values are short and msgpack alone can hold them."""
    for value in values:
        kind = type(value)
        if kind is int:
            if not -(1 << 63) <= value < 1 << 64:
                return False
        elif kind not in _PLAIN or ((kind is str or kind is bytes) and len(value) > _PLAIN_LENGTH_MAX):
            return False
    return len(values) <= _PLAIN_VALUES_MAX


def pack(value: Any, place: Callable[[Sequence[str]], str] = codec.place) -> tuple[Packed, list[memoryview]]:
    """Turn a value into what a frame holds, and what follows it; `place` as in the codec.

    Raises:
        UsageError: something in it cannot travel, or it is too large.
    """
    head, blobs = codec.encode(value, place)
    sizes = [blob.nbytes for blob in blobs]
    total = len(head) + sum(sizes)
    if total > MESSAGE_BYTES_MAX:
        raise UsageError(
            f"a message of {total} bytes; allowed: up to {MESSAGE_BYTES_MAX}",
            next_step="send it in parts, or by comm.send beside the call",
        )
    if total + 72 * len(sizes) <= _FRAME_BYTES:
        return Packed(bytes(codec.pack(value))), []
    if not blobs or len(head) > _FRAME_BYTES or len(sizes) > _SIZES_MAX:
        piece = codec.pack(value)
        return Packed(b"", [], len(piece)), [memoryview(piece)]
    short = b"".join(blob for blob in blobs if blob.nbytes <= _SHORT_BYTES)
    long = [blob for blob in blobs if blob.nbytes > _SHORT_BYTES]
    return Packed(head, sizes), [memoryview(short), *long] if short else long


def places(packed: Packed) -> list[np.ndarray[Any, Any]]:
    """Memory for what follows a frame. Lengths are checked before any of it is taken.

    Raises:
        ProtocolError: no agent packs a value like this, or it is too large.
    """
    sizes, piece = packed.sizes, packed.piece_bytes
    if any(size < 0 for size in sizes) or piece < 0 or (piece and (sizes or packed.head)):
        raise ProtocolError("a malformed frame", cause="the lengths of what follows make no sense")
    if len(packed.head) + sum(sizes) + piece > MESSAGE_BYTES_MAX or len(sizes) > _SIZES_MAX:
        raise ProtocolError("a malformed frame", cause=f"it announces {sum(sizes) + piece} bytes")
    short = sum(size for size in sizes if size <= _SHORT_BYTES)
    lengths = [short, *(size for size in sizes if size > _SHORT_BYTES), piece]
    return [memory.take(length) for length in lengths if length]


def unpack(packed: Packed, came: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Turn a frame's value, and what came for its places, back into the value; arrays are views on these.

    Raises:
        ProtocolError: no encoder makes such bytes.
    """
    if packed.piece_bytes:
        return codec.unpack(came[0].data)
    if not packed.sizes:
        return codec.unpack(bytearray(packed.head))
    pieces = list(came)
    has_short = any(0 < n <= _SHORT_BYTES for n in packed.sizes)
    short = pieces.pop(0).data if has_short else memoryview(b"")
    blobs, at = [], 0
    for size in packed.sizes:
        if size > _SHORT_BYTES:
            blobs.append(pieces.pop(0).data)
        else:
            blobs.append(short[at : at + size])
            at += size
    return codec.decode(packed.head, blobs)
