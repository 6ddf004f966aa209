"""Native ranks in processes: messages of every length, floods, and what comes to their listeners."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.support.member import HELLO, exactly
from tests.support.native_processes import LINKS, DownReports, Ranks, done, exchange, ramp, ranks
from tests.support.native_ranks import CONTEXT, PATIENCE_S, ended
from tests.support.ranks import IS_SANITIZED

from unisono.backends.native.backend import NativeBackend
from unisono.core.request import Request
from unisono.errors import BackendUnavailable, PeerLost

__all__ = ["ranks"]


# -- without failures -------------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.parametrize("links", LINKS)
def test_every_length_crosses_between_processes(ranks: Ranks, links: str) -> None:
    ranks.start(
        exchange, 3, [0, 1, 7, 63, 64, 65, 16383, 16384, 16385, 262143, 262145, 1048583, 9000011], links=links
    )
    kinds = {"shm": "shm+read", "rings": "shm", "tcp": "tcp", "tls": "tcp+tls", "quic": "quic"}
    for rank in range(3):
        seen = ranks.get(rank)
        assert seen[rank] == "self"
        # A faster rank has left by now.
        assert {seen[p] for p in range(3) if p != rank} <= {kinds[links], "down"}


def test_eight_ranks_share_two_cores(ranks: Ranks) -> None:
    ranks.start(exchange, 8, [0, 9, 1000, 20001, 300007] * 5)
    for rank in range(8):
        ranks.get(rank)


def flood(backend: NativeBackend, pipe: Connection, count: int) -> int:
    """Rank 0 sends as fast as it can, and rank 1 receives slowly: memory stays bounded on both sides."""
    piece = memoryview(ramp(0, 4096))
    if backend.rank == 0:
        window: list[Request] = []
        for _ in range(count):
            window.append(backend.start_send(1, CONTEXT, 0, piece))
            if len(window) > 200:
                done(backend, window.pop(0))
        for request in window:
            done(backend, request)
    else:
        time.sleep(0.3)  # let messages pile up
        into = memoryview(bytearray(4096))
        for _ in range(count):
            done(backend, backend.start_recv(0, CONTEXT, 0, into))
            assert into == piece
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


@pytest.mark.parametrize("links", LINKS)
def test_a_flood_does_not_grow_memory(ranks: Ranks, links: str) -> None:
    ranks.start(flood, 2, 12_000, links=links)  # 48 MB
    rss = [ranks.get(0), ranks.get(1)]
    assert IS_SANITIZED or max(rss) < 90_000, f"{rss} KiB"


# -- at the listener --------------------------------------------------------------------------------------


def test_a_peer_that_does_not_know_the_secret_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    a = NativeBackend(0, 2, str(tmp_path), b"one secret")
    b = NativeBackend(1, 2, str(tmp_path), b"another")
    try:
        cards = [a.card(), b.card()]
        b.connect(cards)
        error = ended(b, b.start_send(0, CONTEXT, 0, memoryview(b"x"))).error
        assert isinstance(error, PeerLost)
        assert "secret" in str(error)
    finally:
        a.close()
        b.close()


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(BackendUnavailable, match="0700"):
        NativeBackend(0, 1, str(tmp_path), b"secret")


def test_garbage_at_the_listener_is_dropped(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ranks = [NativeBackend(r, 2, str(tmp_path), b"secret", neighbours=False) for r in range(2)]
    try:
        cards = [rank.card() for rank in ranks]
        for junk in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(72), os.urandom(5000)):
            with socket.create_connection((cards[0].address, cards[0].port)) as stranger:
                stranger.settimeout(10)
                # The listener may close the connection at any of these, but must send nothing.
                with contextlib.suppress(OSError):
                    stranger.sendall(junk)
                    stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(10) == b""
        for rank in ranks:
            rank.connect(cards)
        done(ranks[0], ranks[0].start_send(1, CONTEXT, 0, memoryview(b"hello")))
        assert done(ranks[1], ranks[1].start_recv(0, CONTEXT, 0, None)).data == b"hello"
    finally:
        for rank in ranks:
            rank.close()


def test_a_rank_that_is_dropped_leaves(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ranks = [NativeBackend(r, 2, str(tmp_path), b"secret") for r in range(2)]
    cards = [rank.card() for rank in ranks]
    for rank in ranks:
        rank.connect(cards)
    done(ranks[0], ranks[0].start_send(1, CONTEXT, 0, memoryview(b"x")))
    done(ranks[1], ranks[1].start_recv(0, CONTEXT, 0, None))
    survivor = ranks.pop(0)
    reports = DownReports(survivor)
    ranks.clear()
    del rank
    assert reports.wait(1)[0].left
    survivor.close()
    assert threading.active_count() < 10


CROSSING = 1  # connect/connector.hpp: Admission


@pytest.mark.parametrize("medium", ["shm", "tcp"])
def test_a_rank_that_dies_after_it_confirmed_its_call_is_lost_at_once(tmp_path: Path, medium: str) -> None:
    """Both ranks call at once: rank 0 refuses our call in favour of its own, and dies before that arrives."""
    tmp_path.chmod(0o700)
    secret, is_unix = b"secret", medium == "shm"
    survivor = NativeBackend(1, 2, str(tmp_path), secret, shm=is_unix)
    with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(tmp_path / "zero.sock") if is_unix else ("127.0.0.1", 0))
        listener.listen()
        card = survivor.card()
        zero = (
            card._replace(unix_path=str(tmp_path / "zero.sock"))
            if is_unix
            else card._replace(port=listener.getsockname()[1])
        )
        try:
            reports = DownReports(survivor)
            survivor.connect([zero, card])
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(PATIENCE_S)
                refuse_for_our_own_call(caller, secret)
                assert 0 not in reports.by_rank, "its call may still arrive"
                hung_up_at = time.monotonic()
            down, at = reports.wait(0)
            assert down.cause == "died: its connection was closed"
            assert at - hung_up_at < 1
        finally:
            survivor.close()


def refuse_for_our_own_call(caller: socket.socket, secret: bytes) -> None:
    """The acceptor's side of a handshake, as in native/connect/handshake.hpp."""
    said, nonce = exactly(caller, HELLO.size), os.urandom(32)
    caller.sendall(nonce + hmac.digest(secret, b"acceptor" + said + nonce, "sha256"))
    introduction, fds, _, _ = socket.recv_fds(caller, 56, 2)
    for fd in fds:
        os.close(fd)
    assert introduction[:32] == hmac.digest(secret, b"opener" + said + nonce, "sha256")
    caller.sendall(struct.pack("<II24x", CROSSING, 0))
