"""Faults of ranks and of their system, seen from the communicator: one test each, with its bound.

docs/failure.md has the table. The tests assert twice the documented bounds; time in which the machine did not
run the test does not count.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.bounds import CTRL_C_WITHIN_S, REPORTED_WITHIN_S, SILENT_WITHIN_S
from tests.support.faults import (
    all_ready,
    each_backend,
    each_link,
    each_with_heartbeats,
    in_world,
    until_lost,
)
from tests.support.metronome import Metronome
from tests.support.processes import PATIENCE_S, forked
from tests.support.system import run_tool, skip_without

import unisono as uni
from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.errors import BackendUnavailable, DeadlineExceeded, PeerLost, UnisonoError

pytestmark = pytest.mark.more

SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
CLONE_NEWNET = 0x40000000


# -- F4: stopped ------------------------------------------------------------------------------------------


@each_backend
def test_a_rank_that_is_stopped_for_a_second_is_not_declared_dead(kind: str) -> None:
    def program(comm: Communicator, pipe: Connection) -> int:
        comm.barrier()
        pipe.send("ready")
        if comm.rank == 0:
            pipe.recv()
        return comm.all_reduce(comm.rank + 1)

    with forked(in_world(program), 3, kind=kind) as ranks:
        all_ready(ranks)
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(1)
        ranks.signal(1, signal.SIGCONT)
        ranks.pipes[0].send("go on")
        assert [ranks.result(rank) for rank in range(3)] == [6, 6, 6]


@each_with_heartbeats
def test_a_rank_that_stays_stopped_is_lost_and_learns_of_it_when_it_continues(kind: str) -> None:
    with forked(in_world(until_lost), 3, kind=kind) as ranks:
        all_ready(ranks)
        stopped_at = time.monotonic()
        ranks.signal(2, signal.SIGSTOP)
        for rank in (0, 1):
            name, lost, at, stolen_s = ranks.result(rank)
            assert (name, lost) == ("PeerLost", (2,))
            assert at - stopped_at - stolen_s < SILENT_WITHIN_S
        ranks.signal(2, signal.SIGCONT)
        # The report that it was declared dead, or the others' goodbyes, whichever arrives first.
        assert ranks.result(2)[0] == "PeerLost"


# -- F5, F6: the network ----------------------------------------------------------------------------------


Network = tuple[Callable[[int], dict[str, Any]], Callable[[], None], Callable[[], None]]


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts as network namespaces; functions to enter one, and to cut the network one way or both."""
    names = [f"unisono-f{side}-{os.getpid()}" for side in "ab"]
    ends = [f"uf{side}{os.getpid()}"[:15] for side in "ab"]

    ip = partial(run_tool, "ip")

    def enter(rank: int) -> dict[str, Any]:
        side = rank % 2
        with open(f"/var/run/netns/{names[side]}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return {"host": f"host {side}", "bind": f"10.78.0.{side + 1}"}

    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for side in range(2):
            ip("-n", names[side], "address", "add", f"10.78.0.{side + 1}/24", "dev", ends[side])
            for interface in (ends[side], "lo"):
                ip("-n", names[side], "link", "set", interface, "up")
        yield (
            enter,
            lambda: ip("-n", names[0], "link", "set", ends[0], "down"),
            # Packets of host 0 are lost; those of host 1 arrive.
            lambda: ip("-n", names[0], "route", "add", "blackhole", "10.78.0.2/32"),
        )


@pytest.mark.more
@pytest.mark.parametrize("kind", ["tcp", "quic"])
@pytest.mark.parametrize("what", ["cable cut", "power off", "cut one way"])
def test_a_host_without_a_network_is_lost(network: Network, what: str, kind: str) -> None:
    """No packet reports the cut; both sides notice only the silence."""
    enter, cut, cut_one_way = network
    with forked(in_world(until_lost), 2, kind=kind, links=enter) as ranks:
        all_ready(ranks)
        cut_at = time.monotonic()
        (cut_one_way if what == "cut one way" else cut)()
        if what == "power off":
            ranks.signal(1, signal.SIGKILL)
        for rank in (0,) if what == "power off" else (0, 1):
            name, lost, at, stolen_s = ranks.result(rank)
            assert (name, lost) == ("PeerLost", (1 - rank,))
            assert at - cut_at - stolen_s < SILENT_WITHIN_S


# -- F9, F15: slow, or absent -----------------------------------------------------------------------------


@each_backend
def test_a_slow_rank_is_not_declared_dead_and_a_deadline_names_it(kind: str) -> None:
    def program(comm: Communicator, pipe: Connection) -> Any:
        late = comm.split(0)
        assert late is not None
        if comm.rank == 1:
            time.sleep(3.5)  # longer than the limit for silence
            return comm.all_reduce(1)
        error = None
        try:
            late.all_reduce(np.ones(50_000), timeout=1.5)  # the missing rank is queried after 0.25 s
        except DeadlineExceeded as caught:
            error = caught.waiting_on
        return error, comm.all_reduce(1)

    with forked(in_world(program), 3, kind=kind) as ranks:
        assert [ranks.result(rank) for rank in range(3)] == [((1,), 3), 3, ((1,), 3)]


# -- F10, F11: broken connections and damaged bytes -------------------------------------------------------


def connections(pid: int) -> list[socket.socket]:
    """The TCP connections of a process, by duplicates of their descriptors."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd, found = libc.syscall(SYS_PIDFD_OPEN, pid, 0), []
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                    continue
                fd = libc.syscall(SYS_PIDFD_GETFD, pidfd, int(entry), 0)
                if fd < 0:
                    continue
                sock = socket.socket(fileno=fd)
                try:
                    sock.getpeername()
                    is_tcp = sock.family == socket.AF_INET
                except OSError:
                    is_tcp = False
                if is_tcp:
                    found.append(sock)
                else:
                    sock.close()
    finally:
        os.close(pidfd)
    return found


def disconnect(found: list[socket.socket]) -> None:
    """Let the kernel send a RST."""
    unspecified = (ctypes.c_ubyte * 16)()
    for sock in found:
        ctypes.CDLL(None).connect(sock.fileno(), unspecified, 16)


def destroy(found: list[socket.socket]) -> None:
    """Kill a connection as `ss -K` does: the owner gets ECONNABORTED, the other side a RST."""
    ports = " or ".join(f"sport = :{sock.getsockname()[1]}" for sock in found)
    if not run_tool("ss", "--kill", "--tcp", "--no-header", ports):
        skip_without("ss --kill", "the kernel does not end connections of others")


@pytest.mark.parametrize("end", [disconnect, destroy])
@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_reset_connection_ends_the_link_at_once(
    kind: str, end: Callable[[list[socket.socket]], None]
) -> None:
    with contextlib.ExitStack() as stack, forked(in_world(until_lost), 2, kind=kind) as ranks:
        all_ready(ranks)
        found = [stack.enter_context(sock) for sock in connections(ranks.pids[0])]
        if not found:
            skip_without("pidfd_getfd", "the kernel does not lend us another process's sockets")
        reset_at = time.monotonic()
        end(found)
        for rank in (0, 1):
            name, lost, at, stolen_s = ranks.result(rank)
            assert (name, lost) == ("PeerLost", (1 - rank,))
            assert at - reset_at - stolen_s < REPORTED_WITHIN_S


# -- F20, F22, F23, F25: resources of the system ----------------------------------------------------------


def test_no_memory_for_a_link_is_an_error_that_says_so() -> None:
    """A limit on file sizes makes the reservation fail as a full /dev/shm would."""

    def links(rank: int) -> dict[str, Any]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        return {}

    def program(comm: Communicator, pipe: Connection) -> Any:
        try:
            comm.barrier()
        except PeerLost as error:
            return str(error)
        return "it worked"

    with forked(in_world(program), 2, links=links) as ranks:
        said = [ranks.result(rank) for rank in range(2)]
    assert any("no shared memory for a link of" in str(each) for each in said), said
    assert "it worked" not in said


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE], ids=["memory", "files"])
def test_a_rank_that_cannot_start_says_why(limit: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    _, hard = before = resource.getrlimit(limit)
    free = os.dup(0)
    os.close(free)
    least = 0 if limit == resource.RLIMIT_FSIZE else free + 2
    resource.setrlimit(limit, (least, hard))
    try:
        with pytest.raises(BackendUnavailable, match=r"File too large|Too many open files"):
            NativeBackend(0, 2, str(tmp_path), b"secret")
    finally:
        resource.setrlimit(limit, before)


WITHOUT_A_THREAD = """
import os, resource, signal
import unisono as uni

pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), resource.RLIM_INFINITY))
try:
    uni.local(2)
except uni.BackendUnavailable as error:
    print("the engine's thread" in str(error), len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
child = os.fork()
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_rank_whose_thread_cannot_start_leaves_nothing_behind() -> None:
    """No memory is left for a thread's stack. Signals are delivered as before, and the process can fork."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_THREAD],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (16 << 30, resource.RLIM_INFINITY)),
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.stdout.split() == ["True", "0", "7"], ended


def test_a_link_for_which_no_descriptor_is_left_is_an_error_that_says_so() -> None:
    """At the start rank 0 of 8 has links to ranks 1, 2, 4, 6 and 7; the send opens the link to rank 3."""

    def program(comm: Communicator, pipe: Connection) -> str:
        comm.barrier()
        try:
            if comm.rank == 0:
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                with contextlib.suppress(OSError):
                    while True:
                        os.dup(0)
                comm.send(b"hello", 3)
            comm.recv_bytes(0)
        except UnisonoError as error:
            return str(error)
        return "it worked"

    with forked(in_world(program), 8) as ranks:
        assert "Too many open files (raise this rank's ulimit -n)" in str(ranks.result(0))
        for rank in range(1, 8):
            ranks.result(rank)


def test_a_taken_port_and_an_address_of_others_are_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BackendUnavailable, match=f"port {port}.*in use"):
            NativeBackend(0, 2, str(tmp_path), b"secret", port=port)
    with pytest.raises(BackendUnavailable, match=r"192\.0\.2\.1"):
        NativeBackend(0, 2, str(tmp_path), b"secret", bind="192.0.2.1")
    assert not list(tmp_path.iterdir()), "nothing is left of the attempts"


def test_a_message_for_which_there_is_no_memory_is_an_error() -> None:
    length = 1 << 30

    def program(comm: Communicator, pipe: Connection) -> str:
        if comm.rank == 0:
            comm.send(np.zeros(length, np.uint8), 1)
            comm.barrier()
            return "sent"
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + length // 2, resource.RLIM_INFINITY))
        try:
            comm.recv_bytes(0)
        except UnisonoError as error:
            comm.barrier()
            return str(error)
        return "it worked"

    with forked(in_world(program), 2) as ranks:
        assert ranks.result(0) == "sent"
        assert "no memory" in str(ranks.result(1))


# -- F26: Ctrl-C ------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Communicator], Any]] = {
    "recv": lambda comm: comm.recv(np.empty(3), 1),
    "recv from ANY": lambda comm: comm.recv(np.empty(3)),
    "recv_bytes": lambda comm: comm.recv_bytes(1),
    "probe": lambda comm: comm.probe(1),
    "send": lambda comm: comm.send(np.ones(1_000_000), 1),
    "sendrecv": lambda comm: comm.sendrecv(np.ones(1_000_000), 1, np.empty(3), 1),
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(1_000_000)),
    "broadcast": lambda comm: comm.broadcast(np.ones(10), root=1),
    "all_gather_v": lambda comm: comm.all_gather_v(np.ones(3)),
    "broadcast_object": lambda comm: comm.broadcast_object(None, root=1),
    "split": lambda comm: comm.split(0),
    "wait": lambda comm: comm.start.recv_bytes(1).wait(),
    "a user's op": lambda comm: comm.all_reduce(np.ones(10), uni.op(np.maximum)),
}


@each_backend
def test_ctrl_c_ends_every_blocking_call(kind: str) -> None:
    def program(comm: Communicator, pipe: Connection) -> Any:
        if comm.rank == 1:
            pipe.send("ready")
            return pipe.recv()
        metronome, heard = Metronome(), {}
        pipe.send("ready")
        for name, call in CALLS.items():
            # An interrupted collective ends its communicator, so each call has its own.
            group = comm.sub([0, 1])
            try:
                pipe.send(name)
                call(group)
            except KeyboardInterrupt:
                at = time.monotonic()
                sent_at = pipe.recv()
                heard[name] = metronome.fair_s(sent_at, at)
        return heard

    with forked(in_world(program), 2, kind=kind) as ranks:
        all_ready(ranks)
        for name in CALLS:
            assert ranks.receive(0) == name
            time.sleep(0.02)  # a signal before the wait has begun would prove less
            ranks.signal(0, signal.SIGINT)
            ranks.pipes[0].send(time.monotonic())
        heard = ranks.result(0)
        assert set(heard) == set(CALLS)
        assert {name: late for name, late in heard.items() if late > CTRL_C_WITHIN_S} == {}
        ranks.pipes[1].send("done")


@each_link
def test_a_signal_that_comes_together_with_a_completion_loses_neither(kind: str) -> None:
    """A handler may raise between any two instructions, also between a completion and its dispatch."""

    def program(comm: Communicator, pipe: Connection) -> Any:
        pid = comm.broadcast_object(os.getpid(), root=1)
        heard = []
        for i in range(40):
            if comm.rank == 0:
                comm.recv_bytes(1)
                # The engine checks for signals only every 50 ms, so rank 1 finds both at once.
                os.kill(pid, signal.SIGINT if i % 2 else signal.SIGTERM)
                comm.send(b"now", 1, i)
                comm.send(b"later", 1, 1000)
                continue
            try:
                comm.send(b"ready", 0)
                comm.recv_bytes(0, i, timeout=10)
                time.sleep(10)  # the signal is delivered here at the latest
            except (KeyboardInterrupt, SystemExit) as error:
                heard.append(type(error).__name__)
            assert comm.recv_bytes(0, 1000, timeout=10) == b"later"
        return heard

    def live(backend: NativeBackend, pipe: Connection) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        return in_world(program)(backend, pipe)

    with forked(live, 2, kind=kind) as ranks:
        assert ranks.result(0) == []
        assert ranks.result(1) == ["SystemExit", "KeyboardInterrupt"] * 20
