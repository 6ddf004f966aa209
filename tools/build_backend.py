"""The build backend: scikit-build-core, after a look for what pip cannot install.

Without a compiler or OpenSSL's headers a build ends with one sentence that names what to install, instead of
pages of CMake. A wheel needs neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(*args: Any, **kwargs: Any) -> str:
    """Build a wheel, if the system has what it takes."""
    _check_system()
    return _build.build_wheel(*args, **kwargs)


def build_editable(*args: Any, **kwargs: Any) -> str:
    """Build an editable wheel, if the system has what it takes."""
    _check_system()
    return _build.build_editable(*args, **kwargs)


def _check_system() -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler or not _compiles(compiler, "#include <bit>"):
        raise SystemExit(
            "unisono's engine is C++20 and there is no compiler for it: install g++ 12 or newer "
            "(Debian, Ubuntu: g++; Fedora: gcc-c++), set CXX, or install a wheel, which needs no compiler"
        )
    if not _compiles(compiler, "#include <openssl/ssl.h>\nstatic_assert(OPENSSL_VERSION_MAJOR >= 3);"):
        raise SystemExit(
            "unisono's engine needs the headers of OpenSSL 3 for TLS: install libssl-dev (Debian, Ubuntu) or "
            "openssl-devel (Fedora), set OPENSSL_ROOT_DIR, or install a wheel, which needs no headers"
        )


def _compiles(compiler: str, source: str) -> bool:
    root = os.environ.get("OPENSSL_ROOT_DIR")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "look.cpp"
        file.write_text(source)
        command = [
            *compiler.split(),
            "-std=c++20",
            "-fsyntax-only",
            *([f"-I{root}/include"] if root else []),
            file,
        ]
        try:
            return subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            return False
