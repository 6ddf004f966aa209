"""A relay that loses, duplicates, delays, damages and replays datagrams, and can change its addresses.

The relay runs in its own process, so that the ranks' interpreters do not slow it down.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import random
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

__all__ = ["Relay", "Weather", "relay"]


@dataclass
class Weather:
    """Which share of the datagrams, in both directions, suffers each fault."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    flipped: float = 0.0  # one bit
    replayed: float = 0.0  # an earlier datagram follows it


@dataclass
class Relay:
    """The opener sends to `port`."""

    port: int
    _pipe: Connection

    def forward_to(self, port: int) -> None:
        self._pipe.send(port)

    def rebind(self) -> None:
        """Change the address of the opener as the acceptor sees it."""
        self._pipe.send("rebind")

    def move(self) -> None:
        """Change the address of the acceptor as the opener sees it; the old address no longer works."""
        self._pipe.send("move")


@contextlib.contextmanager
def relay(seed: int, weather: Weather | None = None) -> Iterator[Relay]:
    ours, theirs = mp.Pipe()
    with _socket() as entry:
        process = mp.get_context("fork").Process(
            target=_serve, args=(entry, theirs, random.Random(seed), weather or Weather()), daemon=True
        )
        process.start()
        port: int = entry.getsockname()[1]
    try:
        yield Relay(port, ours)
    finally:
        process.kill()
        process.join()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    made.bind(("127.0.0.1", 0))
    return made


def _serve(entry: socket.socket, pipe: Connection, rng: random.Random, weather: Weather) -> None:
    acceptor = ("127.0.0.1", pipe.recv())
    opener: tuple[str, int] | None = None
    exit_ = _socket()
    kept: list[tuple[socket.socket, bytes, tuple[str, int]]] = []
    seen: list[tuple[bool, bytes]] = []
    while True:
        ready, _, _ = select.select([entry, exit_, pipe], [], [], 0.005 if kept else None)
        waiting, kept = kept, []
        if pipe in ready:
            if pipe.recv() == "move":
                entry = _socket()  # the old socket is closed
            else:
                exit_.close()
                exit_ = _socket()
            continue
        for source in ready:
            data, sender = source.recvfrom(65536)
            if source is entry:
                opener = sender
            target = (exit_, acceptor) if source is entry else (entry, opener)
            if target[1] is None or rng.random() < weather.lost:
                continue
            if rng.random() < weather.late:
                kept.append((target[0], data, target[1]))
                continue
            if rng.random() < weather.flipped:
                at = rng.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            for _ in range(2 if rng.random() < weather.doubled else 1):
                target[0].sendto(data, target[1])
            if weather.replayed:
                seen.append((source is entry, data))
                if rng.random() < weather.replayed:
                    is_openers, old = rng.choice(seen)
                    to = (exit_, acceptor) if is_openers else (entry, opener)
                    to[0].sendto(old, to[1])
        for sock, data, to in waiting:
            with contextlib.suppress(OSError):
                sock.sendto(data, to)
