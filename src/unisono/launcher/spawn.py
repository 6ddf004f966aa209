"""`uni.spawn`: call a function in fresh processes of this host and collect the results.

How ranks are connected is up to the caller: `enter` makes a communicator in each of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from unisono.bootstrap.descriptors import need
from unisono.bootstrap.folder import remove_dead_folders
from unisono.bootstrap.seed import Seed
from unisono.config import Config
from unisono.core import codec
from unisono.core.clock import RealRuntime
from unisono.core.runtime import Deadline
from unisono.environment import environment, network
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
from unisono.launcher.pipe import FrameReceiver, FrameSender, frame
from unisono.launcher.program import Main, Reference, is_main_running
from unisono.launcher.supervisor import Process, Supervisor

__all__ = ["GRACE_S", "spawn"]

_log = logging.getLogger("unisono.launcher")

# After the first failure the other ranks have this long to learn of it and end by themselves.
GRACE_S: Final = 5.0
# From SIGTERM to SIGKILL.
_TERM_S: Final = 1.0

# Per rank: a socket, a pidfd and, until the world is formed, the seed's connection.
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

    In each child `enter(launch_info, backend, config, timeout)` returns a context manager that gives the
    communicator; like `fn` it is found by its qualified name.

    Raises:
        UsageError: fn cannot be found by a new process, or an argument cannot be sent; nothing was started.
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
    # Without a config the ranks read theirs from the environment, which `env` may have changed.
    settings = None if config is None else config.packed()
    task = {**_program_of(fn, enter), "backend": backend, "config": settings, "timeout": timeout, "size": n}
    arguments = frame(codec.pack(list(args), codec.path_of_argument))
    with contextlib.ExitStack() as stack:
        with need(_DESCRIPTORS + _DESCRIPTORS_PER_RANK * n, "spawn"):
            join = ""
            report: Callable[[int, str], None] = lambda rank, how: None  # noqa: E731 - no other rank waits
            if n > 1:
                tls = (config if config is not None else Config.inherited(env or {})).tls
                seed = stack.enter_context(Seed(n, version=version, tls=tls or None))
                join, report = seed.ticket.text(), seed.on_rank_ended
                folder = (env or {}).get("TMPDIR") or network().folder
                stack.callback(remove_dead_folders, folder)
            ranks = stack.enter_context(_SpawnedRanks(n, runtime, deadline, grace_s, report))
            if n > 1 and "OMP_NUM_THREADS" not in environment(env or {}):
                threads = rank_defaults(n)["OMP_NUM_THREADS"]
                _log.info("OMP_NUM_THREADS=%s for each of %d ranks; a value that you set wins", threads, n)
            for rank in range(n):
                head = frame(codec.pack({**task, "rank": rank, "join": join}))
                ranks.start(rank, [*head, *arguments], env or {})
        return ranks.results()


def _program_of(fn: Callable[..., Any], enter: Callable[..., Any]) -> dict[str, Any]:
    """How a new process finds the functions: by their names, in the main file and modules of this one.

    Raises:
        UsageError: it cannot find them.
    """
    main = Main.of_this_process()
    return {
        "main": list(dataclasses.astuple(main)),
        "fn": list(dataclasses.astuple(Reference.to(fn, main))),
        "enter": list(dataclasses.astuple(Reference.to(enter, main))),
        "argv": list(sys.argv),
        "path": list(sys.path),
    }


class _SpawnedRank:
    """One child: its process, the socket to it and what it has reported."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.process: Process  # set as soon as it is started
        self.sock: socket.socket | None = sock
        self.receiver = FrameReceiver()
        self.report: dict[str, Any] | None = None

    def end(self) -> End:
        """How it failed, to find the culprit."""
        if self.report is None:
            return End(self.rank)
        error = self.report["error"]
        return End(self.rank, error["name"] in VICTIM_TYPES, blamed(error))

    def error(self) -> Exception:
        """The exception to raise for its failure."""
        if self.report is not None:
            return rebuild(self.report["error"], self.rank)
        assert self.process.code is not None
        return lost(self.rank, self.process.popen.pid, self.process.code)


class _SpawnedRanks:
    """All children, from start to end."""

    def __init__(
        self,
        size: int,
        runtime: RealRuntime,
        deadline: Deadline,
        grace_s: float,
        report_end: Callable[[int, str], None],
    ) -> None:
        self._size = size
        self._report_end = report_end  # to the seed: which rank has ended, and how
        self._runtime = runtime
        self._deadline = deadline
        self._grace_s = grace_s
        self._started_at = runtime.now()
        self._supervisor = Supervisor(_TERM_S)
        self._ranks: list[_SpawnedRank] = []
        self._failed: list[_SpawnedRank] = []  # in the order in which they ended

    def __enter__(self) -> _SpawnedRanks:  # noqa: PYI034 - private
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened: no rank survives."""
        self._supervisor.close()
        for rank in self._ranks:
            if rank.sock is not None:
                rank.sock.close()

    def start(self, number: int, pieces: list[memoryview], env: Mapping[str, str]) -> None:
        """Start one child and begin to send it its task."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        rank = _SpawnedRank(number, ours)
        self._ranks.append(rank)
        numbers = {"RANK": number, "SIZE": self._size, "LOCAL_RANK": number, "LOCAL_SIZE": self._size}
        variables = {**env, **{f"UNISONO_{name}": str(value) for name, value in numbers.items()}}
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            # It stays in the caller's process group, so that Ctrl-Z and Ctrl-C reach it. Its program sets the
            # parent-death signal itself: the caller may have threads.
            rank.process = self._supervisor.start(
                [sys.executable, *flags, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
                environment(variables, rank_defaults(self._size)),
                lambda _: self._on_end(rank),
                has_group=False,
                dies_with_parent=False,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        sender = FrameSender(pieces)

        def send(_: int) -> None:
            if rank.sock is None:
                return
            with contextlib.suppress(OSError):  # it died before it read its task: `_on_end` will follow
                if not sender.send(ours):
                    return
            self._supervisor.unwatch(ours)
            self._supervisor.watch(ours, lambda _: self._receive(rank))

        self._supervisor.watch(ours, send, selectors.EVENT_WRITE)

    def results(self) -> list[Any]:
        """Wait for all; the results by rank, or the error that explains the failure."""
        while self._supervisor.is_running and not self._deadline.has_passed(self._runtime.now()):
            if self._failed or all(rank.report is not None for rank in self._ranks):
                self._supervisor.stop(self._grace_s)
            self._supervisor.serve(self._deadline.at)
        waiting = tuple(r.rank for r in self._ranks if r.report is None and r.process.code is None)
        self._supervisor.stop(0.0)
        while self._supervisor.is_running:
            self._supervisor.serve()
        if self._failed:
            guilty = culprit([rank.end() for rank in self._failed])
            # The culprit may have returned before the others were done; then the first victim says so.
            raise next((rank for rank in self._failed if rank.rank == guilty), self._failed[0]).error()
        if waiting:
            raise DeadlineExceeded(
                f"spawn: {ranks_text(waiting)} of {self._size} had not ended after "
                f"{self._runtime.now() - self._started_at:.3g} s; all were killed",
                waiting_on=waiting,
                next_step="raise timeout=, or see what these ranks wait for",
            )
        return [rank.report["value"] for rank in self._ranks if rank.report is not None]

    def _receive(self, rank: _SpawnedRank) -> bool:
        """Read the rank's report; False if it is not complete, or the socket is closed."""
        if rank.sock is None:
            return False
        try:
            report = rank.receiver.receive(rank.sock)
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            self._supervisor.unwatch(rank.sock)
            rank.sock.close()
            rank.sock = None
            return False
        if rank.report is None:
            rank.report = codec.unpack(report)
            if "error" in rank.report:
                self._fail(rank)
        return True

    def _on_end(self, rank: _SpawnedRank) -> None:
        """A child has ended; its report may still be in the socket."""
        while rank.report is None and self._receive(rank):
            pass
        assert rank.process.code is not None
        self._report_end(rank.rank, exit_words(rank.process.code))
        if rank.report is None:
            self._fail(rank)

    def _fail(self, rank: _SpawnedRank) -> None:
        if not rank.process.was_told_to_end:  # otherwise the launcher ended it, and it is not to blame
            self._failed.append(rank)
