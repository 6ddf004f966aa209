"""Programs under `unisono run`: started, read line by line, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

PATIENCE_S = 60.0

# The head of every program; it does not import unisono, since it needs only the variables of its rank.
HEAD = "import os, signal, sys, threading\nrank = int(os.environ['UNISONO_RANK'])\n"

# A program whose ranks join as with uni.init.
MEET = """
from unisono import environment
from unisono.config import Config
from unisono.bootstrap.entry import enter
from unisono.bootstrap.launch_info import decide
info = decide(environment.launch(), environment.network())
with enter(info, make_card=lambda listen: b"card %d" % listen.rank, config=Config(),
           version=__import__("unisono").__version__, timeout=30) as entry:
    view = entry.view
    print("met", view.rank, view.cards[-1].decode(), info.local_rank, view.identity is not None, flush=True)
"""


class Launcher:
    """A running `unisono run`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self.out: IO[str] = process.stdout
        self.err: IO[str] = process.stderr

    def lines(self, count: int) -> list[str]:
        return [self.out.readline().rstrip("\n") for _ in range(count)]

    def pids(self, count: int) -> list[int]:
        return [int(line.split()[-1]) for line in self.lines(count)]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def launched(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> Iterator[Launcher]:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "unisono", "run", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    ) as process:
        try:
            yield Launcher(process)
        finally:
            process.kill()


def run(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    with launched(*arguments, cwd=cwd, env=env) as launcher:
        return launcher.end()


@pytest.fixture
def program(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str, name: str = "program.py") -> str:
        path = tmp_path / name
        path.write_text(HEAD + text)
        return str(path)

    return write


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
        if not ready:
            return False
    return True


LOOP = "print('ready', os.getpid())\nthreading.Event().wait()\n"
