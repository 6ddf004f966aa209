"""Communicators in a thread that runs an event loop of asyncio."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S

import unisono as uni

LONG = 1 << 20  # bytes: beyond the eager limit, so a send lasts until its receive


def test_async_with_closes_a_communicator_without_stopping_the_loop() -> None:
    async def main() -> np.ndarray:
        sender, receiver = uni.local(2)
        is_leaving = asyncio.Event()
        into = np.zeros(LONG, np.uint8)

        async def receive() -> None:
            await is_leaving.wait()  # the receive is posted while the sender closes
            await receiver.start.recv(into, src=0, timeout=PATIENCE_S)

        async with receiver:
            receiving = asyncio.create_task(receive())
            async with sender as entered:
                assert entered is sender
                sending = sender.start.send(np.arange(LONG, dtype=np.uint8), dst=1)
                is_leaving.set()
            assert sending.done()
            await receiving
        with pytest.raises(uni.ClosedError):
            sender.barrier()
        return into

    np.testing.assert_array_equal(asyncio.run(main()), np.arange(LONG, dtype=np.uint8))


def test_what_async_with_left_undone_is_logged_with_the_line_of_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        first, second = uni.local(2)
        async with second:
            async with first:
                first.start.send(np.ones(3), 1)
            line = main.__code__.co_firstlineno + 3
            assert f"rank 0 closes 'world' at test_event_loop.py:{line} with works never" in caplog.text

    asyncio.run(main())


def test_a_mismatch_that_the_coroutine_saw_is_not_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    async def one(comm: uni.Communicator, call: Callable[[uni.Communicator], Awaitable[object]]) -> None:
        async with comm:
            with pytest.raises(uni.CollectiveMismatch):
                await call(comm)

    async def main() -> None:
        first, second = uni.local(2)
        await asyncio.gather(
            one(first, lambda comm: comm.start.barrier()),
            one(second, lambda comm: comm.start.all_reduce(1.0)),
        )

    asyncio.run(main())
    assert not caplog.records


def test_an_exception_in_async_with_ends_the_calls_of_other_ranks() -> None:
    async def main() -> None:
        first, second = uni.local(2)
        waiting = first.start.barrier()
        with pytest.raises(ValueError, match="the data is bad"):
            async with second:
                raise ValueError("the data is bad")
        with pytest.raises(uni.PeerAborted, match="the data is bad"):
            await waiting
        first.close()

    asyncio.run(main())


def test_async_with_works_in_virtual_time() -> None:
    def program(world: uni.Communicator) -> int:
        async def part() -> int:
            async with world:
                return int(await world.start.all_reduce(world.rank + 1))

        steps = part()
        try:
            while True:
                steps.send(None)
        except StopIteration as stop:
            return int(stop.value)

    assert uni.simulate(program, 3).results == [6, 6, 6]


@pytest.mark.parametrize("is_debug", [True, False])
def test_a_blocking_verb_in_a_loop_in_debug_mode_warns(is_debug: bool) -> None:
    largest = uni.op(max, name="largest")

    async def main() -> object:
        (world,) = uni.local(1)
        with world:
            return world.all_reduce(7, op=largest)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert asyncio.run(main(), debug=is_debug) == 7
    ours = [each for each in caught if "event loop" in str(each.message)]
    assert [each.filename for each in ours] == [__file__] * is_debug
    assert all("await comm.start.all_reduce(...)" in str(each.message) for each in ours)


def test_a_verb_that_blocks_a_loop_in_the_engine_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank makes its call only after the warning."""
    is_warned = threading.Event()
    monkeypatch.setattr(warnings, "showwarning", lambda *about: is_warned.set())
    first, second = uni.local(2, config=uni.Config(stall_query_s=0.01))

    def come_late() -> None:
        if is_warned.wait(PATIENCE_S):
            second.barrier()

    async def main() -> None:
        first.barrier(timeout=PATIENCE_S)

    late = threading.Thread(target=come_late)
    late.start()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *about: is_warned.set()  # type: ignore[assignment]
        asyncio.run(main(), debug=True)
    late.join(PATIENCE_S)
    assert is_warned.is_set()
    for rank in (first, second):
        rank.close()
