"""Frames: the messages between agents. The core packs and reads them (native/python/rpc_frame.cpp).

Every frame has the same fields and a value of any kind. Long parts of the value travel beside the frame as
*blobs*, without being copied; `number` is their tag. The frame itself is one short message.

- ASK: call the function `name` within `timeout_s`. The value is (args, kwargs). `call` is the caller's number
  of the call; 0 is a notification, which gets no answer. With a `count`, the items of a generator are wanted:
  this many before the reader asks for more.
- ANSWER: the value is the result of `call`; after a generator's last item, the number of its items.
- FAILURE: the value is (kind, what, type_name, traceback_text). dispatch.py makes an error of it. A generator
  has sent `count` items before.
- ITEM: the value is the item of a generator with the index `count`.
- MORE: the reader of a generator wants `count` more items.
- CANCEL: the caller no longer waits for `call`.
- ACK: `count` notifications have been run.
- UNWANTED: the receiver of a notification refuses it, and will not receive its blobs of the tag `count`.
- GOODBYE: the sender's agent is closed and its answers were sent before. The value is a tuple
  of one text: why the sender has given the receiver up, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from unisono._native import RPC_MESSAGE_BYTES_MAX, Frame, frame_value, open_frame, pack_frame
from unisono.errors import ProtocolError, UsageError

__all__ = [
    "ACK",
    "ANSWER",
    "ASK",
    "CANCEL",
    "FAILURE",
    "GOODBYE",
    "ITEM",
    "MORE",
    "NAME_CHARS_MAX",
    "TEXT_CHARS_MAX",
    "UNWANTED",
    "Frame",
    "Packed",
    "arguments_of",
    "failure",
    "open_frame",
    "pack",
    "short",
    "texts_of",
]

ASK, ANSWER, FAILURE, ITEM, MORE, CANCEL, ACK, GOODBYE, UNWANTED = range(9)

# A frame, the tag of its blobs, and these.
Packed: TypeAlias = tuple[bytes, int, Sequence[memoryview]]

NAME_CHARS_MAX: Final = 256
# A peer's text about an exception is shown to people: enough to find the line, and it fits into a frame.
TEXT_CHARS_MAX: Final = 1000
_TRACE_CHARS_MAX: Final = 2000


def pack(
    kind: int,
    call: int,
    number: int,
    value: Any,
    place: Callable[[Sequence[str]], str] | None = None,
    name: str = "",
    timeout_s: float | None = None,
    count: int = 0,
) -> Packed:
    """Pack a frame; `place` as in the codec.

    Raises:
        UsageError: something in the value cannot be sent, or it is too large.
    """
    data, blobs = pack_frame(kind, call, number, name, timeout_s, count, value, place)
    if blobs and (total := sum(blob.nbytes for blob in blobs)) > RPC_MESSAGE_BYTES_MAX:
        raise UsageError(
            f"a message of {total} bytes; allowed: up to {RPC_MESSAGE_BYTES_MAX}",
            next_step="send it in parts, or by comm.send beside the call",
        )
    return data, number, blobs


def short(kind: int, call: int = 0, *, count: int = 0, value: Any = None) -> bytes:
    """Pack a frame whose value is short: it has no blobs."""
    return pack_frame(kind, call, 0, "", None, count, value)[0]


def failure(
    call: int, kind: str, what: str, type_name: str = "", traceback_text: str = "", items: int = 0
) -> bytes:
    """Why a call failed, in texts that are cut to fit; of a traceback the end is kept."""
    what, type_name = _cut(what, slice(TEXT_CHARS_MAX)), _cut(type_name, slice(NAME_CHARS_MAX))
    trace = _cut(traceback_text, slice(-_TRACE_CHARS_MAX, None))
    return short(FAILURE, call, count=items, value=(kind, what, type_name, trace))


def arguments_of(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the value of an ASK.

    Raises:
        ProtocolError: no agent sends such a value.
    """
    if type(value) is tuple and len(value) == 2:
        args, kwargs = value
        if (
            type(args) is tuple
            and type(kwargs) is dict
            and (not kwargs or all(type(key) is str for key in kwargs))
        ):
            return args, kwargs
    raise ProtocolError("a malformed call")


def texts_of(frame: Frame, count: int) -> Sequence[str]:
    """The texts in the value of a FAILURE or GOODBYE.

    Raises:
        ProtocolError: it has other parts.
    """
    value = None if frame.blob_bytes else frame_value(frame.data)
    if type(value) is tuple and len(value) == count and all(type(text) is str for text in value):
        return value
    raise ProtocolError("a malformed frame: texts were expected")


def _cut(text: str, part: slice) -> str:
    """A part of a text. UTF-8 has no lone surrogates, an exception's text may: each becomes 6 characters."""
    return text[part].encode(errors="backslashreplace").decode()[part]
