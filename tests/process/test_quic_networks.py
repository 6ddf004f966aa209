"""QUIC links on networks that lose, damage and delay datagrams, or change addresses: no value changes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.credentials import Issuer
from tests.support.hosts import Hosts, hosts
from tests.support.paths import ROOT
from tests.support.processes import forked
from tests.support.quic_ranks import PATIENCE_S, Make, exchange, make, ranks_through, wait_for_all
from tests.support.relay import Weather, relay
from tests.support.system import run_tool

from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.errors import PeerLost

__all__ = ["hosts", "make"]

SO_NO_CHECK = 11
FIRST_WINDOW_BYTES = 1 << 20  # native/connect/quic_connector.cpp
SILENT_WITHIN_S = 6.0  # twice the bound of docs/failure.md


@pytest.mark.parametrize(
    "weather",
    [
        Weather(),
        Weather(lost=0.01),
        Weather(lost=0.05, doubled=0.05, late=0.05),
        Weather(flipped=0.05),
        Weather(replayed=0.2),
    ],
    ids=str,
)
def test_packet_faults_and_a_changed_address_of_the_opener_change_no_value(
    make: Make, weather: Weather
) -> None:
    """Rank 0 reaches rank 1 through a relay, which changes its port, like NAT that lost its table."""
    with relay(7, weather) as between:
        ranks = ranks_through(between, make)
        for tag in range(1, 10):
            exchange(ranks[0], ranks[1], tag)
            if tag % 3 == 0:
                between.rebind()


def test_the_openers_address_changes_in_the_middle_of_a_message(make: Make) -> None:
    data = (np.arange(24 << 20) * 13).astype(np.uint8)
    with relay(8) as between:
        ranks = ranks_through(between, make)
        exchange(*ranks)
        for turn in range(2):
            into = np.zeros_like(data)
            receive = ranks[1].start_recv(0, 5, turn, memoryview(into))
            send = ranks[0].start_send(1, 5, turn, memoryview(data))
            ends = time.monotonic() + PATIENCE_S
            while not into[: 1 << 20].any():
                assert time.monotonic() < ends, "a request does not end"
            between.rebind()
            assert not into[-(1 << 20) :].any(), "this is the middle of the message"
            wait_for_all(send, receive)
            assert send.error is None
            assert np.array_equal(into, data)


def test_an_acceptor_that_moved_is_lost_and_the_cause_is_named(make: Make) -> None:
    """In QUIC only the opener may change its address."""
    with relay(9) as between:
        ranks = ranks_through(between, make)
        exchange(*ranks)
        waiting = [ranks[1 - rank].start_recv(rank, 5, 9, None) for rank in range(2)]
        began = time.monotonic()
        between.move()
        wait_for_all(*waiting)
        assert time.monotonic() - began < SILENT_WITHIN_S
    texts = [str(request.error) for request in waiting]
    assert all(isinstance(request.error, PeerLost) for request in waiting), texts
    assert all("silent for" in text or "no heartbeat for" in text or "gave rank" in text for text in texts), (
        texts
    )


def test_a_system_that_cannot_cut_batches_gets_single_datagrams(make: Make) -> None:
    """Linux refuses batches (UDP GSO) on a socket without checksums, as it also does on some paths."""
    one, other = make(2, Issuer(2), datagram_bytes=1452)
    for sock in udp_sockets():
        sock.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        sock.close()
    for tag in range(1, 4):
        exchange(one, other, tag)


def test_datagrams_too_long_for_the_interface_become_short(hosts: Hosts) -> None:
    subprocess.run(["ip", "-n", hosts[0], "link", "set", "lo", "mtu", "9000"], check=True)

    def enter(_: int) -> dict[str, Any]:
        hosts.enter(0)
        return {}

    with forked(two_long_messages, 2, kind="quic", links=enter) as ranks:
        assert [ranks.result(rank) for rank in range(2)] == [True] * 2


def two_long_messages(backend: NativeBackend, _: Any) -> bool:
    with Communicator.world(backend) as comm:
        data = (np.arange(3_000_001) * 7 + comm.rank).astype(np.uint8)
        into = np.zeros_like(data)
        comm.sendrecv(data, 1 - comm.rank, into, 1 - comm.rank, timeout=PATIENCE_S)
        comm.barrier()
        return bool(np.array_equal(into, (np.arange(3_000_001) * 7 + 1 - comm.rank).astype(np.uint8)))


def udp_sockets() -> Iterator[socket.socket]:
    """Duplicates of the descriptors of all UDP sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sock = socket.socket(fileno=os.dup(int(name)))
                if sock.type == socket.SOCK_DGRAM and sock.family == socket.AF_INET:
                    yield sock
                else:
                    sock.close()


def test_a_rank_bound_to_all_addresses_answers_from_the_one_that_was_called(make: Make) -> None:
    issuer = Issuer(2)
    ranks = make(2, only=(0,), bind="0.0.0.0") + make(2, only=(1,))
    cards = [ranks[0].card()._replace(address="127.0.0.5"), ranks[1].card()]
    for rank in ranks:
        rank.connect(cards, issuer.credentials(rank.rank))
    exchange(ranks[1], ranks[0])  # rank 1 opens the link


def test_a_million_links_would_need_one_descriptor(make: Make) -> None:
    ranks = make(6, Issuer(6))
    before = len(os.listdir("/proc/self/fd"))
    for rank in ranks[1:]:
        exchange(ranks[0], rank)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.more
def test_windows_grow_on_a_gigabit_path_of_forty_milliseconds(
    make: Make, hosts: Hosts, tmp_path: Path
) -> None:
    """tbf at both ends of the cable, and a relay that keeps every datagram for 20 ms."""
    for host, interface in zip(hosts, hosts.interfaces, strict=True):
        shaped = ["tc", "-n", host, "qdisc", "add", "dev", interface, "root", "tbf"]
        run_tool(*shaped, "rate", "1gbit", "burst", "256kb", "latency", "50ms")
    # The relay is beside rank 1, with another address: neither side takes the path for a local one.
    run_tool("ip", "-n", hosts[1], "address", "add", "10.77.0.3/24", "dev", hosts.interfaces[1])
    program, source = str(tmp_path / "relay"), str(ROOT / "bench" / "lossy_relay.cpp")
    run_tool("c++", "-O2", "-std=c++20", source, "-o", program)
    issuer = Issuer(2)
    ranks: list[NativeBackend] = []

    def enter(rank: int, address: str) -> None:
        """A socket belongs to the host of the thread that opens it."""
        hosts.enter(rank)
        ranks.extend(make(2, only=(rank,), bind=address, host=f"host {rank}"))

    for rank, address in enumerate(("10.77.0.1", "10.77.0.3")):
        thread = threading.Thread(target=enter, args=(rank, address))
        thread.start()
        thread.join()
    cards = [rank.card() for rank in ranks]
    words = [program, str(cards[1].port), "0", "20", "10.77.0.3", "10.77.0.2"]
    command = ["ip", "netns", "exec", hosts[1], *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as between:
        try:
            assert between.stdout is not None
            cards[1] = cards[1]._replace(address="10.77.0.2", port=int(between.stdout.readline()))
            for rank in ranks:
                rank.connect(cards, issuer.credentials(rank.rank))
            exchange(*ranks)
            data = (np.arange(64 << 20) * 17).astype(np.uint8)
            with_first_window_s = len(data) / FIRST_WINDOW_BYTES * 0.04
            for tag in range(
                2, 12
            ):  # the first messages make the windows grow; a busy machine needs some more
                into = np.zeros_like(data)
                began = time.monotonic()
                receive = ranks[1].start_recv(0, 5, tag, memoryview(into))
                send = ranks[0].start_send(1, 5, tag, memoryview(data))
                wait_for_all(send, receive)
                took_s = time.monotonic() - began
                assert send.error is None
                assert np.array_equal(into, data)
                if took_s < with_first_window_s:
                    break
            else:
                pytest.fail("the windows have not grown")
            for rank in ranks:
                rank.close()
        finally:
            between.terminate()
