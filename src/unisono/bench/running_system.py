"""The processes of one measured system: started once, asked for one case after another, always ended."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from unisono.bench.cases import Case
from unisono.bench.systems import System
from unisono.bench.worker import SOCKET_NAME
from unisono.core.clock import RealRuntime
from unisono.environment import environment
from unisono.launcher.supervisor import Supervisor

__all__ = ["RunningSystem", "SystemFailed"]

# Four interpreters that import torch on two busy cores take half a minute.
_START_S: Final = 90.0
_ANSWER_S: Final = 120.0
# After the sockets are closed, ranks have this long to end; then SIGTERM, and SIGKILL a second later.
_END_S: Final = 5.0
_TERM_S: Final = 1.0
_OUTPUT_SHOWN: Final = 600  # characters


class SystemFailed(RuntimeError):
    """A system could not be measured any further; the text says why."""


class RunningSystem:
    """The ranks of a system. `close` ends all of them."""

    def __init__(self, system: System, ranks: int) -> None:
        self.system = system
        self.ranks = ranks
        self._stack = contextlib.ExitStack()
        self._supervisor = self._stack.enter_context(Supervisor(_TERM_S))
        self._sockets = contextlib.ExitStack()
        self._lines: dict[int, Any] = {}  # by rank: the socket to it, as text
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def measure(self, case: Case, repeats: int, *, check: bool = False) -> float:
        """Seconds per call, on the slowest rank. With `check` the result is compared first, untimed.

        Raises:
            SystemFailed: a rank failed, gave a wrong result or did not answer.
        """
        question = json.dumps({"case": asdict(case), "repeats": repeats, "check": check})
        answers = []
        lines = [self._lines[rank] for rank in sorted(self._lines)]
        try:
            for each in lines:
                each.write(question + "\n")
                each.flush()
            for each in lines:
                answers += [json.loads(each.readline() or '{"error": "it ended"}')]
        except (OSError, ValueError) as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        for answer in answers:
            if "error" in answer:
                raise self._failed(answer["error"])
        return float(max(answer["seconds"] for answer in answers)) / case.row.calls_per_repeat

    def close(self) -> None:
        """Close the sockets, which ends the ranks; end those that do not end by themselves."""
        self._sockets.close()
        self._lines.clear()
        self._supervisor.stop(_END_S)
        while self._supervisor.is_running:
            self._supervisor.serve()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-bench-")))
        self._output = self._stack.enter_context((folder / "output").open("w+b"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / SOCKET_NAME))
            listener.listen(self.ranks)
            for command in self.system.commands(self.ranks, folder):
                self._supervisor.start(
                    command,
                    environment(self.system.env),
                    dies_with_parent=False,  # the caller may have threads; a closed socket ends a rank, too
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                )
            self._accept_ranks(listener)

    def _accept_ranks(self, listener: socket.socket) -> None:
        """Wait until every rank has connected."""
        runtime = RealRuntime()
        deadline = runtime.deadline(_START_S)
        self._supervisor.watch(listener, lambda _: self._accept(listener))
        try:
            while len(self._lines) < self.ranks:
                if any(process.code is not None for process in self._supervisor.processes):
                    raise self._failed("it ended before all ranks had connected")
                if deadline.has_passed(runtime.now()):
                    raise self._failed(f"its ranks have not connected within {_START_S:.0f} s")
                self._supervisor.serve(deadline.at)
        finally:
            self._supervisor.unwatch(listener)

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        self._sockets.callback(sock.close)
        sock.settimeout(_ANSWER_S)
        lines = sock.makefile("rw")
        self._sockets.callback(_close_quietly, lines)
        self._lines[json.loads(lines.readline())["rank"]] = lines

    def _failed(self, why: str) -> SystemFailed:
        self._output.seek(0)
        output = self._output.read().decode("utf-8", "replace").strip()[-_OUTPUT_SHOWN:]
        said = f"; it said: {output}" if output else ""
        return SystemFailed(f"{self.system.name} on {self.ranks} ranks failed: {why}{said}")


def _close_quietly(lines: Any) -> None:
    """Close what may hold unsent text for a rank that is gone."""
    with contextlib.suppress(OSError):
        lines.close()
