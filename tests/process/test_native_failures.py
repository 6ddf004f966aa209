"""Native ranks in processes that are killed, stopped, forked, cancel, or corrupt shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.metronome import Metronome
from tests.support.native_processes import LINKS, DownReports, Ranks, done, exchange, meet, ramp, ranks
from tests.support.native_ranks import CONTEXT, PATIENCE_S, ended

from unisono.backends.native.backend import NativeBackend
from unisono.core.envelope import ANY
from unisono.errors import ClosedError, PeerLost

__all__ = ["ranks"]


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
