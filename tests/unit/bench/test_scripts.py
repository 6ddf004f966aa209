"""The scripts of bench/: their arithmetic, their checks, and one short run of each."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.paths import ROOT
from tests.support.system import skip_without

from unisono.bench.systems import SYSTEMS


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "ranks", "least_s"),
    [
        # A copy of the vector takes 3 s and a reduction 6 s, on every rank at the same time.
        ("all_reduce", 2, 3 / 2 + 6 / 2),
        ("all_reduce", 4, 3 * 3 / 4 + 3 * 6 / 4),
        ("broadcast", 4, 3 * 3 / 4),
        ("all_gather", 4, 3.0),
        ("reduce_scatter", 4, 3 * 6 / 4),
        ("scan", 2, 3 / 2 + 6 / 2),
    ],
)
def test_the_limit_is_the_fewest_bytes_at_the_bandwidth_of_all_ranks(
    name: str, ranks: int, least_s: float
) -> None:
    times = {"bare copy": 3.0, "bare reduce": 6.0, name: 10.0}
    assert script("limit").fraction(name, ranks, times) == pytest.approx(least_s / 10.0)


def test_the_slowest_rank_of_each_round_counts() -> None:
    of_ranks = [[{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 1.0}], [{"a": 3.0, "b": 4.0}, {"a": 1.0, "b": 2.0}]]
    assert script("limit").slowest(of_ranks) == [{"a": 3.0, "b": 5.0}, {"a": 2.0, "b": 2.0}]


def test_the_page_of_calls_has_every_part_of_a_run_between_its_two_lines() -> None:
    tables = script("rpc_tables")
    times = {"shm": [10.0, 20.0, 30.0], "tcp": [20.0, 30.0, 40.0], "torch": [300.0, 1, 1], "torch-tcp": 200.0}
    forms = {"messages": 100.0, "bytes": 110.0, "bytearray": 120.0, "text": 130.0, "array": 140.0}
    rate = {name: [1000.0, 1.0, 2.0, 3.0] for name in ("shm", "torch")}
    data = {
        "about": ["a machine", "a machine"],
        "kinds": {"int": [times, times], "bytes-1Ki": [times]},
        "sendrecv": {"tcp, 64Ki": [forms]},
        "alike": {"tcp, 64Ki": [forms]},
        "steps": {"tcp": [{"256": 10.0, "512": 12.0, "1024": 13.0}]},
        "load": {"64, 1 thread, to one rank": [rate]},
        "busy": {"tcp, sleeps": [{"int": [20.0, 30.0, 40.0]}]},
        "wakes": {"tcp, int": [{"caller: readers": 0.05}]},
    }
    page = tables.into_page(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n", data)
    assert page.startswith(f"before\n{tables.BEGIN}\n\n- a machine\n\n")
    assert page.endswith(f"\n\n{tables.END}\nafter\n")
    assert page.count("a machine") == 1
    assert "old" not in page
    for line in (
        "| an int | 10.0 | 20.0 |  | 300 | 200 | 0.03 (0.03 to 0.03) | 0.10 (0.10 to 0.10) |  |  |",
        "| bytes, 1 KiB | 10.0 | 20.0 |  | 300 | 200 | 0.03 (0.03 to 0.03) | 0.10 (0.10 to 0.10) |  | 118 |",
        "| tcp, 64Ki | 100 | 110 | 140 | 1.10 (1.10 to 1.10) | 1.40 (1.40 to 1.40) |",
        "| TCP | 256 | 1.20 (1.20 to 1.20) |",
        "| 64, 1 thread, to one rank | 1,000 |  |  | 1,000 |  | 1.00 (1.00 to 1.00) |  |  |",
        "| 64, 1 thread, to one rank | 0.0, 0.0, 0.0 |  |  |",
        "| tcp, int | caller: readers 0.05 |",
    ):
        assert line in page.splitlines()
    with pytest.raises(ValueError, match="no lines"):
        tables.into_page("another page", data)


def test_a_halo_exchange_that_forgets_an_edge_is_detected() -> None:
    halo = script("halo")

    def both(u: Any) -> None:
        u[0], u[-1] = u[-2], u[1]

    def upper(u: Any) -> None:
        u[0] = u[-2]

    halo.check(both, 0, 1, 13)
    with pytest.raises(SystemExit, match="upper of a grid of 13"):
        halo.check(upper, 0, 1, 13)


def test_an_observer_that_a_work_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    observers = script("observers")
    observers.show("callback", None)
    observers.show("await", [1000, 3000, 2000])
    lacks, has = capsys.readouterr().out.splitlines()
    assert lacks.split() == ["callback", "this", "version", "has", "none"]
    assert has.split() == ["await", "2.0", "3.0", "3.0"]


def test_ratios_to_the_first_are_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    script("local_ranks").show({"first": [1e-6, 2e-6, 4e-6], "second": [2e-6, 8e-6, 12e-6]})
    assert capsys.readouterr().out.splitlines()[1].split() == ["second", "8.0", "3.00", "(2.00-4.00)"]


def test_link_goals_that_the_median_misses_are_named_and_the_page_gets_the_table(tmp_path: Path) -> None:
    rounds = {
        "round trip 8 B": [{"tls": 1e-5, "quic": n * 1e-5} for n in (1.0, 1.4, 1.5)],
        "64 MiB one way": [{"tls": 1e-2, "quic": 1e-2, "quic 1452": 1.4e-2}],
        "9 ranks: all links": [{"tls": 0.2, "quic": 0.3}],
        "9 ranks: sockets of a rank": [{"tls": 18, "quic": 1}, {"tls": 18, "quic": 2}],
    }
    kept, page = tmp_path / "rounds.json", tmp_path / "page.md"
    kept.write_text(json.dumps(rounds))
    page.write_text("before\n<!-- bench/links.py: begin -->\nold\n<!-- bench/links.py: end -->\nafter\n")
    command = [sys.executable, str(ROOT / "bench" / "links.py"), "--seconds", "0", "--json", str(kept)]
    done = subprocess.run([*command, "--into", str(page)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    missed = [
        "round trip 8 B, quic: 1.40 of tls, goal 1.30",
        "9 ranks: all links, quic: 1.50 of tls, goal 1.00",
        "9 ranks: sockets of a rank: 2, goal 1",
    ]
    lines = done.stdout.splitlines()
    assert [line.removeprefix("missed: ") for line in lines if line.startswith("missed")] == missed
    assert "| round trip 8 B | 10.0 |  | 14.0 (1.40, 1.20-1.45) | 3 |" in page.read_text()
    assert [line for line in page.read_text().splitlines() if line.startswith("- ")] == [
        f"- {goal}" for goal in missed
    ]
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert "old" not in page.read_text()


@pytest.mark.more
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(
            "compression.py -n 2 --steps 3 --seeds 1",
            "| top-k 1 % |",
            marks=pytest.mark.more,
            id="compression",
        ),
        ("halo.py -n 2 --grids 8 --rounds 1 --links shm", "8 x 8   sendrecv"),
        ("limit.py -n 2 --mib 1 --rounds 1 --only all_reduce,scan", "scan"),
        ("local_ranks.py -n 2 --rounds 1 --mib 1", "all_reduce 1 MiB"),
        ("observers.py --links shm --times 5", "shm, await"),
        ("links.py --seconds 1 --kinds tls,quic --rows 8 --plot {folder}/links.png", "| round trip 8 B |"),
        ("links.py --seconds 1 --form 3", "| 3 ranks: sockets of a rank |"),
    ],
)
def test_a_short_run(arguments: str, shown: str, tmp_path: Path) -> None:
    name, *rest = arguments.format(folder=tmp_path).split()
    if name == "halo.py" and (why := SYSTEMS["mpi"].missing()) is not None:
        skip_without("the library of 'mpi'", why)
    command = [sys.executable, str(ROOT / "bench" / name), *rest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
