"""What every test gets: in-process ranks on threads, and a check that nothing is left behind.

Acceptance tests get native ranks in processes of their own, too, with every kind of links: see ON_EVERY_LINK.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono as uni
from unisono.config import Config

from .processes import Failed, run_processes

# Where the ranks of an acceptance test live: on threads, or in processes with these links between them. Each
# test goes through all its parameters on threads, and through one of them in processes, with other links than
# the test before; with --long through all of them with every kind.
IN_THREADS = "threads"
ON_EVERY_LINK = ("shm", "tcp", "hosts", "tls", "hosts tls")
_place = IN_THREADS

# Under `make sanitize` freed memory is kept for a while: what a process takes then says nothing about ours.
IS_SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")

# Long enough for a loaded machine; every wait in a test ends by then, so that a hang is a failure.
PATIENCE_S = 120

# Started in the background by a shell, the tests ignore Ctrl-C, and so would the children that we interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Ended(list[Any]):
    """What each rank returned, or the exception that ended it."""

    def values(self) -> list[Any]:
        """The results; the first exception is raised."""
        for result in self:
            if isinstance(result, BaseException):
                raise result
        return list(self)


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, config: Config | None = None) -> Ended:
    """Run `fn(comm, *args)` on n in-process ranks, one thread each, inside `with comm`.

    In an acceptance test they may be native ranks, in processes of their own.
    """
    if _place != IN_THREADS:
        ended = run_processes(fn, n, *args, kind=_place, config=config)
        return Ended([each.error() if isinstance(each, Failed) else each for each in ended])

    def one(comm: uni.Communicator) -> Any:
        with comm:
            return fn(comm, *args)

    return run_each(one, uni.local(n, config))


def run_each(fn: Callable[[Any], Any], places: list[Any]) -> Ended:
    """Run `fn(place)` on a thread per place; collect how each ended. Who hangs is shown and left behind."""
    ended = Ended([None] * len(places))

    def one(index: int) -> None:
        try:
            ended[index] = fn(places[index])
        except BaseException as error:
            ended[index] = error

    threads = [
        threading.Thread(target=one, args=(index,), name=f"rank_{index}", daemon=True)
        for index in range(len(places))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        frames = sys._current_frames()
        stacks = [
            f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident])[-8:])
            for thread in threads
            if thread.ident in frames and thread.is_alive()
        ]
        raise AssertionError(f"after {PATIENCE_S} s these still run:\n" + "\n".join(stacks))
    return ended


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make soak` ask for more."""
    parser.addoption("--long", action="store_true", help="every kind of links, and more of what takes long")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every acceptance test that runs a program on ranks."""
    if not metafunc.module.__name__.rpartition(".")[2].startswith("test_acceptance_"):
        return
    is_bound = metafunc.definition.get_closest_marker("in_one_process") is not None
    if not is_bound and _runs_ranks(metafunc.function, vars(metafunc.module)):
        metafunc.parametrize("place", (IN_THREADS, *ON_EVERY_LINK), indirect=True)


# Of the kinds of links that a test names in its id, `make test` takes shared memory; the others are for
# `make test-more`.
_MORE_LINKS = {"rings", "tcp", "TCP", "tls", "hosts", "hosts tls"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most kinds of links to `make test-more`; of an acceptance test's runs in processes keep one."""
    for item in items:
        if _MORE_LINKS.intersection(item.nodeid.partition("[")[2].removesuffix("]").split("-")):
            item.add_marker(pytest.mark.more)
    runs: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _place_of(item) != IN_THREADS:
            runs.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if config.getoption("--long"):
        return
    dropped: set[pytest.Item] = set()
    for number, group in enumerate(runs.values()):
        mine = [item for item in group if _place_of(item) == ON_EVERY_LINK[number % len(ON_EVERY_LINK)]]
        kept = mine[number % len(mine)]
        dropped.update(item for item in group if item is not kept)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def _place_of(item: pytest.Item) -> str:
    spec = getattr(item, "callspec", None)
    return IN_THREADS if spec is None else spec.params.get("place", IN_THREADS)


def _runs_ranks(fn: Any, names: dict[str, Any]) -> bool:
    """Whether a function calls run_ranks, itself or by a helper of its module."""
    called = fn.__code__.co_names
    helpers = [names[name] for name in called if hasattr(names.get(name), "__code__")]
    return any(helper is run_ranks or "run_ranks" in helper.__code__.co_names for helper in helpers)


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where `run_ranks` puts ranks during a test."""
    global _place
    _place = getattr(request, "param", IN_THREADS)
    yield
    _place = IN_THREADS


@pytest.fixture
def ranks() -> Callable[..., Ended]:
    """`ranks(fn, n, *args)`: see run_ranks."""
    return run_ranks


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, descriptors, children or shared memory behind."""
    before = _belongings()
    yield
    deadline = time.monotonic() + 5
    while True:
        left = {kind: now - before[kind] for kind, now in _belongings().items() if now - before[kind]}
        if "shared memory" in left:
            left["shared memory"] -= _of_others(left["shared memory"])
        if not any(left.values()) or time.monotonic() > deadline:
            break
        gc.collect()
        time.sleep(0.01)
    assert not any(left.values()), f"left behind: {left}"


def _belongings() -> dict[str, set[str]]:
    descriptors = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
        except OSError:
            continue
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        # One thread, once made, stays for the process: it waits for what finalizers ask for.
        "threads": {f"{t.name} {t.ident}" for t in threading.enumerate() if t.name != "unisono-collected"},
        "descriptors": descriptors,
        "children": set(children),
        "shared memory": set(os.listdir("/dev/shm")),
    }


def _of_others(names: set[str]) -> set[str]:
    """Those of the names in /dev/shm that other programs of this machine use: jobs come and go beside us.

    Open MPI's are never ours, and after a crash nobody's.
    """
    used = {name for name in names if name.startswith("sm_segment.")}
    for process in Path("/proc").glob("[0-9]*"):
        if process.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                mapped = (process / "maps").read_text()
                used.update(name for name in names if f"/dev/shm/{name}" in mapped)
    return used
