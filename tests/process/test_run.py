"""`unisono run`: output, variables, exit codes and failing ranks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from tests.support.launched import PATIENCE_S, launched, program, run
from tests.support.metronome import stopwatch

from unisono.cli import main

__all__ = ["program"]


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


def test_ranks_get_a_port_for_the_store_of_torch_that_is_not_the_seeds(program) -> None:  # type: ignore[no-untyped-def]
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
