"""Ranks as processes, forked from the test.

A forked child has the test's own functions and closures, so the same cases run on threads and in processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tests.support.credentials import credentials

from unisono.backends.gloo import backend as gloo
from unisono.backends.iroh import backend as iroh
from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Credentials
from unisono.backends.registry import BindSpec, UnconnectedBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.messaging.backend import Backend

__all__ = ["BINDERS", "KINDS", "Failed", "Ranks", "forked", "run_processes"]

KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "shm": lambda rank: {},
    "rings": lambda rank: {"direct_read": False},
    "tcp": lambda rank: {"shm": False},
    "hosts": lambda rank: {"host": f"host {rank % 2}"},  # shared memory in a host, TCP with checksums between
    "tls": lambda rank: {"shm": False, "tls": True},
    "hosts tls": lambda rank: {"host": f"host {rank % 2}", "tls": True},
    "quic": lambda rank: {"shm": False, "quic": True},
    "hosts quic": lambda rank: {"host": f"host {rank % 2}", "quic": True},
    "gloo": lambda rank: {},
    "iroh": lambda rank: {},
}
BINDERS: dict[str, Callable[[BindSpec], UnconnectedBackend]] = {
    "gloo": gloo.UnconnectedGloo,
    "iroh": iroh.UnconnectedIroh,
}
PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Failed(Exception):
    """A rank that ended with an exception: the exception's text, and the ranks that it names."""

    type_name: str
    text: str
    traceback_text: str = field(repr=False, default="")
    ranks: tuple[int, ...] = ()
    original: _Raised | None = field(repr=False, default=None)

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}\n{self.traceback_text}"

    @staticmethod
    def by(error: BaseException) -> Failed:
        ranks = getattr(error, "ranks", None) or getattr(error, "waiting_on", None)
        if ranks is None:
            ranks = (error.rank,) if hasattr(error, "rank") else ()
        text = "".join(traceback.format_exception(error))
        return Failed(type(error).__name__, str(error), text, tuple(ranks), _Raised.of(error))

    def error(self) -> BaseException:
        """The exception itself, if it can be sent to another process."""
        return self if self.original is None else self.original.again()


@dataclass
class _Raised:
    """An exception in the form in which it is sent to another process: fields and cause, but no traceback."""

    type_: type[BaseException]
    args: tuple[Any, ...]
    fields: dict[str, Any]
    cause: _Raised | None

    @staticmethod
    def of(error: BaseException) -> _Raised | None:
        cause = None if error.__cause__ is None else _Raised.of(error.__cause__)
        fields = {name: value for name, value in vars(error).items() if not name.startswith("__")}
        made = _Raised(type(error), error.args, fields, cause)
        try:
            pickle.dumps(made)
        except Exception:  # its class is local to a test, or a field of it cannot be sent
            return None
        return made

    def again(self) -> BaseException:
        error = self.type_.__new__(self.type_, *self.args)
        error.__dict__.update(self.fields)
        error.__cause__ = None if self.cause is None else self.cause.again()
        return error


class Ranks:
    """The processes of one world. Each has a pipe to the test; its last message is what it returned."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        self.codes: dict[int, int] = {}

    def start(
        self,
        program: Callable[[Any, Connection], Any],
        size: int,
        *,
        kind: str = "shm",
        config: Config | None = None,
        links: Callable[[int], dict[str, Any]] | None = None,
        bind: Callable[[BindSpec], UnconnectedBackend] | None = None,
    ) -> None:
        """Fork the ranks: each calls `program(backend, pipe)` with a backend that is connected.

        `links(rank)` is called in the rank's own process and gives further settings of its backend, beside
        those of `kind`. `bind(spec)`, which binds another backend, is also called there.
        """
        pairs = [mp.Pipe() for _ in range(size)]
        shown = [None] * size if {"tls", "quic"}.isdisjoint(KINDS[kind](0)) else credentials(size)

        def settings(rank: int) -> dict[str, Any]:
            return {**KINDS[kind](rank), **({} if links is None else links(rank))}

        for rank in range(size):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a rank uses no thread of the test
                pid = os.fork()
            if pid == 0:
                opened = partial(native_rank, self.folder, settings, shown[rank])
                if bind is not None or kind in BINDERS:
                    opened = partial(bound_rank, bind or BINDERS[kind])
                _be_rank(program, partial(opened, rank, size, config), rank, pairs, self.folder)
            self.pids.append(pid)
        for ours, theirs in pairs:
            theirs.close()
            self.pipes.append(ours)
        cards = [self.receive(rank) for rank in range(size)]
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(cards)

    def receive(self, rank: int, timeout: float = PATIENCE_S) -> Any:
        assert self.pipes[rank].poll(timeout), f"rank {rank} sends nothing within {timeout:g} s"
        said = self.pipes[rank].recv()
        if isinstance(said, Failed):
            raise said
        return said

    def result(self, rank: int, timeout: float = PATIENCE_S) -> Any:
        """The value that a rank returned, or its failure; other messages of the rank are skipped."""
        deadline = time.monotonic() + timeout
        while True:
            if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} hangs\n{self.stacks()}")
            try:
                said = self.pipes[rank].recv()
            except EOFError:
                return Failed("Killed", f"rank {rank} ended without a result")
            if isinstance(said, Failed):
                return said
            if isinstance(said, _Returned):
                return said.value

    def stacks(self) -> str:
        """The stacks of all Python threads of every rank that is still alive."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)  # a signal is not acknowledged
        texts = []
        for rank in range(len(self.pids)):
            with contextlib.suppress(OSError), open(_stack_file(self.folder, rank)) as file:
                texts.append(f"-- rank {rank}:\n{file.read() or 'no stack: it has ended'}")
        return "\n".join(texts)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def code(self, rank: int, timeout: float = PATIENCE_S) -> int:
        """Wait until a rank ends; return its exit code, negative for a signal."""
        deadline = time.monotonic() + timeout
        while rank not in self.codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                break
            assert time.monotonic() < deadline, f"rank {rank} does not end"
            time.sleep(0.002)
        return self.codes[rank]

    def end(self) -> None:
        """Kill the ranks that are still alive."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for pipe in self.pipes:
            pipe.close()


@contextlib.contextmanager
def forked(program: Callable[[Any, Connection], Any], size: int, **how: Any) -> Iterator[Ranks]:
    """Ranks that are killed at the end of the block if they are still alive."""
    folder = tempfile.mkdtemp(prefix="unisono-test-")  # mode 0700
    ranks = Ranks(folder)
    try:
        ranks.start(program, size, **how)
        yield ranks
    finally:
        ranks.end()
        shutil.rmtree(folder)


def run_processes(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    kind: str = "shm",
    config: Config | None = None,
    patience_s: float = PATIENCE_S,
) -> list[Any]:
    """Run `fn(comm, *args)` on new ranks, inside `with comm`; return the result of each, or a Failed."""

    def program(backend: Backend, pipe: Connection) -> Any:
        with Communicator.world(backend) as comm:
            return fn(comm, *args)

    with forked(program, size, kind=kind, config=config) as ranks:
        results = [ranks.result(rank, patience_s) for rank in range(size)]
        for rank in range(size):
            assert ranks.code(rank) == 0, f"rank {rank} ended with {ranks.codes[rank]}"
    return results


@dataclass
class _Returned:
    value: Any


def native_rank(
    folder: str,
    links: Callable[[int], dict[str, Any]],
    shown: Credentials | None,
    rank: int,
    size: int,
    config: Config | None,
    pipe: Connection,
) -> NativeBackend:
    backend = NativeBackend(rank, size, folder, b"the job's secret", config=config, **links(rank))
    try:
        pipe.send(backend.card())
        backend.connect(pipe.recv(), shown)
    except BaseException:
        backend.close()
        raise
    return backend


def bound_rank(
    make: Callable[[BindSpec], UnconnectedBackend],
    rank: int,
    size: int,
    config: Config | None,
    pipe: Connection,
) -> Backend:
    bind = make(
        BindSpec(rank, size, "127.0.0.1", is_encrypted=False, config=config or Config(), secret=b"the secret")
    )
    try:
        pipe.send(bind.card())
        return bind.connect(pipe.recv())
    except BaseException:
        bind.close()
        raise


def _be_rank(
    program: Callable[[Any, Connection], Any],
    opened: Callable[[Connection], Backend],
    rank: int,
    pairs: list[tuple[Connection, Connection]],
    folder: str,
) -> None:
    """Run a forked rank until it exits. Never returns to the test."""
    code = 0
    # Garbage of earlier tests belongs to the parent: a finalizer run here might wait for a thread that was
    # not forked.
    gc.freeze()
    try:
        faulthandler.register(signal.SIGUSR2, open(_stack_file(folder, rank), "w"))  # noqa: SIM115
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for other, (ours, theirs) in enumerate(pairs):
            ours.close()
            if other != rank:
                theirs.close()
        pipe = pairs[rank][1]
        with contextlib.ExitStack() as stack:
            try:
                backend = opened(pipe)
                stack.callback(backend.close)
                pipe.send(_Returned(program(backend, pipe)))
            except BaseException as error:
                pipe.send(Failed.by(error))
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        os._exit(code)


def _stack_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stacks.{rank}")
