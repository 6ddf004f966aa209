"""What every test gets: a check that nothing is left behind, and for marked tests every kind of links."""

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

# Hypothesis remembers failing examples in .venv, where all caches are. A slow test is not wrong.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(ROOT / ".venv/cache/hypothesis"))
hypothesis.settings.register_profile("unisono", deadline=None)
hypothesis.settings.load_profile("unisono")

# In thousands of tests the ranks are threads of this process. By default glibc gives them up to 16 heaps,
# each of which keeps what its largest test took: 1.3 GB in the end. So there is one heap, and the size from
# which a block is mapped by itself, and unmapped when it is freed, stays at glibc's
# first value instead of growing.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)

# Started in the background by a shell, the tests ignore Ctrl-C, and so would the children that we interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make soak` ask for more."""
    parser.addoption("--long", action="store_true", help="every kind of links, and more of what takes long")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `on_every_link` on threads and in processes with every kind of links."""
    if metafunc.definition.get_closest_marker("on_every_link") is not None:
        metafunc.parametrize("rank_links", (IN_THREADS, *ON_EVERY_LINK), indirect=True)


# Of the kinds of links that a test names in its id, `make test` takes shared memory; the others are for
# `make test-more`.
_MORE_LINKS = {
    *("rings", "tcp", "TCP", "tight tcp", "tls", "tight tls", "hosts", "hosts tls"),
    *("quic", "tight quic", "hosts quic"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most kinds of links to `make test-more`; of an acceptance test's runs in processes keep one."""
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
        # By a hash of its id: other tests and further parameters leave the choice as it is.
        kept = min(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
        dropped.update(item for item in group if item is not kept)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    """Exempt what was collected from garbage collections, here and in every rank that is forked."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Which links a test runs on stands in its id."""
    has_links = item.path.relative_to(TESTS).parts[0] in _WITH_LINKS or _links_of(item) != IN_THREADS
    if has_links and "quic" in re.split(r"[^a-z]+", item.nodeid.lower()):
        need_quic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests that this machine could not run, by what they wanted."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    for what, count in skipped_by_need(reasons).items():
        terminalreporter.write_line(f"skipped for want of {what}: {count} test{'s' if count > 1 else ''}")


_WITH_LINKS = ("process", "conformance", "native")
# Files of these folders take longest. With them at the end, one of two workers would wait for the other.
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
    # Beside other programs a collection may take a second, in which no other thread of this process runs.
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
        # The thread that does the work of finalizers stays until the process ends.
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
