"""`unisono run` at a terminal, and without one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.launched import PATIENCE_S, program, run

__all__ = ["program"]


def test_ranks_share_a_session_and_have_process_groups_of_their_own(program) -> None:  # type: ignore[no-untyped-def]
    path = program("print(os.getsid(0), os.getpgid(0), os.getpid())\n")
    code, out, _ = run("-n", "3", path)
    assert code == 0
    places = [line.split()[1:] for line in out.splitlines()]
    assert {session for session, _, _ in places} == {str(os.getsid(0))}
    assert all(group == pid for _, group, pid in places)
    assert len(places) == 3


# Like a shell: runs a command in the foreground of a session with a terminal, and prints its exit code.
SHELL = (
    "import fcntl, subprocess, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "try:\n"
    "    process = subprocess.Popen(sys.argv[1:])\n"
    "    print('launcher', process.pid, flush=True)\n"
    "    code = process.wait()\n"
    "except KeyboardInterrupt:\n"
    "    code = process.wait()\n"
    "print('code', code, flush=True)\n"
)


# Like a shell with job control: the command has a process group of its own, and is continued when it stops.
JOB_CONTROL = (
    "import fcntl, os, signal, subprocess, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "process = subprocess.Popen(sys.argv[1:], process_group=0)\n"
    "os.tcsetpgrp(0, process.pid)\n"
    "print('launcher', process.pid, flush=True)\n"
    "while os.WIFSTOPPED(status := os.waitpid(process.pid, os.WUNTRACED)[1]):\n"
    "    print('stopped', flush=True)\n"
    "    os.killpg(process.pid, signal.SIGCONT)\n"
    "print('code', os.waitstatus_to_exitcode(status), flush=True)\n"
)


@contextlib.contextmanager
def at_terminal(path: str, size: int, shell_text: str = SHELL) -> Iterator[tuple[int, Iterator[str]]]:
    """`unisono run` at a terminal: the file to write keys to, and the lines of output."""
    master, slave = os.openpty()
    command = [sys.executable, "-m", "unisono", "run", "-n", str(size), path]
    try:
        with subprocess.Popen(
            [sys.executable, "-c", shell_text, *command],
            stdin=slave,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as shell:
            assert shell.stdout is not None
            yield master, iter(map(str.rstrip, shell.stdout))
    finally:
        os.close(slave)
        os.close(master)


def test_rank_0_reads_from_a_terminal_and_all_ranks_share_a_session(program) -> None:  # type: ignore[no-untyped-def]
    path = program("print(repr(sys.stdin.readline()), os.getsid(0))\nsys.exit(5 * rank)\n")
    with at_terminal(path, 2) as (keys, lines):
        os.write(keys, b"typed\n")
        launcher, *shown = lines
    printed = [line.split() for line in shown if line.startswith("[")][:2]
    assert sorted(words[:2] for words in printed) == [["[0]", "'typed\\n'"], ["[1]", "''"]]
    assert len({session for *_, session in printed}) == 1
    assert launcher.startswith("launcher ")
    assert shown[-1] == "code 5"


def test_ctrl_c_at_a_terminal_reaches_every_rank_once(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "print('ready', flush=True)\n"
        "signal.sigwait([signal.SIGINT])\n"
        "print('again' if signal.SIGINT in signal.sigpending() else 'once', flush=True)\n"
    )
    with at_terminal(path, 2) as (keys, lines):
        seen = [next(lines) for _ in range(3)]
        assert sorted(seen[1:]) == ["[0] ready", "[1] ready"]
        os.write(keys, b"\x03")
        *shown, code = lines
    assert sorted(shown) == ["[0] once", "[1] once"]
    assert code == "code 0"


READS = "print('ready', flush=True)\nprint(sys.stdin.readline().strip())\n"


@pytest.mark.parametrize(("shell_text", "stops"), [(JOB_CONTROL, ["stopped"]), (SHELL, [])])
def test_ctrl_z_stops_the_launcher_only_under_a_shell_that_can_continue_it(  # type: ignore[no-untyped-def]
    program, shell_text: str, stops: list[str]
) -> None:
    with at_terminal(program(READS), 1, shell_text) as (keys, lines):
        assert [next(lines) for _ in range(2)][1] == "[0] ready"
        os.write(keys, b"\x1a")
        assert [next(lines) for _ in stops] == stops
        os.write(keys, b"typed\n")
        assert list(lines) == ["[0] typed", "code 0"]


def test_a_killed_launcher_gives_its_signal_to_the_shell_at_a_terminal(program) -> None:  # type: ignore[no-untyped-def]
    with at_terminal(program("os.kill(os.getppid(), signal.SIGKILL)\n"), 1) as (_, lines):
        assert list(lines)[-1] == "code -9"


def test_no_rank_outlives_a_launcher_that_is_killed_at_a_terminal(program) -> None:  # type: ignore[no-untyped-def]
    path = program("import time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with at_terminal(path, 2) as (_, lines):
        launcher = int(next(lines).split()[1])
        pids = [int(next(lines).split()[1]) for _ in range(2)]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        os.kill(launcher, signal.SIGKILL)
        assert list(lines)[-1] == "code -9"
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)


def test_a_launcher_whose_output_was_closed_runs_the_job(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = program(f"print('into the void')\nopen({str(tmp_path)!r} + f'/{{rank}}', 'w').close()\n")
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", path]
    with open(os.devnull, "rb") as nothing:
        ended = subprocess.run(
            ["sh", "-c", '"$@" >&- 2>&-', "sh", *command], stdin=nothing, timeout=PATIENCE_S, check=False
        )
    assert ended.returncode == 0
    assert all((tmp_path / str(rank)).exists() for rank in range(2))
