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
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from unisono.bootstrap.address import Address, bindable
from unisono.bootstrap.descriptors import need
from unisono.bootstrap.folder import remove_dead_folders
from unisono.bootstrap.join import tell_ended
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import TicketSource
from unisono.config import environment, network
from unisono.core.clock import RealRuntime
from unisono.errors import UsageError, counted, ranks_text
from unisono.launcher.defaults import cores, rank_defaults
from unisono.launcher.failure import culprit, exit_words
from unisono.launcher.mpiexec import ALLOWANCES, mpiexec_command
from unisono.launcher.output import Errors, Prefixer, beginnings, last_words
from unisono.launcher.parent_death import die_with_parent
from unisono.launcher.summary import AFTER_MAX, Ended, end_of, summary
from unisono.launcher.writer import Sink

__all__ = ["Job", "Patience", "run"]

_TERM_S: Final = 3.0
# What a process leaves in its pipes when it is gone is read for so long at most, and printed for so long at
# most when we were told to end.
_DRAIN_S: Final = 1.0
# A traceback is kept back for so long, to see whether its rank ends by it; longer when ranks hear of an end.
_HELD_S: Final = 5.0
_ENDING_S: Final = 10.0
# Of each rank the launcher keeps two pipes, a pidfd and, until the world is formed, the seed's connection.
_DESCRIPTORS_PER_RANK: Final = 4
_DESCRIPTORS: Final = 20
# How long the launcher of a host without a seed tries to tell the seed that a rank has ended.
_TELL_S: Final = 2.0
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PIPE_CODE: Final = 128 + signal.SIGPIPE


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and where its ranks meet. `env` tells the ranks of every option that they need, too.

    With `is_mpi` mpiexec starts the ranks, and they meet by MPI. `verbose`: a failed job tells everything.
    """

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
    is_mpi: bool = False
    verbose: bool = False

    @property
    def size(self) -> int:
        """Ranks on all hosts."""
        return self.ranks_here * self.nodes

    def check(self) -> None:
        """Refuse what cannot work, before anything is started."""
        if self.ranks_here < 1 or self.nodes < 1:
            given = f"{counted(self.ranks_here, 'rank')} on {counted(self.nodes, 'node')}"
            raise UsageError(f"{given}; allowed: at least 1 of each")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(f"--node-rank {self.node_rank}; allowed: 0 to {self.nodes - 1}")
        if not self.grace_s >= 0:
            raise UsageError(f"--grace {self.grace_s}; allowed: seconds >= 0")
        if self.is_mpi and (self.nodes > 1 or self.join is not None):
            raise UsageError(
                "--nnodes and --join with --backend mpi; allowed: one host",
                next_step="on several, run mpiexec with its host file, and uni.init(backend='mpi')",
            )
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
                    next_step="--address ADDRESS, or the name of an interface, on node 0",
                )
            if TicketSource(self.join or "").path is None:
                raise UsageError(
                    "node 0 makes the ticket; give it a file to put it in, not a ticket",
                    next_step="--join FILE",
                )
        if "UNISONO_JOIN" in self.env:
            raise UsageError(
                "a ticket on a command line can be read by every user; use --join FILE",
                next_step="--join FILE",
            )


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


def run(job: Job, *, version: str, out: int, err: int, colour: bool = False) -> int:
    """Run the job's ranks of this host to their end; returns the exit code for the launcher.

    `out` and `err` are descriptors to print to.

    Raises:
        UsageError: the job cannot work; nothing was started.
        RendezvousError: the seed cannot listen or write its ticket.
        BackendUnavailable: there is no mpiexec.
    """
    job.check()
    with contextlib.ExitStack() as stack:
        stack.enter_context(need(_DESCRIPTORS + _DESCRIPTORS_PER_RANK * job.ranks_here, "unisono run"))
        about: dict[str, str] = {}
        seed: Seed | None = None
        if job.node_rank == 0 and job.size > 1 and not job.is_mpi:
            seed, about = _host(job, version, stack)
        elif job.join is not None:
            path = TicketSource(job.join).path
            about = {"UNISONO_JOIN": job.join if path is None else str(path.resolve())}
        tell: Callable[[int, str], None] = lambda rank, how: None  # noqa: E731 - nobody else waits
        if seed is not None:
            tell = seed.lose
        elif job.size > 1:
            tell = stack.enter_context(contextlib.closing(_Teller(job, version))).tell
        crew = stack.enter_context(_Crew(job, out, err, colour, tell))
        # Forking comes before any thread: a child of a process with threads may inherit a held lock.
        crew.start({**job.env, **about})
        if seed is not None:
            seed.start()
        return crew.run()


class _Teller:
    """Tells the seed, on another host, of the first rank that has ended here, while the others are served."""

    def __init__(self, job: Job, version: str) -> None:
        self._source = TicketSource(job.join or "", insecure=job.insecure)
        self._version = version
        self._began = RealRuntime().now()
        self._thread: threading.Thread | None = None

    def tell(self, rank: int, how: str) -> None:
        """Begin to tell it. The ranks were started when this object was made, or later."""
        if self._thread is not None:
            return
        deadline = RealRuntime().deadline(_TELL_S)
        call = partial(
            tell_ended,
            self._source,
            rank,
            how,
            started_at=self._began,
            version=self._version,
            deadline=deadline,
        )
        self._thread = threading.Thread(target=call, name="unisono-tell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until it is told, or nobody is there to hear it."""
        if self._thread is not None:
            self._thread.join(_TELL_S)


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
    stack.callback(remove_dead_folders, folder)
    if job.nodes > 1 and job.join is not None:
        stack.callback(TicketSource(str(Path(job.join).resolve())).claim(seed.ticket))
    return seed, {"UNISONO_JOIN": seed.local_ticket.text()}


class _Rank:
    """A rank of this host and what it said. `code` is None while it runs, and if the launcher ended it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.errors = Errors()
        self.code: int | None = None
        self._judged: tuple[float | None, int] = (None, 0)  # which words `_is_victim` is about
        self._is_victim = False

    def is_victim(self) -> bool:
        """Whether a traceback that is kept back says that it heard of another's end."""
        held = self.errors.held
        state = (self.errors.held_since, len(held))
        if state != self._judged:
            self._judged = state
            self._is_victim = end_of(Ended(self.rank, None, last_words(held))).is_victim
        return self._is_victim


class _Process:
    """A process that we have started: a rank, or mpiexec, which has no rank."""

    def __init__(self, process: subprocess.Popen[bytes], rank: _Rank | None) -> None:
        self.popen = process
        self.rank = rank
        self.pidfd = os.pidfd_open(process.pid)
        self.is_gone = False
        self.is_told_to_end = False

    def signal(self, number: signal.Signals) -> None:
        """Signal it and its own children. A zombie keeps the group's number from being used again."""
        if not self.is_gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)


class _Crew:
    """The ranks of this host, from start to end."""

    def __init__(self, job: Job, out: int, err: int, colour: bool, tell: Callable[[int, str], None]) -> None:
        self._job = job
        self._tell_end = tell  # who forms the world hears which ranks have ended, and how
        self._out, self._err, self._colour = out, err, colour
        self._runtime = RealRuntime()
        self._patience = Patience(job.grace_s)
        self._selector = selectors.DefaultSelector()
        self._ears, self._mouth = _wake_pair()
        self._selector.register(self._ears, selectors.EVENT_READ, lambda: self._ears.recv(4096))
        self._sink = Sink(self._tell)
        self._ranks: list[_Rank] = []
        self._processes: list[_Process] = []
        self._failed: list[_Rank] = []  # in the order in which they ended
        self._streams: dict[int, Callable[[], None]] = {}  # by descriptor: what reads it
        self._is_paused = False  # nobody is read: what they say has no room
        self._lent: list[int] = []  # ends of pipes that ranks under mpiexec open themselves
        self._forwarded: signal.Signals | None = None
        self._told_at: float | None = None  # when somebody wanted us to end
        self._is_deaf = False  # nobody reads what we print

    def __enter__(self) -> _Crew:  # noqa: PYI034 - private
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened: nobody survives."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.popen.wait()
            os.close(process.pidfd)
        for descriptor in (*self._streams, *self._lent):
            os.close(descriptor)
        self._selector.close()
        self._ears.close()
        # The end of the socket that the printing thread uses stays: it may live as long as the process.

    def start(self, about: Mapping[str, str]) -> None:
        """Start all ranks."""
        job = self._job
        defaults = {"PYTHONUNBUFFERED": "1", **rank_defaults(job.ranks_here)}
        self._say_threads(defaults)
        self._ranks = [_Rank(job.node_rank * job.ranks_here + i) for i in range(job.ranks_here)]
        if job.is_mpi:
            self._start_mpiexec(about, defaults)
            return
        for local_rank, rank in enumerate(self._ranks):
            numbers = {
                "RANK": rank.rank,
                "SIZE": job.size,
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": job.ranks_here,
            }
            changes = {**about, **{f"UNISONO_{name}": str(value) for name, value in numbers.items()}}
            self._begin(job.command, environment(changes, defaults), rank)

    def _start_mpiexec(self, about: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """Start mpiexec, which starts the ranks; what it says itself has no rank before it."""
        for rank in self._ranks:
            for target, errors in ((self._out, None), (self._err, rank.errors)):
                self._lent.append(self._pipe(rank, target, errors))
        pairs = zip(self._lent[::2], self._lent[1::2], strict=True)
        command = mpiexec_command(self._job.command, os.getpid(), pairs)
        environ = environment({**ALLOWANCES, **about}, defaults)
        self._begin(command, environ, None)

    def _begin(self, command: list[str], environ: Mapping[str, str], rank: _Rank | None) -> None:
        """Start a process: a rank, or mpiexec. Rank 0 has our standard input."""
        out = self._pipe(rank, self._out, None)
        err = self._pipe(rank, self._err, None if rank is None else rank.errors)
        try:
            popen = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL if rank is not None and rank.rank != 0 else None,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        finally:
            os.close(out)
            os.close(err)
        process = _Process(popen, rank)
        self._processes.append(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._bury(process))

    def _say_threads(self, defaults: Mapping[str, str]) -> None:
        """Once: what we chose for the threads of numeric libraries, if nobody else has."""
        name, ranks = "OMP_NUM_THREADS", self._job.ranks_here
        if ranks > 1 and name not in environment(self._job.env):
            place = f"each of {ranks} ranks on {counted(cores(), 'core')}"
            text = f"unisono run: {name}={defaults[name]} for {place}"
            self._sink.put(self._err, f"{text}; a value that you set wins\n".encode())

    def run(self) -> int:
        """Serve until all have ended; the exit code."""
        self._sink.start()
        with _signals(self._selector, self._forward):
            while not all(process.is_gone for process in self._processes):
                self._serve()
            while self._lent:
                os.close(self._lent.pop())
            ended_at = self._runtime.now()
            self._drain(lambda: not self._streams, ended_at)
            code = self._conclude()
            # Whoever reads us may take its time, but for one who wants us to end.
            while not self._sink.is_empty and self._told_at is None:
                self._serve()
            self._drain(lambda: self._sink.is_empty, max(ended_at, self._told_at or 0.0))
        if self._is_deaf:
            return _PIPE_CODE if isinstance(self._sink.error, BrokenPipeError) else 1
        if self._forwarded is not None and not self._sink.is_empty:
            return code or 128 + self._forwarded
        return code

    def _drain(self, is_done: Callable[[], bool], since: float) -> None:
        """Serve on for a while. The time that ranks' output waits for our reader does not count."""
        while not is_done():
            now = self._runtime.now()
            if self._is_paused and self._told_at is None:
                since = now
            if now >= since + _DRAIN_S:
                return
            self._serve(since + _DRAIN_S)

    def _serve(self, until: float | None = None) -> None:
        limits = [at for at in (until, self._patience.next_at, self._release_at()) if at is not None]
        wait = max(0.0, min(limits) - self._runtime.now()) if limits else None
        for key, _ in self._selector.select(wait):
            act: Callable[[], None] = key.data
            act()
        now = self._runtime.now()
        number = self._patience.due(now)
        if number is not None:
            for process in self._processes:
                process.is_told_to_end = True
                process.signal(number)
        release_at = self._release_at()
        if release_at is not None and now >= release_at:
            for rank in self._ranks:
                self._show(rank, rank.errors.release())
        self._pause_or_go_on()
        if self._sink.error is not None and not self._is_deaf:
            self._is_deaf = True
            self._patience.begin(now - self._job.grace_s)

    def _release_at(self) -> float | None:
        """When tracebacks that were kept back are shown, because nobody ends by them."""
        since = [rank.errors.held_since for rank in self._ranks if rank.errors.held_since is not None]
        if not since or self._failed:
            return None
        # Who heard of another's end will soon end, and so will the other.
        is_ending = any(rank.is_victim() for rank in self._ranks)
        return min(since) + (_ENDING_S if is_ending else _HELD_S)

    def _pause_or_go_on(self) -> None:
        """Ranks are read only while there is room for what they say: without a reader they wait."""
        if self._sink.is_full != self._is_paused:
            self._is_paused = not self._is_paused
            for descriptor, read in self._streams.items():
                if self._is_paused:
                    self._selector.unregister(descriptor)
                else:
                    self._selector.register(descriptor, selectors.EVENT_READ, read)

    def _tell(self) -> None:
        """Called by the printing thread: it got on."""
        with contextlib.suppress(OSError):  # full: the loop will wake anyway
            self._mouth.send(b"\0")

    def _pipe(self, rank: _Rank | None, target: int, errors: Errors | None) -> int:
        """A descriptor to write to: whole lines of it are printed to `target`, with the rank before them."""
        descriptor, written = os.pipe()
        prefixer = Prefixer(None if rank is None else rank.rank, self._job.size, colour=self._colour)

        def read() -> None:
            data = os.read(descriptor, 65536)
            lines = prefixer.feed(data) if data else prefixer.finish()
            if not data:
                self._selector.unregister(descriptor)
                del self._streams[descriptor]
                os.close(descriptor)
            if errors is not None:
                now = self._runtime.now()
                lines = [shown for line in lines for shown in errors.add(line, now)]
            self._sink.put(target, b"".join(map(prefixer.show, lines)))

        self._streams[descriptor] = read
        self._selector.register(descriptor, selectors.EVENT_READ, read)
        return written

    def _show(self, rank: _Rank, lines: list[bytes]) -> None:
        prefixer = Prefixer(rank.rank, self._job.size, colour=self._colour)
        self._sink.put(self._err, b"".join(map(prefixer.show, lines)))

    def _bury(self, process: _Process) -> None:
        """A process has ended: so do those it has left, and, if it failed, soon the other ranks."""
        process.signal(signal.SIGKILL)
        self._selector.unregister(process.pidfd)
        code = process.popen.wait()
        process.is_gone = True
        if process.rank is not None:
            process.rank.code = None if process.is_told_to_end else code
            self._tell_end(process.rank.rank, exit_words(code))
        if code != 0:
            if process.rank is not None:
                self._failed.append(process.rank)
            self._patience.begin(self._runtime.now())

    def _forward(self, number: signal.Signals) -> None:
        """Pass a signal on; the second one ends everything at once."""
        self._told_at = self._told_at or self._runtime.now()
        if self._forwarded is not None:
            self._patience.end(self._runtime.now())
            return
        self._forwarded = number
        for process in self._processes:
            process.signal(number)
        self._patience.begin(self._runtime.now())

    def _conclude(self) -> int:
        """Say how ranks failed, the culprit's words last, and give back the exit code."""
        codes = [process.popen.returncode for process in self._processes if process.popen.returncode != 0]
        if self._job.is_mpi and codes:  # mpiexec alone knows how each ended
            self._failed = [rank for rank in self._ranks if rank.errors.has_traceback]
            for rank in self._failed:
                rank.code = codes[0]
        ends: list[Ended] = []
        for rank in self._ranks:
            if rank not in self._failed:
                self._show(rank, rank.errors.release())
        for rank in self._failed:
            before, words, after = rank.errors.split()
            self._show(rank, before)
            if len(after) > AFTER_MAX and not self._job.verbose:
                self._show(rank, after)
                after = []
            ends.append(Ended(rank.rank, rank.code, words, after))
        if not codes:
            return 0
        if self._forwarded is not None:
            self._say(summary([end for end in ends if end.words], None, verbose=self._job.verbose))
            return 128 + self._forwarded
        if not ends:  # mpiexec has said why
            return _exit_code(codes[0])
        found = culprit([end_of(end) for end in ends])
        guilty = next((end for end in ends if end.rank == found), Ended(found, 0, []))
        about = f"unisono run: rank {found} failed first ({self._how(guilty)})"
        self._say(summary(ends, guilty, about, verbose=self._job.verbose))
        own = [end.code for end in (guilty, *ends) if end.code]
        return _exit_code(own[0] if own else codes[0])

    def _how(self, guilty: Ended) -> str:
        """How the culprit ended."""
        if guilty.rank not in [rank.rank for rank in self._ranks]:
            return "on another host"
        if guilty.code is None:
            return "it did not end by itself"
        words = exit_words(guilty.code)
        if not guilty.code:
            return f"{words}, while others still needed it"
        # Without a traceback nobody knows why it failed; that others have left may be the reason.
        left = [rank.rank for rank in self._ranks if rank.code == 0]
        is_clear = not left or bool(beginnings(guilty.words))
        return words if is_clear else f"{words}; {ranks_text(left)} ended with exit code 0"

    def _say(self, lines: list[bytes]) -> None:
        self._sink.put(self._err, b"".join(line + b"\n" for line in lines))


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _wake_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a socket; a byte sent to the second wakes the loop that watches the first."""
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair


@contextlib.contextmanager
def _signals(selector: selectors.BaseSelector, forward: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hear signals in the loop, not between two instructions.

    The handlers note the numbers, so that no signal depends on room in the socket, which only wakes the loop.
    """
    ears, mouth = _wake_pair()
    noted: deque[int] = deque()

    def hear() -> None:
        ears.recv(4096)
        while noted:
            forward(signal.Signals(noted.popleft()))

    before = {number: signal.signal(number, lambda got, _: noted.append(got)) for number in _FORWARDED}
    woken = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    selector.register(ears, selectors.EVENT_READ, hear)
    try:
        yield
    finally:
        selector.unregister(ears)
        signal.set_wakeup_fd(woken)
        ears.close()
        mouth.close()
        for number, handler in before.items():
            signal.signal(number, handler)
