"""torch's own tests of a backend (`DistributedTest`, from its wheel) on our backend with four ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]

# torch 2.13.0: the number of tests that Gloo passes (`python -m tests.support.torch_suite gloo
# results.json`), without the twelve tests of all_to_all on CPUs, which torch runs only for MPI. Gloo would
# pass eight of those.
GLOO_PASSES = 115
PASSES = GLOO_PASSES + 12

# The tests that fail on our backend, and why.
EXPECTED: dict[str, str] = {}


def test_more_of_torchs_own_tests_pass_than_on_gloo(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    around = {name: text for name, text in os.environ.items() if not name.startswith("UNISONO_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_suite", "unisono", results],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        env={**around, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-20_000:]
    ended: dict[str, str] = json.loads(results.read_text())
    failed = {name: how for name, how in ended.items() if not how.startswith(("passed", "skipped"))}
    passed = [name for name, how in ended.items() if how == "passed"]
    assert failed.keys() == EXPECTED.keys(), "\n".join(f"{name}: {how}" for name, how in failed.items())
    assert len(passed) >= PASSES
