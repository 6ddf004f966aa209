"""Makes the first inputs of every decoder: one message of each kind, as a correct peer sends it.

    python -m tests.fuzz.corpus

Inputs that fuzzing finds are added to the folders by hand, under names that say what they showed.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import numpy as np
from tests.fuzz import rpc_frames
from tests.fuzz.decoders import CORPUS, NONCE, TOKEN

from unisono.backends.native.card import Card
from unisono.bootstrap import protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.ticket import Ticket
from unisono.comm.control_messages import (
    CallReport,
    DeadlockFound,
    Goodbye,
    Goodbyes,
    GroupFailure,
    Marker,
    ServiceFound,
    ServiceMissing,
    ServiceQuery,
    StallQuery,
    StallReply,
    WaitQuery,
    WaitReport,
)
from unisono.comm.deadlock import RankState, Wait
from unisono.comm.fingerprint import FORGOTTEN, described, fingerprint_of
from unisono.core import codec
from unisono.core.dtypes import DTYPES
from unisono.core.envelope import Lane, Status
from unisono.errors import PeerLost
from unisono.rpc.objects import Reference

# native/wire/frame.hpp: Kind
EAGER, RTS, CTS, DATA, FIN, CREDIT, QUEUED, WITHDRAW, HEARTBEAT, GOODBYE, DOWN = range(2, 13)
FIRST_RENDEZVOUS_ID = 1 << 32  # the first use of the first slot


def frame(
    kind: int,
    *,
    context: int = 0,
    tag: int = 0,
    nbytes: int = 0,
    body: bytes = b"",
    header: int = 0,
    dtype: int = 255,
    flags: int = 0,
    lines: bool = False,
) -> bytes:
    """A frame; in a ring it is padded to whole cache lines."""
    size = -(-(32 + len(body)) // 64)
    word = kind | flags << 8 | (size << 16 if lines else 0)
    whole = struct.pack("<IBBHQQQ", word, dtype, 0, header, context, tag, nbytes) + body
    return whole.ljust(64 * size, b"\0") if lines else whole


def frames(lines: bool) -> dict[str, bytes]:
    """Frames that fit the operations that the harness has under way."""
    rendezvous_id = struct.pack("<Q", FIRST_RENDEZVOUS_ID)
    rts = rendezvous_id + struct.pack("<Q", 0x1000)

    def make(kind: int, **fields: int | bytes) -> bytes:
        return frame(kind, lines=lines, **fields)  # type: ignore[arg-type]

    return {
        "eager": make(EAGER, context=1, tag=0, nbytes=8, body=b"headbytes_8b", header=4),
        "eager-confirmed": make(EAGER, context=1, tag=2, nbytes=4, body=rendezvous_id + b"four", flags=1),
        "eager-unexpected": make(EAGER, context=7, tag=2, nbytes=4, body=b"four"),
        "eager-queue": make(EAGER, context=7, nbytes=4, body=b"four") * 9,
        "rts": make(RTS, context=1, tag=0, nbytes=200, body=rts),
        "rts-late": make(RTS, context=1, tag=1, nbytes=200, body=rts),
        "rts-data": make(RTS, context=1, tag=0, nbytes=200, body=rts)
        + make(DATA, context=FIRST_RENDEZVOUS_ID, tag=0, nbytes=120, body=bytes(120))
        + make(DATA, context=FIRST_RENDEZVOUS_ID, tag=120, nbytes=80, body=bytes(80)),
        "rts-empty": make(RTS, context=1, tag=0, nbytes=0, body=rts),
        "rts-withdraw": make(RTS, context=7, nbytes=200, body=rts)
        + make(WITHDRAW, context=FIRST_RENDEZVOUS_ID),
        "cts": make(CTS, context=FIRST_RENDEZVOUS_ID),
        "fin": make(FIN, context=FIRST_RENDEZVOUS_ID, dtype=0),
        "fin-withdrawn": make(FIN, context=FIRST_RENDEZVOUS_ID + 1, dtype=1),
        "credit": make(CREDIT, nbytes=64, dtype=0),
        "queued": make(QUEUED, context=FIRST_RENDEZVOUS_ID),
        "heartbeat": make(HEARTBEAT) * 3,
        "goodbye": make(GOODBYE),
        "down": make(DOWN, context=0, dtype=1, body=b"silent for 2.6 s", header=16),
    }


def all_seeds() -> dict[str, dict[str, bytes]]:
    """The inputs of every decoder, by name."""
    hello = struct.pack("<8sIIIIBBB5xQ32s", b"unisono\n", 2, 2, 1, 0, 0, 0, 0, 256 * 1024, NONCE)
    client = protocol.JoinClient(TOKEN, protocol.NO_BINDING, NONCE)
    request = protocol.Request(
        1, 4, "0.1.0", "digest", {"shm": "True"}, b"card", b"csr", "host", 812, "instance"
    )
    member = protocol.Member(0, 1, b"card", "host", 812, "127.0.0.1")
    replies = {
        "refused": protocol.Refused("too late", "taken late"),
        "status": protocol.Status("2 of 4"),
        "admitted": protocol.Admitted("job", 1, b"pem", b"pem"),
        "members": protocol.Members([member, member]),
        "store": protocol.Store(29500),
    }
    control = {
        "group_failure": GroupFailure.of(PeerLost("rank 3 is lost", ranks=(3,), cause="silent"), 1),
        "abort": GroupFailure(2, "ValueError", "no", "because", is_abort=True),
        "goodbye": Goodbye(1, Lane.BULK, {4: CallReport(bytes(range(16)), "all_reduce", "here.py:1")}),
        "goodbyes": Goodbyes((5, 2**64 - 1), Lane.CONTROL),
        "stall_query": StallQuery(1, 9, bytes(range(16))),
        "stall_reply": StallReply(1, 9, True, (2, 3)),
        "service_query": ServiceQuery(7, "worker", {1: 5, 9: 0}),
        "service_found": ServiceFound(7, ""),
        "service_missing": ServiceMissing(7),
        "wait_query": WaitQuery(3, (0, 1)),
        "wait_report": WaitReport(3, True, RankState(1, (Wait(5, "recv", 1, (0,)),), next_sequences={1: 4})),
        "marker": Marker(0, 3),
        "deadlock_found": DeadlockFound((5,), "rank 1 waits for rank 0 in recv"),
    }
    tickets = {
        "plain": Ticket(Address("127.0.0.1", 4711), b"", TOKEN),
        "pinned": Ticket(Address("::1", 4711), bytes(range(32)), TOKEN),
    }
    objects = {
        "plain": {"a": [1, 2.5, None, True, "text", b"bytes"], "b": (1, (2, 3))},
        "arrays": [np.arange(5), np.ones((2, 3), np.float32), np.zeros((0, 4), np.complex64)],
        "deep": [[[[[[]]]]]],
        "rare": [
            2**70,
            1j,
            {1},
            frozenset({2}),
            np.float32(1),
            Status(1, 2, 3),
            Reference(1, "Store", 7),
            bytearray(3),
        ],
        "long": ["t" * 4096, b"b" * 300, {i: -i for i in range(-300, 0)}, np.arange(700.0)],
    }
    in_parts = {
        "blobs": [["t" * 300, b"b" * 300, np.arange(70)], {"k": bytearray(257)}],
        "none": {"a": (1, 2)},
    }
    ring = bytes(16)
    return {
        "tcp": {
            f"{name}-{lane}": bytes([lane]) + data
            for name, data in frames(lines=False).items()
            for lane in (0, 1)
        },
        "ring": {name: ring + data for name, data in frames(lines=True).items()}
        | {
            "control": b"\1" + ring[1:] + frames(lines=True)["heartbeat"],
            "head": b"\2\0" + struct.pack("<QIBB", 1 << 40, 0, 0, 0) + frames(lines=True)["eager"],
            "wants-room": b"\4\0" + struct.pack("<QIBB", 0, 1, 0, 0) + frames(lines=True)["eager"],
            "claimed": b"\x08\0" + struct.pack("<QIBB", 0, 3, 0, 0) + frames(lines=True)["rts"],
            "withdrawn": b"\x10\0" + struct.pack("<QIBB", 0, 5, 0, 0) + frames(lines=True)["fin"],
            "wrap": ring + frame(1, lines=True),
        },
        "connector": {
            "hello": b"\0" + hello,
            "hello-sound": b"\1" + bytes(88),
            "introduction": b"\2" + bytes(56) + b"more",
            "challenge": b"\3" + bytes(64),
            "reply": b"\4" + bytes(64) + struct.pack("<IIQ16s", 0, 0, 0, b""),
            "reply-leaving": b"\4" + bytes(64) + struct.pack("<IIQ16s", 4, 0, 0, b""),
        },
        "ticket": {name: each.text().encode() for name, each in tickets.items()},
        "join": {
            "stranger": b"\0" + client.hello() + client.proof(client.hello()),
            "altered": b"\1" + struct.pack(">I32s", 5, bytes(32)) + b"hello",
            "request": b"\2" + protocol.encode(request),
            "ended": b"\2" + protocol.encode(protocol.Ended(1, "exit code 0", 0.5)),
            "arrival": b"\2" + protocol.encode(protocol.Arrival(1, "instance")),
            "greeting": b"\3" + client.hello(),
            "outcome": b"\4" + protocol.NO_ENTRY,
        }
        | {name: b"\5" + protocol.encode(reply) for name, reply in replies.items()},
        "control": {name: msgspec.msgpack.encode(each) for name, each in control.items()},
        "mismatch": {
            "calls": _calls("all_gather int32[2,3] algorithm=ring", "all_gather int32[3,2]"),
            "words": _calls("", ""),
        },
        "card": {"card": msgspec.msgpack.encode(Card("host", "/tmp/r0.sock", "127.0.0.1", 4711))},
        "typed": {name: codec.pack(each) for name, each in objects.items()},
        "parts": {name: _in_parts(*codec.pack_parts(each, None, 256)) for name, each in in_parts.items()},
        "frame": {f"{number:02}": data for number, data in enumerate(rpc_frames.corpus())},
    }


def _calls(*words: str) -> bytes:
    """Input of the decoder `mismatch`: calls that differ, one of them without its words."""
    records = [
        fingerprint_of("all_gather", described(DTYPES["int32"], (6,), (2 + rank, 3)), None, "ring", 0, 0, ())
        for rank in range(len(words))
    ]
    calls = [record + bytes([len(text)]) + text.encode() for record, text in zip(records, words, strict=True)]
    return b"".join(calls) + FORGOTTEN + b"\0"


def _in_parts(head: bytes, blobs: list[memoryview]) -> bytes:
    """Input of the decoder `parts`."""
    pieces = [head, *blobs]
    lengths = [struct.pack("<H", len(piece)) for piece in pieces[:-1]]
    return b"".join([bytes([len(lengths)]), *lengths, *pieces])


def write(folder: Path = CORPUS) -> None:
    for decoder, seeds in all_seeds().items():
        (folder / decoder).mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (folder / decoder / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    write()
