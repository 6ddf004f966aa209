"""Message envelopes, and what they consist of: wildcards, lanes, tags and their ranges."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple

__all__ = [
    "ANY",
    "HEADER_BYTES_MAX",
    "TAG_MAX",
    "UNTYPED",
    "Any_",
    "Envelope",
    "Lane",
    "Status",
    "Tags",
    "as_int",
]


class Any_(StrEnum):
    """The wildcard for sources and tags; `Any` is the name of a type in typing.

    A text, because a signature made for C (`inspect.signature`) can show no other kind of object.
    """

    ANY = "ANY"

    def __repr__(self) -> str:
        return "unisono.ANY"


ANY: Final = Any_.ANY

# Users have 31 bits, as in MPI; collectives and control messages use the tags above (see Tags).
TAG_MAX: Final = 2**31 - 1


def as_int(given: Any) -> Any:
    """A rank or tag as an int, whatever kind of integer it is; what is none, and a bool, unchanged."""
    if isinstance(given, bool):
        return given
    try:
        return operator.index(given)
    except TypeError:
        return given


class Status(NamedTuple):
    """What a receive or probe found: the sender's rank, the tag and the length in bytes."""

    source: int
    tag: int
    nbytes: int


# A header holds a fingerprint, a group's descriptor, or what a user's backend puts there.
HEADER_BYTES_MAX: Final = 1024

# The dtype code of plain bytes, which match a receive of any type.
UNTYPED: Final = 255


class Tags:
    """The layout of a tag's 64 bits. A receive with tag ANY matches only the tags of users.

    In the tag of a collective, bits 40 to 60 belong to the engine: they number the messages of a plan.
    """

    COLLECTIVE = 1 << 62
    CONTROL = 1 << 61
    RPC = 1 << 60  # RPC frames; an attachment of a frame adds its number
    STAGES = 16  # a collective may have several stages (metadata first); each has its own tag

    @staticmethod
    def collective(sequence: int, stage: int) -> int:
        """The tag of one stage of a numbered collective."""
        assert 0 <= stage < Tags.STAGES
        return Tags.COLLECTIVE | sequence * Tags.STAGES + stage

    @staticmethod
    def is_users(tag: int) -> bool:
        """Whether it is a tag of users."""
        return 0 <= tag <= TAG_MAX

    @staticmethod
    def is_control(tag: int) -> bool:
        """Whether it is the tag of control messages or RPC frames, which CONTROL_BYTES_MAX bounds."""
        return bool(tag & Tags.CONTROL) or tag == Tags.RPC


class Lane(IntEnum):
    """An independent queue on a link. A full lane never blocks another."""

    BULK = 0
    CONTROL = 1


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known about a message before its bytes; `header` is opaque to the backend."""

    source: int
    context: int
    tag: int
    nbytes: int
    dtype: int = UNTYPED
    header: bytes = b""
