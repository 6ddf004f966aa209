"""For every test: a check that nothing leaks. For marked tests: runs with every kind of links."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from tests.support.paths import ROOT, TESTS
from tests.support.ranks import IN_THREADS, ON_EVERY_LINK, Ended, ranks_linked_by, run_ranks
from tests.support.system import need_quic, skipped_by_need

# Hypothesis keeps failing examples in .venv, where all caches are. A slow example is not a failure.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(ROOT / ".venv/cache/hypothesis"))
hypothesis.settings.register_profile("unisono", deadline=None)
hypothesis.settings.load_profile("unisono")

# In thousands of tests the ranks are threads of this process. By default glibc gives them up to 16 heaps,
# each of which keeps the memory of its largest test: 1.3 GB at the end. So there is one heap, and the
# threshold from which glibc maps a block separately, and unmaps it when it is freed, is fixed at its initial
# value.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)

# A shell that starts the tests in the background lets them ignore SIGINT, and nohup SIGHUP. The children that
# tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--long`, which `make soak` uses."""
    parser.addoption("--long", action="store_true", help="every kind of links, and more of what takes long")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `on_every_link` on threads and in processes with every kind of links."""
    if metafunc.definition.get_closest_marker("on_every_link") is not None:
        metafunc.parametrize("rank_links", (IN_THREADS, *ON_EVERY_LINK), indirect=True)


# Of the kinds of links that a test names in its id, `make test` runs only shared memory; the others are for
# `make test-more`.
_MORE_LINKS = {
    *("rings", "tcp", "TCP", "tight tcp", "tls", "tight tls", "hosts", "hosts tls"),
    *("quic", "tight quic", "hosts quic"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most kinds of links `more`; keep only one of an acceptance test's runs in processes."""
    items.sort(key=_folder_order)
    for item in items:
        if _MORE_LINKS.intersection(item.nodeid.partition("[")[2].removesuffix("]").split("-")):
            item.add_marker(pytest.mark.more)
    runs: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _links_of(item) != IN_THREADS:
            runs.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if config.getoption("--long"):
        return
    dropped: set[pytest.Item] = set()
    for group in runs.values():
        # By a hash of the id: new tests and further parameters do not change the choice.
        kept = min(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
        dropped.update(item for item in group if item is not kept)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection, here and in every rank that is forked."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of QUIC links if unisono was built without them; the id of a test names its links."""
    has_links = item.path.relative_to(TESTS).parts[0] in _WITH_LINKS or _links_of(item) != IN_THREADS
    if has_links and "quic" in re.split(r"[^a-z]+", item.nodeid.lower()):
        need_quic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests that this machine could not run, by the tool or permission that they need."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    for what, count in skipped_by_need(reasons).items():
        terminalreporter.write_line(f"skipped for want of {what}: {count} test{'s' if count > 1 else ''}")


_WITH_LINKS = ("process", "conformance", "native")
# The files of these folders take longest. If they ran last, one of two workers would wait for the other.
_FIRST = ("process", "conformance")


def _folder_order(item: pytest.Item) -> int:
    folder = item.path.relative_to(TESTS).parts[0]
    return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)


def _links_of(item: pytest.Item) -> str:
    spec = getattr(item, "callspec", None)
    return IN_THREADS if spec is None else spec.params.get("rank_links", IN_THREADS)


@pytest.fixture(autouse=True)
def rank_links(request: pytest.FixtureRequest) -> Iterator[None]:
    """How `run_ranks` links ranks during a test: as threads, or as processes with one kind of links."""
    with ranks_linked_by(getattr(request, "param", IN_THREADS)):
        yield


@pytest.fixture
def ranks() -> Callable[..., Ended]:
    """`ranks(fn, n, *args)`: see run_ranks."""
    return run_ranks


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, descriptors, children or shared memory behind."""
    before = _resources()
    yield
    # On a busy machine a garbage collection may take a second, during which no other thread of this process
    # runs.
    deadline = time.monotonic() + 30
    while True:
        left = {kind: now - before[kind] for kind, now in _resources().items() if now - before[kind]}
        if "shared memory" in left:
            left["shared memory"] -= _used_elsewhere(left["shared memory"])
        if not any(left.values()) or time.monotonic() > deadline:
            break
        gc.collect()
        time.sleep(0.02)
    assert not any(left.values()), f"left behind: {left}"


def _resources() -> dict[str, set[str]]:
    descriptors = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
        except OSError:
            continue
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        # The thread that runs finalizers stays until the process ends.
        "threads": {f"{t.name} {t.ident}" for t in threading.enumerate() if t.name != "unisono-collected"},
        "descriptors": descriptors,
        "children": set(children),
        "shared memory": set(os.listdir("/dev/shm")),
    }


def _used_elsewhere(names: set[str]) -> set[str]:
    """The names in /dev/shm that other programs of this machine use, and those of Open MPI."""
    used = {name for name in names if name.startswith("sm_segment.")}
    for process in Path("/proc").glob("[0-9]*"):
        if process.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                mapped = (process / "maps").read_text()
                used.update(name for name in names if f"/dev/shm/{name}" in mapped)
    return used
