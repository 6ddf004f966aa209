"""The errors of a call: failures, cancellation, deadlines, and missing agents or functions."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from tests.support.calls import LONG_S, echo

import unisono as uni
from unisono.rpc import Agent, here
from unisono.simulation import sleep


def troubles(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    release = threading.Event()

    @agent.expose
    def divide(a: int, b: int, *, digits: int = 3) -> float:
        return round(a / b, digits)

    @agent.expose
    def leave() -> None:
        raise SystemExit(3)

    @agent.expose
    def strange() -> None:
        class Strange(Exception):
            def __str__(self) -> str:
                raise ValueError("no words")

        raise Strange

    @agent.expose
    def stuck() -> None:
        release.wait(LONG_S)

    @agent.expose
    def odd() -> object:
        return object()

    agent.register("echo", echo)
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(uni.RemoteError, match="ZeroDivisionError") as caught:
            agent.call(1, "divide", 1, 0)
        assert caught.value.rank == 1
        assert caught.value.type_name == "ZeroDivisionError"
        assert "a / b" in caught.value.traceback_text
        line = divide.__code__.co_firstlineno + 2
        assert f"division by zero, at {__file__}:{line} in divide. Next: " in str(caught.value)
        for args, kwargs, words in [
            ((1,), {}, "'b'"),
            ((1, 2, 3), {}, "too many"),
            ((1, "two"), {}, "'b'"),
            ((True, 2), {}, "'a'"),
            ((1, 2), {"digits": "x"}, "'digits'"),
            ((1, 2), {"figures": 2}, "'figures'"),
        ]:
            with pytest.raises(TypeError, match=words) as refused:
                agent.call(1, "divide", *args, **kwargs)
            assert isinstance(refused.value, uni.RemoteError)
        assert agent.call(1, "divide", 1, 3, digits=2) == 0.33
        with pytest.raises(
            uni.NotExposed, match=r"'missing'.*it exposes .*divide, .*Next: agent.register\('missing'"
        ):
            agent.call(1, "missing")
        with pytest.raises(uni.RemoteError, match="SystemExit"):
            agent.call(1, "leave")
        with pytest.raises(uni.RemoteError, match="Strange"):
            agent.call(1, "strange")
        with pytest.raises(uni.RemoteError, match="cannot travel"):
            agent.call(1, "odd")
        with pytest.raises(uni.DeadlineExceeded) as late:
            agent.call(1, "stuck", timeout=0.05)
        assert late.value.waiting_on == (1,)
        work = agent.start(1, "stuck", timeout=0.05)  # the call expires although no thread waits for it
        with pytest.raises(uni.DeadlineExceeded, match="goes on"):
            agent.start(1, "stuck").wait(timeout=0.01)
        while not work.done():
            time.sleep(0.005)
        with pytest.raises(TimeoutError):
            work.wait()
        assert agent.call(1, "echo", 1) == [[1], {}]  # a stuck handler does not block others
        for dst in (2, -1, 1.5, True, None, "unknown"):
            with pytest.raises(uni.UsageError):
                agent.call(dst, "echo")
        with pytest.raises(uni.UsageError):
            agent.call(1, "echo", timeout=-1)
    comm.barrier()
    release.set()
    comm.barrier()
    return "ok"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_failure_is_an_error_of_its_own_type(world_of):
    assert world_of(troubles, 2) == ["ok"] * 2


def ending_the_loop(comm: uni.Communicator) -> str:
    """Async handlers that would end the event loop which all of them share, or cancel themselves."""
    agent = Agent(comm)

    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    class Odd(str):
        def __getitem__(self, key: Any) -> Any:
            raise ValueError("as told")

    class Wordy(Exception):
        def __str__(self) -> str:
            return Odd("words")

    async def raise_exit() -> None:
        raise SystemExit(3)

    @agent.expose
    async def exits() -> None:
        await asyncio.get_running_loop().create_task(raise_exit())

    @agent.expose
    async def stops() -> int:
        asyncio.get_running_loop().stop()
        return 8

    @agent.expose
    async def cancels_itself() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)

    @agent.expose
    async def mute_async() -> None:
        raise Mute

    @agent.expose
    def mute() -> None:
        raise Mute

    @agent.expose
    def wordy() -> None:
        raise Wordy

    comm.barrier()
    if comm.rank == 0:
        for _ in range(2):
            for name, type_name in (
                ("exits", "SystemExit"),
                ("cancels_itself", "asyncio.exceptions.CancelledError"),
                ("mute", f"{__name__}.ending_the_loop.<locals>.Mute"),
                ("mute_async", f"{__name__}.ending_the_loop.<locals>.Mute"),
                ("wordy", f"{__name__}.ending_the_loop.<locals>.Wordy"),
            ):
                with pytest.raises(uni.RemoteError) as caught:
                    agent.call(1, name)
                assert caught.value.type_name == type_name
            assert agent.call(1, "stops") == 8
    comm.barrier()
    return "ok"


def test_no_handler_ends_the_event_loop_of_the_others(world_of):
    assert world_of(ending_the_loop, 2) == ["ok"] * 2


def cancelling(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    began, was_cancelled = threading.Event(), threading.Event()

    @agent.expose
    def patient() -> None:
        began.set()
        mine = here()
        assert mine is not None
        while not mine.is_cancelled:
            time.sleep(0.001)
        was_cancelled.set()

    @agent.expose
    def passes_on() -> None:
        agent.call(0, "patient")

    @agent.expose
    async def sleeper() -> None:
        began.set()
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    agent.register("began", lambda: began.wait(LONG_S))
    agent.register("was_cancelled", lambda: was_cancelled.wait(LONG_S))

    @agent.expose
    def reset() -> None:
        began.clear()
        was_cancelled.clear()

    agent.register("remaining", lambda: here().remaining())
    comm.barrier()
    if comm.rank == 0:
        for name in ("patient", "sleeper"):
            work = agent.start(1, name)
            assert agent.call(1, "began")
            assert work.cancel()
            assert not work.cancel()
            with pytest.raises(uni.PeerAborted):
                work.wait()
            assert agent.call(1, "was_cancelled")  # cancellation reaches the handler
            agent.call(1, "reset")
        work = agent.start(1, "passes_on")
        assert began.wait(LONG_S)
        work.cancel()
        assert was_cancelled.wait(LONG_S)  # and what it called in turn
        assert 1.0 < agent.call(1, "remaining", timeout=7.0) <= 7.0
        assert agent.call(1, "remaining", timeout=None) is None
    comm.barrier()
    return "ok"


def test_cancellation_and_deadlines_reach_the_other_side(world_of):
    assert world_of(cancelling, 2) == ["ok"] * 2


def strangers(comm: uni.Communicator) -> str:
    """Rank 2 makes no agent and rank 1 exposes one name; a collective shows that their set-up is done."""
    half = comm.split(int(comm.rank == 0))
    agent = Agent(comm) if comm.rank < 2 else None
    if agent is not None:
        agent.register("echo", echo)
    comm.barrier()
    if comm.rank == 0:
        assert agent is not None
        for dst, words in ((1, "no function 'missing'"), (2, "rank 2 has no agent")):
            for _ in range(3):
                with pytest.raises(uni.NotExposed, match=words):
                    agent.call(dst, "missing")
        with pytest.raises(uni.UsageError, match="somebody"):
            agent.call("somebody", "missing")
        assert agent.call(1, "echo") == [[], {}]
    comm.barrier()
    inner = Agent(half) if comm.rank == 1 else None
    comm.barrier()  # a collective of the world counts for all of its groups
    if inner is not None:
        with pytest.raises(uni.NotExposed, match="rank 2 has no agent"):
            inner.call(1, "missing")
    comm.barrier()
    return "ok"


def test_what_is_not_there_after_a_collective_is_an_error_at_once(world_of, monkeypatch):
    """The grace period is not waited for: it is set to more than any call may take here."""
    for module in ("unisono.comm.control", "unisono.rpc.server"):
        monkeypatch.setattr(f"{module}.GRACE_S", 10 * LONG_S)
    assert world_of(strangers, 3) == ["ok"] * 3


def test_a_rank_that_waits_in_a_collective_is_known_to_have_no_agent():
    def program(comm: uni.Communicator) -> float:
        """In virtual time, so that the durations are exact."""
        if comm.rank == 1:
            sleep(0.1)
            comm.barrier()
            return 0.0
        agent = Agent(comm)
        began = comm.backend.runtime.now()
        with pytest.raises(uni.NotExposed, match="no agent"):
            agent.call(1, "f")
        took = comm.backend.runtime.now() - began
        comm.barrier()
        return took

    assert 0.09 < uni.simulate(program, 2).results[0] < 0.12


def test_a_rank_without_agent_and_collective_is_waited_for_only_once():
    def program(comm: uni.Communicator) -> list[float]:
        took = []
        if comm.rank == 1:
            sleep(3.0)
        else:
            agent = Agent(comm)
            for _ in range(3):
                began = comm.backend.runtime.now()
                with pytest.raises(uni.NotExposed, match="no agent"):
                    agent.call(1, "f")
                took.append(comm.backend.runtime.now() - began)
        comm.barrier()
        return took

    first, *later = uni.simulate(program, 2).results[0]
    assert 0.49 < first < 0.52
    assert max(later) < 0.01


def test_an_agent_that_is_made_a_little_later_is_waited_for():
    """In virtual time, so that the durations are exact."""

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            sleep(0.1)
        agent = Agent(comm)
        if comm.rank == 1:
            sleep(0.1)
        agent.register("echo", echo)
        result = agent.call(1 - comm.rank, "echo", 5)
        comm.barrier()
        return result

    assert uni.simulate(program, 2).results == [[[5], {}]] * 2


@pytest.mark.parametrize("name", ["", "_f", "__class__", "a.__init__", "a b", "1a", "ü", "x" * 257, 5, None])
def test_an_invalid_name_is_refused(name):
    (comm,) = uni.local(1)
    with comm:
        agent = Agent(comm)
        with pytest.raises(uni.UsageError):
            agent.register(name, echo)


def test_a_name_belongs_to_one_function_and_an_agent_to_one_communicator():
    (comm,) = uni.local(1)
    with comm:
        agent = Agent(comm)
        agent.register("f", echo)
        agent.register("f", echo)
        with pytest.raises(uni.UsageError, match="already"):
            agent.register("f", len)
        with pytest.raises(uni.UsageError, match="agent"):
            Agent(comm)
        with pytest.raises(uni.UsageError):
            agent.register("g", 5)
        with pytest.raises(uni.UsageError):
            Agent("world")
    with pytest.raises(uni.ClosedError):
        Agent(comm)
