"""QUIC links as a user chooses them, and what strangers find at their port."""

from __future__ import annotations

import contextlib
import hmac
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from tests.support.credentials import Issuer
from tests.support.hosts import Hosts, hosts
from tests.support.processes import forked, run_processes
from tests.support.relay import relay

import unisono as uni
from unisono import _native
from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import BackendUnavailable, UsageError
from unisono.messaging import strangers

__all__ = ["hosts"]

Make = Callable[..., list[NativeBackend]]

PATIENCE_S = 30.0
INITIAL_BYTES = 1200
SO_NO_CHECK = 11
LONG_HEADER_RETRY = 0xF0
STRANGERS_UNPROVEN_MAX = 16  # native/connect/quic_connector.cpp


def links_and_sum(comm: Communicator) -> tuple[str, set[str], float]:
    x = np.full(100_003, comm.rank + 1.0)
    comm.all_reduce(x)
    for peer in range(comm.size):
        comm.send(np.full(3, comm.rank), peer, 1)
    for peer in range(comm.size):
        comm.recv(np.zeros(3, np.int64), peer, 1)
    assert isinstance(comm.backend, NativeBackend)
    kinds = set(comm.backend.links()) - {"self"}
    comm.barrier()  # nobody has left so far
    return comm.backend.capabilities.name, kinds, float(x[7])


def test_backend_quic_uses_quic_between_all_ranks() -> None:
    assert uni.spawn(links_and_sum, 3, backend="quic") == [("quic", {"quic"}, 6.0)] * 3


def test_links_quic_keeps_shared_memory_within_a_host() -> None:
    (_, kinds, total), *_ = uni.spawn(links_and_sum, 2, config=Config(links="quic"))
    assert (kinds <= {"shm", "shm+read"}, total) == (True, 3.0)


def test_links_quic_without_shared_memory_are_quic() -> None:
    ended = uni.spawn(links_and_sum, 2, config=Config(links="quic", shm=False))
    assert ended == [("quic", {"quic"}, 3.0)] * 2


def test_ranks_that_choose_quic_themselves_get_certificates_from_the_launcher(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import unisono as uni\n"
        "with uni.init(backend='quic') as world:\n"
        "    total, links = world.all_reduce(world.rank + 1), sorted(set(world.backend.links()))\n"
        "    world.barrier()\n"
        "    print(total, links, flush=True)\n"
    )
    run = [sys.executable, "-m", "unisono", "run", "-n", "2", str(program)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] 3 ['quic', 'self']" for rank in range(2)]


def test_ranks_that_disagree_about_links_are_refused_by_name(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, unisono as uni\n"
        "links = 'quic' if os.environ['UNISONO_RANK'] == '0' else 'tcp'\n"
        "uni.init(config=uni.Config(links=links), timeout=10).close()\n"
    )
    run = [sys.executable, "-m", "unisono", "run", "-n", "2", str(program)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode != 0
    assert "its settings differ from rank 0's: links='tcp' (rank 0: 'quic')" in ended.stderr


@pytest.mark.parametrize(
    ("backend", "settings", "text"),
    [
        ("quic", {"links": "tcp"}, 'backend="quic" and links="tcp" contradict each other'),
        ("quic", {"insecure": True}, "QUIC is always encrypted"),
        ("native", {"iroh_streams": 2}, "iroh_streams for backend='native'"),
        ("quic", {"iroh_relay": "default"}, "iroh_relay for backend='quic'"),
    ],
)
def test_settings_that_contradict_the_backend_are_refused(
    backend: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError) as refused:
        uni.spawn(links_and_sum, 2, backend=backend, config=Config(**settings))
    assert text in str(refused.value)


def test_a_build_without_quic_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.backends.native import quic
    from unisono.bootstrap.address import Address
    from unisono.bootstrap.entry import ListenSpec
    from unisono.comm import world

    monkeypatch.setattr(_native, "has_quic", lambda: False)
    assert quic.DESCRIPTION.check() == quic.MISSING
    here = Address("127.0.0.1")
    listen = ListenSpec(0, 2, here, here, False, Path("/"), b"")
    with pytest.raises(BackendUnavailable) as refused:
        world._engine(listen, Config(links="quic"))
    for word in ("Debian", "Ubuntu", "Fedora", "libngtcp2-crypto-gnutls-dev", "ngtcp2-crypto-gnutls-devel"):
        assert word in str(refused.value)


# ---- strangers ----


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(size, issuer)`: connected ranks of this process, over QUIC."""
    tmp_path.chmod(0o700)
    made: list[NativeBackend] = []

    def start(size: int, issuer: Issuer, **how: Any) -> list[NativeBackend]:
        ranks = [
            NativeBackend(r, size, str(tmp_path), b"secret", shm=False, quic=True, neighbours=False, **how)
            for r in range(size)
        ]
        made.extend(ranks)
        cards = [rank.card() for rank in ranks]
        for rank in ranks:
            rank.connect(cards, issuer.credentials(rank.rank))
        return ranks

    yield start
    for backend in made:
        backend.close()


def exchanged(one: NativeBackend, other: NativeBackend, tag: int = 1) -> None:
    """A message each way, of which one is long."""
    data = (np.arange(300_001) * 7 + tag).astype(np.uint8)
    into = np.zeros_like(data)
    receive = other.start_recv(one.rank, 5, tag, memoryview(into))
    send = one.start_send(other.rank, 5, tag, memoryview(data))
    back = one.start_recv(other.rank, 5, tag, None)
    other.start_send(one.rank, 5, tag, memoryview(b"back"))
    ends = time.monotonic() + PATIENCE_S
    while not (receive.done and send.done and back.done):
        assert time.monotonic() < ends, "it hangs"
        time.sleep(0.001)
    assert np.array_equal(into, data)
    assert back.data == b"back"


@pytest.mark.parametrize("seed", range(3))
def test_garbage_at_the_port_changes_nothing(make: Make, seed: int) -> None:
    one, other = make(2, Issuer(2))
    rng = random.Random(seed)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for _ in range(2000):
            data = bytearray(rng.randbytes(rng.choice([1, 20, 64, 200, INITIAL_BYTES])))
            if rng.random() < 0.5:
                data[0] |= 0xC0  # a long header
            if rng.random() < 0.3:
                data[1:5] = b"\0\0\0\1"
            stranger.sendto(data, (one.card().address, one.card().port))
        exchanged(one, other)
        with pytest.raises(TimeoutError):  # nothing that it sent was worth an answer
            stranger.recv(2000)


def initial(rng: random.Random, destination: bytes | None = None) -> bytes:
    """The first datagram of a connection, which anybody can make: part of a TLS hello, with RFC 9001."""
    destination = rng.randbytes(8) if destination is None else destination
    secret = hmac.digest(bytes.fromhex("38762cf7f55934b34d179ae6a4c80cadccbb7f0a"), destination, "sha256")

    def expanded(key: bytes, label: str, nbytes: int) -> bytes:
        info = nbytes.to_bytes(2, "big") + bytes([6 + len(label)]) + b"tls13 " + label.encode() + b"\0"
        return HKDFExpand(SHA256(), nbytes, info).derive(key)

    client = expanded(secret, "client in", 32)
    key, iv, mask_key = (
        expanded(client, f"quic {name}", n) for name, n in (("key", 16), ("iv", 12), ("hp", 16))
    )
    head = b"\xc3\0\0\0\1\x08" + destination + b"\x08" + rng.randbytes(8) + b"\0"
    rest = INITIAL_BYTES - len(head) - 2
    head += (0x4000 | rest).to_bytes(2, "big") + bytes(4)
    hello = b"\x06\0\x40\x64" + b"\x01\0\x01\x90\x03\x03" + rng.randbytes(94)  # 100 bytes of 404
    body = AESGCM(key).encrypt(iv, hello.ljust(rest - 4 - 16, b"\0"), head)
    mask = Cipher(AES(mask_key), ECB()).encryptor().update(body[:16])
    masked = bytes([head[0] ^ mask[0] & 0x0F]) + head[1:-4] + mask[1:5]
    return masked + body


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_flood_of_first_datagrams_takes_bounded_memory_and_shuts_nobody_out(
    make: Make, is_sound: bool
) -> None:
    one, other = make(2, Issuer(2))
    rng = random.Random(3)
    retries = others_bytes = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        before = resident_bytes()
        sent: list[bytes] = []
        for number in range(10_000):
            # Every third one is a replay.
            data = initial(rng)
            fresh = data if is_sound else data[:-1] + bytes([data[-1] ^ 1])
            sent.append(sent[rng.randrange(len(sent))] if number % 3 == 2 else fresh)
            stranger.sendto(sent[-1], (one.card().address, one.card().port))
            if number % 50 == 0:
                time.sleep(0.001)
            if number == 5000:
                exchanged(one, other)  # they connect in the middle of it
            with contextlib.suppress(BlockingIOError):
                answer = stranger.recv(2000)
                is_retry = answer[0] & 0xF0 == LONG_HEADER_RETRY
                retries += is_retry
                others_bytes += 0 if is_retry else len(answer)
                assert not is_retry or len(answer) < 200  # shorter than what it answers
        exchanged(one, other, 2)
        assert resident_bytes() - before < strangers.STRANGERS_MAX * (128 << 10)
    # Few get an answer, of at most three times their bytes, before the others are asked to prove their
    # address. What nobody can have meant gets none.
    assert others_bytes <= (STRANGERS_UNPROVEN_MAX * 3 * 3 * INITIAL_BYTES if is_sound else 0)
    assert (retries > 1000) == is_sound


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_member_of_another_job_is_refused_and_named(make: Make, tmp_path: Path) -> None:
    ours, theirs = Issuer(3), Issuer(3)
    one, other, *_ = make(3, ours)
    folder = tmp_path / "foreign"
    folder.mkdir(mode=0o700)
    foreign = NativeBackend(1, 3, str(folder), b"secret", shm=False, quic=True, neighbours=False)
    try:
        cards = [one.card(), foreign.card(), other.card()]
        foreign.connect(cards, theirs.credentials(1))
        request = foreign.start_send(0, 5, 1, memoryview(b"let me in"))
        ends = time.monotonic() + PATIENCE_S
        while not request.done:
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert request.error is not None
        assert "not from this job's seed" in str(request.error)
        exchanged(one, other)
    finally:
        foreign.close()


# ---- networks ----


@pytest.mark.parametrize("weather", [{}, {"lost": 0.01}, {"lost": 0.05, "doubled": 0.05, "late": 0.05}])
def test_bad_weather_and_a_changed_address_of_the_opener_change_no_value(
    tmp_path: Path, weather: dict[str, float]
) -> None:
    """Rank 0 reaches rank 1 by a relay, which later sends from another port, as a forgetful router does."""
    tmp_path.chmod(0o700)
    issuer = Issuer(2)
    with relay(7, **weather) as between:
        ranks = [
            NativeBackend(
                r, 2, str(tmp_path), b"secret", shm=False, quic=True, neighbours=False, datagram_bytes=1452
            )
            for r in range(2)
        ]
        try:
            between.forward_to(ranks[1].card().port)
            cards = [ranks[0].card(), ranks[1].card()._replace(port=between.port)]
            for rank in ranks:
                rank.connect(cards, issuer.credentials(rank.rank))
            for tag in range(1, 10):
                exchanged(ranks[0], ranks[1], tag)
                if tag % 3 == 0:
                    between.rebind()
        finally:
            for rank in ranks:
                rank.close()


def test_a_killed_rank_of_another_host_is_known_by_its_closed_port(hosts: Hosts) -> None:
    def enter(rank: int) -> dict[str, Any]:
        hosts.enter(rank)
        return {"host": f"host {rank}", "bind": f"10.77.0.{rank + 1}"}

    with forked(until_lost, 2, kind="quic", links=enter) as ranks:
        assert [ranks.hear(rank) for rank in range(2)] == ["ready"] * 2
        ranks.signal(1, signal.SIGKILL)
        took_s, text = ranks.result(0)
    assert took_s < 1.0
    assert "its port was closed" in text


def until_lost(backend: NativeBackend, pipe: Any) -> tuple[float, str]:
    comm = Communicator.world(backend)
    comm.barrier()
    pipe.send("ready")
    began = time.monotonic()
    try:
        comm.recv_bytes(1 - comm.rank, 7)
    except uni.PeerLost as lost:
        return time.monotonic() - began, str(lost)
    return 0.0, ""


def test_a_system_that_cannot_cut_batches_gets_single_datagrams(make: Make) -> None:
    """Without checksums on the socket Linux refuses a batch, as it does on some paths."""
    one, other = make(2, Issuer(2), datagram_bytes=1452)
    for sock in udp_sockets():
        sock.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        sock.close()
    for tag in range(1, 4):
        exchanged(one, other, tag)


def test_datagrams_too_long_for_the_interface_become_short(hosts: Hosts) -> None:
    subprocess.run(["ip", "-n", hosts[0], "link", "set", "lo", "mtu", "9000"], check=True)

    def enter(_: int) -> dict[str, Any]:
        hosts.enter(0)
        return {}

    with forked(two_long_messages, 2, kind="quic", links=enter) as ranks:
        assert [ranks.result(rank) for rank in range(2)] == [True] * 2


def two_long_messages(backend: NativeBackend, _: Any) -> bool:
    comm = Communicator.world(backend)
    data = (np.arange(3_000_001) * 7 + comm.rank).astype(np.uint8)
    into = np.zeros_like(data)
    comm.sendrecv(data, 1 - comm.rank, into, 1 - comm.rank, timeout=PATIENCE_S)
    comm.barrier()
    return bool(np.array_equal(into, (np.arange(3_000_001) * 7 + 1 - comm.rank).astype(np.uint8)))


def udp_sockets() -> Iterator[socket.socket]:
    """The UDP sockets of this process, as further descriptors of them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(name)))
                if sock.type == socket.SOCK_DGRAM and sock.family == socket.AF_INET:
                    yield sock
                else:
                    sock.close()


def test_a_rank_bound_to_all_addresses_answers_from_the_one_that_was_called(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    issuer = Issuer(2)
    ranks = [
        NativeBackend(
            r,
            2,
            str(tmp_path),
            b"secret",
            shm=False,
            quic=True,
            neighbours=False,
            bind=("0.0.0.0", "127.0.0.1")[r],
        )
        for r in range(2)
    ]
    try:
        cards = [ranks[0].card()._replace(address="127.0.0.5"), ranks[1].card()]
        for rank in ranks:
            rank.connect(cards, issuer.credentials(rank.rank))
        exchanged(ranks[1], ranks[0])  # rank 1 calls
    finally:
        for rank in ranks:
            rank.close()


def test_a_million_links_would_need_one_descriptor(make: Make) -> None:
    ranks = make(6, Issuer(6))
    before = len(os.listdir("/proc/self/fd"))
    for rank in ranks[1:]:
        exchanged(ranks[0], rank)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- failure ----


def forged_unreachable(source: tuple[str, int], target: tuple[str, int]) -> bytes:
    """What `source` would get if nobody listened at `target`: ICMP type 3, code 3."""
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(target[0])
    inner = b"\x45\0\0\x24\0\0\0\0\x40\x11\0\0" + addresses
    inner += source[1].to_bytes(2, "big") + target[1].to_bytes(2, "big") + b"\0\x10\0\0" + bytes(8)
    head = b"\x03\x03\0\0\0\0\0\0"
    total = sum(int.from_bytes((head + inner)[i : i + 2], "big") for i in range(0, len(head + inner), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return head[:2] + (0xFFFF - total).to_bytes(2, "big") + head[4:] + inner


def test_forged_messages_that_a_port_is_closed_end_nothing() -> None:
    """Not even while the rank is stopped for a second and answers nobody."""

    def talk(backend: NativeBackend, pipe: Any) -> float:
        comm = Communicator.world(backend)
        comm.barrier()
        pipe.send((backend.card().address, backend.card().port))
        pipe.recv()
        x = np.full(1000, comm.rank + 1.0)
        comm.all_reduce(x)
        return float(x[0])

    with forked(talk, 2, kind="quic") as ranks:
        addresses = [ranks.hear(rank) for rank in range(2)]
        ranks.signal(1, signal.SIGSTOP)
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as forger:
            ends = time.monotonic() + 1.0
            while time.monotonic() < ends:
                forger.sendto(forged_unreachable(addresses[0], addresses[1]), addresses[0])
                time.sleep(0.02)
        ranks.signal(1, signal.SIGCONT)
        for pipe in ranks.pipes:
            pipe.send("go on")
        assert [ranks.result(rank) for rank in range(2)] == [3.0, 3.0]


def test_a_long_message_survives_loss_and_the_senders_exit(tmp_path: Path) -> None:
    """The sender closes as soon as its send has ended; one datagram in twenty is lost."""
    tmp_path.chmod(0o700)
    issuer = Issuer(2)
    data = (np.arange(1_000_003) * 11).astype(np.uint8)
    with relay(9, lost=0.05) as between:
        ranks = [
            NativeBackend(
                r, 2, str(tmp_path), b"secret", shm=False, quic=True, neighbours=False, datagram_bytes=1452
            )
            for r in range(2)
        ]
        try:
            between.forward_to(ranks[1].card().port)
            cards = [ranks[0].card(), ranks[1].card()._replace(port=between.port)]
            for rank in ranks:
                rank.connect(cards, issuer.credentials(rank.rank))
            into = np.zeros_like(data)
            works = [ranks[1].start_recv(0, 5, tag, None) for tag in range(20)]
            long = ranks[1].start_recv(0, 5, 99, memoryview(into))
            sends = [ranks[0].start_send(1, 5, 99, memoryview(data))]
            sends += [ranks[0].start_send(1, 5, tag, memoryview(bytes([tag] * 2000))) for tag in range(20)]
            ends = time.monotonic() + PATIENCE_S
            while not all(send.done for send in sends):
                assert time.monotonic() < ends, "it hangs"
                time.sleep(0.001)
            ranks[0].close()
            while not (long.done and all(work.done for work in works)):
                assert time.monotonic() < ends, "it hangs"
                time.sleep(0.001)
            assert np.array_equal(into, data)
            assert [work.data for work in works] == [bytes([tag] * 2000) for tag in range(20)]
        finally:
            for rank in ranks:
                rank.close()


def test_a_message_that_is_on_its_way_survives_the_senders_exit() -> None:
    """No kernel delivers after exit: a rank that leaves stays until everything is acknowledged."""

    def program(comm: Communicator) -> int:
        if comm.rank == 0:
            for tag in range(20):
                comm.send(np.full(2000, tag, np.uint8), 1, tag)
            return 0
        time.sleep(0.5)
        into = np.zeros(2000, np.uint8)
        total = 0
        for tag in range(20):
            comm.recv(into, 0, tag)
            total += int(into[-1])
        return total

    assert run_processes(program, 2, kind="quic") == [0, sum(range(20))]


def test_a_stopped_rank_is_known_within_three_seconds() -> None:
    with forked(until_lost, 2, kind="quic") as ranks:
        assert [ranks.hear(rank) for rank in range(2)] == ["ready"] * 2
        ranks.signal(1, signal.SIGSTOP)
        took_s, text = ranks.result(0)
        ranks.signal(1, signal.SIGKILL)
    assert took_s < 3.5
    assert "silent for" in text


def test_many_ranks_send_long_messages_to_one() -> None:
    """They share the buffer of one socket."""
    size, nbytes = 9, 2 << 20

    def program(comm: Communicator) -> bool:
        if comm.rank:
            comm.send((np.arange(nbytes) + comm.rank).astype(np.uint8), 0, 1)
            return True
        into = [np.zeros(nbytes, np.uint8) for _ in range(1, size)]
        works = [comm.start.recv(buf, src) for src, buf in enumerate(into, 1)]
        uni.wait_all(works)
        return all(
            np.array_equal(buf, (np.arange(nbytes) + src).astype(np.uint8)) for src, buf in enumerate(into, 1)
        )

    assert run_processes(program, size, kind="quic") == [True] * size


@pytest.mark.more
def test_thirty_one_ranks_send_16_mib_to_one_with_a_small_buffer_and_nothing_is_dropped() -> None:
    """The windows of all peers together fit the receive buffer that the system grants by default."""
    size, nbytes = 32, 16 << 20

    def drops(port: int) -> int:
        rows = [row.split() for row in Path("/proc/net/udp").read_text().splitlines()[1:]]
        return sum(int(row[-1]) for row in rows if int(row[1].split(":")[1], 16) == port)

    def program(backend: NativeBackend, _: Any) -> int:
        comm = Communicator.world(backend)
        comm.gather(np.zeros(1), 0)  # now all have a link to rank 0
        before = drops(backend.card().port)
        comm.barrier()
        if comm.rank:
            comm.send(np.full(nbytes, comm.rank, np.uint8), 0, 1)
            comm.barrier()
            return 0
        into = np.zeros((size - 1, nbytes), np.uint8)
        uni.wait_all([comm.start.recv(buf, src) for src, buf in enumerate(into, 1)])
        assert all(np.all(buf == src) for src, buf in enumerate(into, 1))
        comm.barrier()
        return drops(backend.card().port) - before

    with forked(program, size, kind="quic", links=lambda _: {"socket_buffer_bytes": 212_992 // 2}) as ranks:
        assert [ranks.result(rank, 120.0) for rank in range(size)] == [0] * size


def test_a_forked_child_neither_uses_nor_ends_the_parents_links() -> None:
    def program(comm: Communicator) -> tuple[int, float]:
        comm.barrier()
        child = os.fork()
        if child == 0:
            try:
                comm.barrier()
            except uni.ClosedError:
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        x = np.full(70_001, comm.rank + 1.0)
        comm.all_reduce(x)
        return os.waitstatus_to_exitcode(status), float(x[-1])

    assert run_processes(program, 2, kind="quic") == [(7, 3.0)] * 2
