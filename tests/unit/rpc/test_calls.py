"""Calls in every form and with every kind of value, on every backend that supports them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import threading
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.support.calls import LONG_S, echo, run
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.rpc import Agent


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
    """A dataclass with an array, which travels beside the frame."""

    stops: tuple[int, ...]
    weights: Any = None


@dataclasses.dataclass
class Cart:
    """A class that is not registered: functions name it in their annotations."""

    orders: list[Order]
    owner: Point | None = None


class Span(NamedTuple):
    """A named tuple that an annotation names."""

    start: int
    stop: int


Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - it is not registered


class Unregistered(msgspec.Struct):
    x: int


def everyday(comm: uni.Communicator) -> str:
    """The most common uses of calls, all in one world, because starting processes is slow."""
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
        """A nested call: each rank calls the next, several times around."""
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
    works = [agent.start(right, "add", i, comm.rank) for i in range(2500)]  # more calls than may be under way
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
    assert sorted(noted) == [0, 1, 2]  # handlers run at the same time

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
        uni.UsageError, match=r"argument 1 is .*test_calls\.Unregistered.*Next: uni.register\(Unregistered\)"
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

    assert run("shm", program, 2)[0] < 8
