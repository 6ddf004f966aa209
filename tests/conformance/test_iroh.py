"""The iroh backend in processes: the cases and properties of every backend, and tests for iroh alone.

The process of the tests never uses iroh, because iroh's threads would not survive a fork. Strangers are
therefore endpoints in the process of a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.test_properties import PROPERTIES
from tests.support.bounds import REPORTED_WITHIN_S, SILENT_WITHIN_S
from tests.support.lost_ranks import lose_rank
from tests.support.network import NoNetwork, private_network
from tests.support.processes import Failed, forked, run_processes
from tests.support.rank_pool import ended_in_pool
from tests.support.system import need_tools, skip_without

import unisono as uni
from unisono.backends.iroh.backend import IrohBackend, UnconnectedIroh
from unisono.backends.registry import BindSpec
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import ClosedError
from unisono.testing import CASES

pytestmark = pytest.mark.more


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """Keep iroh from searching for a router where there is none."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(NoNetwork):
            stack.enter_context(private_network())
        yield


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_case_holds_on_iroh(name: str) -> None:
    assert ended_in_pool("iroh", "cases", 4)[name] == "ok"


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_holds_on_iroh(name: str) -> None:
    assert ended_in_pool("iroh", "properties", 6)[name] == "ok"


# -- messages arrive unchanged ----------------------------------------------------------------------------


def bytes_of(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_long_and_odd_messages_arrive_as_they_were_sent() -> None:
    """Lengths around every threshold (empty, eager, one piece, many), several at once in any order."""
    sizes = [0, 1, 16 << 10, (16 << 10) + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_011, 64 << 20]

    def program(comm: Communicator) -> bool:
        if comm.rank == 0:
            uni.wait_all([comm.start.send(bytes_of(size, i), 1, i) for i, size in enumerate(sizes)])
            return True
        for i, size in reversed(list(enumerate(sizes))):
            got = np.zeros(size, np.uint8)
            comm.recv(got, 0, i)
            assert np.array_equal(got, bytes_of(size, i)), size
        return True

    assert run_processes(program, 2, kind="iroh") == [True, True]


def reproducibly(comm: Communicator) -> bytes:
    """Sums whose bits depend on the order of the operands."""
    x = (np.random.default_rng(comm.rank).standard_normal(10_007) * 10.0 ** (comm.rank % 3)).astype(
        np.float32
    )
    rows = np.stack([x[: 1000 + 0 * row] * (row + 1) for row in range(comm.size)])
    return b"".join(
        np.ascontiguousarray(each).tobytes()
        for each in (comm.all_reduce(x.copy()), comm.scan(x), comm.reduce_scatter(rows))
    )


def test_reproducible_results_are_those_of_other_backends_bit_for_bit() -> None:
    config = Config(reproducible=True)
    by_iroh, by_tcp = (run_processes(reproducibly, 3, kind=kind, config=config) for kind in ("iroh", "tcp"))
    assert not [each for each in by_iroh if isinstance(each, Failed)], by_iroh
    assert by_iroh == by_tcp


def test_what_was_sent_before_the_end_arrives() -> None:
    def live(backend: IrohBackend, pipe: Connection) -> list[int]:
        comm = Communicator.world(backend)
        if comm.rank == 0:
            for i in range(100):
                comm.send(np.full(10, i), 1, i)
            comm.close()
            pipe.send("left")
            return []
        pipe.recv()
        got = np.zeros(10, np.int64)
        return [comm.recv(got, 0, i).tag + 0 * int(got[0]) for i in range(100) if int(got[0]) <= i]

    with forked(live, 2, kind="iroh") as ranks:
        assert ranks.receive(0) == "left"
        ranks.pipes[1].send("receive")
        assert ranks.result(1) == list(range(100))


# -- lanes ------------------------------------------------------------------------------------------------


class Stall:
    """Stops reading the long messages of a peer, until it ends."""

    def __init__(self, backend: IrohBackend, peer: int) -> None:
        self._loop = backend._transport._loop.loop
        self._gate = asyncio.Event()
        for reader in backend._transport._links[peer]._readers[2:]:
            reader.read = self._slow(reader.read)  # type: ignore[method-assign]

    def _slow(self, read: Any) -> Any:
        async def slow(limit: int) -> bytes:
            await self._gate.wait()
            return await read(limit)

        return slow

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)


def test_a_stalled_message_delays_no_barrier_and_takes_no_memory() -> None:
    size = 48 << 20

    def live(backend: IrohBackend, pipe: Connection) -> tuple[int, int]:
        comm = Communicator.world(backend)
        data = bytes_of(size, 5) if comm.rank == 0 else np.zeros(size, np.uint8)
        stall = Stall(backend, 0) if comm.rank == 1 else None
        comm.barrier()
        link = backend._transport._links[1 - comm.rank]
        sent, grown = link.connection.stats().udp_tx_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work = comm.start.send(data, 1) if comm.rank == 0 else comm.start.recv(data, 0)
        for i in range(10):
            comm.barrier()
            assert comm.all_reduce(i + comm.rank) == 2 * i + 1
        sent = link.connection.stats().udp_tx_bytes - sent
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
        assert not work.done()
        comm.barrier()
        if stall is not None:
            stall.end()
        work.wait(timeout=60)
        assert np.array_equal(data, bytes_of(size, 5))
        comm.barrier()
        comm.close()
        return sent, grown * 1024

    with forked(live, 2, kind="iroh") as ranks:
        results = [ranks.result(rank) for rank in range(2)]
    assert not [each for each in results if isinstance(each, Failed)], results
    sent, grown = results[0]
    assert sent < size // 3
    assert grown < size // 2


def test_a_slow_receiver_holds_the_sender_back() -> None:
    """A sender that gets no CTS neither sends nor copies its bytes."""

    def live(backend: IrohBackend, pipe: Connection) -> int:
        comm = Communicator.world(backend)
        data = bytes_of(1 << 20, comm.rank)
        comm.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if comm.rank == 0:
            works = [comm.start.send(data, 1, i) for i in range(64)]
            comm.barrier()
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert not [work for work in works if work.done()]
            comm.barrier()
            uni.wait_all(works)
        else:
            comm.barrier()
            comm.barrier()
            got, wanted = np.zeros(1 << 20, np.uint8), bytes_of(1 << 20, 0)
            for i in range(64):
                comm.recv(got, 0, i)
                assert np.array_equal(got, wanted)
            grown = 0
        comm.barrier()
        comm.close()
        return grown * 1024

    with forked(live, 2, kind="iroh") as ranks:
        results = [ranks.result(rank) for rank in range(2)]
    assert not [each for each in results if isinstance(each, Failed)], results
    assert results[0] < 32 << 20


# -- failure ----------------------------------------------------------------------------------------------


def test_a_killed_rank_is_known_to_all_within_the_bound() -> None:
    for lost in lose_rank("iroh", signal.SIGKILL):
        assert lost.ranks == (1,)
        assert "its process ended" in lost.text
        assert lost.after_s < REPORTED_WITHIN_S


def test_a_stopped_rank_is_known_to_all_within_the_bound() -> None:
    for lost in lose_rank("iroh", signal.SIGSTOP):
        assert lost.ranks == (1,)
        assert "silent for 2.5 s" in lost.text
        assert lost.after_s < SILENT_WITHIN_S


def test_a_rank_that_holds_its_interpreter_is_not_taken_for_dead() -> None:
    def program(comm: Communicator) -> int:
        comm.barrier()
        if comm.rank == 1:
            ctypes.PyDLL(None).usleep(2_500_000)  # while it holds the GIL
        return int(comm.all_reduce(comm.rank))

    assert run_processes(program, 2, kind="iroh", config=Config(silence_s=0.5)) == [1, 1]


def test_ctrl_c_ends_a_blocking_call() -> None:
    def live(backend: IrohBackend, pipe: Connection) -> str:
        comm = Communicator.world(backend)
        comm.barrier()
        if comm.rank == 1:
            pipe.send("ready")
            return str(pipe.recv())
        try:
            pipe.send("ready")
            comm.recv(np.zeros(1), 1)
        except KeyboardInterrupt:
            return "interrupted"
        return "received"

    with forked(live, 2, kind="iroh") as ranks:
        for rank in range(2):
            assert ranks.receive(rank) == "ready"
        ranks.signal(0, signal.SIGINT)
        assert ranks.result(0) == "interrupted"
        ranks.pipes[1].send("over")
        assert ranks.result(1) == "over"


def test_a_forked_child_is_refused() -> None:
    def program(comm: Communicator) -> int:
        comm.barrier()
        if comm.rank == 1:
            pid = os.fork()
            if pid == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    try:
                        comm.send(np.ones(1), 0)
                    except ClosedError as error:
                        code = 0 if "belongs to the parent process" in str(error) else 2
                    comm.close()
                os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code == 0, code
        return int(comm.all_reduce(comm.rank))

    assert run_processes(program, 2, kind="iroh") == [1, 1]


# -- strangers --------------------------------------------------------------------------------------------


async def connect_as_stranger(addresses: list[str], key: bytes, alpn: bytes) -> str:
    """Connect with an unknown key; return how the connection ends."""
    import iroh

    builder = iroh.EndpointBuilder()
    builder.apply_minimal()
    builder.relay_mode(iroh.RelayMode.disabled())
    builder.bind_addr("127.0.0.1:0")
    builder.bind_addr("[::1]:0")
    endpoint = await builder.bind()
    try:
        there = iroh.EndpointAddr(iroh.EndpointId.from_bytes(key), None, addresses)
        connection = await asyncio.wait_for(endpoint.connect(there, alpn), 10)
        return str(await asyncio.wait_for(connection.closed(), 10))
    except iroh.IrohError as error:
        return f"no connection: {error.message()}"
    finally:
        await endpoint.close()


class Knocking(UnconnectedIroh):
    """Rank 1 first connects as a stranger, and then joins."""

    def connect(self, cards: Any) -> IrohBackend:
        if self._spec.rank == 1:
            from unisono.backends.iroh.endpoint import ALPN, Card

            first = Card.parse(cards[0])
            answers = [
                asyncio.run(connect_as_stranger(first.addresses, first.key, alpn))
                for alpn in (ALPN, b"unisono/other")
            ]
            assert "no rank of this world" in answers[0], answers
            assert "no connection" in answers[1], answers
        return super().connect(cards)


def test_a_stranger_without_the_ticket_is_refused_before_and_after_the_world_is_formed() -> None:
    def live(backend: IrohBackend, pipe: Connection) -> tuple[int, str]:
        from unisono.backends.iroh.endpoint import ALPN

        comm = Communicator.world(backend)
        card = backend._transport._endpoint.card
        addresses, key = comm.broadcast_object((card.addresses, card.key), 0)
        answer = asyncio.run(connect_as_stranger(addresses, key, ALPN)) if comm.rank == 1 else ""
        total = int(comm.all_reduce(comm.rank))
        comm.close()
        return total, answer

    with forked(live, 2, bind=Knocking) as ranks:
        results = [ranks.result(rank) for rank in range(2)]
    assert not [each for each in results if isinstance(each, Failed)], results
    assert [total for total, _ in results] == [1, 1]
    assert "no connection" in results[1][1]


class Impostor(UnconnectedIroh):
    """Rank 0 does not hold the key that its card names."""

    def card(self) -> bytes:
        from unisono.backends.iroh.endpoint import Card

        card = Card.parse(super().card())
        if self._spec.rank == 0:
            card.key = bytes.fromhex("3ef41c0e46f953b5d90d1bb91b92126979bd9191cf3cd21110e882e64e84282a")
        return card.encoded()


class Ignorant(UnconnectedIroh):
    """Rank 1 does not know the job's secret."""

    def __init__(self, spec: BindSpec) -> None:
        import dataclasses

        super().__init__(dataclasses.replace(spec, secret=b"a guess") if spec.rank == 1 else spec)


def test_a_peer_without_the_key_of_its_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.backends.iroh.backend._CONNECT_S", 2.0)
    with forked(lambda backend, pipe: "connected", 2, bind=Impostor) as ranks:
        failed = ranks.result(1)
    assert isinstance(failed, Failed)
    assert failed.type_name == "RendezvousError"
    assert "rank 1 could not connect by iroh: rank 0: " in failed.text


def test_a_peer_that_does_not_know_the_secret_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank refuses the other; the first one sends the reason and closes the connection."""
    monkeypatch.setattr("unisono.backends.iroh.backend._CONNECT_S", 2.0)
    with forked(lambda backend, pipe: "connected", 2, bind=Ignorant) as ranks:
        failed = [ranks.result(rank) for rank in range(2)]
    for rank, end in enumerate(failed):
        assert isinstance(end, Failed)
        assert end.type_name == "RendezvousError"
        assert f"rank {rank} could not connect by iroh: rank {1 - rank}: " in end.text
    assert any("proof of the job's secret is wrong" in end.text for end in failed), failed


class Recorder:
    """A relay of datagrams that records those of the first sender."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.front, self.back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        self.target = target
        self.kept: list[bytes] = []
        self._client: Any = None
        for sock in (self.front, self.back):
            sock.bind(("127.0.0.1", 0))
        threading.Thread(target=self._there, daemon=True).start()
        threading.Thread(target=self._back, daemon=True).start()

    def _there(self) -> None:
        while True:
            data, self._client = self.front.recvfrom(1 << 16)
            self.kept.append(data)
            self.back.sendto(data, self.target)

    def _back(self) -> None:
        while True:
            data, _ = self.back.recvfrom(1 << 16)
            if self._client is not None:
                self.front.sendto(data, self._client)


RECORDERS: list[Recorder] = []


class Recorded(UnconnectedIroh):
    """Rank 1 reaches rank 0 through a recorder."""

    def connect(self, cards: Any) -> IrohBackend:
        if self._spec.rank == 1:
            from unisono.backends.iroh.endpoint import Card

            first = Card.parse(cards[0])
            host, _, port = first.addresses[0].rpartition(":")
            RECORDERS.append(Recorder((host, int(port))))
            first.addresses = ["{}:{}".format(*RECORDERS[0].front.getsockname())]
            cards = [first.encoded(), *cards[1:]]
        return super().connect(cards)


def test_a_replayed_join_and_garbage_datagrams_change_nothing() -> None:
    def live(backend: IrohBackend, pipe: Connection) -> tuple[int, int]:
        comm = Communicator.world(backend)
        comm.barrier()
        sums = []
        if comm.rank == 1:
            recorder, stranger = RECORDERS[0], socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            kept = list(recorder.kept)
            assert len(kept) >= 3, "the recorder has no datagram of the join"
            rng = random.Random(5)
            for turn in range(3):
                for data in kept:
                    stranger.sendto(data, recorder.target)
                for _ in range(300):
                    data = rng.randbytes(rng.choice([0, 1, 20, 300, 1200, 1500]))
                    stranger.sendto(bytes([rng.choice([0, 0x40, 0xC0, 0xFF])]) + data, recorder.target)
                sums.append(int(comm.all_reduce(comm.rank + turn)))
        else:
            sums = [int(comm.all_reduce(comm.rank + turn)) for turn in range(3)]
        comm.barrier()
        links = len(backend._transport._links)
        comm.close()
        return sum(sums), links

    with forked(live, 2, bind=Recorded) as ranks:
        results = [ranks.result(rank) for rank in range(2)]
    assert results == [(9, 1), (9, 1)]


# -- a bad network ----------------------------------------------------------------------------------------


def test_one_datagram_in_twenty_may_get_lost() -> None:
    def program(comm: Communicator) -> int:
        data = bytes_of(3_000_017, 7) if comm.rank == 0 else np.zeros(3_000_017, np.uint8)
        comm.broadcast(data, 0)
        assert np.array_equal(data, bytes_of(3_000_017, 7))
        for i in range(30):
            x = np.arange(1000) * (comm.rank + i)
            assert np.array_equal(comm.all_reduce(x), np.arange(1000) * (3 * i + 3))
        return int(comm.backend._transport._links[(comm.rank + 1) % 3].connection.stats().udp_tx_datagrams)

    need_tools("ip", "nft")
    try:
        with private_network(lost_percent=5):
            sent = run_processes(program, 3, kind="iroh")
    except NoNetwork as error:
        skip_without("the right to make a network namespace", str(error))
    assert not [each for each in sent if isinstance(each, Failed)], sent
    assert min(sent) > 100


# -- start ------------------------------------------------------------------------------------------------


def spawned(comm: Communicator) -> tuple[str, float]:
    return comm.backend.capabilities.name, comm.all_reduce(float(comm.rank + 1))


def test_spawn_and_the_seed_bring_iroh_ranks_together() -> None:
    assert uni.spawn(spawned, 2, backend="iroh") == [("iroh", 3.0)] * 2


def test_a_rank_listens_on_the_given_address_only() -> None:
    def program(comm: Communicator) -> list[str]:
        own = {os.readlink(link).strip("socket:[]") for link in sockets_of("self")}
        return [
            line.split()[1]
            for name in ("udp", "udp6")
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            if line.split()[9] in own
        ]

    loopback = ("0100007F:", "00000000000000000000000001000000:")
    for bound in run_processes(program, 2, kind="iroh"):
        assert bound
        assert [address for address in bound if not address.startswith(loopback)] == []


def sockets_of(process: str) -> list[str]:
    links = [f"/proc/{process}/fd/{number}" for number in os.listdir(f"/proc/{process}/fd")]
    return [link for link in links if os.path.exists(link) and os.readlink(link).startswith("socket:")]
