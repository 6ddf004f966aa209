"""What a split decides: the row that each rank contributes, and the group that follows from the rows of all.

Pure: no message, no backend. A row says which group its rank wants, and whether the context id of that group
is in use there: then all ranks see it, and try the next id together.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from unisono.comm.fingerprint import Operand
from unisono.errors import UsageError

__all__ = [
    "ATTEMPTS_MAX",
    "ROW_BYTES",
    "ROW_OPERAND",
    "Row",
    "check_request",
    "identity_of",
    "members_of",
    "named_identity",
]

_ROW: Final = struct.Struct("<qqq?7x")
ROW_BYTES: Final = _ROW.size
# What is unique of a split within its communicator.
_SPLIT: Final = struct.Struct("<qQqq")
# What ranks compare of the call: nothing that a user gave, since colors and keys may differ.
ROW_OPERAND: Final = Operand(count=ROW_BYTES)
# Context ids are 64-bit hashes: a second collision in a row is a bug, not chance.
ATTEMPTS_MAX: Final = 4


class Row(NamedTuple):
    """What one rank contributes."""

    has_color: int
    color: int
    key: int
    is_taken: bool

    @property
    def asked(self) -> int | None:
        """The color that the rank passed."""
        return self.color if self.has_color else None

    def pack(self) -> bytes:
        """The bytes that travel."""
        return _ROW.pack(*self)

    @staticmethod
    def unpack(data: bytes) -> Row:
        """One row."""
        return Row(*_ROW.unpack(data))


def check_request(color: Any, key: Any) -> None:
    """Refuse what is no signed 64-bit integer; a color may be None.

    Raises:
        UsageError: it is none.
    """
    if color is not None and not _is_int64(color):
        raise UsageError(f"color={color!r}; allowed: a signed 64-bit integer or None")
    if not _is_int64(key):
        raise UsageError(f"key={key!r}; allowed: a signed 64-bit integer")


def members_of(rows: Any, color: int | None) -> tuple[int, ...] | None:
    """The ranks that passed this color, ordered by (key, rank); None if the context id is in use somewhere.

    `rows` are the bytes of all ranks, in order.
    """
    chosen = []
    for rank, (has_color, theirs, key, is_taken) in enumerate(_ROW.iter_unpack(rows)):
        if is_taken:
            return None
        if has_color and theirs == color:
            chosen.append((key, rank))
    chosen.sort()
    return tuple([rank for _, rank in chosen])


# A split asks twice: to see whether the id is free, and to make the group.
@lru_cache(maxsize=16)
def identity_of(parent: bytes, epoch: int, sequence: int, attempt: int, color: int) -> tuple[int, bytes]:
    """The context id and the descriptor of a group, from its parent's and the call that makes it."""
    return named_identity(parent, _SPLIT.pack(epoch, sequence, attempt, color))


def named_identity(parent: bytes, name: bytes) -> tuple[int, bytes]:
    """The context id and the descriptor of a group from the parent's descriptor and what is unique in it.

    The descriptor identifies a group even if its context id collides with that of another. A context id is
    never 0 (control) or 1 (the world).
    """
    digest = hashlib.blake2b(parent + name, digest_size=24).digest()
    return int.from_bytes(digest[:8], "little") | 2, digest[8:]


def _is_int64(number: Any) -> bool:
    is_whole = type(number) is int or (isinstance(number, int | np.integer) and not isinstance(number, bool))
    return is_whole and -(2**63) <= number < 2**63
