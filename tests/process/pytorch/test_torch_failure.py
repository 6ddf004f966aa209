"""When a rank of a torch program fails: who failed, where, and how soon the others know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

# A survivor knows of a dead process within 0.5 s (docs/failure.md), and ends its step of training then.
KNOWN_S = 1.0


def failed(failure: str, size: int, folder: Path) -> dict[str, Any]:
    results = folder / "results.json"
    around = {name: text for name, text in os.environ.items() if not name.startswith("UNISONO_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_failures", failure, str(size), results],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
        env={**around, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(results.read_text())
    said["stderr"] = done.stderr
    return said


@pytest.mark.parametrize(
    "failure",
    [
        "killed_in_backward",
        *(pytest.param(f"killed_in_{where}", marks=pytest.mark.more) for where in ("hook", "all_reduce")),
    ],
)
def test_every_survivor_names_a_killed_rank(failure: str, tmp_path: Path) -> None:
    said = failed(failure, 3, tmp_path)
    assert said["codes"] == [0, -9, 0]
    assert [each["rank"] for each in said["ended"]] == [0, 2]
    for each in said["ended"]:
        assert "rank 1" in each["text"], each
        assert each["when"] - said["killed"] < KNOWN_S, each


@pytest.mark.parametrize(
    ("failure", "calls"),
    [
        ("other_call", ("broadcast", "all_reduce")),
        pytest.param("other_length", ("float32[1001]", "float32[1000]"), marks=pytest.mark.more),
        pytest.param("other_type", ("float64[64]", "float32[64]"), marks=pytest.mark.more),
        pytest.param("other_root", ("root=0", "root=1"), marks=pytest.mark.more),
    ],
)
def test_ranks_that_call_different_things_are_shown_both_calls(
    failure: str, calls: tuple[str, str], tmp_path: Path
) -> None:
    said = failed(failure, 2, tmp_path)
    assert said["codes"] == [0, 0]
    for each in said["ended"]:
        assert each["error"] == "DistBackendError", each
        for call in calls:
            assert call in each["text"], each


def test_the_lines_of_different_calls_are_those_of_the_program(tmp_path: Path) -> None:
    source = (ROOT / "tests/support/torch_failures.py").read_text().splitlines()
    lines = [n for n, line in enumerate(source, 1) if re.search("# (this line is named|and this one)", line)]
    assert len(lines) == 2
    for each in failed("other_call", 2, tmp_path)["ended"]:
        for line in lines:
            assert f"torch_failures.py:{line}" in each["text"], each["text"]
