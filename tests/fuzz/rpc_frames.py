"""Frames of agents: valid ones, and the same changed at random."""

from __future__ import annotations

import random

import numpy as np

from unisono.rpc.frame import ACK, ANSWER, ASK, CANCEL, GOODBYE, ITEM, MORE, UNWANTED, failure, pack, short

__all__ = ["corpus", "fill", "mutated"]

_GOODBYE = short(GOODBYE, value=("",))


def corpus() -> list[bytes]:
    """One frame of every kind, and of every form in which a value is sent."""
    plain = ((1, "two", 3.0, None, b"4"), {})
    rare = ((np.arange(5), (1, 2)), {"k": 2**70})
    blobs = ((np.arange(50_000), np.arange(3), "ü" * 20_000), {})
    detached = ((list(range(1000)), ["x" * 200] * 99), {})
    both = ((list(range(9000)),), {"k": [b"x" * 20_000, bytearray(20_000), "t" * 20_000]})
    many = ([np.zeros(16_000, np.uint8)] * 257,)
    packed = [
        pack(ASK, 5, 5, plain, None, "echo", 30.0),
        pack(ASK, 0, 6, ((), {}), None, "echo"),
        pack(ASK, 7, 7, rare, None, "echo", 1.5),
        pack(ASK, 8, 8, blobs, None, "echo"),
        pack(ASK, 10, 10, detached, None, "echo"),
        pack(ASK, 12, 12, both, None, "echo"),
        pack(ASK, 14, 14, ((5,), {}), None, "count", None, 16),
        pack(ANSWER, 1, 21, [1, {"a": None}]),
        pack(ANSWER, 2, 22, rare),
        pack(ANSWER, 2, 23, both),
        pack(ANSWER, 2, 24, many),
        pack(ITEM, 15, 25, 1.5, None, count=0),
        pack(ITEM, 16, 26, blobs, None, count=1),
    ]
    short_ones = [
        failure(3, "raised", "text", "ValueError", "trace"),
        short(MORE, 14, count=8),
        short(CANCEL, 5),
        short(ACK, count=32),
        short(UNWANTED, count=9),
        _GOODBYE,
    ]
    return [data for data, _, _ in packed] + short_ones


_BLOBS = [
    bytes(blob)
    for value in ((list(range(9000)), {"k": b"x" * 20_000}), (["x" * 200] * 99,), "ü" * 20_000)
    for blob in pack(ANSWER, 1, 1, value)[2]
]


def fill(memory: list[memoryview], draw: random.Random) -> None:
    """Blobs as agents send them, cut or padded to the length in their frame, some with bytes changed."""
    for view in memory:
        blob = bytearray(draw.choice(_BLOBS)[: view.nbytes].ljust(view.nbytes, b"\0"))
        for _ in range(draw.choice((0, 0, 1, 3))):
            blob[draw.randrange(min(len(blob), 200))] ^= 1 << draw.randrange(8)
        view[:] = blob


def mutated(draw: random.Random, seeds: list[bytes]) -> bytes:
    """A frame with bytes changed, cut, duplicated or mixed with another frame's; never a valid goodbye."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data)) if data else 0
        match draw.randrange(5):
            case 0 if data:
                data[at] = draw.randrange(256)
            case 1 if data:
                data[at] ^= 1 << draw.randrange(8)
            case 2:
                del data[at : at + draw.randrange(1, 9)]
            case 3:
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
            case _:
                other = draw.choice(seeds)
                data[at:] = other[draw.randrange(len(other)) :]
    return b"" if data[:1] == _GOODBYE[:1] else bytes(data)
