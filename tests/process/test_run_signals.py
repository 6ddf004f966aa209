"""`unisono run` and signals: passed on, once, and no rank outlives its launcher."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.launched import LOOP, PATIENCE_S, gone, launched, program
from tests.support.metronome import stopwatch

__all__ = ["program"]


POLITE = (
    "def bye(number, frame):\n    print('bye', signal.Signals(number).name)\n    sys.exit(0)\n"
    "for s in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(s, bye)\n"
) + LOOP


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on(program, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    with launched("-n", "2", program(POLITE)) as launcher:
        pids = launcher.pids(2)
        launcher.process.send_signal(number)
        code, out, _ = launcher.end()
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}] bye {number.name}" for rank in range(2)]
    assert gone(pids, 1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_ranks_that_die_of_a_signal_give_its_code(program, number: signal.Signals, code: int) -> None:  # type: ignore[no-untyped-def]
    with launched("-n", "2", program(LOOP)) as launcher:
        pids = launcher.pids(2)
        launcher.process.send_signal(number)
        assert launcher.end()[0] == code
    assert gone(pids, 1)


def test_a_signal_that_the_launcher_was_started_to_ignore_is_not_forwarded(program) -> None:  # type: ignore[no-untyped-def]
    """As by `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launched("-n", "2", program(POLITE)) as launcher:
            pids = launcher.pids(2)
            launcher.process.send_signal(signal.SIGHUP)
            launcher.process.send_signal(signal.SIGTERM)  # the second one, had the first been caught
            code, out, _ = launcher.end()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}] bye SIGTERM" for rank in range(2)]
    assert gone(pids, 1)


CROWDED = """
import os, signal, sys
from unisono.launcher.job import Job
from unisono.launcher.run import _Launch

with _Launch(Job([sys.executable, "-c", "import signal; signal.pause()"], 1), 1, 2, False, print) as launch:
    launch.start({})
    serve = launch._serve

    def crowded(until=None):
        launch._serve = serve
        for _ in range(10000):  # more than the socket that wakes the loop holds
            launch._relay.wake()
        os.kill(os.getpid(), signal.SIGTERM)
        serve(until)

    launch._serve = crowded
    sys.exit(launch.run())
"""


def test_a_signal_is_handled_however_much_is_printed() -> None:
    done = subprocess.run([sys.executable, "-c", CROWDED], timeout=PATIENCE_S)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_second_ctrl_c_ends_at_once(program) -> None:  # type: ignore[no-untyped-def]
    stubborn = "signal.signal(signal.SIGINT, lambda *_: print('no'))\n" + LOOP
    with launched("-n", "1", "--grace", "600", program(stubborn)) as launcher:
        pids = launcher.pids(1)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.lines(1) == ["[0] no"]
        with stopwatch() as seconds:
            launcher.process.send_signal(signal.SIGINT)
            launcher.end()
            assert seconds() < 2 * 1
    assert gone(pids, 1)


def test_no_rank_outlives_a_killed_launcher(program) -> None:  # type: ignore[no-untyped-def]
    deaf = "for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n    signal.signal(s, signal.SIG_IGN)\n"
    with launched("-n", "3", program(deaf + LOOP)) as launcher:
        pids = launcher.pids(3)
        launcher.process.kill()
        launcher.process.wait(PATIENCE_S)
        assert gone(pids, 2 * 0.5)


def test_a_rank_that_starts_as_the_launcher_dies_does_not_live(program) -> None:  # type: ignore[no-untyped-def]
    """Kill the launcher at several moments of its start; all processes started by then must end."""
    path = program(LOOP)
    for delay in (0.25, 0.35, 0.45, 0.55):
        with launched("-n", "4", path) as launcher:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.process.wait(delay)
            children = Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children")
            pids = [int(pid) for pid in children.read_text().split()]
            launcher.process.kill()
            launcher.process.wait(PATIENCE_S)
            # At the end of the pipe every process that held it has ended, also an unknown one.
            launcher.out.read()
        assert gone(pids, 2 * 0.5)


def test_children_of_ranks_go_with_them(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print('child', child.pid)\n"
        "os._exit(4)\n"
    )
    with launched("-n", "2", path) as launcher:
        pids = launcher.pids(2)
        assert launcher.end()[0] == 4
    assert gone(pids, 1)
