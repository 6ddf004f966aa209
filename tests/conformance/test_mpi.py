"""The mpi backend under the real mpiexec: the cases and properties of every backend, and tests for MPI alone.

One start of mpiexec serves many tests: a start takes seconds, and ranks of MPI poll without sleeping.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.test_properties import PROPERTIES
from tests.support.paths import ROOT
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks
from tests.support.sums import sums

import unisono as uni
from unisono.errors import UsageError
from unisono.launcher.mpiexec import mpiexec
from unisono.testing import CASES

pytestmark = pytest.mark.more


def environment() -> dict[str, str]:
    foreign = ("OMPI_", "PMIX_", "PRTE_", "TORCH", "UNISONO_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    return {name: text for name, text in os.environ.items() if not name.startswith(foreign)}


def started(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )


def on_mpiexec(what: str, ranks: int) -> subprocess.CompletedProcess[str]:
    launcher = mpiexec()
    assert launcher is not None, "make setup installs Open MPI"
    allowed = ["--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    return started(launcher, *allowed, sys.executable, "-m", "tests.support.mpi_program", what)


@cache
def said(what: str, ranks: int) -> list[Any]:
    """The output of the ranks of tests/support/mpi_program.py, by rank."""
    ended = on_mpiexec(what, ranks)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("said "))
    return json.loads(line.removeprefix("said "))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_case_holds_under_mpiexec(name: str) -> None:
    assert said("cases", 4)[0][name] == "ok"


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_holds_under_mpiexec(name: str) -> None:
    assert said("properties", 6)[0][name] == "ok"


def test_mpi_runs_what_it_can_and_a_failing_operation_harms_no_other_call() -> None:
    for rank, words in enumerate(said("behaviour", 3)):
        assert (words["name"], words["size"]) == ("mpi", 3)
        assert words["own"] == [
            ["all_reduce", True],  # a user's operation
            ["scan", True],
            ["all_reduce", False],  # MPI would lose a NaN
            ["all_reduce", False],  # MPI has no 16-bit floats
            ["all_reduce", True],  # so short that it travels with the agreement
            ["barrier", True],
        ]
        assert (
            "returned float64 for two arrays of int64" in words["fraction"]
            or "op middle failed" in words["fraction"]
        )
        assert any(name in words["failed"] for name in ("ArithmeticError", "PeerAborted")), (rank, words)


@pytest.mark.more
def test_a_mismatch_is_the_same_under_mpiexec() -> None:
    assert said("mismatches", 3) == [[]] * 3


def test_reproducible_sums_are_equal_on_every_backend() -> None:
    """Equal bits on threads, in the simulator, in our engine over both links, on Gloo and on MPI."""
    config = uni.Config(reproducible=True)
    wanted = run_ranks(sums, 4, config=config).values()
    assert all(one == wanted[0] for one in wanted)
    assert uni.simulate(sums, 4, config=config).results == wanted
    for kind in ("shm", "tcp", "gloo"):
        assert run_processes(sums, 4, kind=kind, config=config) == wanted, kind
    assert said("sums", 4)[0] == wanted


def test_a_killed_rank_is_the_end_of_the_job() -> None:
    """Open MPI ends all ranks, and mpiexec reports it."""
    ended = on_mpiexec("death", 3)
    assert ended.returncode not in (0, None)
    assert "said" not in ended.stdout
    assert "signal 9" in ended.stdout + ended.stderr


def test_unisono_run_starts_mpi_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import unisono as uni\n"
        "with uni.init() as world:\n"
        "    print(world.backend.capabilities.name, world.all_reduce(world.rank + 1), flush=True)\n"
    )
    ended = started(sys.executable, "-m", "unisono", "run", "--backend", "mpi", "-n", "2", str(program))
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] mpi 3", "[1] mpi 3"]


def test_unisono_run_blames_the_mpi_rank_that_failed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, unisono as uni\n"
        "with uni.init() as world:\n"
        "    print('err', world.rank, file=sys.stderr, flush=True)\n"
        "    if world.rank == 1:\n        raise ValueError('the root of it')\n"
        "    world.barrier()\n"
    )
    ended = started(sys.executable, "-m", "unisono", "run", "--backend", "mpi", "-n", "2", str(program))
    assert ended.returncode == 1
    assert {"[0] err 0", "[1] err 1"} <= set(ended.stderr.splitlines())
    assert "unisono run: rank 1 failed first (exit code 1); its last words:" in ended.stderr
    assert ended.stderr.endswith("ValueError: the root of it\n")


def test_what_mpiexec_decides_is_refused_as_an_argument() -> None:
    with pytest.raises(UsageError, match="takes rank and size from mpiexec"):
        uni.init(backend="mpi", rank=0, size=2)
    with pytest.raises(UsageError, match="unisono run --backend mpi"):
        uni.spawn(sums, 2, backend="mpi")
    ended = started(sys.executable, "-m", "unisono", "run", "--backend", "mpi", "--nnodes", "2", "x.py")
    assert ended.returncode == 2
