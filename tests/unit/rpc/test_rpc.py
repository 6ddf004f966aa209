"""Calls between ranks: what a user can rely on, on every backend that serves them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.support.processes import Failed, run_processes
from tests.support.ranks import reference_local, run_ranks

import unisono as uni
from unisono.rpc import Agent, here
from unisono.rpc.server import INLINE_S
from unisono.simulation import sleep

# A deadline that is never meant to pass: a wait that needs it is a failure.
LONG_S = 60.0


def on_local(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    return run_ranks(fn, size, *args).values()


def on_processes(kind: str) -> Callable[..., list[Any]]:
    def run(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        results = run_processes(fn, size, *args, kind=kind)
        for result in results:
            if isinstance(result, Failed):
                raise result
        return results

    return run


WORLDS = {
    "local": on_local,
    "shm": on_processes("shm"),
    "tcp": on_processes("tcp"),
    "rings": on_processes("rings"),
}


@pytest.fixture(params=WORLDS)
def world_of(request) -> Callable[..., list[Any]]:
    """`world_of(fn, n)` runs `fn(comm)` on n ranks of each kind."""
    return WORLDS[request.param]


@uni.register
@dataclasses.dataclass
class Point:
    x: int
    y: float


class Order(msgspec.Struct):
    item: str
    count: int


@uni.register
class Route(msgspec.Struct, frozen=True, kw_only=True):
    """With an array in it, which travels beside the frame."""

    stops: tuple[int, ...]
    weights: Any = None


@dataclasses.dataclass
class Cart:
    """Nobody registers it: functions name it in their annotations."""

    orders: list[Order]
    owner: Point | None = None


class Span(NamedTuple):
    """A named tuple that an annotation names."""

    start: int
    stop: int


Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - nobody registers it


class Unregistered(msgspec.Struct):
    x: int


def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


# -- calls -----------------------------------------------------------------------------------------------


def everyday(comm: uni.Communicator) -> str:
    """What most programs do, in one world: starting processes is slow."""
    agent = Agent(comm, name=f"worker{comm.rank}")
    size, right = comm.size, (comm.rank + 1) % comm.size

    @agent.expose
    def add(a: int, b: int) -> int:
        return a + b

    @agent.expose(name="who.are-you")
    def who() -> int:
        return comm.rank

    @agent.expose
    def relay(hops: int) -> list[int]:
        """Nested: each rank asks the next, round and round."""
        rest = agent.call((comm.rank + 1) % size, "relay", hops - 1) if hops else []
        return [comm.rank, *rest]

    @agent.expose
    async def gather_squares(n: int) -> int:
        works = [agent.start(rank, "add", n * n, rank) for rank in range(size)]
        return sum([await work for work in works])

    agent.register("echo", echo)
    noted: list[int] = []
    has_noted = threading.Event()

    @agent.expose
    def note(value: int) -> None:
        noted.append(value)
        if len(noted) == 3:
            has_noted.set()

    comm.barrier()
    assert agent.call(right, "add", 20, 22) == 42
    assert agent.call(comm.rank, "add", 1, 2) == 3  # a call to itself
    assert agent.call(np.int64(right), "who.are-you") == right
    assert agent.call(f"worker{right}", "who.are-you") == right
    assert agent.call_all("who.are-you") == list(range(size))
    hops = 3 * size
    assert agent.call(right, "relay", hops) == [(right + i) % size for i in range(hops + 1)]
    assert agent.call(right, "gather_squares", 5) == size * 25 + sum(range(size))
    works = [agent.start(right, "add", i, comm.rank) for i in range(2500)]  # more than may be under way
    assert uni.wait_all(works) == [i + comm.rank for i in range(2500)]
    assert all(work.done() for work in works)
    works = [agent.start(right, "add", i, comm.rank) for i in range(9)]
    called: list[int] = []
    has_called = threading.Event()
    works[4].add_done_callback(lambda work: (called.append(work.wait()), has_called.set()))
    assert sorted(work.wait() for work in uni.as_completed(works)) == [i + comm.rank for i in range(9)]
    assert uni.wait_some(works) == list(range(9))
    assert has_called.wait(LONG_S)
    assert called == [4 + comm.rank]
    for i in range(3):
        agent.notify(right, "note", i)
    assert has_noted.wait(LONG_S)
    assert sorted(noted) == [0, 1, 2]  # handlers run side by side

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(agent.start(r, "add", r, 1) for r in range(size))))

    assert asyncio.run(together()) == [r + 1 for r in range(size)]
    comm.barrier()
    agent.close()
    with pytest.raises(uni.ClosedError):
        agent.call(right, "add", 1, 2)
    return "ok"


def test_calls_in_every_direction(world_of):
    assert world_of(everyday, 3) == ["ok"] * 3


def payloads(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    agent.register("echo", echo)

    @agent.expose
    def order(given: Order) -> int:
        assert type(given) is Order
        return given.count

    @agent.expose
    def scale(x: np.ndarray, by: float) -> np.ndarray:
        x *= by  # an array that arrives belongs to the handler
        return x

    @agent.expose
    def sum_of(data: bytes, span: Span) -> int:
        assert (type(data), type(span)) == (bytes, Span)
        return sum(data) + sum(span)

    @agent.expose
    def make(nbytes: int) -> Any:
        return np.arange(nbytes, dtype=np.uint8)

    comm.barrier()
    if comm.rank == 0:
        plain = [1, -(2**63), 2**64 - 1, 2**200, 1.5, "text", "ü" * 300, b"\0bytes", True, None]
        nested = {"a": (1, [2, {"b": {3, 4}}]), 5: "five", (6, 7): b"x" * 5000, "long": list(range(2000))}
        assert agent.call(1, "echo", *plain) == [plain, {}]
        assert agent.call(1, "echo", nested, key=Point(3, 0.5)) == [[nested], {"key": Point(3, 0.5)}]
        assert agent.call(1, "order", {"item": "nut", "count": 7}) == 7
        mixed = [collections.Counter("aab"), collections.OrderedDict(z=1), memoryview(b"ab"), bytearray(5000)]
        came, _ = agent.call(1, "echo", *mixed)
        assert [(type(each), each) for each in came] == [
            (dict, {"a": 2, "b": 1}),
            (dict, {"z": 1}),
            (bytearray, b"ab"),
            (bytearray, bytes(5000)),
        ]
        (status,), _ = agent.call(1, "echo", uni.Status(1, 2, 3))
        assert (type(status), status) == (uni.Status, uni.Status(1, 2, 3))
        assert agent.call(1, "sum_of", bytearray(b"\1\2"), Span(3, 4)) == 10
        for count in (0, 1, 100, 2048, 16 * 1024, 16 * 1024 + 1, 300_001):
            x = np.arange(count, dtype=np.float64) + comm.rank
            np.testing.assert_array_equal(agent.call(1, "scale", x, 3), 3 * x)
        many = [np.full((i % 3, 7), i, np.int16) for i in range(300)] + [np.ones((3, 100_000))]
        for sent, came in zip(many, agent.call(1, "echo", many)[0][0], strict=True):
            np.testing.assert_array_equal(sent, came)
            assert sent.dtype == came.dtype
        a, b = np.arange(50_000.0), np.arange(70_000)[::2]
        (came_a, came_b, three), _ = agent.call(1, "echo", a, b, 3)
        np.testing.assert_array_equal(came_a, a)
        np.testing.assert_array_equal(came_b, b)
        assert three == 3
        huge = agent.call(1, "make", 5_000_000)
        assert huge.flags.writeable
        np.testing.assert_array_equal(huge, np.arange(5_000_000, dtype=np.uint8))
        with pytest.raises(uni.UsageError, match=r"argument 2 is object; allowed.* Next: "):
            agent.call(1, "echo", 1, object())
        with pytest.raises(
            uni.UsageError, match=r"\[0\] of argument 'k' is .*Pair; .*Next: uni.register\(Pair\)"
        ):
            agent.call(1, "echo", k=[Pair(1, 2)])
        assert agent.call(1, "echo") == [[], {}]
    comm.barrier()
    return "ok"


def records(comm: uni.Communicator) -> str:
    """Dataclasses and Structs, as arguments and as results."""
    agent = Agent(comm)
    agent.register("echo", lambda x: x)

    @agent.expose
    def double(cart: Cart) -> Cart:
        assert type(cart) is Cart
        return Cart([Order(o.item, 2 * o.count) for o in cart.orders] * 2, cart.owner)

    @agent.expose
    def count(orders: list[Order]) -> dict[str, Order]:
        assert all(type(order) is Order for order in orders)
        return {order.item: order for order in orders}

    @agent.expose
    def leaks() -> Any:
        return Unregistered(1)

    comm.barrier()
    other = 1 - comm.rank
    route = Route(stops=(1, 2), weights=np.arange(40_000) + comm.rank)
    came = agent.call(other, "echo", route)
    assert type(came) is Route
    assert came.stops == route.stops
    np.testing.assert_array_equal(came.weights, route.weights)
    assert agent.call(other, "double", Cart([Order("nut", 3)], Point(1, 2.0))) == Cart(
        [Order("nut", 6), Order("nut", 6)], Point(1, 2.0)
    )
    assert agent.call(other, "count", [Order("a", 1), Order("b", 2)]) == {
        "a": Order("a", 1),
        "b": Order("b", 2),
    }
    assert agent.call(other, "count", [{"item": "c", "count": 3}]) == {"c": Order("c", 3)}
    with pytest.raises(TypeError, match="'cart'"):
        agent.call(other, "double", Order("nut", 3))
    with pytest.raises(TypeError, match="'orders'"):
        agent.call(other, "count", [{"item": "c"}])
    with pytest.raises(
        uni.UsageError, match=r"argument 1 is .*test_rpc\.Unregistered.*Next: uni.register\(Unregistered\)"
    ):
        agent.call(other, "echo", Unregistered(1))
    with pytest.raises(
        uni.RemoteError, match=r"cannot travel: the result is .*Next: uni.register\(Unregistered\)"
    ):
        agent.call(other, "leaks")
    comm.barrier()
    return "ok"


def test_dataclasses_and_structs_arrive_as_themselves(world_of):
    assert world_of(records, 2) == ["ok"] * 2


def test_values_arrive_as_they_left(world_of):
    assert world_of(payloads, 2) == ["ok"] * 2


def test_tensors_arrive_as_tensors():
    import torch

    def program(comm: uni.Communicator) -> Any:
        agent = Agent(comm)
        agent.register("echo", echo)
        comm.barrier()
        came = agent.call(1 - comm.rank, "echo", torch.arange(50_000, dtype=torch.bfloat16))[0][0]
        comm.barrier()
        return came

    for came in run_ranks(program, 2).values():
        assert torch.equal(came, torch.arange(50_000, dtype=torch.bfloat16))


# -- errors ----------------------------------------------------------------------------------------------


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
        work = agent.start(1, "stuck", timeout=0.05)  # it expires although no thread waits for it
        with pytest.raises(uni.DeadlineExceeded, match="goes on"):
            agent.start(1, "stuck").wait(timeout=0.01)
        while not work.done():
            time.sleep(0.005)
        with pytest.raises(TimeoutError):
            work.wait()
        assert agent.call(1, "echo", 1) == [[1], {}]  # a stuck handler does not block others
        for dst in (2, -1, 1.5, True, None, "nobody"):
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


def cancelling(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    began, heard = threading.Event(), threading.Event()

    @agent.expose
    def patient() -> None:
        began.set()
        mine = here()
        assert mine is not None
        while not mine.is_cancelled:
            time.sleep(0.001)
        heard.set()

    @agent.expose
    def passes_on() -> None:
        agent.call(0, "patient")

    @agent.expose
    async def sleeper() -> None:
        began.set()
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            heard.set()
            raise

    agent.register("began", lambda: began.wait(LONG_S))
    agent.register("heard", lambda: heard.wait(LONG_S))

    @agent.expose
    def reset() -> None:
        began.clear()
        heard.clear()

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
            assert agent.call(1, "heard")  # cancellation reaches the handler
            agent.call(1, "reset")
        work = agent.start(1, "passes_on")
        assert began.wait(LONG_S)
        work.cancel()
        assert heard.wait(LONG_S)  # and what it called in turn
        assert 1.0 < agent.call(1, "remaining", timeout=7.0) <= 7.0
        assert agent.call(1, "remaining", timeout=None) is None
    comm.barrier()
    return "ok"


def test_cancellation_and_deadlines_reach_the_other_side(world_of):
    assert world_of(cancelling, 2) == ["ok"] * 2


def strangers(comm: uni.Communicator) -> str:
    """Rank 2 makes no agent, rank 1 exposes one name; a collective shows that their set-up is done."""
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
    comm.barrier()  # of the world, which counts for every group of it
    if inner is not None:
        with pytest.raises(uni.NotExposed, match="rank 2 has no agent"):
            inner.call(1, "missing")
    comm.barrier()
    return "ok"


def test_what_is_not_there_after_a_collective_is_an_error_at_once(world_of, monkeypatch):
    """Without the grace period, which is set to more than any call may take here."""
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


# -- groups ----------------------------------------------------------------------------------------------


def in_groups(comm: uni.Communicator) -> str:
    """The same names on the world, on halves of it and on a sub: no call gets into another group."""
    half = comm.split(comm.rank % 2, key=-comm.rank)
    groups = {"world": comm, "half": half}
    if comm.rank in (1, 2, 3):
        groups["sub"] = comm.sub([1, 2, 3])
    agents = {}
    for title, group in groups.items():
        agents[title] = agent = Agent(group)
        agent.register("where", lambda title=title, group=group: [title, group.rank])
        agent.register("echo", echo)
    comm.barrier()
    for title, agent in agents.items():
        size = groups[title].size
        assert agent.call_all("where") == [[title, rank] for rank in range(size)]
        x = np.arange(40_000) + comm.rank
        for other in range(size):
            np.testing.assert_array_equal(agent.call(other, "echo", x)[0][0], x)
    comm.barrier()
    half.close()
    with pytest.raises(uni.ClosedError):
        agents["half"].call(0, "where")
    assert agents["world"].call(0, "where") == ["world", 0]
    comm.barrier()
    return "ok"


def test_every_group_has_calls_of_its_own(world_of):
    assert world_of(in_groups, 4) == ["ok"] * 4


# -- endings ---------------------------------------------------------------------------------------------


def closing(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    began, release = threading.Event(), threading.Event()

    @agent.expose
    def slowly(x: int) -> int:
        began.set()
        release.wait(LONG_S)
        return x

    comm.barrier()
    if comm.rank == 0:
        work = agent.start(1, "slowly", 5)
        comm.barrier()
        assert work.wait(LONG_S) == 5  # the call that it had begun is finished
        with pytest.raises(uni.PeerLost, match="closed its agent"):
            agent.call(1, "slowly", 6)
    else:
        assert began.wait(LONG_S)
        comm.barrier()
        threading.Timer(0.05, release.set).start()
        agent.close()
        agent.close()
    comm.barrier()
    return "ok"


def test_an_agent_finishes_what_it_has_begun_before_it_closes(world_of):
    assert world_of(closing, 2) == ["ok"] * 2


def test_closing_with_calls_in_flight_ends_them(ranks):
    release = threading.Event()

    def program(comm: uni.Communicator) -> Any:
        agent = Agent(comm)
        agent.register("stuck", lambda: release.wait(LONG_S))
        result = None
        comm.barrier()
        if comm.rank == 0:
            work = agent.start(1, "stuck")
            agent.close()
            with pytest.raises(uni.ClosedError):
                work.wait()
            release.set()
        comm.barrier()
        return result

    ranks(program, 2).values()


def test_a_dead_callee_is_a_peer_lost_at_once():
    worlds = reference_local(3)
    agents = [Agent(world) for world in worlds]
    release = threading.Event()
    for agent in agents:
        agent.register("stuck", lambda: release.wait(LONG_S))
        agent.register("echo", echo)
    works = [agents[0].start(1, "stuck") for _ in range(5)]
    worlds[1].backend.kill("was shot")
    for work in works:
        with pytest.raises(uni.PeerLost, match="was shot") as lost:
            work.wait(LONG_S)
        assert lost.value.ranks == (1,)
    with pytest.raises(uni.PeerLost):
        agents[0].call(1, "echo")
    assert agents[0].call(2, "echo", 1) == [[1], {}]
    release.set()
    for world in worlds:
        world.close()


# -- objects ---------------------------------------------------------------------------------------------


class Counter:
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.value, self.step = start, step

    def add(self, times: int) -> int:
        self.value += times * self.step
        return self.value

    async def later(self) -> int:
        await asyncio.sleep(0)
        return self.value

    def _hidden(self) -> int:
        return -1


class Plain:
    def get(self) -> int:
        return 5


def with_objects(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    agent.expose(Counter)
    agent.expose(Counter)  # exposing it twice is allowed
    agent.register("Tally", Counter)  # and under another name, too
    agent.register("held", lambda: len(agent._objects))
    comm.barrier()
    if comm.rank == 0:
        one, two = agent.remote(1, Counter, 5), agent.remote(1, "Counter", step=10)
        assert (one.add(2), two.add(2), one.add(times=1)) == (7, 20, 8)
        assert one.start.add(1).wait() == 9
        with_another_name = agent.remote(1, "Tally", 100)
        assert with_another_name.add(1) == 101
        with_another_name.release()
        assert agent.proxy(one.reference).later() == 9
        while agent.call(1, "held") != 2:  # calls may overtake the notification that releases an object
            time.sleep(0.001)
        for bad, error in [
            (lambda: one.add("x"), TypeError),
            (lambda: one.nothing(), LookupError),
            (lambda: one._hidden(), AttributeError),
            (lambda: one.value(), LookupError),
            (lambda: agent.call(1, "Counter._hidden", 1), LookupError),
            (lambda: agent.call(1, "Counter.add", "x", 1), TypeError),
            (lambda: agent.remote(1, Counter, "x"), TypeError),
            (lambda: agent.remote(1, "Missing"), LookupError),
            (lambda: agent.proxy(5), uni.UsageError),
        ]:
            with pytest.raises(error):
                bad()
        reference = two.reference
        two.release()
        two.release()
        while agent.call(1, "held") != 1:
            time.sleep(0.001)
        with pytest.raises(uni.RemoteError, match="released"):
            agent.proxy(reference).add(1)
        del one  # the last reference to the proxy
        while agent.call(1, "held"):
            time.sleep(0.001)
        agent.remote(1, Counter).add(1)
        kept = agent.remote(1, Counter)
        assert kept.add(1) == 1
    comm.barrier()
    if comm.rank == 0:
        agent.close()
    else:
        while agent._objects:  # a lost rank's objects are released
            time.sleep(0.001)
    comm.barrier()
    return "ok"


def test_objects_live_on_another_rank_until_they_are_released(world_of):
    assert world_of(with_objects, 2) == ["ok"] * 2


# -- inline handlers -------------------------------------------------------------------------------------


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
        """Everything that waits is refused, before anything is sent; what is started goes on."""
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
    if not runs_on_caller:  # simulated: nothing comes while a handler runs, and a real wait stops all ranks
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
            agent.register("f", Counter, inline=True)  # again: nothing of it was exposed
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


# -- streams ---------------------------------------------------------------------------------------------


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


def test_buffers_are_used_again_without_a_garbage_collection():
    def program(comm: uni.Communicator) -> int:
        gc.disable()
        agent = Agent(comm)
        agent.register("echo", lambda x: x)
        comm.barrier()
        places = set()
        if comm.rank == 0:
            for i in range(8):
                came = agent.call(1, "echo", np.arange(1 << 17) + i)
                places.add(came.__array_interface__["data"][0])
                np.testing.assert_array_equal(came, np.arange(1 << 17) + i)
                del came
        comm.barrier()
        return len(places)

    assert on_processes("shm")(program, 2)[0] < 8
