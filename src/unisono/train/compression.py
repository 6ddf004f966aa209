"""Compressors: sums over all ranks of which only a part, or fewer bits, are sent.

Each is a pure exchange (pipeline.py): it takes the flat array to be summed, asks for collectives, returns
what it calls the sum, and leaves in the array what it has not sent. Over all ranks, the sum and what is left
add up to what was put in. All ranks return the same bits. error_feedback.py keeps what is left.

| | collectives | bytes sent per rank of N, for n elements |
|---|---|---|
| TopK(ratio) | all_gather | 8 k (N - 1), k = ratio n |
| RandomK(ratio) | all_reduce | 8 k (N - 1) / N |
| Float16, BFloat16 | all_to_all, all_gather | 4 n (N - 1) / N |
| Int8 | all_to_all, all_gather | 2 n (N - 1) / N |
| none, float32 | all_reduce | 8 n (N - 1) / N |
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from unisono.core.dtypes import BFLOAT16, DTYPES, DType
from unisono.core.kernels import narrow, widen
from unisono.errors import CollectiveMismatch, UsageError
from unisono.train.pipeline import Collective, Exchange, FloatArray

__all__ = ["BFloat16", "Call", "Compressor", "Float16", "Int8", "RandomK", "TopK"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Call:
    """Which exchange it is: the `number`th, from 0, of the array `key`, by this rank of `size`."""

    rank: int
    size: int
    key: str | int
    number: int
    divisor: int  # of the sum: 1, or the number of ranks for a mean


class Compressor(ABC):
    """A way to sum arrays over all ranks that sends less than all of them."""

    @abstractmethod
    def exchange(self, x: FloatArray, call: Call) -> Exchange:
        """Sum `x`, a flat array of float32 or float64, over all ranks and divide it by `call.divisor`.

        `x` is overwritten by what was not sent. It is either finite, or NaN in all elements; then the result
        is NaN in at least one element, on all ranks.
        """


# -- some of the elements ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the largest elements of each rank by magnitude: `ratio` of them, at least one.

    Among equal magnitudes the elements that come first are sent.
    """

    ratio: float

    def __post_init__(self) -> None:
        """Refuse a ratio that keeps nothing, or more than all."""
        _check_ratio(self.ratio)

    def exchange(self, x: FloatArray, call: Call) -> Exchange:
        """See Compressor."""
        if x.size > 2**32:
            raise UsageError(f"top-k got an array of {x.size} elements; allowed: at most {2**32}")
        k = _kept(self.ratio, x.size)
        chosen = largest(x, k)
        mine = np.concatenate([chosen.astype(np.uint32).view(np.uint8), x[chosen].view(np.uint8)])
        x[chosen] = 0
        rows = yield Collective("all_gather", mine)
        total = np.zeros_like(x)
        with np.errstate(over="ignore"):  # the result tells
            for row in rows:  # by rank: every rank adds in this order
                total[row[: 4 * k].view(np.uint32)] += row[4 * k :].view(x.dtype)
        total /= call.divisor
        return total


def largest(x: FloatArray, k: int) -> npt.NDArray[np.intp]:
    """The places of the k largest magnitudes, in their order; equal ones from the left."""
    if k == x.size:
        return np.arange(k)
    magnitude = np.abs(x)
    least = np.partition(magnitude, x.size - k)[x.size - k]
    if np.isnan(least):  # then all are: none is larger than another
        return np.arange(k)
    above = np.flatnonzero(magnitude > least)
    equal = np.flatnonzero(magnitude == least)[: k - above.size]
    return np.sort(np.concatenate([above, equal]))


@dataclass(frozen=True)
class RandomK(Compressor):
    """Sends `ratio` of the elements, at least one: in each call a random one out of every 1/ratio neighbours.

    All ranks send the same elements: `seed`, the key of the array and the number of the call decide, which
    must be equal on all ranks.
    """

    ratio: float
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a ratio that keeps nothing, or more than all."""
        _check_ratio(self.ratio)

    def exchange(self, x: FloatArray, call: Call) -> Exchange:
        """See Compressor."""
        k = _kept(self.ratio, x.size)
        identity = zlib.crc32(f"{self.seed} {call.key!r} {call.number}".encode())
        chosen = stratified(x.size, k, identity)
        # Ranks that sum different elements would not notice: 12 bits, whose sum is exact for 4,096 ranks.
        tag = identity % 4096
        values = np.append(x[chosen], x.dtype.type(tag))
        x[chosen] = 0
        sums = yield Collective("all_reduce", values)
        if sums[-1] != tag * call.size:
            raise CollectiveMismatch(
                f"random-k call {call.number} of {call.key!r} met another one on another rank",
                next_step="use the same seed, and the same keys in the same order, on all ranks",
            )
        total = np.zeros_like(x)
        total[chosen] = sums[:-1]
        total /= call.divisor
        return total


def stratified(n: int, k: int, seed: int) -> npt.NDArray[np.int64]:
    """One random place out of each of k equal parts of n, in their order.

    Made from the raw stream of a counter-based generator, which is the same in every version of NumPy.
    """
    bounds = np.arange(k + 1, dtype=np.int64) * n // max(k, 1)
    raw = np.random.Philox(key=seed).random_raw(k) >> np.uint64(1)
    return bounds[:-1] + raw.astype(np.int64) % np.diff(bounds)


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise UsageError(f"ratio is {ratio}; allowed: above 0, at most 1")


def _kept(ratio: float, n: int) -> int:
    """How many of n elements are sent."""
    return min(n, max(1, round(ratio * n)))


# -- fewer bits of every element --------------------------------------------------------------------------


class Quantizer(Compressor):
    """Rounds what is sent: each rank sums one part of the array in float32, and sends the rounded sum to all.

    The error of the second rounding is left with the rank that made it.
    """

    def exchange(self, x: FloatArray, call: Call) -> Exchange:
        """See Compressor."""
        part = self.part(-(-x.size // call.size))
        padded = np.zeros((call.size, part), x.dtype)
        padded.reshape(-1)[: x.size] = x
        mine = self.encode(padded)
        with np.errstate(invalid="ignore"):  # what overflows is infinite, and the result tells
            x -= self.decode(mine, x.dtype).reshape(-1)[: x.size]
        rows = yield Collective("all_to_all", mine)
        with np.errstate(invalid="ignore", over="ignore"):
            own = self.decode(rows, x.dtype).sum(axis=0) / call.divisor
            coded = self.encode(own[None])
            left = x[call.rank * part : (call.rank + 1) * part]
            left += ((own - self.decode(coded, x.dtype)[0]) * call.divisor)[: left.size]
        results = yield Collective("all_gather", coded[0])
        return self.decode(results, x.dtype).reshape(-1)[: x.size]

    @abstractmethod
    def encode(self, rows: FloatArray) -> Bytes:
        """Each row as bytes."""

    @abstractmethod
    def decode(self, rows: Bytes, dtype: np.dtype[Any]) -> FloatArray:
        """The values of encoded rows."""

    def part(self, count: int) -> int:
        """How many elements a part has that holds `count`."""
        return count


class _Half(Quantizer):
    dtype: ClassVar[DType]

    def encode(self, rows: FloatArray) -> Bytes:
        """16 bits each."""
        bits = np.empty(rows.shape, np.uint16)
        with np.errstate(over="ignore"):
            narrow(np.ascontiguousarray(rows, np.float32), bits, self.dtype)
        return bits.view(np.uint8)

    def decode(self, rows: Bytes, dtype: np.dtype[Any]) -> FloatArray:
        """Exact."""
        bits = np.ascontiguousarray(rows)
        return widen(bits, self.dtype).reshape(len(rows), -1).astype(dtype, copy=False)


@dataclass(frozen=True)
class Float16(_Half):
    """Sends float16: 11 significant bits; a part of a sum beyond 65,504 becomes infinite."""

    dtype: ClassVar = DTYPES["float16"]


@dataclass(frozen=True)
class BFloat16(_Half):
    """Sends bfloat16: 8 significant bits, and the range of float32."""

    dtype: ClassVar = BFLOAT16


# Elements that share a scale: 0.4 % more bytes, and a large element costs only its neighbours precision.
_BLOCK: Final = 1024


@dataclass(frozen=True)
class Int8(Quantizer):
    """Sends 8-bit integers, and for every 1,024 of them the scale that makes the largest 127.

    Nothing is added as integers, so no sum overflows.
    """

    def encode(self, rows: FloatArray) -> Bytes:
        """The scales, then the integers."""
        blocks = rows.reshape(len(rows), -1, max(1, min(_BLOCK, rows.shape[1])))
        # A NaN makes its scale NaN, and so the whole block.
        with np.errstate(invalid="ignore", over="ignore"):
            scales = (np.abs(blocks).max(axis=2) / 127).astype(np.float32)
            units = blocks / np.where(scales == 0, 1, scales)[:, :, None].astype(rows.dtype)
            # Clipped: a subnormal scale may be rounded down.
            integers = np.clip(np.rint(units, out=units), -127, 127, out=units).astype(np.int8)
        flat = [each.reshape(len(rows), -1).view(np.uint8) for each in (scales, integers)]
        return np.concatenate(flat, axis=1)

    def decode(self, rows: Bytes, dtype: np.dtype[Any]) -> FloatArray:
        """Integers times their scales."""
        nbytes = rows.shape[1]
        count = nbytes // (_BLOCK + 4) if nbytes >= _BLOCK + 4 else min(1, nbytes)
        scales = np.ascontiguousarray(rows[:, : 4 * count]).view(np.float32).astype(dtype)
        integers = rows[:, 4 * count :].view(np.int8).reshape(len(rows), count, -1 if count else 1)
        with np.errstate(invalid="ignore"):
            values: FloatArray = integers * scales[:, :, None]
        return values.reshape(len(rows), -1)

    def part(self, count: int) -> int:
        """Whole blocks, or less than one."""
        return count if count <= _BLOCK else -(-count // _BLOCK) * _BLOCK
