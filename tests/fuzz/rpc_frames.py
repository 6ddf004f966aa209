"""Frames of agents: valid ones, and the same changed at random."""

from __future__ import annotations

import random

import numpy as np

from unisono.rpc.wire import (
    Ack,
    Answer,
    Ask,
    Cancel,
    Failure,
    Goodbye,
    Item,
    More,
    Packed,
    PackedAnswer,
    PackedAsk,
    PackedItem,
    encode,
    pack,
)

__all__ = ["corpus", "mutated"]


def corpus() -> list[bytes]:
    """One frame of every kind, and of every form of a value."""
    inline, _ = pack([[np.arange(5), (1, 2)], {"k": 2**70}])
    long, _ = pack([[np.arange(50_000), np.arange(3)], {}])
    piece, _ = pack([["x" * 5000], {}])
    both, _ = pack([list(range(1000)), {"k": [b"x" * 20_000, bytearray(20_000), "t" * 20_000]}])
    frames = [
        Ask(5, "echo", 30.0, [1, "two", 3.0, None, b"4"]),
        Ask(0, "echo", None, []),
        PackedAsk(6, "echo", 1.5, 7, inline),
        PackedAsk(8, "echo", None, 9, long),
        PackedAsk(10, "echo", None, 11, piece),
        PackedAsk(12, "echo", None, 13, Packed(b"", [1 << 40], b"\0", 5)),
        Answer(1, [1, {"a": None}]),
        PackedAnswer(2, 3, inline),
        PackedAnswer(2, 3, long),
        PackedAnswer(2, 3, both),
        Failure(3, "raised", "text", "ValueError", "trace"),
        Cancel(5),
        Ack(32),
        Goodbye(),
        Ask(14, "count", None, [5], 16),
        Item(15, 0, 1.5),
        PackedItem(16, 1, 17, inline),
        More(14, 8),
    ]
    return [encode(frame) for frame in frames]


def mutated(draw: random.Random, seeds: list[bytes]) -> bytes:
    """A frame with bytes changed, cut, doubled or mixed with another's; never a valid goodbye."""
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
    return b"" if bytes(data) == encode(Goodbye()) else bytes(data)
