"""How QUIC links end when ranks are killed, stopped, forked or leave; many links on one socket."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.hosts import Hosts, hosts
from tests.support.processes import forked, run_processes
from tests.support.quic_ranks import Make, make, ranks_through, wait_for_all
from tests.support.relay import Weather, relay

import unisono as uni
from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator

__all__ = ["hosts", "make"]


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


def test_a_killed_rank_of_another_host_is_known_by_its_closed_port(hosts: Hosts) -> None:
    def enter(rank: int) -> dict[str, Any]:
        hosts.enter(rank)
        return {"host": f"host {rank}", "bind": f"10.77.0.{rank + 1}"}

    with forked(until_lost, 2, kind="quic", links=enter) as ranks:
        assert [ranks.receive(rank) for rank in range(2)] == ["ready"] * 2
        ranks.signal(1, signal.SIGKILL)
        took_s, text = ranks.result(0)
    assert took_s < 1.0
    assert "its port was closed" in text


def test_a_stopped_rank_is_known_within_three_seconds() -> None:
    with forked(until_lost, 2, kind="quic") as ranks:
        assert [ranks.receive(rank) for rank in range(2)] == ["ready"] * 2
        ranks.signal(1, signal.SIGSTOP)
        took_s, text = ranks.result(0)
        ranks.signal(1, signal.SIGKILL)
    assert took_s < 3.5
    assert "silent for" in text


def forged_unreachable(source: tuple[str, int], target: tuple[str, int]) -> bytes:
    """The packet that `source` would receive if no process listened at `target`: ICMP type 3, code 3."""
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(target[0])
    inner = b"\x45\0\0\x24\0\0\0\0\x40\x11\0\0" + addresses
    inner += source[1].to_bytes(2, "big") + target[1].to_bytes(2, "big") + b"\0\x10\0\0" + bytes(8)
    head = b"\x03\x03\0\0\0\0\0\0"
    total = sum(int.from_bytes((head + inner)[i : i + 2], "big") for i in range(0, len(head + inner), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return head[:2] + (0xFFFF - total).to_bytes(2, "big") + head[4:] + inner


def test_forged_messages_that_a_port_is_closed_end_nothing() -> None:
    """Not even while the rank is stopped for a second and acknowledges nothing."""

    def talk(backend: NativeBackend, pipe: Any) -> float:
        with Communicator.world(backend) as comm:
            comm.barrier()
            pipe.send((backend.card().address, backend.card().port))
            pipe.recv()
            x = np.full(1000, comm.rank + 1.0)
            comm.all_reduce(x)
            return float(x[0])

    with forked(talk, 2, kind="quic") as ranks:
        addresses = [ranks.receive(rank) for rank in range(2)]
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


def test_a_long_message_survives_packet_loss_and_the_senders_exit(make: Make) -> None:
    """The sender closes as soon as its send has ended; one datagram in twenty is lost."""
    data = (np.arange(1_000_003) * 11).astype(np.uint8)
    with relay(9, Weather(lost=0.05)) as between:
        ranks = ranks_through(between, make)
        into = np.zeros_like(data)
        works = [ranks[1].start_recv(0, 5, tag, None) for tag in range(20)]
        long = ranks[1].start_recv(0, 5, 99, memoryview(into))
        sends = [ranks[0].start_send(1, 5, 99, memoryview(data))]
        sends += [ranks[0].start_send(1, 5, tag, memoryview(bytes([tag] * 2000))) for tag in range(20)]
        wait_for_all(*sends)
        ranks[0].close()
        wait_for_all(long, *works)
        assert np.array_equal(into, data)
        assert [work.data for work in works] == [bytes([tag] * 2000) for tag in range(20)]
        ranks[1].close()


def test_a_message_that_is_on_its_way_survives_the_senders_exit() -> None:
    """No kernel delivers QUIC data after exit: a rank that leaves stays until everything is acknowledged."""

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


def test_many_ranks_send_long_messages_to_one() -> None:
    """All messages arrive in the receive buffer of one socket."""
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
        with Communicator.world(backend) as comm:
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


@pytest.mark.more
def test_a_million_messages_with_key_updates_arrive_once_and_in_order() -> None:
    """Every 500 packets each rank changes its key."""
    count, batch = 1_000_000, 1000

    def program(backend: NativeBackend, _: Any) -> int:
        with Communicator.world(backend) as comm:
            if comm.rank == 0:
                x = np.zeros(1, np.int64)
                for number in range(count):
                    x[0] = number * 3
                    comm.send(x, 1, number % 7)
            else:
                into = np.zeros(batch, np.int64)
                rows = [into[i : i + 1] for i in range(batch)]
                for begin in range(0, count, batch):
                    for i, row in enumerate(rows):
                        comm.recv(row, 0, (begin + i) % 7)
                    assert np.array_equal(into, np.arange(begin, begin + batch) * 3)
            comm.barrier()
            return count

    with forked(program, 2, kind="quic", links=lambda _: {"rekey_records": 500}) as ranks:
        assert [ranks.result(rank, 240.0) for rank in range(2)] == [count] * 2
