"""Inline handlers: where they run, and that they cannot wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.calls import LONG_S, WORLDS, Counter, Plain, echo

import unisono as uni
from unisono.rpc import Agent
from unisono.rpc.server import INLINE_S


def inlined(comm: uni.Communicator, runs_on_caller: bool) -> str:
    agent = Agent(comm)
    other, threads, refused = 1 - comm.rank, {"inline": set(), "pooled": set()}, []

    @agent.expose(inline=True)
    def inline(x: int) -> int:
        threads["inline"].add(threading.get_ident())
        return x + 1

    @agent.expose
    def pooled(x: int) -> int:
        threads["pooled"].add(threading.get_ident())
        return x + 1

    @agent.expose
    def back(name: str, x: int) -> int:
        return 10 * agent.call(other, name, x)

    def waits() -> int:
        """Every operation that waits is refused before anything is sent; started operations go on."""
        received = comm.start.recv(np.zeros(1), other, 5)
        kept.append(agent.start(other, "later"))
        for wait in (
            lambda: comm.barrier(),
            lambda: comm.recv(np.zeros(1), other),
            lambda: agent.call(other, "pooled", 1),
            lambda: next(agent.stream(other, "items", timeout=5)),
            received.wait,
            lambda: uni.wait_any([kept[-1]]),
            lambda: uni.wait_all([kept[-1]]),
            lambda: agent.call_all("pooled", 1),
            lambda: agent.close(),
            lambda: comm.close(),
        ):
            with pytest.raises(uni.UsageError, match="inline=True must not wait"):
                wait()
            refused.append(1)
        received.cancel()
        return len(refused)

    kept: list[Any] = []
    agent.register("waits", waits, inline=True)
    agent.register("items", lambda: (yield 1))
    go_on = threading.Event()
    if not runs_on_caller:  # simulated: no frame arrives meanwhile, and a real wait stops all ranks
        go_on.set()
    agent.register("later", lambda: go_on.wait(LONG_S))

    @agent.expose(inline=True)
    def fails() -> None:
        raise ValueError("inline")

    comm.barrier()
    if comm.rank == 0:
        for i in range(300):
            assert agent.call(other, "inline", i) == i + 1
            assert agent.call(other, "back", "inline", i) == 10 * (i + 1)
            assert agent.call(other, "back", "pooled", i) == 10 * (i + 1)
        me = threading.get_ident()
        assert me not in threads["pooled"]
        assert (me in threads["inline"]) is runs_on_caller
        assert agent.call(0, "inline", 5) == 6
        with pytest.raises(uni.RemoteError, match=r"ValueError.*inline"):
            agent.call(other, "fails")
    assert agent.call(other, "waits") == 10
    go_on.set()
    comm.barrier()  # the thread that ran inline handlers may block
    for work in kept:
        work.wait(LONG_S)
    comm.barrier()
    return "ok"


@pytest.mark.parametrize("kind", WORLDS)
def test_an_inline_handler_runs_on_a_thread_that_waits_for_an_answer_and_must_not_wait(kind):
    assert WORLDS[kind](inlined, 2, True) == ["ok"] * 2


def test_an_inline_handler_runs_on_a_thread_of_the_pool_where_no_caller_reads():
    assert uni.simulate(inlined, 2, False).results == ["ok"] * 2


def test_what_cannot_return_at_once_cannot_be_inline():
    async def coroutine() -> None: ...

    async def async_items() -> Any:
        yield 1

    def items() -> Any:
        yield 1

    (comm,) = uni.local(1)
    with comm:
        agent = Agent(comm)
        for fn in (coroutine, async_items, items, Counter):
            with pytest.raises(uni.UsageError, match=r"is (async|a generator); allowed.*Next: expose it"):
                agent.register("f", fn, inline=True)
            with pytest.raises(uni.UsageError, match="allowed with inline=True"):
                agent.expose(inline=True)(fn)
        with pytest.raises(uni.UsageError, match="allowed with inline=True"):
            agent.register("f", Counter, inline=True)  # a second time: the first left nothing exposed
        with pytest.raises(uni.RemoteError, match="exposes no function 'f'"):
            agent.call(0, "f")
        agent.register("f", Counter)
        with pytest.raises(uni.UsageError, match="already"):
            agent.register("f", Plain, inline=True)
        agent.register("p", Plain, inline=True)
        with pytest.raises(uni.UsageError, match="already"):
            agent.register("p", Plain)
        agent.register("g", echo, inline=True)
        agent.register("g", echo, inline=True)
        with pytest.raises(uni.UsageError, match="already"):
            agent.register("g", echo)
        assert agent.call(0, "g", 1) == [[1], {}]


def test_an_inline_handler_that_takes_long_is_logged_once(caplog):
    (comm,) = uni.local(1)
    with comm:
        agent = Agent(comm)
        agent.register("slow", lambda: time.sleep(2 * INLINE_S), inline=True)
        for _ in range(3):
            agent.call(0, "slow")
    assert sum("'slow' took" in record.message for record in caplog.records) == 1
