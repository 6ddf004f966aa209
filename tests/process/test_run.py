"""`unisono run`: output, exit codes, signals, several nodes, and no process left behind."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO
from unittest import mock

import pytest
from click.testing import CliRunner
from tests.support.hosts import Hosts, hosts
from tests.support.metronome import stopwatch

from unisono.cli import main

__all__ = ["hosts"]

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


# -- output and codes --------------------------------------------------------------------------------------


def test_every_line_has_its_rank_before_it(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "print('out', rank, *sys.argv[1:])\nprint('err', rank, file=sys.stderr)\nsys.stdout.write('no end')\n"
    )
    code, out, err = run("-n", "3", path, "--option", "x")
    assert code == 0
    assert sorted(out.splitlines()) == sorted(
        line for r in range(3) for line in (f"[{r}] out {r} --option x", f"[{r}] no end")
    )
    assert sorted(err.splitlines()[1:]) == [f"[{r}] err {r}" for r in range(3)]
    assert err.startswith("unisono run: OMP_NUM_THREADS=")


def test_lines_come_as_they_are_printed(program) -> None:  # type: ignore[no-untyped-def]
    with launched("-n", "1", program("print('now')\nthreading.Event().wait()")) as launcher:
        assert launcher.lines(1) == ["[0] now"]


def test_a_module_is_run_by_name(tmp_path: Path, program) -> None:  # type: ignore[no-untyped-def]
    program("print(__name__, sys.argv[1:])", "mod.py")
    assert run("-n", "1", "-m", "mod", "a", cwd=tmp_path)[1] == "[0] __main__ ['a']\n"


def test_ranks_get_their_variables_and_none_of_an_outer_launcher(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "names = ('UNI', 'RANK', 'WORLD', 'LOCAL', 'MASTER', 'TORCHELASTIC', 'MY')\n"
        "print(sorted((k, v) for k, v in os.environ.items() if k.startswith(names)))"
    )
    outer = {
        "RANK": "7",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "elsewhere",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    code, out, _ = run("-n", "1", "--env", "MY=a=b", path, env=outer)
    assert code == 0
    assert ast.literal_eval(out.removeprefix("[0] ")) == [
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", mock.ANY),
        ("MY", "a=b"),
        ("RANK", "0"),
        ("UNISONO_LOCAL_RANK", "0"),
        ("UNISONO_LOCAL_SIZE", "1"),
        ("UNISONO_RANK", "0"),
        ("UNISONO_RUN_SET", mock.ANY),
        ("UNISONO_SIZE", "1"),
        ("WORLD_SIZE", "1"),
    ]


PLACE = "print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], {seed}, flush=True)\n"


def test_ranks_are_told_of_a_port_for_the_store_of_torch_that_is_not_the_seeds(program) -> None:  # type: ignore[no-untyped-def]
    path = program(PLACE.format(seed="os.environ['UNISONO_JOIN'].split('/')[2].rpartition(':')[2]"))
    code, out, err = run("-n", "3", path)
    assert code == 0, err
    ((address, port, seed),) = {tuple(line.split()[1:]) for line in out.splitlines()}
    assert address == "127.0.0.1"
    assert port != seed


def test_a_launcher_inside_a_rank_has_a_port_of_its_own(program) -> None:  # type: ignore[no-untyped-def]
    inner = program(PLACE.format(seed="'inner'"), "inner.py")
    path = program(
        f"{PLACE.format(seed=repr('outer'))}import subprocess\n"
        f"subprocess.run([sys.executable, '-m', 'unisono', 'run', '-n', '1', {inner!r}], check=True)\n"
    )
    code, out, err = run("-n", "1", path)
    assert code == 0, err
    ports = [line.split()[-2:] for line in out.splitlines()]
    assert [launcher for _, launcher in ports] == ["outer", "inner"]
    assert ports[0][0] != ports[1][0]


@pytest.mark.parametrize("way", ["variable", "--env"])
def test_a_store_that_the_user_names_is_where_programs_of_torch_meet(program, way: str) -> None:  # type: ignore[no-untyped-def]
    place = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    options = [word for pair in place.items() for word in ("--env", "=".join(pair))] if way == "--env" else []
    path = program(PLACE.format(seed="rank"))
    code, out, err = run("-n", "1", *options, path, env=place if way == "variable" else {})
    assert code == 0, err
    assert out == "[0] node0 29500 0\n"


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7); it said nothing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("raise ValueError('the root')", 1, "ValueError: the root\n"),
    ],
)
def test_the_first_failing_rank_is_summarised_last_and_gives_the_exit_code(
    program, end: str, code: int, words: str
) -> None:  # type: ignore[no-untyped-def]
    path = program(f"if rank == 1:\n    {end}\nsys.stderr.write('noise\\n')\nthreading.Event().wait()")
    found, _, err = run("-n", "3", "--grace", "0.2", path)
    assert found == code
    assert words in err[err.index("unisono run: rank 1 failed first (") :]


# Ranks that wait in init for a rank that has ended, and print how long they waited.
WAIT = """
import time, unisono as uni
began = time.monotonic()
if rank == {gone}:
    sys.exit({code})
try:
    uni.init(timeout=50)
except uni.RendezvousError as error:
    print(time.monotonic() - began < 25, error, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("code", [0, 5])
def test_no_rank_waits_for_a_rank_that_ended_before_it_joined(program, code: int) -> None:  # type: ignore[no-untyped-def]
    found, out, err = run("-n", "3", "--grace", "50", program(WAIT.format(gone=1, code=code)))
    assert found == (code or 3)
    lines = sorted(out.splitlines())
    text = f"cannot join: rank 1 has ended (exit code {code}) before this world had formed. Next: see why"
    assert [line[:10] for line in lines] == ["[0] True r", "[2] True r"], out
    assert all(text in line for line in lines), out
    assert "join refused" not in err


def test_the_launcher_of_another_node_reports_ended_ranks_to_the_seed(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = program(WAIT.format(gone=1, code=0))
    file = str(tmp_path / "ticket")

    def node(rank: int) -> tuple[int, str, str]:
        common = ("-n", "1", "--nnodes", "2", "--node-rank", str(rank), "--join", file)
        return run(*common, *(("--address", "127.0.0.1") if rank == 0 else ()), path)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(node, 0)
        deadline = time.monotonic() + PATIENCE_S
        while not Path(file).exists():
            assert time.monotonic() < deadline
        assert pool.submit(node, 1).result()[0] == 0
        code, out, err = first.result()
    assert code == 3, err
    assert out.startswith("[0] True rank 0 of 2 cannot join: rank 1 has ended (exit code 0)"), out


FEW = """
import resource
import unisono as uni
import unisono.api, unisono.backends.native.backend, unisono.bootstrap.entry
limit = len(os.listdir("/proc/self/fd")) - 1 + {free}
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    with uni.init(timeout=20) as world:
        print("met", world.all_reduce(world.rank), flush=True)
except uni.RendezvousError as error:
    print(error, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("free", [0, 3, 12])
def test_a_rank_with_few_descriptors_says_how_many_it_needs(program, free: int) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("-n", "3", program(FEW.format(free=free)))
    assert code == 3, err
    for rank in range(3):
        assert re.search(rf"\[{rank}\] rank {rank} of 3 has too few file descriptors: it needs \d+, and", out)
    assert out.count("Next: raise the limit of open files") == 3
    assert "OSError" not in err


def test_forty_descriptors_are_enough_for_a_rank_of_three(program) -> None:  # type: ignore[no-untyped-def]
    assert run("-n", "3", program(FEW.format(free=40)))[1].count("met 3") == 3


@pytest.mark.parametrize("limit", [8, 16, 30])
def test_a_launcher_with_few_descriptors_starts_nothing_and_says_why(program, limit: int) -> None:  # type: ignore[no-untyped-def]
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            f'ulimit -n {limit}; exec "$0" -m unisono run -n 6 "$1"',
            sys.executable,
            program(""),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(
        rf"Error: unisono run has too few file descriptors: it needs \d+, .* of {limit} open files\. "
        r"Next: raise the limit of open files .*ulimit -n .*\n",
        done.stderr,
    )


def test_a_rank_that_only_reports_a_failure_is_not_blamed(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    os.mkfifo(tmp_path / "fifo")
    path = program(
        f"fifo = {str(tmp_path / 'fifo')!r}\n"
        "from unisono.errors import PeerLost\n"
        "if rank == 0:\n"
        "    with open(fifo, 'w') as file:\n        print(os.getpid(), file=file)\n"
        "    raise PeerLost('rank 1 is gone', ranks=(1,))\n"
        "import select\n"
        "other = os.pidfd_open(int(open(fifo).read()))\n"
        "select.select([other], [], [])\n"  # rank 0 has ended
        "raise ValueError('the root of it')\n"
    )
    code, _, err = run("-n", "2", "--grace", "20", path)
    assert code == 1
    assert err.rstrip().endswith("ValueError: the root of it")
    assert "rank 1 failed first" in err


def test_an_exception_reaches_the_others_without_a_with_block(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "import unisono as uni\n"
        "world = uni.init()\n"
        "if rank == 1:\n    raise ValueError('the root of it')\n"
        "try:\n    world.recv_bytes((rank + 1) % 3)\n"
        "except uni.PeerAborted as error:\n    print(error.rank, error.cause)\n    sys.exit(7)\n"
    )
    code, out, err = run("-n", "3", "--grace", "20", path)
    assert sorted(out.splitlines()) == [
        "[0] 1 ValueError: the root of it",
        "[2] 1 ValueError: the root of it",
    ]
    assert "ValueError: the root of it" in err
    assert code in (1, 7)  # a rank that catches the error and ends may be the first


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


@contextlib.contextmanager
def at_terminal(path: str, size: int) -> Iterator[tuple[int, Iterator[str]]]:
    """`unisono run` at a terminal: the file to write keys to, and the lines of output."""
    master, slave = os.openpty()
    command = [sys.executable, "-m", "unisono", "run", "-n", str(size), path]
    try:
        with subprocess.Popen(
            [sys.executable, "-c", SHELL, *command],
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


def test_the_other_ranks_have_time_to_end_by_themselves(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    os.mkfifo(tmp_path / "fifo")
    path = program(
        f"fifo = {str(tmp_path / 'fifo')!r}\n"
        "if rank == 1:\n    sys.exit(3)\n"
        "open(fifo).read()\nprint('saved')\n"
    )
    with launched("-n", "2", "--grace", "30", path) as launcher:
        (tmp_path / "fifo").write_text("go")  # blocks until rank 0 reads
        code, out, _ = launcher.end()
    assert code == 3
    assert out == "[0] saved\n"


def test_a_rank_that_ignores_sigterm_is_killed(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "import pathlib, time\n"
        "if rank == 1:\n    sys.stdin.read()\n"
        f"    pathlib.Path({str(tmp_path / 'failed at')!r}).write_text(str(time.monotonic()))\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('not yet'))\n"
        "while True:\n    signal.pause()\n"
    )
    with stopwatch() as seconds:
        code, out, _ = run("-n", "2", "--grace", "1", path)
        since = time.monotonic() - float((tmp_path / "failed at").read_text())
        assert min(since, seconds()) < 2 * (1 + 3 + 1)
    assert code == 3
    assert out in ("[0] not yet\n", "")  # the signal may arrive before its handler is set


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "x.py"], "at least 1"),
        (["--grace", "nan", "x.py"], "seconds >= 0"),
        (["--nnodes", "2", "x.py"], "--join FILE"),
        (["--nnodes", "2", "--join", "unisono1://h:1/a/b", "x.py"], "can be read by every user"),
        (["--nnodes", "2", "--join", "f", "x.py"], "--address on node 0"),
        (["--nnodes", "2", "--join", "f", "--address", "203.0.113.1", "x.py"], "not an address of this host"),
        (["--env", "X", "x.py"], "NAME=VALUE"),
        (["--env", "UNISONO_JOIN=x", "x.py"], "command line"),
        ([], "Missing argument"),
    ],
)
def test_a_wrong_call_is_one_line_and_code_2(arguments: list[str], words: str) -> None:
    ended = CliRunner().invoke(main, ["run", *arguments])
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_reader_that_closes_the_pipe_ends_the_job(program) -> None:  # type: ignore[no-untyped-def]
    with launched("-n", "2", program("while True:\n    print('y' * 1000)")) as launcher:
        launcher.lines(3)
        launcher.out.close()
        assert launcher.process.wait(PATIENCE_S) == 141
        launcher.err.read()


# -- signals -----------------------------------------------------------------------------------------------

LOOP = "print('ready', os.getpid())\nthreading.Event().wait()\n"
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


# -- joining -----------------------------------------------------------------------------------------------


def test_ranks_of_one_host_meet_without_encryption(program) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("-n", "3", program(MEET))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] met {r} card 2 {r} False" for r in range(3)]


def test_ranks_of_two_nodes_meet_at_a_ticket_file(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = program(MEET.replace('"met", ', '"met", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], '))
    file = str(tmp_path / "job.ticket")

    def node(rank: int) -> tuple[int, str, str]:
        common = ("-n", "2", "--nnodes", "2", "--node-rank", str(rank), "--join", file)
        return run(*common, *(("--address", "::1") if rank == 0 else ()), path)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(node, (1, 0)))
    assert [code for code, _, _ in ends] == [0, 0], ends
    said = sorted(line.split() for _, out, _ in ends for line in out.splitlines())
    assert [words[:2] + words[4:] for words in said] == [
        [f"[{r}]", "met", str(r), "card", "3", str(r % 2), "False"] for r in range(4)
    ]
    ((address, _),) = {tuple(words[2:4]) for words in said}
    assert address == "::1"
    assert not Path(file).exists()


FOREIGN = {
    "torchrun": "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 MASTER_ADDR=here MASTER_PORT=1 "
    "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2",
    "Open MPI": "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-1@1",
    "Slurm": "SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID={rank} SLURM_STEP_NUM_NODES=1 "
    "SLURM_JOB_ID=1 SLURM_STEP_ID=0",
    "bare": "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} MASTER_ADDR=localhost MASTER_PORT=1",
}


@pytest.mark.parametrize("launcher", FOREIGN)
def test_ranks_of_another_launcher_meet_on_one_host(launcher: str, tmp_path: Path) -> None:
    def one(rank: int) -> subprocess.CompletedProcess[str]:
        variables = dict(pair.split("=", 1) for pair in FOREIGN[launcher].format(rank=rank).split())
        return subprocess.run(
            [sys.executable, "-c", MEET],
            env={**os.environ, **variables, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(one, (1, 0)))
    assert [end.stdout for end in ends] == [f"met {r} card 1 {r} False\n" for r in (1, 0)], ends
    # Only the folder is left, and a note of the end if another job may have the same name.
    left = [path.name for path in tmp_path.rglob("*")]
    assert left[0] == f"unisono-{os.getuid()}"
    assert [name.rpartition(".")[2] for name in left[1:]] == ["end"] * (launcher == "bare")


def test_the_ticket_is_never_on_a_command_line(program) -> None:  # type: ignore[no-untyped-def]
    path = program("print(os.environ['UNISONO_JOIN'], os.getpid(), flush=True)\nthreading.Event().wait()\n")
    with launched("-n", "2", path) as launcher:
        tickets = [line.split()[1:] for line in launcher.lines(2)]
        token = tickets[0][0].rpartition("/")[2]
        assert re.fullmatch("[0-9a-f]{64}", token)
        for pid in (launcher.process.pid, *(int(pid) for _, pid in tickets)):
            assert token not in Path(f"/proc/{pid}/cmdline").read_text()


# -- between hosts, which are network namespaces here ------------------------------------------------------


def test_ranks_of_two_hosts_meet_encrypted(hosts: Hosts, program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = program(
        MEET.replace("info.local_rank,", "listens[0].bind.host,")
        .replace("lambda listen: b", "lambda listen: listens.append(listen) or b")
        .replace("\ninfo", "\nlistens = []\ninfo")
    )
    file = str(tmp_path / "job.ticket")

    def node(rank: int) -> subprocess.CompletedProcess[str]:
        words = ["-n", "2", "--nnodes", "2", "--node-rank", str(rank), "--join", file]
        words += ["--address", "10.77.0.1"] if rank == 0 else []
        command = hosts.command(rank, "-m", "unisono", "run", *words, path)
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(node, (1, 0)))
    assert [end.returncode for end in ends] == [0, 0], ends
    lines = sorted(line for end in ends for line in end.stdout.splitlines())
    assert lines == [f"[{r}] met {r} card 3 10.77.0.{1 + r // 2} True" for r in range(4)]


def test_an_unreachable_seed_is_described(hosts: Hosts) -> None:
    subprocess.run(["ip", "-n", hosts[1], "route", "add", "unreachable", "10.99.0.0/16"], check=True)
    program = (
        "from unisono.bootstrap.join import join\n"
        "from unisono.bootstrap.ticket import Ticket, TicketSource\n"
        "from unisono.bootstrap.address import Address\n"
        "from unisono.config import Config\n"
        "from unisono.core.clock import RealRuntime\n"
        "for host in ('10.99.0.1', '203.0.113.5', '10.77.0.1'):\n"
        "    source = TicketSource(Ticket.create(Address(host, 4711), bytes(32)).text())\n"
        "    try:\n"
        "        join(source, rank=1, size=2, card=b'', config=Config(), version='1',"
        " deadline=RealRuntime().deadline(0.3))\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    command = hosts.command(1, "-c", program)
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout.splitlines()
    assert "10.99.0.1:4711 no route to the host" in said[0]
    assert "203.0.113.5:4711 no route to the network" in said[1]
    assert "10.77.0.1:4711 refused the connection" in said[2]
