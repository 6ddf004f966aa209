"""Fuzzes the decoders in Python: tickets, joins, control messages, cards and the typed codec.

    python -m tests.fuzz.decoders [inputs] [seed] [decoder ...]

Each input is a file of tests/corpus/<decoder>, changed at random; the same seed gives the same inputs. A
decoder returns a value or raises one of its named errors; anything else is a failure, and so is growing
memory.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.rpc_frames import fill

from unisono import _native
from unisono.bootstrap import protocol
from unisono.bootstrap.limits import REQUEST_BYTES_MAX
from unisono.bootstrap.ticket import Ticket
from unisono.comm.control_messages import CallReport, GroupFailure, decode
from unisono.comm.mismatch import Mismatch
from unisono.comm.world import card_of
from unisono.core import codec
from unisono.errors import ProtocolError, UsageError
from unisono.messaging.stage import FINGERPRINT_BYTES
from unisono.rpc.frame import arguments_of, open_frame, texts_of

CORPUS = Path(__file__).parent.parent / "corpus"
TOKEN, NONCE = bytes(range(32)), bytes(range(100, 132))
_ODD = [0, 1, 63, 64, 127, 128, 255, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1]


def ticket(data: bytes) -> None:
    """The text of a ticket."""
    Ticket.parse(data.decode("utf-8", "surrogateescape"), insecure=True)


def join(data: bytes) -> None:
    """Both sides of a join; the first byte selects the step of the protocol."""
    mode, rest = (data[0] % 6 if data else 0), data[1:]
    client = protocol.JoinClient(TOKEN, protocol.NO_BINDING, NONCE)
    server = protocol.JoinServer(TOKEN, protocol.NO_BINDING, NONCE)
    match mode:
        case 0:
            for piece in (rest[: len(rest) // 2], rest[len(rest) // 2 :]):
                server.receive(piece)
        case 1 | 2:
            server.receive(client.hello() + client.proof(client.hello()))
            assert server.frames is not None
            if mode == 2:
                key = protocol._proof(TOKEN, b"frames", NONCE + NONCE, protocol.NO_BINDING)
                rest = protocol.Frames(key, b"worker", b"seed", REQUEST_BYTES_MAX).seal(rest) + rest
            for body in server.receive(rest)[1]:
                protocol.parse_request(body)
        case 3:
            client.proof(rest)
        case 4:
            client.proof(client.hello())
            client.frames(rest)
        case 5:
            protocol.parse_reply(rest)


def control_message(data: bytes) -> None:
    """A control message."""
    message = decode(data)
    if isinstance(message, GroupFailure):
        str(message.error(3))


def mismatch(data: bytes) -> None:
    """The calls of ranks in one report: for each its record, a length byte and the words."""
    found, rank = Mismatch(9), 0
    while len(data) > FINGERPRINT_BYTES:
        record, length, data = (
            data[:FINGERPRINT_BYTES],
            data[FINGERPRINT_BYTES],
            data[FINGERPRINT_BYTES + 1 :],
        )
        _native.fingerprint_fields(record)
        found.add({rank: CallReport(record, data[:length].decode(errors="replace"), "here.py:1")})
        data, rank = data[length:], rank + 1
    error = found.error(tuple(range(rank + 1)), 0, "world", 0)
    assert str(error).isprintable()


def card(data: bytes) -> None:
    """A card."""
    card_of(data)


def typed(data: bytes) -> None:
    """An object of the typed codec, in memory that arrays may keep, and in memory that they must copy."""
    for given in (data, bytearray(data)):
        codec.unpack(given)


def parts(data: bytes) -> None:
    """The same in parts: first the lengths of the head and of each blob but the last, each a u16."""
    count = data[0] % 8 if data else 0
    rest, pieces = data[1 + 2 * count :], []
    for i in range(count):
        length = int.from_bytes(data[1 + 2 * i : 3 + 2 * i], "little")
        pieces.append(rest[:length])
        rest = rest[length:]
    head, *blobs = [*pieces, rest]
    for kind in (bytes, bytearray):
        codec.unpack_parts(head, [kind(blob) for blob in blobs])


def frame(data: bytes) -> None:
    """A frame of an agent, and the memory that it asks for."""
    said = open_frame(data)
    if said.blob_bytes >= 1 << 20:
        return
    memory = _native.frame_memory(data)
    fill([memoryview(each) for each in memory], random.Random(data))
    arguments_of(_native.frame_value(data, memory))
    texts_of(said, 4)


DECODERS: dict[str, tuple[Callable[[bytes], None], tuple[type[BaseException], ...]]] = {
    "ticket": (ticket, (UsageError,)),
    "join": (join, (ProtocolError, protocol.WrongToken)),
    "control": (control_message, (ProtocolError,)),
    "mismatch": (mismatch, ()),
    "card": (card, (ProtocolError,)),
    "typed": (typed, (ProtocolError,)),
    "parts": (parts, (ProtocolError,)),
    "frame": (frame, (ProtocolError,)),
}


def seeds(name: str) -> list[bytes]:
    """The corpus of a decoder."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def feed(name: str, data: bytes) -> None:
    """Run a decoder, which may raise only its named errors."""
    decode, refusals = DECODERS[name]
    try:
        decode(data)
    except refusals:
        return


def mutated(corpus: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Changed inputs without end."""
    while True:
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randrange(5)):
            _change(data, corpus, rng)
        yield bytes(data[:8192])


def _change(data: bytearray, corpus: list[bytes], rng: random.Random) -> None:
    if not data:
        data += rng.randbytes(1 + rng.randrange(64))
        return
    at = rng.randrange(len(data))
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.randrange(256)
        case 2:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(_ODD) % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
        case 3:
            del data[at:]
        case 4:
            other = rng.choice(corpus)
            data += other[rng.randrange(len(other) + 1) :]
        case 5:
            data[at:at] = data[at : at + rng.randrange(64)]
        case 6:
            del data[at : at + rng.randrange(64)]


def main(inputs: int = 1_000_000, seed: int = 1, names: list[str] | None = None) -> None:
    for name in names or DECODERS:
        stream = mutated(seeds(name), random.Random(f"{name} {seed}"))
        begun, before = time.monotonic(), 0
        for i in range(inputs):
            data = next(stream)
            try:
                feed(name, data)
            except BaseException:
                print(f"{name}: input {i} of seed {seed}: {data.hex()}", file=sys.stderr)
                raise
            if i == inputs // 2:
                before = _peak_kib()
        grown = _peak_kib() - before
        print(f"{name}: {inputs} inputs in {time.monotonic() - begun:.0f} s, peak memory grew by {grown} KiB")
        assert grown < 8 << 10, "memory grows"


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    given: list[Any] = sys.argv[1:]
    main(*(int(word) for word in given[:2]), names=given[2:])
