"""Ranks in fresh processes of this host: start them, hand them their work, collect what they return.

Knows processes, pipes and time. Does not know how ranks are connected: `enter`, which the caller gives, makes
a communicator in each of them. However it ends, no process is left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from unisono.bootstrap.descriptors import need
from unisono.bootstrap.folder import remove_dead_folders
from unisono.bootstrap.seed import Seed
from unisono.config import Config, environment, network
from unisono.core import codec
from unisono.core.clock import Deadline, RealRuntime
from unisono.errors import DeadlineExceeded, UsageError, ranks_text
from unisono.launcher.defaults import rank_defaults
from unisono.launcher.failure import (
    VICTIM_TYPES,
    End,
    blamed,
    culprit,
    exit_words,
    lost,
    rebuild,
)
from unisono.launcher.pipe import Inlet, Outlet, frame
from unisono.launcher.program import Main, Reference, is_main_running

__all__ = ["GRACE_S", "spawn"]

_log = logging.getLogger("unisono.launch")

# After the first failure, so long for the others to hear of it and end by themselves.
GRACE_S: Final = 5.0
# After SIGTERM, so long until SIGKILL.
_TERM_S: Final = 1.0

# Of each rank a socket, a pidfd and, until the world is formed, the seed's connection are kept.
_DESCRIPTORS_PER_RANK: Final = 3
_DESCRIPTORS: Final = 12

_PROGRAM: Final = "from unisono.launcher.child import main; main()"


def spawn(
    fn: Callable[..., Any],
    n: int,
    args: Sequence[Any],
    *,
    enter: Callable[..., Any],
    backend: str,
    version: str,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    config: Config | None = None,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Run `fn(comm, *args)` in `n` fresh processes and return the results by rank.

    In each child `enter(place, backend, config, timeout)` returns a context manager that gives the
    communicator; like `fn` it is found by its qualified name.

    Raises:
        UsageError: fn cannot be found by a new process, or an argument cannot travel; nothing was started.
        DeadlineExceeded: time ran out; all ranks were killed, and `waiting_on` names those without a result.
        Exception: what the first failing rank raised, with its traceback as a note.
    """
    if is_main_running():
        raise UsageError(
            "spawn was called while a new rank runs the main file",
            next_step='put the call under `if __name__ == "__main__":`',
        )
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"n={n!r}; allowed: at least 1 rank")
    runtime = RealRuntime()
    deadline = runtime.deadline(timeout)
    main = Main.of_this_process()
    task: dict[str, Any] = {
        "main": list(dataclasses.astuple(main)),
        "fn": list(dataclasses.astuple(Reference.to(fn, main))),
        "enter": list(dataclasses.astuple(Reference.to(enter, main))),
        "argv": list(sys.argv),
        "path": list(sys.path),
        "backend": backend,
        # Settings that nobody gave are read by the ranks, from an environment that `env` may have changed.
        "config": {} if config is None else dataclasses.asdict(config),
        "timeout": timeout,
        "size": n,
    }
    arguments = frame(codec.pack(list(args), codec.place_of_argument))
    with contextlib.ExitStack() as stack:
        with need(_DESCRIPTORS + _DESCRIPTORS_PER_RANK * n, "spawn"):
            join = ""
            tell: Callable[[int, str], None] = lambda rank, how: None  # noqa: E731 - nobody else waits
            if n > 1:
                settings = config if config is not None else Config.inherited(env or {})
                seed = stack.enter_context(Seed(n, version=version, tls=settings.tls or None))
                join, tell = seed.ticket.text(), seed.lose
                folder = (env or {}).get("TMPDIR") or network().folder
                stack.callback(remove_dead_folders, folder)
            crew = stack.enter_context(_Crew(n, runtime, deadline, grace_s, tell))
            if n > 1 and "OMP_NUM_THREADS" not in environment(env or {}):
                threads = rank_defaults(n)["OMP_NUM_THREADS"]
                _log.info("OMP_NUM_THREADS=%s for each of %d ranks; a value that you set wins", threads, n)
            for rank in range(n):
                head = frame(codec.pack({**task, "rank": rank, "join": join}))
                crew.start(rank, n, [*head, *arguments], env or {})
        return crew.results()


class _Rank:
    """One child: its process, its pipe and what is known of its end."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.rank = rank
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.sock: socket.socket | None = sock
        self.inlet = Inlet()
        self.report: dict[str, Any] | None = None
        self.is_gone = False

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a result."""
        return "error" in self.report if self.report is not None else self.is_gone

    def end(self) -> End:
        """How it ended, for whoever looks for the cause."""
        if self.report is None:
            return End(self.rank)
        error = self.report["error"]
        return End(self.rank, error["name"] in VICTIM_TYPES, blamed(error))

    def error(self) -> Exception:
        """What to raise for it."""
        if self.report is not None:
            return rebuild(self.report["error"], self.rank)
        return lost(self.rank, self.process.pid, self.process.returncode)


class _Crew:
    """All children, from start to end."""

    def __init__(
        self,
        size: int,
        runtime: RealRuntime,
        deadline: Deadline,
        grace_s: float,
        tell: Callable[[int, str], None],
    ) -> None:
        self._size = size
        self._tell = tell  # who forms the world hears which ranks have ended, and how
        self._runtime = runtime
        self._deadline = deadline
        self._grace_s = grace_s
        self._began = runtime.now()
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._failed: list[_Rank] = []  # in the order in which they ended

    def __enter__(self) -> _Crew:  # noqa: PYI034 - private
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened: nobody survives."""
        for rank in self._ranks:
            if rank.process.returncode is None:
                rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            os.close(rank.pidfd)
            if rank.sock is not None:
                rank.sock.close()
        self._selector.close()

    def start(self, rank: int, size: int, pieces: list[memoryview], env: Mapping[str, str]) -> None:
        """Start one child and begin to send it its work."""
        ours, theirs = socket.socketpair()
        about = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
                env=environment(
                    {**env, **{f"UNISONO_{name}": str(value) for name, value in about.items()}},
                    rank_defaults(size),
                ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        started = _Rank(rank, process, ours)
        self._ranks.append(started)
        outlet = Outlet(pieces)

        def talk(mask: int) -> None:
            if mask & selectors.EVENT_WRITE and started.sock is not None:
                with contextlib.suppress(OSError):  # it died before it read its work: the pidfd will say so
                    if not outlet.send(started.sock):
                        return
                self._selector.modify(started.sock, selectors.EVENT_READ, talk)
            if mask & selectors.EVENT_READ:
                self._hear(started)

        self._selector.register(ours, selectors.EVENT_READ | selectors.EVENT_WRITE, talk)
        self._selector.register(started.pidfd, selectors.EVENT_READ, lambda mask: self._bury(started))

    def results(self) -> list[Any]:
        """Wait for all; the results by rank, or the error that explains the failure."""
        ends_at: float | None = None  # when patience with the rest is over
        while not all(rank.is_gone for rank in self._ranks):
            now = self._runtime.now()
            if ends_at is None and (self._failed or all(rank.report is not None for rank in self._ranks)):
                ends_at = now + self._grace_s
            if self._deadline.has_passed(now) or (ends_at is not None and now >= ends_at):
                break
            limits = [at for at in (ends_at, self._deadline.at) if at is not None]
            self._serve(min(limits) - now if limits else None)
        waiting = tuple(rank.rank for rank in self._ranks if rank.report is None and not rank.is_gone)
        self._end_all()
        if self._failed:
            guilty = culprit([rank.end() for rank in self._failed])
            # A rank that left the others alone returned well: who waited for it says so.
            raise next((rank for rank in self._failed if rank.rank == guilty), self._failed[0]).error()
        if waiting:
            raise DeadlineExceeded(
                f"spawn: {ranks_text(waiting)} of {self._size} had not ended after "
                f"{self._runtime.now() - self._began:.3g} s; all were killed",
                waiting_on=waiting,
                next_step="raise timeout=, or see what these ranks wait for",
            )
        return [rank.report["value"] for rank in self._ranks if rank.report is not None]

    def _serve(self, timeout: float | None) -> None:
        for key, mask in self._selector.select(timeout):
            act: Callable[[int], None] = key.data
            act(mask)

    def _hear(self, rank: _Rank) -> None:
        if rank.sock is None:
            return
        try:
            report = rank.inlet.receive(rank.sock)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._hang_up(rank)
            return
        if report is not None and rank.report is None:
            rank.report = codec.unpack(report)
            if rank.has_failed:
                self._failed.append(rank)

    def _bury(self, rank: _Rank) -> None:
        """A child has ended; its last words may still be in the pipe."""
        while rank.sock is not None and rank.report is None:
            before = rank.sock
            self._hear(rank)
            if rank.sock is before and rank.report is None:
                break
        self._selector.unregister(rank.pidfd)
        rank.process.wait()
        rank.is_gone = True
        self._tell(rank.rank, exit_words(rank.process.returncode))
        if rank.report is None:
            self._failed.append(rank)

    def _hang_up(self, rank: _Rank) -> None:
        assert rank.sock is not None
        self._selector.unregister(rank.sock)
        rank.sock.close()
        rank.sock = None

    def _end_all(self) -> None:
        """Ask the rest to end, wait a little, then end them."""
        rest = [rank for rank in self._ranks if not rank.is_gone]
        failed = len(self._failed)
        for rank in rest:
            rank.process.send_signal(signal.SIGTERM)
        limit = self._runtime.now() + _TERM_S
        while not all(rank.is_gone for rank in rest) and self._runtime.now() < limit:
            self._serve(limit - self._runtime.now())
        for rank in rest:
            if not rank.is_gone:
                rank.process.kill()
        # What we ended is not to blame.
        del self._failed[failed:]
