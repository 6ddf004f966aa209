"""Finalizers: calls after an object was dropped, made on another thread and never where it was dropped."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.ranks import PATIENCE_S

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.core.clock import RealRuntime


class Node:
    """An object that can have weak references, and be part of a cycle."""

    def __init__(self) -> None:
        self.kept: Any = None


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_the_call_is_made_on_another_thread(is_cyclic: bool) -> None:
    called = threading.Event()
    threads: list[int] = []

    def note() -> None:
        threads.append(threading.get_ident())
        called.set()

    node = Node()
    finalizer = RealRuntime().finalizer(node, note)
    if is_cyclic:
        node.kept = (node, finalizer)
    assert not called.wait(0.01)
    del node
    gc.collect()
    assert called.wait(PATIENCE_S)
    assert not finalizer.detach()
    assert threads != [threading.get_ident()]
    assert len(threads) == 1


def test_calls_wait_while_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short lack of memory must not end the thread for finalizers, after which none would be called."""
    runtime, called, refused = RealRuntime(), threading.Event(), threading.Event()
    start, attempts = threading._start_new_thread, itertools.count()  # type: ignore[attr-defined]

    def fail_thrice(*args: Any) -> Any:
        if next(attempts) < 3:
            refused.set()
            raise RuntimeError("can't start new thread")
        return start(*args)

    monkeypatch.setattr(threading, "_start_new_thread", fail_thrice)
    node = Node()
    runtime.finalizer(node, called.set)
    del node
    assert refused.wait(PATIENCE_S)
    assert called.wait(PATIENCE_S)


def test_a_timer_is_called_although_no_thread_could_be_started_for_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, called = RealRuntime(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raise_no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            runtime.call_at(runtime.now() + 3600, called.clear)
    runtime.call_at(runtime.now(), called.set)
    assert called.wait(PATIENCE_S)


def raise_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_detached_finalizer_is_not_called() -> None:
    runtime, called = RealRuntime(), threading.Event()
    numbers: list[int] = []
    nodes = [Node() for _ in range(3)]
    finalizers = [runtime.finalizer(node, lambda n=n: numbers.append(n)) for n, node in enumerate(nodes)]  # type: ignore[misc]
    assert finalizers[1].detach()
    assert not finalizers[1].detach()
    last = Node()
    runtime.finalizer(last, called.set)  # calls are made in the order in which objects are dropped
    while nodes:
        nodes.pop(0)
    del last
    assert called.wait(PATIENCE_S)
    assert numbers == [0, 2]


def drop_quietly(holder: list[Any]) -> list[str]:
    """Drop the contents of a list; return the Python functions that were called meanwhile."""
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        holder.clear()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("make", [uni.local, LocalBackend.create])
def test_a_dropped_world_or_backend_runs_no_python_where_it_is_dropped(make: Callable[[int], Any]) -> None:
    """Python discards what a signal handler raises in a finalizer: a Ctrl-C at that moment would be lost."""
    assert drop_quietly([make(1)]) == []
