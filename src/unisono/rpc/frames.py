"""Frames: what agents say to each other, as bytes.

Knows the layout and its limits. Does not know what a frame causes, nor how it travels. A frame is one msgpack
array and always short: what is long, an array or the head of a large value, follows in messages of its own.

A *call* is the caller's number of a call. A *body* is a value: plain data in the frame itself (`Ask.args`,
`Answer.value`), or packed (see payload.py).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from unisono.errors import ProtocolError

__all__ = [
    "MESSAGE_BYTES_MAX",
    "NAME_CHARS_MAX",
    "TEXT_CHARS_MAX",
    "Ack",
    "Answer",
    "Ask",
    "Bye",
    "Cancel",
    "Failure",
    "Frame",
    "Item",
    "More",
    "Packed",
    "PackedAnswer",
    "PackedAsk",
    "PackedItem",
    "decode",
    "encode",
]

# Of one call or answer, its arrays included.
MESSAGE_BYTES_MAX: Final = 1 << 30
NAME_CHARS_MAX: Final = 256

# What a peer says about an exception is shown to people: enough to find the line, and a frame stays short.
TEXT_CHARS_MAX: Final = 1000
_TRACE_CHARS_MAX: Final = 2500


class Packed(msgspec.Struct, array_like=True, gc=False):
    """A value that plain msgpack cannot hold: the codec's head, and the lengths of its blobs, which follow.

    Without lengths the head is the whole value in one piece; if it is empty, `piece_bytes` of that follow.
    """

    head: bytes
    sizes: list[int] = []
    piece_bytes: int = 0


class Ask(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Call a function with plain arguments. Nobody waits for the answer to call 0.

    With a `window` the items of a generator are wanted, so many before more are asked for.
    """

    call: int
    name: str
    timeout_s: float | None
    args: list[Any]
    window: int = 0


class PackedAsk(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Call a function with arguments of any kind: the body is [args, kwargs]. `number` names what follows."""

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
    """Why a call did not end well. `kind` is the caller's word for it: see calls.py."""

    call: int
    kind: str
    what: str
    type_name: str = ""
    traceback_text: str = ""

    @classmethod
    def of(cls, call: int, kind: str, what: str, type_name: str = "", traceback_text: str = "") -> Failure:
        """Make one that is short enough: of a traceback the end counts."""
        return cls(
            call,
            kind,
            _sound(what[:TEXT_CHARS_MAX]),
            _sound(type_name[:NAME_CHARS_MAX]),
            _sound(traceback_text[-_TRACE_CHARS_MAX:]),
        )


class Cancel(msgspec.Struct, array_like=True, tag=5, gc=False):
    """The caller no longer waits."""

    call: int


class Ack(msgspec.Struct, array_like=True, tag=6, gc=False):
    """So many notifications have been taken care of."""

    count: int


class Bye(msgspec.Struct, array_like=True, tag=7, gc=False):
    """The sender's agent is closed, its answers came before; or why it has given the receiver up."""

    why: str = ""


class Item(msgspec.Struct, array_like=True, tag=8, gc=False):
    """What a generator gave, as which of its items; an answer with their number follows the last."""

    call: int
    index: int
    value: Any


class PackedItem(msgspec.Struct, array_like=True, tag=9, gc=False):
    """What a generator gave, of any kind."""

    call: int
    index: int
    number: int
    body: Packed


class More(msgspec.Struct, array_like=True, tag=10, gc=False):
    """The reader of a stream wants so many more."""

    call: int
    count: int


Frame: TypeAlias = (
    Ask | PackedAsk | Answer | PackedAnswer | Failure | Cancel | Ack | Bye | Item | PackedItem | More
)


def _refuse(code: int, data: memoryview) -> Any:
    raise ProtocolError(f"extension {code} in a plain frame")


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame, ext_hook=_refuse).decode


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


def _sound(text: str) -> str:
    """Text that can travel: an exception may hold halves of characters."""
    return text.encode(errors="backslashreplace").decode()
