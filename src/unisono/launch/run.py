"""`unisono run`: start the ranks of one host, show what they print, pass on signals, end them all.

Knows processes, pipes and signals. Does not know what ranks do, nor the command line. Ranks live in sessions
of their own, die with this process whatever kills it, and leave nothing behind in their process group.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Final

from unisono.config import environment, network
from unisono.errors import UsageError
from unisono.launch.address import Address, bindable
from unisono.launch.failure import culprit, exit_words
from unisono.launch.folder import remove_socket_folder
from unisono.launch.leash import make_leash
from unisono.launch.output import Prefixer, Tail, is_victim, last_words
from unisono.launch.seed import Seed
from unisono.launch.ticket import TicketSource
from unisono.runtime import RealRuntime

__all__ = ["Job", "Patience", "run"]

_TERM_S: Final = 3.0
# What a process leaves in its pipes when it is gone is read for so long at most.
_DRAIN_S: Final = 1.0
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PIPE_CODE: Final = 128 + signal.SIGPIPE


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and where its ranks meet."""

    command: list[str]
    ranks_here: int
    nodes: int = 1
    node_rank: int = 0
    join: str | None = field(default=None, repr=False)
    address: str | None = None
    advertise: str | None = None
    insecure: bool = False
    tls: bool = False
    grace_s: float = 5.0
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Ranks on all hosts."""
        return self.ranks_here * self.nodes

    def check(self) -> None:
        """Refuse what cannot work, before anything is started."""
        if self.ranks_here < 1 or self.nodes < 1:
            raise UsageError(f"{self.ranks_here} ranks on {self.nodes} nodes; allowed: at least 1 of each")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(f"--node-rank {self.node_rank}; allowed: 0 to {self.nodes - 1}")
        if not self.grace_s >= 0:
            raise UsageError(f"--grace {self.grace_s}; allowed: seconds >= 0")
        if self.nodes > 1 and self.join is None:
            raise UsageError(
                "several nodes need --join FILE, or UNISONO_JOIN",
                next_step="name a file that every node can read: node 0 puts the ticket there",
            )
        if self.nodes > 1 and self.node_rank == 0:
            if self.address is None:
                raise UsageError(
                    "several nodes need --address on node 0: an address or interface that the others reach",
                    cause="nothing listens beyond loopback unasked",
                )
            if TicketSource(self.join or "").path is None:
                raise UsageError("node 0 makes the ticket; give it a file to put it in, not a ticket")
        if "UNISONO_JOIN" in self.env:
            raise UsageError("a ticket on a command line can be read by every user; use --join FILE")


class Patience:
    """Pure: when to ask harder. Nothing happens before `begin`."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._steps: list[tuple[float, signal.Signals]] = []
        self._has_begun = False

    def begin(self, now: float) -> None:
        """The end has come for all: first time to end by themselves, then SIGTERM, then SIGKILL."""
        if not self._has_begun:
            self._has_begun = True
            term_at = now + self._grace_s
            self._steps = [(term_at, signal.SIGTERM), (term_at + _TERM_S, signal.SIGKILL)]

    def end(self, now: float) -> None:
        """No more patience."""
        self._has_begun = True
        self._steps = [(now, signal.SIGKILL)]

    @property
    def next_at(self) -> float | None:
        """When the next signal is due."""
        return self._steps[0][0] if self._steps else None

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send now."""
        if self._steps and now >= self._steps[0][0]:
            return self._steps.pop(0)[1]
        return None


def run(job: Job, *, version: str, out: BinaryIO, err: BinaryIO, colour: bool = False) -> int:
    """Run the job's ranks of this host to their end; returns the exit code for the launcher.

    Raises:
        UsageError: the job cannot work; nothing was started.
        RendezvousError: the seed cannot listen or write its ticket.
    """
    job.check()
    with contextlib.ExitStack() as stack:
        about: dict[str, str] = {}
        seed: Seed | None = None
        if job.node_rank == 0 and job.size > 1:
            seed, about = _host(job, version, stack)
        elif job.join is not None:
            path = TicketSource(job.join).path
            about = {"UNISONO_JOIN": job.join if path is None else str(path.resolve())}
        if job.address is not None:
            about["UNISONO_ADDRESS"] = job.address
        if job.advertise is not None:
            about["UNISONO_ADVERTISE"] = job.advertise
        if job.insecure:
            about["UNISONO_INSECURE"] = "1"
        crew = stack.enter_context(_Crew(job, out, err, colour))
        # Forking comes before the seed's thread: a child of a process with threads may inherit a held lock.
        crew.start({**job.env, **about})
        if seed is not None:
            seed.start()
        return crew.run()


def _host(job: Job, version: str, stack: contextlib.ExitStack) -> tuple[Seed, dict[str, str]]:
    seed = Seed(
        job.size,
        version=version,
        address=bindable(job.address) if job.address is not None else None,
        advertise=Address.parse(job.advertise) if job.advertise is not None else None,
        insecure=job.insecure,
        tls=job.tls or None,
    )
    stack.callback(seed.close)
    folder = job.env.get("TMPDIR") or network().folder
    stack.callback(remove_socket_folder, folder, seed.ticket.token, is_over=True)
    if job.nodes > 1 and job.join is not None:
        stack.callback(TicketSource(str(Path(job.join).resolve())).write(seed.ticket))
    return seed, {"UNISONO_JOIN": seed.local_ticket.text()}


class _Rank:
    """One child and what it said."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.tail = Tail()
        self.is_gone = False

    def signal(self, number: signal.Signals) -> None:
        """Signal it and its own children. A zombie keeps the group's number from being used again."""
        if not self.is_gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


class _Crew:
    """The ranks of this host, from start to end."""

    def __init__(self, job: Job, out: BinaryIO, err: BinaryIO, colour: bool) -> None:
        self._job = job
        self._out, self._err, self._colour = out, err, colour
        self._runtime = RealRuntime()
        self._patience = Patience(job.grace_s)
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._failed: list[_Rank] = []  # in the order in which they ended
        self._streams = 0
        self._forwarded: signal.Signals | None = None
        self._is_deaf = False  # nobody reads what we print

    def __enter__(self) -> _Crew:  # noqa: PYI034 - private
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened: nobody survives."""
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            os.close(rank.pidfd)
            for stream in (rank.process.stdout, rank.process.stderr):
                if stream is not None:
                    stream.close()
        self._selector.close()

    def start(self, about: Mapping[str, str]) -> None:
        """Start all ranks."""
        leash = make_leash(os.getpid())
        job = self._job
        for local_rank in range(job.ranks_here):
            rank = job.node_rank * job.ranks_here + local_rank
            numbers = {
                "RANK": rank,
                "SIZE": job.size,
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": job.ranks_here,
            }
            changes = {"PYTHONUNBUFFERED": "1", **about}
            changes |= {f"UNISONO_{name}": str(value) for name, value in numbers.items()}
            process = subprocess.Popen(
                job.command,
                env=environment(changes),
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=leash,
            )
            started = _Rank(rank, process)
            self._ranks.append(started)
            self._follow(started, process.stdout, self._out, None)
            self._follow(started, process.stderr, self._err, started.tail)
            self._selector.register(
                started.pidfd, selectors.EVENT_READ, lambda started=started: self._bury(started)
            )

    def run(self) -> int:
        """Serve until all have ended; the exit code."""
        with _signals(self._selector, self._forward):
            while not all(rank.is_gone for rank in self._ranks):
                self._serve(self._patience.next_at)
            drained_by = self._runtime.now() + _DRAIN_S
            while self._streams and self._runtime.now() < drained_by:
                self._serve(drained_by)
        return self._conclude()

    def _serve(self, until: float | None) -> None:
        wait = None if until is None else max(0.0, until - self._runtime.now())
        for key, _ in self._selector.select(wait):
            act: Callable[[], None] = key.data
            act()
        number = self._patience.due(self._runtime.now())
        if number is not None:
            for rank in self._ranks:
                rank.signal(number)

    def _follow(self, rank: _Rank, stream: IO[bytes] | None, target: BinaryIO, tail: Tail | None) -> None:
        assert stream is not None
        descriptor = stream.fileno()
        prefixer = Prefixer(rank.rank, self._job.size, colour=self._colour)

        def read() -> None:
            data = os.read(descriptor, 65536)
            lines = prefixer.feed(data) if data else prefixer.finish()
            if not data:
                self._selector.unregister(descriptor)
                self._streams -= 1
            for line in lines:
                if tail is not None:
                    tail.add(line)
            self._print(target, b"".join(map(prefixer.show, lines)))

        self._streams += 1
        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def _print(self, target: BinaryIO, data: bytes) -> None:
        if not data or self._is_deaf:
            return
        try:
            target.write(data)
            target.flush()
        except BrokenPipeError:
            self._is_deaf = True
            self._patience.begin(self._runtime.now() - self._job.grace_s)

    def _bury(self, rank: _Rank) -> None:
        """A rank has ended: so do the processes it has left, and, if it failed, soon the others."""
        rank.signal(signal.SIGKILL)
        self._selector.unregister(rank.pidfd)
        rank.process.wait()
        rank.is_gone = True
        if rank.process.returncode != 0:
            self._failed.append(rank)
            self._patience.begin(self._runtime.now())

    def _forward(self, number: signal.Signals) -> None:
        """Pass a signal on; the second one ends everything at once."""
        if self._forwarded is not None:
            self._patience.end(self._runtime.now())
            return
        self._forwarded = number
        for rank in self._ranks:
            rank.signal(number)
        self._patience.begin(self._runtime.now())

    def _conclude(self) -> int:
        """Say what the first failing rank said last, and give back its code."""
        if self._is_deaf:
            return _PIPE_CODE
        if not self._failed:
            return 0
        if self._forwarded is not None:
            return 128 + self._forwarded
        ends = [(rank.rank, is_victim(list(rank.tail.lines))) for rank in self._failed]
        first = next(rank for rank in self._failed if rank.rank == culprit(ends))
        code = first.process.returncode
        words = last_words(list(first.tail.lines))
        text = f"unisono run: rank {first.rank} failed first ({exit_words(code)})"
        text += "; its last words:" if words else "; it said nothing"
        self._print(self._err, b"\n".join([text.encode(), *words, b""]))
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals(selector: selectors.BaseSelector, forward: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hear signals in the loop, not between two instructions."""
    ear, mouth = socket.socketpair()
    ear.setblocking(False)
    mouth.setblocking(False)

    def hear() -> None:
        for number in ear.recv(64):
            if number in _FORWARDED:
                forward(signal.Signals(number))

    before = {number: signal.signal(number, lambda *_: None) for number in _FORWARDED}
    woken = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    selector.register(ear, selectors.EVENT_READ, hear)
    try:
        yield
    finally:
        selector.unregister(ear)
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        ear.close()
        mouth.close()
