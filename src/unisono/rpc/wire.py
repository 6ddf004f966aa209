"""The wire format: what agents say to each other, as frames, and how a value travels in one.

A frame is one msgpack array and always short. What is long travels beside it in attachments: the head of a
large value, then each blob (bytes, text or an array); or the whole value in one piece. Blobs are not copied.

In a frame, `call` is the caller's number of a call, and `number` is the tag of the attachments. A value is
plain data in the frame itself (`Ask.args`, `Answer.value`), or `Packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from unisono._native import BlobMemory
from unisono.core import codec
from unisono.errors import ProtocolError, UsageError

__all__ = [
    "MESSAGE_BYTES_MAX",
    "NAME_CHARS_MAX",
    "TEXT_CHARS_MAX",
    "Ack",
    "Answer",
    "Ask",
    "Cancel",
    "Failure",
    "Frame",
    "Goodbye",
    "Item",
    "More",
    "Packed",
    "PackedAnswer",
    "PackedAsk",
    "PackedItem",
    "decode",
    "encode",
    "is_plain",
    "pack",
    "part_kinds",
    "part_lengths",
    "unpack",
]

# Of one call or answer, its attachments included.
MESSAGE_BYTES_MAX: Final = 1 << 30
NAME_CHARS_MAX: Final = 256

# A peer's text about an exception is shown to people: enough to find the line, and a frame stays short.
TEXT_CHARS_MAX: Final = 1000
_TRACE_CHARS_MAX: Final = 2500

# Bounds of a packed value inside a frame, in bytes and in blobs, so that every frame stays short.
_FRAME_BYTES: Final = 2048
_SIZES_MAX: Final = 256
# Copying less costs less than an attachment of its own.
_BLOB_BYTES: Final = 16 * 1024
# What a blob is received into: the memory of the object that it becomes, or any.
_PART_KINDS: Final[tuple[type[bytes | bytearray] | None, ...]] = (None, bytes, bytearray)

# What msgpack alone can hold, and what keeps a frame of such values short.
_PLAIN: Final = frozenset({int, float, str, bytes, bool, type(None)})
_PLAIN_VALUES_MAX: Final = 16
_PLAIN_LENGTH_MAX: Final = 128


# -- frames -----------------------------------------------------------------------------------------------


class Packed(msgspec.Struct, array_like=True, gc=False):
    """A value that plain msgpack cannot hold: the codec's head, and lengths and kinds of its attached blobs.

    Without blobs the head is the whole value. If it is empty, it is the first attachment, of `piece_bytes`.
    A kind is an index in _PART_KINDS.
    """

    head: bytes
    sizes: list[int] = []
    kinds: bytes = b""
    piece_bytes: int = 0


class Ask(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Call a function with plain arguments. Call 0 is a notification: it gets no answer.

    With a `window` the items of a generator are wanted: this many, before the reader asks for more.
    """

    call: int
    name: str
    timeout_s: float | None
    args: list[Any]
    window: int = 0


class PackedAsk(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Call a function with arguments of any kind: the body is [args, kwargs]."""

    call: int
    name: str
    timeout_s: float | None
    number: int
    body: Packed
    window: int = 0


class Answer(msgspec.Struct, array_like=True, tag=2, gc=False):
    """What a function returned."""

    call: int
    value: Any


class PackedAnswer(msgspec.Struct, array_like=True, tag=3, gc=False):
    """What a function returned, of any kind."""

    call: int
    number: int
    body: Packed


class Failure(msgspec.Struct, array_like=True, tag=4, gc=False):
    """Why a call failed. `kind` selects the error that the caller raises: see dispatch.py."""

    call: int
    kind: str
    what: str
    type_name: str = ""
    traceback_text: str = ""

    @classmethod
    def of(cls, call: int, kind: str, what: str, type_name: str = "", traceback_text: str = "") -> Failure:
        """Make one that is short enough; of a traceback the end is kept."""
        return cls(
            call,
            kind,
            _encodable(what[:TEXT_CHARS_MAX]),
            _encodable(type_name[:NAME_CHARS_MAX]),
            _encodable(traceback_text[-_TRACE_CHARS_MAX:]),
        )


class Cancel(msgspec.Struct, array_like=True, tag=5, gc=False):
    """The caller no longer waits."""

    call: int


class Ack(msgspec.Struct, array_like=True, tag=6, gc=False):
    """This many notifications have been run."""

    count: int


class Goodbye(msgspec.Struct, array_like=True, tag=7, gc=False):
    """The sender's agent is closed and its answers were sent before; or why it has given the receiver up."""

    why: str = ""


class Item(msgspec.Struct, array_like=True, tag=8, gc=False):
    """One item of a generator, by its index; an Answer with the number of items follows the last."""

    call: int
    index: int
    value: Any


class PackedItem(msgspec.Struct, array_like=True, tag=9, gc=False):
    """One item of a generator, of any kind."""

    call: int
    index: int
    number: int
    body: Packed


class More(msgspec.Struct, array_like=True, tag=10, gc=False):
    """The reader of a stream wants this many more items."""

    call: int
    count: int


Frame: TypeAlias = (
    Ask | PackedAsk | Answer | PackedAnswer | Failure | Cancel | Ack | Goodbye | Item | PackedItem | More
)


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ProtocolError(f"extension {code} in a plain frame")


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame, ext_hook=_refuse_extension).decode


def decode(data: bytes) -> Frame:
    """Read a frame.

    Raises:
        ProtocolError: no agent makes such bytes.
    """
    try:
        frame: Frame = _decode(data)
    except (msgspec.MsgspecError, ProtocolError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError("a malformed frame", cause=str(error)) from None
    return frame


def _encodable(text: str) -> str:
    """Text that UTF-8 can hold: an exception's may contain lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


# -- values -----------------------------------------------------------------------------------------------


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
    """Turn a value into what a frame holds, and its attachments; `place` as in the codec.

    Raises:
        UsageError: something in the value cannot be encoded, or it is too large.
    """
    head, blobs = codec.pack_parts(value, place, _BLOB_BYTES)
    sizes = [blob.nbytes for blob in blobs]
    total = len(head) + sum(sizes)
    if total > MESSAGE_BYTES_MAX:
        raise UsageError(
            f"a message of {total} bytes; allowed: up to {MESSAGE_BYTES_MAX}",
            next_step="send it in parts, or by comm.send beside the call",
        )
    if len(sizes) > _SIZES_MAX:
        head, blobs, sizes = codec.pack(value, place), [], []
    kinds = bytes(_PART_KINDS.index(_part_kind(blob)) for blob in blobs)
    if len(head) <= _FRAME_BYTES:
        return Packed(head, sizes, kinds), blobs
    return Packed(b"", sizes, kinds, len(head)), [memoryview(head), *blobs]


def _part_kind(blob: memoryview) -> type[bytes | bytearray] | None:
    kind = type(blob.obj)
    return kind if kind is bytes or kind is bytearray else None


def part_lengths(packed: Packed) -> list[int]:
    """The lengths of the attachments in bytes, checked so that memory can be taken for them.

    Raises:
        ProtocolError: no agent packs a value like this, or it is too large.
    """
    sizes, piece = packed.sizes, packed.piece_bytes
    if (
        (piece > 0) != (not packed.head)
        or piece < 0
        or any(size < _BLOB_BYTES for size in sizes)
        or len(packed.kinds) != len(sizes)
        or any(kind >= len(_PART_KINDS) for kind in packed.kinds)
    ):
        raise ProtocolError("a malformed frame", cause="the lengths of its attachments are inconsistent")
    if len(packed.head) + sum(sizes) + piece > MESSAGE_BYTES_MAX or len(sizes) > _SIZES_MAX:
        raise ProtocolError("a malformed frame", cause=f"it announces {sum(sizes) + piece} bytes")
    return [piece, *sizes] if piece else list(sizes)


def part_kinds(packed: Packed) -> list[type[bytes | bytearray] | None]:
    """The kind of object that each attachment becomes; None: it is read, or the memory of an array."""
    kinds = [_PART_KINDS[kind] for kind in packed.kinds]
    return [None, *kinds] if packed.piece_bytes else kinds


def unpack(packed: Packed, parts: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Turn a frame's value and its received attachments back into the value, which keeps their memory.

    Raises:
        ProtocolError: no encoder makes such bytes.
    """
    blobs = [part.base.owner if isinstance(part.base, BlobMemory) else part for part in parts]
    head = blobs.pop(0) if packed.piece_bytes else packed.head
    return codec.unpack_parts(head, blobs) if blobs else codec.unpack(head)
