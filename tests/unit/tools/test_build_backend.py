"""A build without a compiler or OpenSSL's headers ends with one sentence that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT

SCRIPT = "import build_backend; build_backend.build_wheel('nowhere')"


def refused(tmp_path: Path, compiler: str) -> list[str]:
    """The error of a build that uses this program as compiler."""
    fake = tmp_path / "c++"
    fake.write_text(f"#!/bin/sh\n{compiler}\n")
    fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CXX": str(fake), "PYTHONPATH": str(ROOT / "tools")},
    )
    assert done.returncode == 1
    assert not done.stdout
    return done.stderr.strip().splitlines()


@pytest.mark.parametrize(
    ("compiler", "package"),
    [
        ("exit 127", "g++"),
        ('for file in "$@"; do :; done; ! grep -q openssl "$file"', "libssl-dev"),
    ],
    ids=["no compiler", "no headers"],
)
def test_a_missing_package_is_named_in_one_line(tmp_path: Path, compiler: str, package: str) -> None:
    (line,) = refused(tmp_path, compiler)
    assert package in line
    assert "or install a wheel" in line
