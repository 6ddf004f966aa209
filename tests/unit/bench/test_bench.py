"""Measurements: correct formulas, ratios with their spread, checked results; missing peers are named."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.support.paths import ROOT
from tests.support.system import skip_without

from unisono.bench import Case, Options, Ratio, Results, contest
from unisono.bench.libraries import Library
from unisono.bench.machine import pressure
from unisono.bench.operations import FLOAT32, OPERATIONS, Operation
from unisono.bench.running_system import RunningSystem, SystemFailed
from unisono.bench.systems import SYSTEMS, System
from unisono.bench.ways import WAYS
from unisono.cli import main
from unisono.cli.bench import print_tables
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
    assert (Case("all_reduce_many", 4, 4096).block, Case("all_reduce_many", 4, 4096).count) == (128, 1024)
    assert (Case("all_reduce", 4, 0, data="number").count, Case("split_close", 4).count) == (0, 0)
    assert Case("barrier", 4, 0).count == 0


def test_a_bandwidth_that_nccl_tests_does_not_define_is_left_out() -> None:
    assert Case("scan", 4, 1 << 20).bus_bandwidth(0.5) is None


def test_a_pattern_picks_cases_by_their_label() -> None:
    case = Case("all_reduce", 2, 64 << 10, "new size")
    assert case.label == "all_reduce/new size/float32/64 KiB"
    assert all(map(case.matches, ("all_reduce", "new size", "all_*64 KiB", "")))
    assert not case.matches("all_reduce/blocking")
    chosen = Options(only=["sendrecv/started", "barrier"], sizes=[8]).cases(2)
    assert {each.operation for each in chosen} == {"sendrecv", "barrier"}
    assert {each.way for each in chosen if each.operation == "sendrecv"} == {"started"}


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


def test_a_small_ratio_keeps_its_digits() -> None:
    assert Ratio(1.5, 0.25, 12.0).texts() == ("1.50", "(0.25-12.00)")
    assert Ratio(0.0123, 0.00456, 0.1).texts() == ("0.012", "(0.0046-0.10)")


def test_a_summary_has_the_geometric_mean_and_the_cases_in_which_the_peer_is_faster() -> None:
    found = results()  # ratio 2.0
    slow, equal = Case("scan", 2, 8, "started"), Case("barrier", 2)
    for case, ours, theirs in [(slow, 8e-6, 1e-6), (equal, 3e-6, 3e-6), (Case("barrier", 4), 1e-6, 9e-6)]:
        found.add(case, "unisono", ours)
        found.add(case, "mpi", theirs)
    found.add(Case("scan", 2, 64), "unisono", 1e-6)  # no peer to compare with
    two, four = found.summaries()
    assert (two.ours, two.peer, two.ranks, two.cases) == ("unisono", "mpi", 2, 3)
    assert two.geometric_mean == pytest.approx((2.0 * 0.125 * 1.0) ** (1 / 3))
    assert [(case, ratio.median) for case, ratio in two.below] == [(slow, 0.125)]
    assert (four.ranks, four.cases, four.geometric_mean, four.below) == (4, 1, pytest.approx(9.0), ())


def test_tables_are_printed_with_what_is_below_one() -> None:
    found = results()
    slow = Case("scan", 2, 8, "started")
    found.add(slow, "unisono", 8e-6)
    found.add(slow, "mpi", 1e-6)
    console = Console(file=io.StringIO(), width=200)
    print_tables(console, found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"blocking +float32 +1 KiB +1 us +1.02 +3 us +2.00 \(1.50-4.00\)", text)
    assert re.search(r"unisono +mpi +2 +2 +0.50 +1", text)
    assert re.search(r"scan/started/float32/8 B +0.12 \(0.12-0.12\)", text)


def test_json_keeps_everything() -> None:
    again = Results.from_json(results().as_json())
    assert again == results()
    row = json.loads(results().as_json())["rows"][0]
    assert row["median_s"] == 1e-6
    assert row["busbw_bytes_per_s"] == pytest.approx(1024 / 1e-6)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 9, "rows": []}'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Results.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"only": ["all_reduces"]},
        {"peers": ["nccl"]},
        {"links": ["quic"]},
        {"ranks": [1]},
        {"ranks": []},
        {"sizes": [0]},
        {"rounds": 0},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        Options(**wrong)


def test_systems_are_compared_with_those_on_the_same_link() -> None:
    assert Options(links=["shm"]).systems() == ["unisono", "mpi", "gloo"]
    assert Options(links=["tcp"], peers=["mpi", "mpi-tcp"]).systems() == ["unisono-tcp", "mpi-tcp"]


def test_a_page_is_made_of_the_results(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(results().as_json())
    script = ROOT / "bench" / "page.py"
    command = [sys.executable, str(script), str(tmp_path / "out.json")]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "| processor | an abacus |" in page
    assert "gloo: not installed" in page
    assert "| unisono | mpi | 2 | 1 | 2.00 | 1x | 1 | 0 |" in page
    assert "| blocking | float32 | 1 KiB | 1 us | 1.02 | 3 us | 2.00 (1.50-4.00) |" in page


class Idle:
    """A system whose verbs do nothing and return a given value."""

    def __init__(self, result: Any = None, start: Any = None) -> None:
        self.result, self.start = result, start

    def __getattr__(self, verb: str) -> Any:
        return lambda *_, **__: self.result


class Forgetful(Library):
    """A system whose verbs return their input."""

    name, rank, size = "unisono", 1, 2

    def names(self) -> dict[str, Any]:
        return {"world": Idle(start=Idle(Idle())), "first": max}


# Results of other verbs are not compared, or on root only.
CHECKED = [
    row
    for row in OPERATIONS
    if row.has_sizes and row.name not in ("recv_bytes", "reduce", "gather", "gather_v")
]


@pytest.mark.parametrize("row", CHECKED, ids=[row.name for row in CHECKED])
def test_a_wrong_result_is_reported(row: Operation) -> None:
    with pytest.raises(ArithmeticError, match="on rank 1"):
        Forgetful().prepared(Case(row.name, 2, 4096, row.ways[0]), check=True)


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
        only=["all_reduce/blocking/float32", "ping/started/float32", "barrier/blocking"],
        sizes=[8, 4096],
        way_sizes=[8],
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


SMOKE = [
    ("all_reduce", "1000 lines", FLOAT32, 8),
    ("all_gather_v", "new size", FLOAT32, 40),
    ("sendrecv", "new array", "torch", 8),
    ("isend_irecv", "polled", FLOAT32, 8),
    ("scan", "timeout", "number", 0),
    ("all_gather_object", "started", "100 B dict", 0),
    ("split_close", "blocking", FLOAT32, 0),
]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_can_be_measured(name: str) -> None:
    if (why := SYSTEMS[name].missing()) is not None:
        skip_without(f"the library of {name!r}", why)
    with RunningSystem(SYSTEMS[name], 2) as system:
        for operation, way, data, nbytes in SMOKE:
            case = Case(operation, 2, nbytes, way, data)
            if system.system.library in case.row.lines and (name != "gloo" or WAYS[way].for_gloo):
                assert system.measure(case, 3, check=True) > 0


def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    arguments = shlex.split(
        "-n 2 --only broadcast/blocking/float32 --only barrier/blocking --sizes 1Ki,2Ki"
        " --links shm --peers none --rounds 1"
    )
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    # In a separate process, because matplotlib keeps its fonts open.
    command = [sys.executable, "-m", "unisono", "bench", *arguments, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "broadcast, 2 ranks, unisono" in done.stdout
    assert "1 KiB" in done.stdout
    assert Results.from_json((tmp_path / "out.json").read_text()).operations() == ["broadcast", "barrier"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments", ["--only nothing", "-n x", "--sizes 5Q", "--peers unknown", "--json /no/such/folder/x"]
)
def test_wrong_arguments_end_with_one_line(arguments: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments.split()])
    assert done.exit_code == 2
    assert done.output.count("\n") <= 2
    assert "Traceback" not in done.output


def test_the_pressure_of_a_machine_is_read_from_linux(tmp_path: Path) -> None:
    path = tmp_path / "cpu"
    path.write_text("some avg10=95.20 avg60=1.00 avg300=0.00 total=5\nfull avg10=7.00 avg60=0.00 total=1\n")
    assert pressure(str(path)) == 95.2
    path.write_text("")
    assert pressure(str(path)) is None
    assert pressure(str(tmp_path / "none")) is None
