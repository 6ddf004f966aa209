"""Starts tests/native/quic_member.cpp: a peer in a QUIC world that sends the bytes that a test gives it."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.support.native_programs import built

from unisono.backends.native.card import Card, Credentials

__all__ = ["CONTROL_STREAM", "DATA_STREAM", "MESSAGES_STREAM", "QuicMember"]

CONTROL_STREAM, MESSAGES_STREAM, DATA_STREAM = 0, 1, 2  # native/link/quic_connection.hpp: QuicStream


class QuicMember:
    """A link from `rank` to the engine that a card names; with `is_deaf` the process never reads from it."""

    def __init__(
        self, card: Card, shown: Credentials, rank: int, to: int, size: int, *, is_deaf: bool = False
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (
                ("key.pem", shown.key_pem),
                ("certificate.pem", shown.certificate_pem),
                ("authority.pem", shown.authority_pem),
                ("names", "\n".join(shown.names).encode()),
            ):
                Path(folder, name).write_bytes(text)
            words = [rank, size, to, card.address, card.port, folder, *(["deaf"] if is_deaf else [])]
            self.process = subprocess.Popen(
                [built("quic_member"), *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self.process.stdout is not None
            said = self.process.stdout.readline()
        assert said == b"linked\n", said

    def send(self, data: bytes, stream: int = MESSAGES_STREAM) -> None:
        """Send any bytes; a link that has ended is not an error."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(struct.pack("<BI", stream, len(data)) + data)
            self.process.stdin.flush()

    def ending(self) -> str:
        """Wait until the other side closes the connection; return the reason."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline().decode()
        assert said.startswith("closed: "), said
        return said

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with contextlib.suppress(OSError):
            self.process.communicate()
