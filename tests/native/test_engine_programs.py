"""What `make sanitize` and `make fuzz` compile from the engine still fits it, long before they run."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.support.paths import ROOT, TESTS


@pytest.mark.more
@pytest.mark.parametrize("source", ["native/engine_test.cpp", "fuzz/decoders.cpp"])
def test_a_program_beside_the_module_compiles(source: str) -> None:
    compiler = os.environ.get("CXX", "c++")
    done = subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-fsyntax-only",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
            ROOT / "native",
            TESTS / source,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
