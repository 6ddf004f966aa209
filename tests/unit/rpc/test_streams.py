"""Streams: the items of generators."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from tests.support.calls import LONG_S

import unisono as uni
from unisono.core.clock import RealRuntime
from unisono.rpc import Agent, Stream
from unisono.rpc.streams import ItemBuffer
from unisono.simulation import sleep


async def _listed(stream: Any) -> list[Any]:
    return [item async for item in stream]


def with_streams(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    made, closed = [0], threading.Event()

    @agent.expose
    def count(n: int, length: int = 0) -> Any:
        try:
            for i in range(n):
                made[0] += 1
                yield np.arange(length) + i if length and i % 3 else i
        finally:
            closed.set()

    @agent.expose
    def breaks() -> Any:
        yield 1
        raise ValueError("after the first")

    @agent.expose
    def through(n: int) -> Any:
        yield from agent.stream(0, "count", n)

    @agent.expose
    async def count_async(n: int, length: int = 0) -> Any:
        try:
            for i in range(n):
                made[0] += 1
                if i % 5 == 0:
                    await asyncio.sleep(0)
                yield np.arange(length) + i if length and i % 3 else i
        finally:
            closed.set()

    @agent.expose
    async def breaks_async() -> Any:
        yield 1
        raise ValueError("after the first")

    @agent.expose
    async def through_async(n: int) -> Any:
        async for item in agent.stream(0, "count_async", n):
            yield -item

    async def reads() -> None:
        for name in ("count", "count_async"):
            assert [item async for item in agent.stream(1, name, 100)] == list(range(100))
            i = 0
            async for item in agent.stream(1, name, 30, length=9000):
                np.testing.assert_array_equal(item, np.arange(9000) + i if i % 3 else i)
                i += 1
            assert i == 30
        two = (agent.stream(rank, "count_async", 50) for rank in range(2))
        assert await asyncio.gather(*(_listed(one) for one in two)) == [list(range(50))] * 2
        with pytest.raises(uni.RemoteError, match="after the first"):
            [item async for item in agent.stream(1, "breaks_async")]
        with pytest.raises(uni.DeadlineExceeded, match="no item"):
            await anext(agent.stream(1, "waits", timeout=0.05))
        async with agent.stream(1, "count_async", 10**9) as endless:
            assert [await anext(endless) for _ in range(20)] == list(range(20))
        waiting = asyncio.ensure_future(anext(agent.stream(1, "waits", timeout=None)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    @agent.expose
    async def waits() -> Any:
        await asyncio.sleep(LONG_S)
        yield 1

    agent.register("made", lambda: made[0])
    agent.register("closed", lambda: closed.wait(LONG_S))
    agent.register("unclosed", lambda: closed.clear())
    agent.register("plain", lambda: 5)
    comm.barrier()
    if comm.rank == 0:
        asyncio.run(reads())
        assert list(agent.stream(1, "count_async", 100)) == list(range(100))
        assert list(agent.stream(1, "through_async", 40)) == [-i for i in range(40)]
        with pytest.raises(TypeError, match="stream"):
            agent.call(1, "count_async", 5)
        agent.call(1, "unclosed")
        before = agent.call(1, "made")
        with agent.stream(1, "count_async", 10**9) as endless:
            assert [next(endless) for _ in range(20)] == list(range(20))
            assert agent.call(1, "made") - before <= 20 + 17  # it waits for its reader
        assert agent.call(1, "closed")  # and is closed with it
        agent.call(1, "unclosed")
        assert list(agent.stream(1, "count", 100)) == list(range(100))
        assert list(agent.stream(1, "count", 0)) == []
        for i, item in enumerate(agent.stream(1, "count", 50, length=9000)):
            np.testing.assert_array_equal(item, np.arange(9000) + i if i % 3 else i)
        assert list(agent.stream(1, "through", 40)) == list(range(40))
        assert list(agent.stream(0, "count", 3)) == [0, 1, 2]
        stream = agent.stream(1, "breaks")
        assert next(stream) == 1
        with pytest.raises(uni.RemoteError, match="after the first"):
            next(stream)
        with pytest.raises(TypeError, match="stream"):
            agent.call(1, "count", 5)
        with pytest.raises(TypeError, match="call"):
            next(agent.stream(1, "plain"))
        before = agent.call(1, "made")
        with agent.stream(1, "count", 10**9) as endless:
            assert [next(endless) for _ in range(20)] == list(range(20))
            assert agent.call(1, "made") - before <= 20 + 17  # it waits for its reader
        assert agent.call(1, "closed")
    comm.barrier()
    return "ok"


def test_generators_stream_as_fast_as_they_are_read(world_of):
    assert world_of(with_streams, 2) == ["ok"] * 2


def broken_streams(comm: uni.Communicator) -> str:
    """Generators that raise after items of several lengths, read at once and when all of it has arrived."""
    agent = Agent(comm)

    @agent.expose
    def breaks(count: int, length: int) -> Any:
        for i in range(count):
            yield np.full(length, i)
        raise ValueError("after the last")

    @agent.expose
    async def breaks_async(count: int, length: int) -> Any:
        for i in range(count):
            yield np.full(length, i)
        raise ValueError("after the last")

    comm.barrier()
    if comm.rank == 0:
        for name in ("breaks", "breaks_async"):
            for length in (1, 3_000, 40_000):
                for count in (0, 1, 15, 40):
                    stream = agent.stream(1, name, count, length)
                    assert [next(stream)[0] for _ in range(count)] == list(range(count))
                    with pytest.raises(uni.RemoteError, match="after the last"):
                        next(stream)
    comm.barrier()
    return "ok"


def test_a_generator_that_raises_gives_all_items_before_that(world_of):
    assert world_of(broken_streams, 2) == ["ok"] * 2


def test_an_async_generator_streams_in_virtual_time():
    def program(comm: uni.Communicator) -> Any:
        agent = Agent(comm)

        @agent.expose
        async def count(n: int) -> Any:
            for i in range(n):
                sleep(0.01)
                yield i

        result = None
        if comm.rank == 0:
            result = asyncio.run(_listed(agent.stream(1, "count", 40)))
        comm.barrier()
        return result

    assert uni.simulate(program, 2).results == [list(range(40)), None]


class InterruptedOnce:
    """A call whose first cancellation is interrupted by a signal."""

    def __init__(self) -> None:
        self.is_interrupted, self.is_cancelled = False, threading.Event()

    def cancel(self) -> None:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        self.is_cancelled.set()


def test_a_stream_whose_close_was_interrupted_is_ended_when_it_is_dropped() -> None:
    pending = InterruptedOnce()
    stream = Stream(RealRuntime(), pending, ItemBuffer(lambda waitable: None), None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    del stream
    assert pending.is_cancelled.wait(LONG_S)
