"""A living rank is not declared dead: long messages, a network cut for a while, closed ports.

docs/failure.md has the table.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.credentials import credentials
from tests.support.faults import Ends, all_ready, in_world, rank_zero
from tests.support.hosts import Hosts, hosts
from tests.support.member import BULK, CONTROL, HEAD, Member, exactly
from tests.support.native_ranks import CONTEXT, SECRET, ended
from tests.support.processes import PATIENCE_S, forked

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import PeerLost
from unisono.messaging.peer_down import PeerDown

pytestmark = pytest.mark.more

__all__ = ["hosts", "rank_zero"]

DOWN, GIVEN_UP = 12, 2  # frame.hpp: Kind, Fate


# -- much data --------------------------------------------------------------------------------------------


def receives_in_the_background(kind: str, nbytes: int, silence_s: float) -> None:
    """No thread waits for the receive: the engine's thread receives all of it, and sends the heartbeats."""

    def program(comm: Communicator, pipe: Connection) -> Any:
        comm.barrier()
        if comm.rank == 0:
            data = np.arange(nbytes // 8, dtype=np.int64)
            comm.send(data, 1)
            return comm.all_reduce(1)
        into = np.empty(nbytes // 8, np.int64)  # fresh memory: every piece causes page faults
        work = comm.start.recv(into, 0)
        work._adopt(False)  # set by Python at the end, without progress of the engine
        while not work._task.is_done():  # `done()` would make progress
            time.sleep(0.02)
        work.wait()
        assert np.array_equal(into[:: 1 << 10], np.arange(0, nbytes // 8, 1 << 10))
        return comm.all_reduce(1)

    with forked(in_world(program), 2, kind=kind, config=Config(silence_s=silence_s)) as ranks:
        assert [ranks.result(rank) for rank in range(2)] == [2, 2]


# Ranks on different hosts, because a busy rank on the same host is never declared dead.
@pytest.mark.parametrize("kind", ["hosts", "hosts tls"])
def test_heartbeats_go_on_while_a_long_message_comes(kind: str) -> None:
    receives_in_the_background(kind, 512 << 20, 0.3)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["hosts", "hosts tls", "tcp", "shm", "rings"])
def test_a_started_receive_of_a_gibibyte_loses_no_rank(kind: str) -> None:
    receives_in_the_background(kind, 5 << 28, 0.8)


def test_the_error_of_a_long_send_says_how_long_it_took() -> None:
    """The send has matched, so it cannot be withdrawn; then its receiver dies."""

    def program(comm: Communicator, pipe: Connection) -> Any:
        comm.barrier()
        if comm.rank == 1:
            buffer = np.empty(1 << 30, np.uint8)
            pipe.send("ready")
            comm.recv(buffer, 0)
            return None
        pipe.send("ready")
        begun = time.monotonic()
        try:
            while True:
                comm.send(np.ones(1 << 20), 1)
        except PeerLost as error:
            return error.elapsed_s, time.monotonic() - begun

    with forked(in_world(program), 2, kind="tcp") as ranks:
        all_ready(ranks)
        ranks.signal(1, signal.SIGSTOP)  # in the middle: the rank is silent, and then declared dead
        said, took = ranks.result(0)
        assert took > 2
        assert abs(said - took) < 1.5


# -- a network that is cut --------------------------------------------------------------------------------

both_ways = pytest.param((0, 1), id="both ways")
one_way = [pytest.param((side,), id=f"from {side}", marks=pytest.mark.more) for side in (0, 1)]


@pytest.mark.parametrize("kind", ["tcp", "quic"])
@pytest.mark.parametrize("sides", [both_ways, *one_way])
def test_a_cut_that_heals_is_survived(hosts: Hosts, sides: tuple[int, ...], kind: str) -> None:
    """2 s, where 2.5 s of silence are death: by itself TCP would retransmit only a second later."""

    def enter(rank: int) -> dict[str, Any]:
        hosts.enter(rank)
        return {"host": f"host {rank}", "bind": f"10.77.0.{rank + 1}"}

    def program(comm: Communicator, pipe: Connection) -> int:
        pipe.send("ready")
        data, calls, is_over = np.arange(100_003) * (comm.rank + 1), 0, 0
        while not is_over:
            assert np.array_equal(comm.all_reduce(data.copy()), np.arange(100_003) * 3)
            is_over = comm.all_reduce(int(pipe.poll()), "max")
            calls += 1
        return calls

    with forked(in_world(program), 2, kind=kind, links=enter) as ranks, hosts.link_cutter() as cut:
        all_ready(ranks)
        for side in sides:
            cut(side, True)
        time.sleep(2)
        for side in sides:
            cut(side, False)
        ranks.pipes[0].send("enough")
        calls, same = (ranks.result(rank) for rank in range(2))
        assert calls == same


def test_a_rank_learns_why_a_peer_declared_it_dead(rank_zero: Callable[..., NativeBackend]) -> None:
    backend = rank_zero()
    backend.connect([backend.card(), backend.card()._replace(port=1, pid=0)])
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        kind = 0
        while kind != DOWN:
            word, fate, _, length, rank, _, _ = HEAD.unpack(exactly(member.lanes[CONTROL], HEAD.size))
            kind = word & 0xFF
        assert (fate, rank) == (GIVEN_UP, 1)
        assert exactly(member.lanes[CONTROL], length).startswith(b"silent for 0.")
        for lane in (CONTROL, BULK):
            assert exactly(member.lanes[lane], 1) == b"", "then the connection is closed"


@pytest.mark.parametrize("is_left_open", [False, True])
def test_a_rank_declared_dead_says_so(rank_zero: Callable[..., NativeBackend], is_left_open: bool) -> None:
    backend = rank_zero(silence_s=20.0)
    ends = Ends(backend)
    backend.connect([backend.card(), backend.card()._replace(port=1)])
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        why = b"silent for 2.6 s"
        member.send(HEAD.pack(DOWN, GIVEN_UP, 0, len(why), 0, 0, 0) + why, CONTROL)
        if is_left_open:
            member.lanes[BULK].shutdown(socket.SHUT_WR)  # and the end of the control lane is under way
        else:
            for sock in member.lanes.values():
                sock.close()
        assert ends.wait() == PeerDown(1, "gave rank 0 up: silent for 2.6 s")


# -- datagrams --------------------------------------------------------------------------------------------

# pinger.hpp: magic, kind, from, to, number; then the proof
DATAGRAM = struct.Struct("<8sB7xIIQ")
PING, ALIVE, DATAGRAM_GIVEN_UP = 0, 1, 2


def proven(kind: int, sender: int, to: int, number: int, secret: bytes = SECRET) -> bytes:
    said = DATAGRAM.pack(b"uniping\n", kind, sender, to, number)
    return said + hmac.digest(secret, b"ping" + said, "sha256")


def test_a_rank_that_answers_datagrams_has_time_until_its_connection_goes_on(
    rank_zero: Callable[..., NativeBackend],
) -> None:
    backend = rank_zero()
    ends = Ends(backend)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.settimeout(PATIENCE_S)
        silent_since = time.monotonic()
        backend.connect([backend.card(), backend.card()._replace(port=ear.getsockname()[1], pid=0)])
        with Member(backend.card(), SECRET, 1, 0, 2):
            while not ends:
                with contextlib.suppress(TimeoutError):
                    said = ear.recv(100)
                    _, kind, sender, to, number = DATAGRAM.unpack(said[: DATAGRAM.size])
                    assert said == proven(PING, 0, 1, number)
                    assert (kind, sender, to) == (PING, 0, 1)
                    ear.sendto(proven(ALIVE, 1, 0, number), (backend.card().address, backend.card().port))
                    ear.settimeout(0.5)
            assert "its connection brought nothing for 0." in ends[0].cause
            assert time.monotonic() - silent_since > 0.5


def test_only_proven_datagrams_are_answered(rank_zero: Callable[..., NativeBackend]) -> None:
    backend = rank_zero(silence_s=20.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.settimeout(PATIENCE_S)
        card = backend.card()
        backend.connect([card, card._replace(port=ear.getsockname()[1])])
        sound = proven(PING, 1, 0, 7)
        flipped = [bytes(b ^ (i == at) for i, b in enumerate(sound)) for at in range(len(sound))]
        for said in [
            b"",
            os.urandom(64),
            sound[:-1],
            sound + b"x",
            proven(PING, 1, 0, 7, b"another"),
            proven(PING, 5, 0, 7),
            proven(PING, 0, 0, 7),
            proven(PING, 1, 1, 7),
            proven(ALIVE, 1, 0, 7),
            *flipped,
        ]:
            ear.sendto(said, (card.address, card.port))
        ear.sendto(proven(PING, 1, 0, 8), (card.address, card.port))
        assert ear.recv(100) == proven(ALIVE, 0, 1, 8), "the first reply is to the only query"


def test_a_rank_that_did_not_get_the_query_cannot_answer_it(rank_zero: Callable[..., NativeBackend]) -> None:
    """Any member could prove a datagram in another's name, so a reply must have the number of the query."""
    backend = rank_zero(silence_s=1.0)
    ends = Ends(backend)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.settimeout(PATIENCE_S)
        card = backend.card()
        backend.connect([card, card._replace(port=ear.getsockname()[1], pid=0)])
        with Member(card, SECRET, 1, 0, 2):
            numbers = []
            while len(numbers) < 3:
                numbers.append(DATAGRAM.unpack(ear.recv(100)[: DATAGRAM.size])[-1])
                guesses = {*range(100), *(number + step for number in numbers for step in (-1, 1))}
                for guess in guesses - set(numbers):
                    ear.sendto(proven(DATAGRAM_GIVEN_UP, 1, 0, guess), (card.address, card.port))
            assert len({number >> 32 for number in numbers}) == 3, "from the system's random source"
            assert ends.wait().cause.startswith("silent for ")


# -- ports that cannot be reached ----------------------------------------------------------------------------


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that never replies, as behind a firewall that drops packets: its accept queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.2)
            try:
                caller.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener.getsockname()[1]


def test_a_rank_behind_a_firewall_is_unreachable_and_the_error_names_the_address(
    rank_zero: Callable[..., NativeBackend],
) -> None:
    with black_hole() as port:
        backend = rank_zero()
        backend.connect([backend.card(), backend.card()._replace(port=port)])  # pid of a running process
        with Communicator.world(backend) as comm, pytest.raises(PeerLost) as caught:
            comm.barrier()
    said = str(caught.value)
    assert said.startswith("rank 1 is out of reach during barrier")
    assert f"cannot be reached from rank 0 at 127.0.0.1 port {port}: no answer to a connection in 0." in said
    assert "open that port of its host for TCP and UDP" in said
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("kind", ["plain", pytest.param("tls", marks=pytest.mark.more)])  # 5 s
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_port_that_accepts_and_closes_is_unreachable_in_time(
    rank_zero: Callable[..., NativeBackend], kind: str, is_reset: bool
) -> None:
    """As a proxy or an acceptor that refuses every hello: every connection is accepted and then closed."""
    is_over = threading.Event()

    def hang_up(listener: socket.socket) -> None:
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError), listener.accept()[0] as caller:
                if is_reset:
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    backend = rank_zero(tls=kind == "tls")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        port = listener.getsockname()[1]
        hangs_up = threading.Thread(target=hang_up, args=(listener,))
        hangs_up.start()
        try:
            shown = credentials(2)[0] if kind == "tls" else None
            backend.connect([backend.card(), backend.card()._replace(port=port, pid=0)], shown)
            error = ended(backend, backend.start_send(1, CONTEXT, 0, memoryview(b"x"))).error
        finally:
            is_over.set()
            hangs_up.join()
    assert isinstance(error, PeerLost)
    where = rf"cannot be reached from rank 0 at 127\.0\.0\.1 port {port}"
    assert re.search(rf"{where}: it hung up \d+ times during the handshake", str(error))


def test_the_longest_silence_is_long_for_the_system_too(rank_zero: Callable[..., NativeBackend]) -> None:
    """Four times this value exceeds the milliseconds that a system call accepts."""
    backend = rank_zero(silence_s=1e6)
    backend.connect([backend.card(), backend.card()._replace(port=1)])
    with Member(backend.card(), SECRET, 1, 0, 2) as member:
        theirs = {sock.getsockname() for sock in member.lanes.values()}
        timeouts = []
        for file in Path("/proc/self/fd").iterdir():
            if not file.is_socket():
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as sock:
                if sock.getpeername() in theirs:
                    timeouts.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        assert timeouts == [2**31 - 1] * 2


@pytest.mark.parametrize("fate", ["lives", "is a zombie", "is gone"])
def test_only_the_socket_of_a_dead_rank_is_removed(tmp_path: Path, fate: str) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "one.sock"
    pid = os.getpid()
    if fate != "lives":
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if fate == "is gone":
        os.waitpid(pid, 0)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(path))
        listener.listen()
        backend = NativeBackend(0, 2, str(tmp_path), SECRET, neighbours=False)
        stack.callback(backend.close)
        backend.connect([backend.card(), backend.card()._replace(unix_path=str(path), pid=pid)])
        request = backend.start_send(1, CONTEXT, 0, memoryview(b"x"))
        listener.accept()[0].close()
        assert "hung up" in str(ended(backend, request).error)
    assert path.exists() == (fate == "lives")
    if fate == "is a zombie":
        os.waitpid(pid, 0)


def test_hosts_that_do_not_reach_each_other_name_address_and_port(hosts: Hosts) -> None:
    def enter(rank: int) -> dict[str, Any]:
        hosts.enter(rank)
        return {"host": f"host {rank}", "bind": f"10.77.0.{rank + 1}"}

    def program(comm: Communicator, pipe: Connection) -> str:
        with pytest.raises(PeerLost) as caught:
            comm.barrier()
        return str(caught.value)

    with hosts.link_cutter() as cut:
        for side in (0, 1):
            cut(side, True)
        with forked(in_world(program), 2, links=enter, config=Config(silence_s=1.0)) as ranks:
            for rank in range(2):
                where = rf"from rank {rank} at 10\.77\.0\.{2 - rank} port \d+: "
                assert re.search(where, ranks.result(rank))


def test_a_rank_that_cannot_be_reached_opens_the_link_itself(tmp_path: Path) -> None:
    """Rank 0's connection fails; the other rank's counts, although that rank is higher."""
    tmp_path.chmod(0o700)
    with black_hole() as port, contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            ranks.append(NativeBackend(rank, 2, str(tmp_path), SECRET, shm=False, neighbours=False))
            stack.callback(ranks[rank].close)
        cards: list[Card] = [backend.card() for backend in ranks]
        ranks[0].connect([cards[0], cards[1]._replace(port=port)])
        sent = ranks[0].start_send(1, CONTEXT, 0, memoryview(b"down"))
        ranks[1].connect(cards)
        answer = ranks[1].start_send(0, CONTEXT, 0, memoryview(b"up"))
        assert ended(ranks[0], ranks[0].start_recv(1, CONTEXT, 0, None)).data == b"up"
        assert ended(ranks[1], ranks[1].start_recv(0, CONTEXT, 0, None)).data == b"down"
        assert ended(ranks[0], sent).error is ended(ranks[1], answer).error is None
