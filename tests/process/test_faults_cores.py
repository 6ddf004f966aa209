"""More ranks than cores: no rank is declared dead because it was not scheduled."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from tests.support.faults import Ends, in_world, rank_zero
from tests.support.member import Member
from tests.support.native_ranks import CONTEXT, SECRET, ended
from tests.support.processes import PATIENCE_S, forked

import unisono as uni
from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.errors import PeerLost

pytestmark = pytest.mark.more

CALLS_MAX = 16  # connect/connection_owner.hpp

__all__ = ["rank_zero"]


@pytest.fixture
def busy() -> Iterator[int]:
    """A process that is always runnable."""
    pid = os.fork()
    if pid == 0:
        while True:
            pass
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def is_quiet(backend: NativeBackend, ends: Ends, seconds: float) -> bool:
    """Whether no rank is reported down for this time on the engine's own clock."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ends:
        time.sleep(0.02)
    return not ends


def test_a_starved_rank_behind_a_socket_is_not_declared_dead(
    rank_zero: Callable[..., NativeBackend], busy: int
) -> None:
    backend = rank_zero()
    card, ends = backend.card(), Ends(backend)
    backend.connect([card, card._replace(port=1, pid=busy)])
    with Member(card, SECRET, 1, 0, 2):
        assert is_quiet(backend, ends, 1.5), "five times the limit for silence"
        os.kill(busy, signal.SIGSTOP)
        assert re.fullmatch(r"silent for \d\.\d s", ends.wait().cause)


def test_a_starved_rank_has_time_for_a_handshake(rank_zero: Callable[..., NativeBackend], busy: int) -> None:
    backend = rank_zero()
    ends = Ends(backend)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        backend.connect([backend.card(), backend.card()._replace(port=port, pid=busy)])
        request = backend.start_send(1, CONTEXT, 0, memoryview(b"x"))
        assert is_quiet(backend, ends, 1.5)
        os.kill(busy, signal.SIGKILL)
        os.waitpid(busy, 0)
        error = ended(backend, request).error
        assert isinstance(error, PeerLost)
        assert re.search(rf"at 127\.0\.0\.1 port {port}: no answer to a handshake in \d", str(error))


def test_a_rank_opens_few_connections_at_a_time(rank_zero: Callable[..., NativeBackend]) -> None:
    size = 2 * CALLS_MAX + 1
    backend = rank_zero(size, silence_s=20.0)
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(PATIENCE_S)
        card = backend.card()
        backend.connect([card] + [card._replace(port=listener.getsockname()[1])] * (size - 1))
        requests = [backend.start_send(rank, CONTEXT, 0, memoryview(b"x")) for rank in range(1, size)]
        callers = [stack.enter_context(listener.accept()[0]) for _ in range(CALLS_MAX)]
        listener.settimeout(0.3)
        with pytest.raises(TimeoutError):
            listener.accept()
        listener.settimeout(PATIENCE_S)
        for caller in callers:  # an invalid reply ends a call, so that another can begin
            caller.sendall(bytes(64))
        for _ in range(CALLS_MAX):
            stack.enter_context(listener.accept()[0]).sendall(bytes(64))
        for request in requests:
            assert "secret" in str(ended(backend, request).error)


def test_ranks_that_never_reply_do_not_delay_connections_to_others(
    rank_zero: Callable[..., NativeBackend],
) -> None:
    size = CALLS_MAX + 2
    backend = rank_zero(size, silence_s=1.0)
    ends = Ends(backend)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=64) as stopped,  # the kernel accepts connections to it
        socket.create_server(("127.0.0.1", 0)) as lives,
    ):
        lives.settimeout(PATIENCE_S)
        silent = backend.card()._replace(port=stopped.getsockname()[1], pid=0)
        card = silent._replace(port=lives.getsockname()[1])
        backend.connect([backend.card(), *[silent] * CALLS_MAX, card])
        for rank in range(1, size):
            backend.start_send(rank, CONTEXT, 0, memoryview(b"x"))
        with lives.accept()[0]:
            assert ends == [], "the other ranks were not declared dead"


@pytest.mark.more
@pytest.mark.parametrize("kind", ["tls", "quic"])
def test_64_ranks_with_tls_on_few_cores_lose_no_rank(kind: str) -> None:
    size = 64

    def program(comm: Communicator, pipe: Connection) -> bool:
        into = np.zeros((size, 3), np.int64)
        others = [rank for rank in range(size) if rank != comm.rank]
        works: list[uni.Work[Any]] = [comm.start.recv(into[rank], rank) for rank in others]
        works += [comm.start.send(np.full(3, comm.rank * size + rank), rank) for rank in others]
        uni.wait_all(works)
        comm.barrier()
        return all((into[rank] == rank * size + comm.rank).all() for rank in others)

    with forked(in_world(program), size, kind=kind) as ranks:
        assert [ranks.result(rank, 4 * PATIENCE_S) for rank in range(size)] == [True] * size
