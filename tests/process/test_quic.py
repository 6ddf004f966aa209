"""QUIC links as a user chooses them, and what strangers find at their port."""

from __future__ import annotations

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


def test_a_launcher_that_was_not_told_certifies_quic_ranks(tmp_path: Path) -> None:
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


def initial(rng: random.Random) -> bytes:
    """The first datagram of a connection as far as its header goes: what follows cannot be decrypted."""
    head = b"\xc3\0\0\0\1\x08" + rng.randbytes(8) + b"\x08" + rng.randbytes(8) + b"\0"
    rest = INITIAL_BYTES - len(head) - 2
    return head + (0x4000 | rest).to_bytes(2, "big") + rng.randbytes(rest)


def test_a_flood_of_first_datagrams_takes_bounded_memory_and_shuts_nobody_out(make: Make) -> None:
    one, other = make(2, Issuer(2))
    rng = random.Random(3)
    answered = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        before = resident_bytes()
        for number in range(20_000):
            stranger.sendto(initial(rng), (one.card().address, one.card().port))
            if number % 50 == 0:
                time.sleep(0.001)
            try:
                answered += len(stranger.recv(2000)) > 0
            except BlockingIOError:
                continue
        exchanged(one, other)
        assert resident_bytes() - before < strangers.STRANGERS_MAX * (128 << 10)
    # From some number on it is asked to prove its address: a retry is shorter than what it answers.
    assert answered > 0


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


# ---- failure ----


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
