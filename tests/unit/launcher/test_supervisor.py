"""Processes that are started, watched and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from unisono.core.clock import RealRuntime
from unisono.launcher.supervisor import Escalation, Process, Supervisor

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# Ignores SIGTERM, and prints a line once it does.
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)",
]
# Leaves a child behind, prints its process id and ends.
LEAVES_A_CHILD = [
    sys.executable,
    "-c",
    """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(child.pid)
""",
]
# The process of pytest may have threads.
HERE = {"dies_with_parent": False, "stdin": subprocess.DEVNULL}


def serve_until_ended(supervisor: Supervisor) -> None:
    while supervisor.is_running:
        supervisor.serve()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_signals_escalate_with_time() -> None:
    escalation = Escalation(term_s=3.0)
    assert escalation.next_at is None
    escalation.begin(100.0, grace_s=5.0)
    escalation.begin(104.0, grace_s=5.0)  # a second failure does not extend the time
    assert escalation.due(104.9) is None
    assert escalation.next_at == 105.0
    assert escalation.due(105.0) is signal.SIGTERM
    assert escalation.due(107.9) is None
    assert escalation.due(108.0) is signal.SIGKILL
    assert escalation.due(999.0) is None


def test_a_kill_does_not_wait() -> None:
    escalation = Escalation(term_s=3.0)
    escalation.begin(6.0, grace_s=5.0)
    escalation.kill(7.0)
    assert escalation.due(7.0) is signal.SIGKILL


def test_the_earliest_sigterm_counts_and_is_sent_once() -> None:
    escalation = Escalation(term_s=3.0)
    escalation.begin(100.0, grace_s=5.0)
    escalation.begin(101.0, grace_s=0.0)
    assert escalation.due(101.0) is signal.SIGTERM
    escalation.begin(102.0, grace_s=0.0)
    assert escalation.due(103.9) is None
    assert escalation.due(104.0) is signal.SIGKILL


@pytest.mark.parametrize("has_group", [True, False])
def test_the_exit_code_of_every_process_is_reported_once(has_group: bool) -> None:
    ended: list[Process] = []
    with Supervisor(term_s=1.0) as supervisor:
        for code in (0, 7):
            command = [sys.executable, "-c", f"raise SystemExit({code})"]
            supervisor.start(command, os.environ, ended.append, has_group=has_group, **HERE)
        serve_until_ended(supervisor)
        assert sorted(process.code or 0 for process in ended) == [0, 7]
        assert not any(process.was_told_to_end for process in ended)


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    with Supervisor(term_s=0.2) as supervisor:
        process = supervisor.start(STUBBORN, os.environ, stdout=subprocess.PIPE, **HERE)
        stdout = process.popen.stdout
        assert stdout is not None
        with stdout:
            stdout.readline()
            supervisor.stop(grace_s=0.1)
            serve_until_ended(supervisor)
        assert process.code == -signal.SIGKILL
        assert process.was_told_to_end


def test_processes_left_in_its_group_end_with_a_process() -> None:
    with Supervisor(term_s=1.0) as supervisor:
        process = supervisor.start(LEAVES_A_CHILD, os.environ, stdout=subprocess.PIPE, **HERE)
        stdout = process.popen.stdout
        assert stdout is not None
        with stdout:
            child = int(stdout.readline())
        serve_until_ended(supervisor)
        runtime = RealRuntime()
        deadline = runtime.deadline(30.0)
        while is_alive(child) and not deadline.has_passed(runtime.now()):
            runtime.sleep(0.01)
        assert not is_alive(child)


def test_closing_kills_what_still_runs() -> None:
    supervisor = Supervisor(term_s=1.0)
    popen = supervisor.start(SLEEP, os.environ, **HERE).popen
    supervisor.close()
    assert popen.returncode == -signal.SIGKILL
    assert not supervisor.is_running
