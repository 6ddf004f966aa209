"""The processes of one measured system: started once, asked for one case after the other, ended for certain.

Knows processes and the socket where ranks report. Does not know what the cases mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from unisono.bench.cases import Case
from unisono.bench.systems import System
from unisono.bench.worker import SOCKET_NAME
from unisono.config import environment
from unisono.core.clock import RealRuntime

__all__ = ["Crew", "CrewFailed"]

# Four interpreters that import torch on two busy cores take half a minute.
_START_S: Final = 90.0
_ANSWER_S: Final = 120.0
_END_S: Final = 5.0
_WORDS_SHOWN: Final = 600


class CrewFailed(RuntimeError):
    """A system could not be measured any further; the text says why."""


class Crew:
    """The ranks of a system. `close` ends all of them."""

    def __init__(self, system: System, ranks: int) -> None:
        self.system = system
        self.ranks = ranks
        self._stack = contextlib.ExitStack()
        self._sockets = contextlib.ExitStack()
        self._lines: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def measure(self, case: Case, repeats: int, *, check: bool = False) -> float:
        """Seconds per call, on the slowest rank. With `check` the result is compared first, untimed."""
        question = json.dumps(
            {
                "operation": case.operation,
                "ranks": case.ranks,
                "nbytes": case.nbytes,
                "repeats": repeats,
                "check": check,
            }
        )
        answers = []
        try:
            for lines in self._lines:
                lines.write(question + "\n")
                lines.flush()
            for lines in self._lines:
                answers += [json.loads(lines.readline() or '{"error": "it ended"}')]
        except (OSError, ValueError) as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        for answer in answers:
            if "error" in answer:
                raise self._failed(answer["error"])
        each_way = 2 if case.operation == "ping" else 1
        return float(max(answer["seconds"] for answer in answers)) / repeats / each_way

    def close(self) -> None:
        """Hang up, and end what does not end by itself."""
        for lines in self._lines:
            with contextlib.suppress(OSError):
                lines.close()
        self._lines.clear()
        self._sockets.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-bench-")))
        self._words = self._stack.enter_context((folder / "words").open("w+b"))
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen(self.ranks)
        env = environment(self.system.env)
        for command in self.system.commands(self.ranks, folder):
            self._processes.append(
                # A group of its own: it can be ended with all that it has started.
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=self._words,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        self._lines = self._connected(listener)

    def _connected(self, listener: socket.socket) -> list[Any]:
        """Wait for every rank to report; in the order of ranks."""
        runtime = RealRuntime()
        deadline = runtime.deadline(_START_S)
        listener.settimeout(0.2)
        found: dict[int, Any] = {}
        while len(found) < self.ranks:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise self._failed("it ended before its ranks had met") from None
                if deadline.has_passed(runtime.now()):
                    raise self._failed(f"its ranks have not met in {_START_S:.0f} s") from None
                continue
            self._sockets.callback(sock.close)
            sock.settimeout(_ANSWER_S)
            lines = sock.makefile("rw")
            found[json.loads(lines.readline())["rank"]] = lines
        return [found[rank] for rank in sorted(found)]

    def _failed(self, why: str) -> CrewFailed:
        self._words.seek(0)
        words = self._words.read().decode("utf-8", "replace").strip()[-_WORDS_SHOWN:]
        said = f"; it said: {words}" if words else ""
        return CrewFailed(f"{self.system.name} on {self.ranks} ranks failed: {why}{said}")
