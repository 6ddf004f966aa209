"""Envelopes: what is known of a message before its bytes. Also wildcards, lanes and the ranges of tags."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, NamedTuple

__all__ = ["ANY", "HEADER_BYTES_MAX", "TAG_MAX", "UNTYPED", "Any_", "Envelope", "Lane", "Status", "Tags"]


class Any_(Enum):
    """The wildcard for sources and tags; the name `Any` belongs to typing."""

    ANY = "ANY"

    def __repr__(self) -> str:
        return "unisono.ANY"


ANY: Final = Any_.ANY

# User tags are 31 bits, as in MPI; collectives and control live above them (see Tags).
TAG_MAX: Final = 2**31 - 1


class Status(NamedTuple):
    """What a receive or probe found: the sender's rank, the tag and the length in bytes."""

    source: int
    tag: int
    nbytes: int


# An envelope's header holds a fingerprint or a descriptor: a line of text and its call site.
HEADER_BYTES_MAX: Final = 1024

# The dtype code of plain bytes, which fit any receive buffer.
UNTYPED: Final = 255


class Tags:
    """How the 64 bits of a tag are shared out. An ANY receive meets only what users send.

    In the tag of a collective bits 40 to 60 are the engine's: which message of a plan it is.
    """

    COLLECTIVE = 1 << 62
    CONTROL = 1 << 61
    RPC = 1 << 60  # of frames; what follows a frame adds its number
    STAGES = 16  # a collective may exchange metadata before its plan: each stage has a tag of its own

    @staticmethod
    def collective(sequence: int, stage: int) -> int:
        """The tag of one stage of a numbered collective."""
        assert 0 <= stage < Tags.STAGES
        return Tags.COLLECTIVE | sequence * Tags.STAGES + stage

    @staticmethod
    def is_users(tag: int) -> bool:
        """Whether a user may have sent it."""
        return 0 <= tag <= TAG_MAX

    @staticmethod
    def is_control(tag: int) -> bool:
        """Whether it is news between ranks or the frame of a call: at most CONTROL_BYTES_MAX long."""
        return bool(tag & Tags.CONTROL) or tag == Tags.RPC


class Lane(IntEnum):
    """An independent queue on a link. A full lane never blocks another."""

    BULK = 0
    CONTROL = 1


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known about a message before its bytes: `header` is opaque to the backend."""

    source: int
    context: int
    tag: int
    nbytes: int
    dtype: int = UNTYPED
    header: bytes = b""
