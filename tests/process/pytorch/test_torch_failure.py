"""When a rank of a torch program fails: who failed, where, and how soon the others know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

# A survivor knows of a dead process within 0.5 s (docs/failure.md), and ends its step of training then.
KNOWN_S = 1.0


# The size of the world, and the failures that `make test` shows; the others are for `make test-more`.
QUICK = {3: ("killed_in_backward",), 2: ("other_call",)}
MORE = {3: ("killed_in_hook", "killed_in_all_reduce"), 2: ("other_length", "other_type", "other_root")}


@cache
def failed(size: int, names: tuple[str, ...]) -> dict[str, Any]:
    """By failure: how the ranks ended. torch is imported once."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        around = {name: text for name, text in os.environ.items() if not name.startswith("UNISONO_")}
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.torch_failures", str(size), results, *names],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=ROOT,
            env={**around, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(results.read_text())
        return said


def ended(size: int, failure: str) -> dict[str, Any]:
    names = QUICK[size] if failure in QUICK[size] else MORE[size]
    said: dict[str, Any] = failed(size, names)[failure]
    return said


@pytest.mark.parametrize(
    "failure",
    [
        "killed_in_backward",
        *(pytest.param(name, marks=pytest.mark.more) for name in MORE[3]),
    ],
)
def test_every_survivor_names_a_killed_rank(failure: str) -> None:
    said = ended(3, failure)
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
def test_ranks_that_call_different_things_are_shown_both_calls(failure: str, calls: tuple[str, str]) -> None:
    said = ended(2, failure)
    assert said["codes"] == [0, 0]
    for each in said["ended"]:
        assert each["error"] == "DistBackendError", each
        for call in calls:
            assert call in each["text"], each


def test_the_lines_of_different_calls_are_those_of_the_program() -> None:
    source = (ROOT / "tests/support/torch_failures.py").read_text().splitlines()
    lines = [n for n, line in enumerate(source, 1) if re.search("# (this line is named|and this one)", line)]
    assert len(lines) == 2
    for each in ended(2, "other_call")["ended"]:
        for line in lines:
            assert f"torch_failures.py:{line}" in each["text"], each["text"]
