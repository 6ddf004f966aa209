"""C++ programs of the tests, built in the folder in which `make setup` compiled the module."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.system import skip_without

__all__ = ["built"]

# The objects of the module are linked, not compiled again.
BUILD = ROOT / ".venv/build/module"


@functools.cache
def built(target: str) -> Path:
    """The program, linked again if a source of it changed."""
    if not (BUILD / "CMakeCache.txt").exists():
        skip_without("a build folder", f"no CMakeCache.txt in {BUILD}; run `make setup`")
    build = ["cmake", "--build", str(BUILD), "--target", target]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILD / "native" / target
