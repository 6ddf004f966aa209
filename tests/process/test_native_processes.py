"""Native ranks in processes: crashes, stops, forks, floods and corrupt memory, seen by the survivors."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import multiprocessing as mp
import multiprocessing.resource_tracker
import os
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
from tests.support.member import HELLO, exactly
from tests.support.metronome import Metronome
from tests.support.ranks import IS_SANITIZED

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card, Credentials
from unisono.config import Config
from unisono.core.envelope import ANY
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.errors import BackendUnavailable, ClosedError, PeerLost
from unisono.messaging.peer_down import PeerDown

CONTEXT = 0xC0FFEE
PATIENCE_S = 120

# A process of the standard library that stays; started here, so that the leak check knows it.
multiprocessing.resource_tracker.ensure_running()

LINKS = {
    "shm": {},
    "rings": {"direct_read": False},
    "tcp": {"shm": False},
    "tls": {"shm": False, "tls": True},
    "quic": {"shm": False, "quic": True},
}


class Ranks:
    """Processes that each run one function on a backend; the parent connects the backends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = mp.get_context("spawn")
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(
        self, fn: Callable[..., Any], size: int, *args: Any, links: str = "shm", config: Any = None
    ) -> None:
        """Run `fn(backend, pipe, *args)` in `size` processes; the result is sent back through the pipe."""
        given = credentials(size) if links in ("tls", "quic") else [None] * size
        for rank in range(size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_live,
                args=(fn, rank, size, str(self._folder), theirs, args, links, config or {}, given[rank]),
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        cards = [self.get(rank) for rank in range(size)]
        for pipe in self.pipes:
            pipe.send(cards)

    def get(self, rank: int, timeout: float = PATIENCE_S) -> Any:
        assert self.pipes[rank].poll(timeout), f"rank {rank} sends nothing"
        said = self.pipes[rank].recv()
        if isinstance(said, BaseException):
            raise said
        return said

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.join(0.5 if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()


def _live(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    pipe: Connection,
    args: tuple[Any, ...],
    links: str,
    config: dict[str, Any],
    given: Credentials | None,
) -> None:
    backend = NativeBackend(rank, size, folder, b"the job's secret", config=Config(**config), **LINKS[links])
    try:
        pipe.send(tuple(backend.card()))
        backend.connect([Card(*card) for card in pipe.recv()], given)
        pipe.send(fn(backend, pipe, *args))
    except BaseException as error:
        pipe.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        backend.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Processes that are ended with the test."""
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    made = Ranks(folder)
    yield made
    made.end()


def ended(backend: NativeBackend, request: Request, timeout: float = PATIENCE_S) -> Request:
    """Wait until a request ends, with or without an error."""
    event = backend.runtime.event()
    request.notify(event.set)
    assert backend.runtime.block(event, timeout, lambda: Waiting(backend.rank, (), "a test")), (
        "the request does not end"
    )
    return request


def done(backend: NativeBackend, request: Request) -> Request:
    """Wait for a request that must succeed."""
    if ended(backend, request).error is not None:
        raise request.error
    return request


def ramp(rank: int, nbytes: int) -> np.ndarray[Any, Any]:
    return ((np.arange(nbytes, dtype=np.uint64) * 2654435761 + rank * 97) >> 7).astype(np.uint8)


def meet(backend: NativeBackend) -> None:
    """Wait until all ranks have called this."""
    for step in (0, 1):
        for peer in range(backend.size):
            if (backend.rank == 0) == (peer != 0):
                wants = (step == 0) == (backend.rank == 0)
                if wants:
                    done(backend, backend.start_recv(peer, 1, 0, memoryview(bytearray(0))))
                else:
                    done(backend, backend.start_send(peer, 1, 0, memoryview(b"")))


# -- without failures -------------------------------------------------------------------------------------


def exchange(backend: NativeBackend, pipe: Connection, sizes: list[int]) -> list[str]:
    peers = [p for p in range(backend.size) if p != backend.rank]
    for n in sizes:
        mine = ramp(backend.rank, n)
        into = {p: np.zeros(n + 1, np.uint8) for p in peers}
        receives = {p: backend.start_recv(p, CONTEXT, n, memoryview(into[p])) for p in peers}
        sends = [backend.start_send(p, CONTEXT, n, memoryview(mine)) for p in peers]
        for p, request in receives.items():
            envelope = done(backend, request).envelope
            assert envelope is not None
            assert envelope.nbytes == n
            assert np.array_equal(into[p][:n], ramp(p, n)), (n, p)
            assert into[p][n] == 0, "no byte beyond the message"
        for send in sends:
            done(backend, send)
    meet(backend)
    return backend.links()


@pytest.mark.more
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


# -- failures ---------------------------------------------------------------------------------------------


class DownReports:
    """The times at which the backend reported ranks down."""

    def __init__(self, backend: NativeBackend) -> None:
        self.by_rank: dict[int, tuple[PeerDown, float]] = {}
        self._event = backend.runtime.event()
        self._backend = backend
        backend.watch(self._hear)

    def _hear(self, down: PeerDown) -> None:
        self.by_rank[down.rank] = (down, time.monotonic())
        self._event.set()

    def wait(self, rank: int) -> tuple[PeerDown, float]:
        end = time.monotonic() + PATIENCE_S
        while rank not in self.by_rank:
            assert self._backend.runtime.block(
                self._event, end - time.monotonic(), lambda: Waiting(0, (), "")
            ), "the end is not reported"
            self._event.clear()
        return self.by_rank[rank]


def survive(backend: NativeBackend, pipe: Connection, victim: int) -> Any:
    reports, metronome, begun = DownReports(backend), Metronome(), time.monotonic()
    exchange(backend, pipe, [1])  # every link is open
    if backend.rank == victim:
        done(backend, backend.start_send(0, CONTEXT, 7, memoryview(b"last words")))
        pipe.send("ready")
        time.sleep(PATIENCE_S)
    receive = backend.start_recv(victim, CONTEXT, 0, memoryview(bytearray(8)))
    send = backend.start_send(victim, CONTEXT, 9, memoryview(bytes(1 << 20)))
    pipe.send("ready")
    for request in (receive, send):
        error = ended(backend, request).error
        assert isinstance(error, PeerLost), error
        assert error.ranks == (victim,)
    down, at = reports.wait(victim)
    late = ended(backend, backend.start_send(victim, CONTEXT, 0, memoryview(b"x"))).error
    assert isinstance(late, PeerLost)
    if backend.rank == 0:
        words = bytearray(10)
        done(backend, backend.start_recv(victim, CONTEXT, 7, memoryview(words)))
        assert words == b"last words"
    meet_others(backend, victim)
    return down.left, down.cause, at, at - begun - metronome.fair_s(begun, at)


def meet_others(backend: NativeBackend, victim: int) -> None:
    """Check that the survivors still work together."""
    others = [r for r in range(backend.size) if r != victim]
    after = others[(others.index(backend.rank) + 1) % len(others)]
    receive = backend.start_recv(ANY, CONTEXT, 5, None)
    done(backend, backend.start_send(after, CONTEXT, 5, memoryview(bytes(100_000))))
    assert len(done(backend, receive).data or b"") == 100_000


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_known_at_once(ranks: Ranks, tmp_path: Path, links: str, victim: int) -> None:
    ranks.start(survive, 3, victim, links=links)
    for rank in range(3):
        assert ranks.get(rank) == "ready"
    killed_at = time.monotonic()
    ranks.signal(victim, signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        left, cause, at, stolen_s = ranks.get(rank)
        assert not left
        assert "died: its" in cause
        assert "was closed" in cause
        assert at - killed_at - stolen_s < 1, f"rank {rank} took {at - killed_at:.2f} s"
    for rank in {0, 1, 2} - {victim}:
        ranks.processes[rank].join(PATIENCE_S)
    assert not list((tmp_path / "job").iterdir()), "the survivors removed the files of the dead rank"


@pytest.mark.parametrize("links", ["shm", "tcp"])
def test_a_stopped_rank_is_known_by_its_silence(ranks: Ranks, links: str) -> None:
    ranks.start(survive, 3, 1, links=links)
    for rank in range(3):
        assert ranks.get(rank) == "ready"
    stopped_at = time.monotonic()
    ranks.signal(1, signal.SIGSTOP)
    for rank in (0, 2):
        left, cause, at, stolen_s = ranks.get(rank)
        assert not left
        assert "silent" in cause or "closed" in cause
        assert at - stopped_at > 1.5, f"rank {rank} took {at - stopped_at:.2f} s"
        assert at - stopped_at - stolen_s < 6, f"rank {rank} took {at - stopped_at:.2f} s"


def be_helped(backend: NativeBackend, pipe: Connection, nbytes: int) -> bool:
    """Rank 0 sends, copying a part itself into rank 1's memory, until it is stopped and declared dead."""
    memory = np.zeros(nbytes, np.uint8)
    turn = 0
    while True:
        if backend.rank == 0:
            request = backend.start_send(1, CONTEXT, 0, memoryview(memory))
        else:
            request = backend.start_recv(0, CONTEXT, 0, memoryview(memory))
        if (error := ended(backend, request).error) is not None:
            break
        turn += 1
        if turn == 20:
            pipe.send("ready")
    assert isinstance(error, PeerLost), error
    if backend.rank == 0:
        return True
    memory.fill(0xA5)  # the memory is the caller's again
    pipe.send("lost")
    assert pipe.recv() == "look"
    return bool((memory == 0xA5).all())


@pytest.mark.more
@pytest.mark.parametrize("nbytes", [1 << 20, 16 << 20])
def test_a_rank_stopped_during_a_cooperative_copy_writes_no_more(ranks: Ranks, nbytes: int) -> None:
    ranks.start(be_helped, 2, nbytes)
    for rank in range(2):
        assert ranks.get(rank) == "ready"
    ranks.signal(0, signal.SIGSTOP)
    assert ranks.get(1) == "lost"
    ranks.signal(0, signal.SIGCONT)
    assert ranks.get(0), "it was notified that it was declared dead"
    ranks.pipes[1].send("look")
    assert ranks.get(1), "and wrote no more into the memory"


def hold_the_gil(backend: NativeBackend, pipe: Connection, seconds: int) -> bool:
    reports = DownReports(backend)
    meet(backend)
    if backend.rank == 1:
        ctypes.PyDLL(None).sleep(seconds)  # like a C extension that never releases the GIL
    meet(backend)
    # The other rank may be done first, and leave: this is no death.
    return all(down.left for down, _ in reports.by_rank.values())


@pytest.mark.more
@pytest.mark.parametrize("links", ["shm", "tcp"])
def test_a_rank_that_holds_the_gil_is_not_declared_dead(
    ranks: Ranks, links: str, request: pytest.FixtureRequest
) -> None:
    # Longer than the limit for silence; with --long the documented minute.
    ranks.start(hold_the_gil, 2, 60 if request.config.getoption("--long") else 4, links=links)
    assert ranks.get(0)
    assert ranks.get(1)


def fork_and_go_on(backend: NativeBackend, pipe: Connection) -> tuple[int, int]:
    meet(backend)
    child = os.fork()
    if child == 0:
        try:
            backend.start_send(1 - backend.rank, CONTEXT, 0, memoryview(b"from the child"))
        except ClosedError:
            kept = [name for name in _descriptors() if "unisono" in name or "eventpoll" in name]
            backend.close()
            os._exit(len(kept))
        os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    exchange(backend, pipe, [10, 100_000])
    return status, len(list(Path(backend.card().unix_path).parent.iterdir()))


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def test_a_forked_child_neither_uses_nor_disturbs_the_engine(ranks: Ranks) -> None:
    ranks.start(fork_and_go_on, 2)
    for rank in range(2):
        status, _ = ranks.get(rank)
        assert status == 0, "the child was refused and had none of the engine's descriptors"


def cancel_races(backend: NativeBackend, pipe: Connection, turns: int) -> tuple[int, int]:
    """Rank 0 cancels long sends while rank 1 may be reading them: all of a message arrives, or none of it."""
    n = 700_001
    withdrawn = arrived = 0
    for turn in range(turns):
        if backend.rank == 0:
            data = ramp(turn, n)
            send = backend.start_send(1, CONTEXT, turn, memoryview(data))
            time.sleep((turn % 7) * 0.0002)
            if send.cancel():
                withdrawn += 1
                data[:] = 0xFF  # the memory is the caller's again
                done(backend, backend.start_send(1, CONTEXT, turn, memoryview(b"gone")))
            else:
                done(backend, send)
                arrived += 1
        else:
            into = bytearray(n)
            envelope = done(backend, backend.start_recv(0, CONTEXT, turn, memoryview(into))).envelope
            assert envelope is not None
            if envelope.nbytes == n:
                assert np.array_equal(np.frombuffer(into, np.uint8), ramp(turn, n)), turn
                arrived += 1
            else:
                assert into[:4] == b"gone"
                withdrawn += 1
    return withdrawn, arrived


@pytest.mark.parametrize("links", LINKS)
def test_a_cancelled_send_arrives_whole_or_not_at_all(ranks: Ranks, links: str) -> None:
    ranks.start(cancel_races, 2, 150, links=links)
    assert ranks.get(0) == ranks.get(1)


def corrupt(backend: NativeBackend, pipe: Connection, seed: int) -> str:
    """Rank 1 writes noise over the shared memory; rank 0 must end with an error, never a crash."""
    reports = DownReports(backend)
    meet(backend)
    if backend.rank == 0:
        down, _ = reports.wait(1)
        return down.cause
    rng = np.random.default_rng(seed)
    low, high = _link_memory()
    stop = time.monotonic() + PATIENCE_S
    # Through this file, because the memory is unmapped once the link is closed.
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        while not reports.by_rank and time.monotonic() < stop:
            with contextlib.suppress(OSError):
                for _ in range(64):
                    os.pwrite(
                        memory.fileno(), rng.bytes(4), low + 4 * int(rng.integers(0, (high - low) // 4))
                    )
            backend.start_send(0, CONTEXT, 0, memoryview(b"x"))
            time.sleep(0.001)
    return "reported" if reports.by_rank else "nothing"


def _link_memory() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    low, high = next(line for line in maps if "unisono-link" in line).split()[0].split("-")
    return int(low, 16), int(high, 16)


@pytest.mark.more
@pytest.mark.parametrize("seed", range(6))
def test_noise_in_shared_memory_is_an_error_not_a_crash(ranks: Ranks, seed: int) -> None:
    ranks.start(corrupt, 2, seed)
    assert ranks.get(0)
    assert ranks.get(1) == "reported"
    for process in ranks.processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0


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
