"""The list of backends: ours and those of outside packages; a broken package does not affect the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import unisono as uni
from unisono.backends.devices import nccl
from unisono.backends.native import quic
from unisono.backends.registry import BackendInfo, BackendStatus, backend_named
from unisono.errors import BackendUnavailable, UsageError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(module, source, name=target)`: an outside package with its metadata, as pip installs it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(module: str, source: str, **points: str) -> None:
        (tmp_path / f"{module}.py").write_text(dedent(source))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[unisono.backends]", *lines]) + "\n")

    yield write
    for module in set(sys.modules) - before:
        del sys.modules[module]


def row(name: str) -> BackendStatus:
    rows = [status for status in uni.list_backends() if status.name == name]
    assert len(rows) == 1, f"{len(rows)} rows named {name}"
    return rows[0]


PIGEON = """
    from unisono.backends.registry import BackendInfo

    def check():
        return {reason!r}

    INFO = BackendInfo("pigeon", "carrier pigeons", check, "pip install pigeon[wings]")
"""


def test_our_own_are_listed_in_order_and_the_local_one_runs() -> None:
    rows = uni.list_backends()
    assert [status.name for status in rows] == sorted(status.name for status in rows)
    local = row("local")
    assert (local.available, local.reason) == (True, "available")
    assert local.install
    assert local.summary
    info = backend_named("local")
    assert isinstance(info, BackendInfo)
    assert info.check() is None


def test_an_outside_package_is_found(install: Install) -> None:
    install("pigeonry", PIGEON.format(reason=None), pigeon="pigeonry:INFO")
    assert row("pigeon") == BackendStatus(
        "pigeon", True, "available", "pip install pigeon[wings]", "carrier pigeons"
    )
    assert backend_named("pigeon").name == "pigeon"
    assert row("local").available


def test_a_backend_that_cannot_run_says_why_and_what_to_install(install: Install) -> None:
    install("pigeonry", PIGEON.format(reason="no pigeons on this roof"), pigeon="pigeonry:INFO")
    status = row("pigeon")
    assert (status.available, status.reason) == (False, "no pigeons on this roof")
    assert status.install == "pip install pigeon[wings]"
    with pytest.raises(
        BackendUnavailable, match=r"'pigeon': no pigeons on this roof.*pip install pigeon\[wings\]"
    ):
        backend_named("pigeon")
    with pytest.raises(BackendUnavailable, match="no pigeons on this roof"):
        uni.init("pigeon")


BROKEN = {
    "does not import": ("raise ImportError('libpigeon.so.3 is missing')", "broken:INFO", "libpigeon.so.3"),
    "has no such name": ("INFO = 1", "broken:OTHER", "OTHER"),
    "is something else": ("INFO = 1", "broken:INFO", "int"),
    "has a check that fails": (
        """
        from unisono.backends.registry import BackendInfo

        def check():
            raise OSError("the loft is locked")

        INFO = BackendInfo("broken", "", check, "")
        """,
        "broken:INFO",
        "the loft is locked",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_package_is_a_row_and_not_a_crash(install: Install, how: str) -> None:
    source, target, text = BROKEN[how]
    install("broken", source, broken=target)
    status = row("broken")
    assert not status.available
    assert text in status.reason
    assert status.install
    with pytest.raises(BackendUnavailable, match=text):
        uni.init("broken")
    assert row("local").available
    assert backend_named("local").name == "local"


def test_an_unknown_name_is_refused_with_those_that_exist(install: Install) -> None:
    install("pigeonry", PIGEON.format(reason=None), pigeon="pigeonry:INFO")
    with pytest.raises(UsageError, match=r"backend 'telegraph' is unknown; allowed: auto, .*local.*pigeon"):
        backend_named("telegraph")
    with pytest.raises(UsageError, match="backend 'telegraph' is unknown"):
        uni.init("telegraph")


def test_packages_that_are_not_about_backends_are_left_alone(install: Install, tmp_path: Path) -> None:
    before = uni.list_backends()
    install("bystander", "raise RuntimeError('imported for nothing')")
    points = tmp_path / "bystander-1.0.dist-info" / "entry_points.txt"
    points.write_text("[console_scripts]\nbystander = bystander:main\n")
    assert uni.list_backends() == before


def test_auto_is_the_native_backend() -> None:
    assert backend_named("auto") == backend_named("native")


def test_backends_whose_ranks_are_processes_say_so() -> None:
    by_name = {name: backend_named(name).has_processes for name in ("native", "gloo", "mpi", "iroh", "local")}
    assert by_name == {"native": True, "gloo": True, "mpi": True, "iroh": True, "local": False}
    assert nccl.DESCRIPTION.has_processes
    assert quic.DESCRIPTION.has_processes
