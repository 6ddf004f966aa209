"""Worlds of processes: spawned, launched and joined, over shared memory and over TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unisono as uni

pytestmark = pytest.mark.more

TRANSPORTS = {"shared memory": {}, "TCP": {"UNISONO_SHM": "0"}}


@pytest.fixture(params=TRANSPORTS, ids=lambda name: name.replace(" ", "-"))
def env(request: pytest.FixtureRequest) -> dict[str, str]:
    return TRANSPORTS[request.param]


# Functions that run in the ranks: a new process finds them by name.


def everything(world: uni.Communicator, count: int) -> dict[str, Any]:
    rank, size = world.rank, world.size
    x = np.arange(count, dtype=np.float64) * (rank + 1)
    row = world.split(rank % 2, key=-rank)
    assert row is not None
    swapped = np.empty(count)
    world.sendrecv(x, (rank + 1) % size, swapped, (rank - 1) % size, tag=3)
    return {
        "links": sorted(set(world.backend.links()) - {"self", "unopened"}),
        "sum": world.all_reduce(x.copy()),
        "rows": world.all_gather(x[:5]),
        "scattered": world.scatter(np.arange(size * 3).reshape(size, 3) if rank == 1 else None, root=1),
        "uneven": world.all_to_all_v([np.full(d + rank, 10 * rank + d) for d in range(size)]),
        "row": (row.rank, row.all_reduce(rank)),
        "swapped": swapped,
        "object": world.broadcast_object({"from": (rank, "root")} if rank == 2 else None, root=2),
        "prefix": world.exscan(rank + 1),
    }


def mismatched(world: uni.Communicator) -> str:
    try:
        if world.rank == 1:
            world.barrier()
        else:
            world.all_reduce(np.ones(3))
    except uni.CollectiveMismatch as error:
        return error.report
    return "no mismatch"


def one_dies(world: uni.Communicator, victim: int) -> tuple[tuple[int, ...], float]:
    world.barrier()
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            world.all_reduce(np.ones(1000))
    except uni.PeerLost as error:
        # One write: the ranks share a pipe, and print writes the end of a line separately.
        os.write(1, f"rank {world.rank} heard {error.ranks} after {time.monotonic() - began:.3f}\n".encode())
        raise


def one_raises(world: uni.Communicator) -> None:
    if world.rank == 2:
        raise LookupError("rank 2 has no data")
    world.all_reduce(np.ones(5))


def one_is_absent(world: uni.Communicator) -> tuple[int, ...]:
    if world.rank == 3:
        world.recv_bytes(src=0)
        return ()
    try:
        world.all_reduce(np.ones(5), timeout=1.0)
    except uni.DeadlineExceeded as error:
        if world.rank == 0:
            world.send(b"go home", 3)
        return error.waiting_on
    raise AssertionError("the all_reduce ended without rank 3")


@pytest.mark.parametrize("count", [0, 7, 100_003])
def test_every_kind_of_operation_between_processes(env: dict[str, str], count: int) -> None:
    size = 4
    results = uni.spawn(everything, size, count, env=env)
    for rank, got in enumerate(results):
        ramp = np.arange(count, dtype=np.float64)
        assert np.array_equal(got["sum"], ramp * 10)
        assert np.array_equal(got["rows"], np.stack([ramp[:5] * (r + 1) for r in range(size)]))
        assert got["scattered"].tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
        assert [part.tolist() for part in got["uneven"]] == [
            [10 * s + rank] * (rank + s) for s in range(size)
        ]
        assert got["row"] == (1 - rank // 2, 2 if rank % 2 == 0 else 4)
        assert np.array_equal(got["swapped"], ramp * ((rank - 1) % size + 1))
        assert got["object"] == {"from": (2, "root")}
        assert got["prefix"] == sum(range(1, rank + 1))
        assert {link.partition("+")[0] for link in got["links"]} == {"tcp" if env else "shm"}


TLS = {"UNISONO_SHM": "0", "UNISONO_TLS": "1"}


def test_links_on_one_host_are_encrypted_if_asked(tmp_path: Path) -> None:
    results = uni.spawn(everything, 3, 100_003, env=TLS)
    for got in results:
        assert np.array_equal(got["sum"], np.arange(100_003) * 6.0)
        assert got["links"] == ["tcp+tls"]
    done = run(tmp_path, PROGRAM, "-m", "unisono", "run", "-n", "2", env=TLS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] sum 3006 on {r} of 2" for r in range(2)]


def test_a_rank_that_requires_encryption_is_refused_without_it(tmp_path: Path) -> None:
    """The launcher does not encrypt: its ticket is a plain one."""
    program = "import os\nos.environ['UNISONO_TLS'] = '1'\n" + PROGRAM
    done = run(tmp_path, program, "-m", "unisono", "run", "-n", "2", env={})
    assert done.returncode != 0
    assert "without encryption" in done.stderr


def test_different_calls_are_reported_on_every_rank(env: dict[str, str]) -> None:
    for report in uni.spawn(mismatched, 3, env=env):
        assert "all_reduce float64[3]" in report
        assert "barrier" in report


def test_a_killed_rank_is_named_by_the_others(env: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(uni.UnisonoError, match="rank 1"):
        uni.spawn(one_dies, 4, 1, env=env)
    heard = [line for line in capfd.readouterr().out.splitlines() if "heard" in line]
    assert len(heard) == 3
    for line in heard:
        assert "heard (1,)" in line
        assert float(line.split()[-1]) < 1.0  # the bound is 0.5 s


def test_an_exception_reaches_the_caller_as_itself(env: dict[str, str]) -> None:
    with pytest.raises(LookupError, match="rank 2 has no data"):
        uni.spawn(one_raises, 4, env=env)


def test_a_deadline_names_the_absent_rank(env: dict[str, str]) -> None:
    assert uni.spawn(one_is_absent, 4, env=env) == [(3,), (3,), (3,), ()]


PROGRAM = """
import numpy as np
import unisono as uni

with uni.init() as world:
    x = np.arange(1003) * (world.rank + 1)
    world.all_reduce(x)
    print("sum", x[-1], "on", world.rank, "of", world.size, flush=True)
"""


def run(tmp_path: Path, program: str, *command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, *command, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **env},
    )


def test_unisono_run_starts_ranks_that_find_each_other(tmp_path: Path, env: dict[str, str]) -> None:
    done = run(tmp_path, PROGRAM, "-m", "unisono", "run", "-n", "3", env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] sum 6012 on {r} of 3" for r in range(3)]


def test_bare_variables_join_by_a_file(tmp_path: Path, env: dict[str, str]) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    meeting = {"UNISONO_JOIN": str(tmp_path / "ticket"), "UNISONO_ADDRESS": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env, "RANK": str(r), "WORLD_SIZE": "2", **meeting},
        )
        for r in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == [
        f"sum 3006 on {r} of 2\n" for r in range(2)
    ]


def test_a_process_alone_is_a_world_of_one() -> None:
    with uni.init() as world:
        assert (world.rank, world.size) == (0, 1)
        assert world.all_reduce(5) == 5
