"""Measurements: right formulas, honest ratios, checked results; peers that are missing are named."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.paths import ROOT

from unisono.bench import Case, Options, Results, contest
from unisono.bench.libraries import Library
from unisono.bench.running_system import RunningSystem, SystemFailed
from unisono.bench.systems import SYSTEMS, System
from unisono.cli import main
from unisono.errors import UsageError

pytestmark = pytest.mark.more


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("broadcast", 1.0),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("ping", 1.0),
    ],
)
def test_bandwidths_follow_nccl_tests(operation: str, factor: float) -> None:
    case = Case(operation, 4, 1 << 20)
    assert case.algorithm_bandwidth(0.5) == 2 * (1 << 20)
    assert case.bus_bandwidth(0.5) == factor * 2 * (1 << 20)


def test_every_block_has_an_element() -> None:
    assert (Case("all_gather", 4, 8).count, Case("all_gather", 4, 8).block) == (4, 1)
    assert Case("all_reduce", 4, 8).count == 2
    assert Case("barrier", 4, 0).count == 0


def results() -> Results:
    found = Results({"processor": "an abacus"}, absent={"gloo": "not installed"})
    case = Case("all_reduce", 2, 1024)
    for ours, theirs in [(1e-6, 2e-6), (2e-6, 3e-6), (1e-6, 4e-6)]:
        found.add(case, "unisono", ours)
        found.add(case, "mpi", theirs)
    return found


def test_a_ratio_is_the_median_of_the_rounds_ratios_with_its_ends() -> None:
    ratio = results().ratio(Case("all_reduce", 2, 1024), "unisono", "mpi")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 1.5, 4.0))
    assert results().ratio(Case("all_reduce", 2, 1024), "unisono", "gloo") is None
    assert results().seconds(Case("all_reduce", 2, 1024), "mpi") == 3e-6


def test_json_keeps_everything() -> None:
    again = Results.from_json(results().as_json())
    assert again == results()
    row = json.loads(results().as_json())["rows"][0]
    assert row["median_s"] == 1e-6
    assert row["busbw_bytes_per_s"] == pytest.approx(1024 / 1e-6)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 9, "rows": []}'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Results.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"operations": ["all_reduces"]},
        {"peers": ["nccl"]},
        {"links": ["quic"]},
        {"ranks": [1]},
        {"ranks": []},
        {"sizes": [0]},
        {"rounds": 0},
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Options(**wrong)


def test_systems_meet_those_with_the_same_link() -> None:
    assert Options(links=["shm"]).systems() == ["unisono", "mpi", "gloo"]
    assert Options(links=["tcp"], peers=["mpi", "mpi-tcp"]).systems() == ["unisono-tcp", "mpi-tcp"]


def test_a_page_is_made_of_the_results(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(results().as_json())
    script = ROOT / "bench" / "page.py"
    command = [sys.executable, str(script), str(tmp_path / "out.json")]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "| processor | an abacus |" in page
    assert "gloo: not installed" in page
    assert "| unisono | mpi | 1x | 1 of 1 | 2.00: all_reduce, 2 ranks, 1 KiB |" in page
    assert "| 1 KiB | 1 us | 1.02 | 3 us | 2.00 (1.50-4.00) |" in page


class Forgetful(Library):
    """Gives back what it was given."""

    rank, size = 0, 2

    def call(self, operation: str, x: Any, out: Any) -> Any:
        return lambda: None


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_wrong_result_is_seen(operation: str) -> None:
    with pytest.raises(ArithmeticError, match="on rank 0"):
        Forgetful().prepared(Case(operation, 2, 4096), check=True)


def test_a_system_that_cannot_start_says_why() -> None:
    broken = dataclasses.replace(SYSTEMS["unisono"], env={"UNISONO_NONSENSE": "1"})
    with pytest.raises(SystemFailed, match="UNISONO_NONSENSE"):
        RunningSystem(broken, 2)


def test_a_rank_that_ends_in_the_middle_is_a_failure_of_its_system() -> None:
    with RunningSystem(SYSTEMS["unisono"], 2) as system:
        assert system.measure(Case("barrier", 2, 0), 3, check=True) > 0
        with pytest.raises(SystemFailed, match="unisono on 2 ranks failed"):
            system.measure(Case("no such thing", 2, 8), 1)


def test_a_contest_measures_checks_and_names_the_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = System("gloo", "gloo", "any", packages=("no_such_package",), install="pip install torch")
    monkeypatch.setitem(SYSTEMS, "gloo", absent)  # type: ignore[arg-type]
    options = Options(
        ranks=[2],
        operations=["all_reduce", "ping", "barrier"],
        sizes=[8, 4096],
        peers=["gloo"],
        rounds=2,
        turn_s=1e-3,
    )
    found = contest(options)
    assert found.absent == {"gloo": "not installed (no_such_package): pip install torch"}
    for system in ("unisono", "unisono-tcp"):
        for case in options.cases(2):
            assert len(found.times[case][system]) == 2
            assert (found.seconds(case, system) or 0) > 0
    assert found.systems("tcp") == ["unisono-tcp"]


def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    arguments = shlex.split("-n 2 --ops broadcast,barrier --sizes 1Ki --links shm --peers none --rounds 1")
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    # In a process of its own: matplotlib keeps its fonts open.
    command = [sys.executable, "-m", "unisono", "bench", *arguments, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "broadcast, 2 ranks, unisono" in done.stdout
    assert "1 KiB" in done.stdout
    assert Results.from_json((tmp_path / "out.json").read_text()).operations() == ["broadcast", "barrier"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments", ["--ops nothing", "-n x", "--sizes 5Q", "--peers nobody", "--json /no/such/folder/x"]
)
def test_wrong_arguments_end_with_one_line(arguments: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments.split()])
    assert done.exit_code == 2
    assert done.output.count("\n") <= 2
    assert "Traceback" not in done.output
