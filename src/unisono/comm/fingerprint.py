"""The fingerprint of a collective call: what ranks compare, as a record of 16 bytes.

Any rank can put a record into words alone, without the interpreter or the life of the rank that made the
call. Its last 32 bits are a hash of the rest: the shape where ranks must agree on it, uneven counts, the
segment size, the group, and the name and properties of a user's op. The numbers of verbs, ops and algorithms
are their places in tables: ranks of different versions never meet, so a table may change with a version.

The native twin is native/collective/fingerprint.hpp: the same layout and the same hash.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from unisono.comm.verb_table import COLLECTIVES, Fact, verbs_with
from unisono.core.dtypes import DTYPES, DType
from unisono.core.envelope import UNTYPED
from unisono.core.ops import OP_NAMES, ReduceOp
from unisono.messaging.stage import FINGERPRINT_BYTES
from unisono.plans.catalog import ALGORITHM_NAMES

__all__ = [
    "COUNT_ANY",
    "FORGOTTEN",
    "NOTHING",
    "Fingerprint",
    "Operand",
    "described",
    "fingerprint_of",
    "fused",
    "hash_of",
    "may_be_one_call",
    "seed_of",
    "verb_of",
    "words_of",
]

# Verbs of which reports show all lengths: the shape on which ranks must agree, or those of parts or arrays.
_SHOWN_WHOLE: Final = verbs_with(Fact.SHAPED | Fact.CUT | Fact.FUSED)
_ROOTED: Final = verbs_with(Fact.ROOTED)

# Stands for a call of this rank that is no longer in its call log. No verb has number 0.
FORGOTTEN: Final = bytes(FINGERPRINT_BYTES)
_FORGOTTEN_WORDS: Final = "(another call, made long ago)"

_NO_OP: Final = 255
# In place of a count: ranks may give different ones, or it has more than 40 bits.
COUNT_ANY: Final = (1 << 40) - 1
_WIDTHS: Final = (8, 8, 8, 8, 20, 4, 40, 32)
_COUNTS_SHOWN: Final = 16

_VERB_NUMBERS: Final = {verb: number for number, verb in enumerate(COLLECTIVES, 1)}
_OP_NUMBERS: Final = {name: number for number, name in enumerate(OP_NAMES)}
_ALGORITHM_NUMBERS: Final = {name: number for number, name in enumerate(ALGORITHM_NAMES)}
_DTYPE_NAMES: Final = tuple(DTYPES)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fields of a record, from the lowest bit on, by their numbers."""

    verb: int
    dtype: int
    op: int
    algorithm: int
    root: int
    stage: int
    count: int
    hash: int

    def fields(self) -> tuple[int, ...]:
        """All of them, in order."""
        return (
            *(self.verb, self.dtype, self.op, self.algorithm),
            *(self.root, self.stage, self.count, self.hash),
        )

    def pack(self) -> bytes:
        """The record."""
        bits = at = 0
        for value, width in zip(self.fields(), _WIDTHS, strict=True):
            assert 0 <= value < 1 << width, f"a field of {width} bits holds {value}"
            bits |= value << at
            at += width
        return bits.to_bytes(FINGERPRINT_BYTES, "little")

    @staticmethod
    def unpack(data: bytes) -> Fingerprint:
        """The fields of a record; whatever its bits are, each field has a value."""
        assert len(data) == FINGERPRINT_BYTES
        bits, values = int.from_bytes(data, "little"), []
        for width in _WIDTHS:
            values.append(bits & (1 << width) - 1)
            bits >>= width
        return Fingerprint(*values)


def may_be_one_call(mine: bytes, theirs: bytes) -> bool:
    """Whether two records may be of one call in which one rank is a stage further than the other.

    Stages differ in lengths and algorithm, of which the rank behind does not know yet.
    """
    if mine == theirs or {len(mine), len(theirs)} != {FINGERPRINT_BYTES}:
        return mine == theirs
    one, other = Fingerprint.unpack(mine), Fingerprint.unpack(theirs)
    return one.stage != other.stage and (one.verb, one.root) == (other.verb, other.root)


@dataclass(frozen=True, slots=True)
class Operand:
    """What ranks compare of the arrays that a user gave, and how they are shown.

    `values` are hashed: a shape, uneven counts, or types and lengths. `root` is given where the stage that
    carries the fingerprint has none. A count of None may differ.
    """

    dtype: DType | None = None
    count: int | None = 0
    values: tuple[int, ...] = ()
    text: str = ""
    root: int | None = None


NOTHING: Final = Operand()


def described(dtype: DType, counts: tuple[int, ...], shape: tuple[int, ...] | None = None) -> Operand:
    """An array that is cut into `counts`; its `shape` where ranks must agree on it."""
    text = f"{dtype}[{_lengths_text(counts if shape is None else shape)}]"
    if shape is not None:
        return Operand(dtype, math.prod(shape), shape, text)
    return Operand(dtype, sum(counts), counts if len(set(counts)) > 1 else (), text)


def fused(arrays: Sequence[tuple[DType, int]]) -> Operand:
    """Arrays that travel together, by type and length.

    In the order given: lists of the same arrays in another order would be paired by type without a word.
    Those of the type with the lowest number are reduced first.
    """
    runs = itertools.groupby(arrays, key=lambda array: array[0])
    text = " ".join(f"{dtype}[{_lengths_text(tuple(n for _, n in run))}]" for dtype, run in runs)
    values = tuple(value for dtype, count in arrays for value in (dtype.code, count))
    first = min((dtype for dtype, _ in arrays), key=lambda dtype: dtype.code, default=None)
    return Operand(first, sum(count for _, count in arrays), values, text or "[]")


def _lengths_text(lengths: tuple[int, ...]) -> str:
    """Of many lengths the first are shown, and a checksum stands for the rest."""
    shown = ",".join(map(str, lengths[:_COUNTS_SHOWN]))
    more = f"+{zlib.crc32(repr(lengths).encode()):x}" if len(lengths) > _COUNTS_SHOWN else ""
    return f"{shown}{more}"


def fingerprint_of(
    verb: str,
    operand: Operand,
    op: ReduceOp | None,
    algorithm: str,
    root: int,
    stage: int,
    rest: tuple[object, ...],
) -> bytes:
    """The record of a call; `rest` are values with a text that is hashed: the group, and so on."""
    count = COUNT_ANY if operand.count is None else min(operand.count, COUNT_ANY)
    values = operand.values if count != COUNT_ANY else (*operand.values, operand.count or 0)
    op_name = None if op is None else op.name if op.fn is None else "user"
    return Fingerprint(
        _VERB_NUMBERS[verb],
        UNTYPED if operand.dtype is None else operand.dtype.code,
        _NO_OP if op_name is None else _OP_NUMBERS[op_name],
        _ALGORITHM_NUMBERS[algorithm],
        root if verb in _ROOTED else 0,
        stage,
        count,
        hash_of(seed_of(rest), values),
    ).pack()


def hash_of(seed: int, values: Iterable[int]) -> int:
    """32 bits of a 64-bit seed and signed 64-bit values; native/collective/fingerprint.hpp has the same."""
    x = seed
    for value in values:
        x = (x ^ value & _MASK) * 0x9E3779B97F4A7C15 & _MASK
        x ^= x >> 29
    return (x ^ x >> 32) & 0xFFFFFFFF


_MASK: Final = (1 << 64) - 1


@lru_cache(maxsize=1024)
def seed_of(rest: tuple[object, ...]) -> int:
    """The seed of the hash: what ranks compare beside the numbers that are hashed."""
    text = "\0".join(map(str, rest)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def verb_of(data: bytes) -> str:
    """The verb of a record."""
    return words_of(data).partition(" ")[0] if data != FORGOTTEN else _FORGOTTEN_WORDS


def words_of(
    data: bytes, arrays: str | None = None, op: str | None = None, lengths: tuple[int, ...] | None = None
) -> str:
    """A record in words. The rank that made the call knows more of its arrays and its op.

    `lengths` are the shape of the array, or the lengths of its parts or of several arrays.
    """
    if data == FORGOTTEN:
        return _FORGOTTEN_WORDS
    fields = Fingerprint.unpack(data)
    verb = _named(COLLECTIVES, fields.verb - 1)
    if arrays is None and fields.dtype != UNTYPED:
        shown = "*" if fields.count == COUNT_ANY else str(fields.count)
        if lengths and verb == "reduce_scatter":  # equal parts, one per rank
            shown = _lengths_text((math.prod(lengths[1:]),) * lengths[0])
        elif lengths is not None and fields.count == COUNT_ANY:
            shown = ",".join(["*", *map(str, lengths[1:])])
        elif lengths is not None and verb in _SHOWN_WHOLE:
            shown = _lengths_text(lengths)
        arrays = f"{_named(_DTYPE_NAMES, fields.dtype)}[{shown}]"
    if op is None and fields.op != _NO_OP:
        op = _named(OP_NAMES, fields.op)
    words = [
        verb,
        arrays,
        op and f"op={op}",
        f"root={fields.root}" if verb in _ROOTED else None,
        f"stage={fields.stage}" if fields.stage else None,
        f"algorithm={_named(ALGORITHM_NAMES, fields.algorithm)}",
    ]
    return " ".join(word for word in words if word)


def _named(table: tuple[str, ...], number: int) -> str:
    """A name by its number, which a peer may have sent."""
    return table[number] if 0 <= number < len(table) else f"unknown({number})"
