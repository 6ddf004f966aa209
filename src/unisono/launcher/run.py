"""`unisono run`: start the ranks of one host, show what they print, forward signals, end them all.

Each rank has a process group of its own, dies with this process, and leaves nothing behind in that group.
All ranks share our session (see terminal.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from unisono.bootstrap.address import Address, bindable
from unisono.bootstrap.descriptors import need
from unisono.bootstrap.folder import remove_dead_folders
from unisono.bootstrap.join import arrive, report_ended
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import TicketSource
from unisono.core.clock import RealRuntime
from unisono.environment import environment, launch_variables, network, torch_variables
from unisono.errors import counted, ranks_text
from unisono.launcher.defaults import cores, rank_defaults
from unisono.launcher.failure import culprit, exit_words
from unisono.launcher.job import Job
from unisono.launcher.mpiexec import ALLOWANCES, mpiexec_command
from unisono.launcher.output import beginnings
from unisono.launcher.relay import LocalRank, OutputRelay, release_at
from unisono.launcher.store_port import StorePort
from unisono.launcher.summary import AFTER_MAX, Ended, end_of, summary
from unisono.launcher.supervisor import Process, Supervisor

__all__ = ["run"]

# From SIGTERM to SIGKILL.
_TERM_S: Final = 3.0
# After all ranks have ended: how long their pipes are still read (a process they left may hold them open),
# and how long a reader that does not read may delay a launcher that was told to end.
_DRAIN_S: Final = 1.0
# Per rank: two pipes, a pidfd and, until the world is formed, the seed's connection.
_DESCRIPTORS_PER_RANK: Final = 4
_DESCRIPTORS: Final = 20
# How long the launcher of a host without a seed tries to report an ended rank to the seed.
_REPORT_S: Final = 2.0
# How long the launcher of another node waits for node 0, whose start may take minutes where jobs are queued.
_NODE_0_S: Final = 300.0
_PIPE_CODE: Final = 128 + signal.SIGPIPE


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
        join: dict[str, str] = {}
        master = Address("127.0.0.1")  # where programs of torch meet
        seed: Seed | None = None
        if job.node_rank == 0:
            port = stack.enter_context(contextlib.closing(StorePort()))
            master = Address("127.0.0.1", port.number)
        if job.node_rank == 0 and job.size > 1 and not job.is_mpi:
            seed = _make_seed(job, version, stack, master.port)
            join = {"UNISONO_JOIN": seed.local_ticket.text()}
            if job.nodes > 1:
                master = replace(seed.local_ticket.address, port=master.port)
        elif job.join is not None:
            path = TicketSource(job.join).path
            join = {"UNISONO_JOIN": job.join if path is None else str(path.resolve())}
            if job.node_rank > 0:
                master = _find_node_0(job, version)
        report: Callable[[int, str], None] = lambda rank, how: None  # noqa: E731 - no other rank waits
        if seed is not None:
            report = seed.on_rank_ended
        elif job.size > 1:
            report = stack.enter_context(contextlib.closing(_EndReporter(job, version))).report
        launch = stack.enter_context(_Launch(job, out, err, colour, report))
        # All forks come before the first thread: a forked child may inherit a held lock.
        launch.start({**job.env, **join}, master)
        if seed is not None:
            seed.start()
        return launch.run()


def _find_node_0(job: Job, version: str) -> Address:
    """Tell the seed on node 0 that this node has come; where the store of torch programs listens there."""
    source = TicketSource(job.join or "", insecure=job.insecure)
    return arrive(source, job.node_rank, version=version, deadline=RealRuntime().deadline(_NODE_0_S))


def _make_seed(job: Job, version: str, stack: contextlib.ExitStack, store_port: int) -> Seed:
    seed = Seed(
        job.size,
        version=version,
        address=bindable(job.address) if job.address is not None else None,
        advertise=Address.parse(job.advertise) if job.advertise is not None else None,
        insecure=job.insecure,
        tls=job.tls or None,
        store_port=store_port,
    )
    stack.callback(seed.close)
    folder = job.env.get("TMPDIR") or network().folder
    stack.callback(remove_dead_folders, folder)
    if job.nodes > 1 and job.join is not None:
        stack.callback(TicketSource(str(Path(job.join).resolve())).claim(seed.ticket))
    return seed


class _EndReporter:
    """Reports the first rank that has ended here to the seed on another host, on a thread of its own."""

    def __init__(self, job: Job, version: str) -> None:
        self._source = TicketSource(job.join or "", insecure=job.insecure)
        self._version = version
        self._started_at = RealRuntime().now()  # no rank was started before
        self._thread: threading.Thread | None = None

    def report(self, rank: int, how: str) -> None:
        """Begin to report it; one ended rank is enough for the seed to end the formation."""
        if self._thread is not None:
            return
        call = partial(
            report_ended,
            self._source,
            rank,
            how,
            started_at=self._started_at,
            version=self._version,
            deadline=RealRuntime().deadline(_REPORT_S),
        )
        self._thread = threading.Thread(target=call, name="unisono-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until it is reported, or the attempt has failed."""
        if self._thread is not None:
            self._thread.join(_REPORT_S)


class _Launch:
    """The ranks of this host, from start to end."""

    def __init__(
        self, job: Job, out: int, err: int, colour: bool, report: Callable[[int, str], None]
    ) -> None:
        self._job = job
        self._report_end = report  # to the seed: which rank has ended, and how
        self._runtime = RealRuntime()
        self._supervisor = Supervisor(_TERM_S)
        self._relay = OutputRelay(self._supervisor, job.size, out, err, colour=colour)
        self._ranks: list[LocalRank] = []
        self._failed: list[LocalRank] = []  # in the order in which they ended
        self._lent: list[int] = []  # ends of pipes that ranks under mpiexec open themselves
        self._forwarded: signal.Signals | None = None
        self._told_to_end_at: float | None = None  # when the first signal arrived
        self._has_reader = True  # until printing fails

    def __enter__(self) -> _Launch:  # noqa: PYI034 - private
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened: no rank survives."""
        self._supervisor.close()
        self._relay.close()
        for descriptor in self._lent:
            os.close(descriptor)

    def start(self, variables: Mapping[str, str], master: Address | None = None) -> None:
        """Start all ranks with these variables beside our own. Programs of torch meet at `master`."""
        job = self._job
        defaults = {"PYTHONUNBUFFERED": "1", **rank_defaults(job.ranks_here)}
        self._say_threads(defaults)
        self._ranks = [LocalRank(job.node_rank * job.ranks_here + i) for i in range(job.ranks_here)]
        if master is not None:  # a store that the user names wins
            defaults |= {"MASTER_ADDR": master.host, "MASTER_PORT": str(master.port)}
        if job.is_mpi:
            self._start_mpiexec(variables, defaults)
            return
        for local_rank, rank in enumerate(self._ranks):
            place = launch_variables(rank.rank, job.size, local_rank, job.ranks_here)
            self._start_process(job.command, environment({**variables, **place}, defaults), rank)

    def _start_mpiexec(self, variables: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """Start mpiexec, which starts the ranks; what it says itself has no rank before it."""
        pairs = [self._relay.pipes(rank) for rank in self._ranks]
        self._lent = [descriptor for pair in pairs for descriptor in pair]
        size = self._job.size
        places = [torch_variables(rank.rank, size, rank.rank, size) for rank in self._ranks]
        command = mpiexec_command(self._job.command, os.getpid(), pairs, places)
        self._start_process(command, environment({**ALLOWANCES, **variables}, defaults), None)

    def _start_process(self, command: list[str], environ: Mapping[str, str], rank: LocalRank | None) -> None:
        """Start a rank, or mpiexec. Rank 0 and mpiexec have our standard input."""
        has_input = rank is None or rank.rank == 0
        out, err = self._relay.pipes(rank)
        try:
            self._supervisor.start(
                command,
                environ,
                partial(self._on_end, rank),
                stdin=None if has_input else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        finally:
            os.close(out)
            os.close(err)

    def _say_threads(self, defaults: Mapping[str, str]) -> None:
        """Once: what we chose for the threads of numeric libraries, if the user has not."""
        name, ranks = "OMP_NUM_THREADS", self._job.ranks_here
        if ranks > 1 and name not in environment(self._job.env):
            scope = f"each of {ranks} ranks on {counted(cores(), 'core')}"
            text = f"unisono run: {name}={defaults[name]} for {scope}; a value that you set wins"
            self._relay.say([text.encode()])

    def run(self) -> int:
        """Serve until all have ended; the exit code."""
        self._relay.start()
        with self._supervisor.signals(self._forward):
            while self._supervisor.is_running:
                self._serve()
            while self._lent:
                os.close(self._lent.pop())
            ended_at = self._runtime.now()
            self._drain(lambda: self._relay.is_read, ended_at)
            code = self._conclude()
            # A slow reader gets all the time it needs, unless a signal has told us to end.
            while not self._relay.is_written and self._told_to_end_at is None:
                self._serve()
            self._drain(lambda: self._relay.is_written, max(ended_at, self._told_to_end_at or 0.0))
        if not self._has_reader:
            return _PIPE_CODE if isinstance(self._relay.error, BrokenPipeError) else 1
        if self._forwarded is not None and not self._relay.is_written:
            return code or 128 + self._forwarded
        return code

    def _drain(self, is_done: Callable[[], bool], since: float) -> None:
        """Serve on for a while. The time for which the ranks' output waits for our reader does not count."""
        while not is_done():
            now = self._runtime.now()
            if self._relay.is_paused and self._told_to_end_at is None:
                since = now
            if now >= since + _DRAIN_S:
                return
            self._serve(since + _DRAIN_S)

    def _serve(self, until: float | None = None) -> None:
        limits = [at for at in (until, self._release_at()) if at is not None]
        self._supervisor.serve(min(limits, default=None))
        at = self._release_at()
        if at is not None and self._runtime.now() >= at:
            for rank in self._ranks:
                self._relay.show(rank, rank.errors.release())
        self._relay.pause_or_resume()
        if self._relay.error is not None and self._has_reader:
            self._has_reader = False
            self._supervisor.stop(0.0)

    def _release_at(self) -> float | None:
        """When held tracebacks are shown. After a failure they belong to the summary."""
        return None if self._failed else release_at(self._ranks)

    def _on_end(self, rank: LocalRank | None, process: Process) -> None:
        """A process has ended; if it failed, the other ranks have the grace time to end."""
        assert process.code is not None
        if rank is not None:
            rank.code = None if process.was_told_to_end else process.code
            self._report_end(rank.rank, exit_words(process.code))
        if process.code != 0:
            if rank is not None:
                self._failed.append(rank)
            self._supervisor.stop(self._job.grace_s)

    def _forward(self, number: signal.Signals) -> None:
        """Forward a signal; the second one kills all ranks at once."""
        self._told_to_end_at = self._told_to_end_at or self._runtime.now()
        if self._forwarded is not None:
            self._supervisor.kill()
            return
        self._forwarded = number
        for process in self._supervisor.processes:
            process.signal(number)
        self._supervisor.stop(self._job.grace_s)

    def _conclude(self) -> int:
        """Print how ranks failed, the culprit's words last; the exit code."""
        codes = [process.code for process in self._supervisor.processes if process.code]
        if self._job.is_mpi and codes:  # only mpiexec knows how each rank ended
            self._failed = [rank for rank in self._ranks if rank.errors.has_traceback]
            for rank in self._failed:
                rank.code = codes[0]
        ends: list[Ended] = []
        for rank in self._ranks:
            if rank not in self._failed:
                self._relay.show(rank, rank.errors.release())
        for rank in self._failed:
            before, words, after = rank.errors.split()
            self._relay.show(rank, before)
            if len(after) > AFTER_MAX and not self._job.verbose:
                self._relay.show(rank, after)
                after = []
            ends.append(Ended(rank.rank, rank.code, words, after))
        if not codes:
            return 0
        if self._forwarded is not None:
            self._relay.say(summary([end for end in ends if end.words], None, verbose=self._job.verbose))
            return 128 + self._forwarded
        if not ends:  # mpiexec has printed why
            return _exit_code(codes[0])
        found = culprit([end_of(end) for end in ends])
        guilty = next((end for end in ends if end.rank == found), Ended(found, 0, []))
        about = f"unisono run: rank {found} failed first ({self._how(guilty)})"
        self._relay.say(summary(ends, guilty, about, verbose=self._job.verbose))
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
        # Without a traceback the reason is unknown; that other ranks have left may be it.
        left = [rank.rank for rank in self._ranks if rank.code == 0]
        is_clear = not left or bool(beginnings(guilty.words))
        return words if is_clear else f"{words}; {ranks_text(left)} ended with exit code 0"


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code
