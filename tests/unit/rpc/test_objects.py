"""Objects that live on another rank."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
from tests.support.calls import LONG_S, Counter

import unisono as uni
from unisono.core.clock import RealRuntime
from unisono.rpc import Agent, Proxy, Reference
from unisono.rpc.frame import CANCEL, short


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
        with pytest.raises(uni.BadArguments, match=r"it is a generator. Next: read it by .* proxy.stream"):
            one.counts(3)
        with pytest.raises(uni.BadArguments, match=r"it is no generator. Next: call it by"):
            next(one.stream.add(1))
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


class Gate:
    """Its method returns when the test opens it."""

    opened = threading.Event()

    def passed(self, count: int) -> int:
        assert Gate.opened.wait(LONG_S)
        return count


def with_dropped_proxies(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    agent.expose(Counter)
    agent.expose(Gate)
    agent.register("held", lambda: len(agent._objects))
    agent.register("open", Gate.opened.set)
    Gate.opened.clear()
    comm.barrier()
    if comm.rank == 0:
        add, start_add = agent.remote(1, Counter).add, agent.remote(1, Counter, 5).start.add
        work = agent.remote(1, Gate).start.passed(3)
        dropped = agent.remote(1, Counter)
        assert dropped.add(1) == 1
        assert agent.call(1, "held") == 4
        del dropped  # its release is queued last, if the other releases are queued
        while agent.call(1, "held") == 4:
            time.sleep(0.001)
        assert (add(1), start_add(1).wait(), agent.call(1, "held")) == (1, 6, 3)
        agent.call(1, "open")
        assert work.wait() == 3
        del add, start_add, work
        while agent.call(1, "held"):
            time.sleep(0.001)
        items = agent.remote(1, Counter, 5).stream.counts(40, timeout=LONG_S)  # keeps the object, too
        assert (list(items), agent.call(1, "held")) == (list(range(6, 46)), 1)
        del items
        assert list(agent.remote(1, Counter, 5).stream.later_counts(3)) == [5] * 3
        while agent.call(1, "held"):
            time.sleep(0.001)
        for number in range(50):
            assert agent.remote(1, Counter, number).add(1) == number + 1
            assert agent.remote(1, Counter, number).start.add(2).wait() == number + 2
    comm.barrier()
    return "ok"


def test_a_method_and_a_call_under_way_keep_the_object_of_a_dropped_proxy(world_of):
    assert world_of(with_dropped_proxies, 2) == ["ok"] * 2


@pytest.mark.parametrize("name", ["start", "stream", "release", "reference"])
def test_a_method_that_a_proxy_could_not_call_is_refused(name: str) -> None:
    with uni.local(1)[0] as comm, Agent(comm) as agent:
        with pytest.raises(uni.UsageError, match=f"has a method '{name}', which a proxy has itself"):
            agent.expose(type("Named", (), {name: lambda self: None}))
        with pytest.raises(uni.NotExposed):
            agent.remote(0, "Named")


class Slow:
    """Its constructor returns when the test opens the gate."""

    def __init__(self) -> None:
        assert Gate.opened.wait(LONG_S)


def with_makers_that_give_up(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    agent.expose(Counter)
    agent.expose(Slow)
    agent.register("held", lambda: len(agent._objects))
    agent.register("open", Gate.opened.set)
    Gate.opened.clear()
    comm.barrier()
    if comm.rank == 0:
        kept = agent.remote(1, Counter)
        with pytest.raises(uni.DeadlineExceeded):  # while the constructor runs
            agent.remote(1, Slow, timeout=0.05)
        agent.call(1, "open")
        answered = agent.start(1, "Slow")
        answered.wait()
        assert agent.call(1, "held") >= 2
        agent._peers.send(1, short(CANCEL, answered.number))  # the answer was on its way
        agent.notify(1, "Counter")
        while agent.call(1, "held") != 1:
            time.sleep(0.001)
        assert kept.add(1) == 1
    comm.barrier()
    if comm.rank == 1:
        agent.close()
        assert len(agent._objects) == 0
    comm.barrier()
    return "ok"


def test_an_instance_is_released_whose_maker_has_given_up(world_of):
    assert world_of(with_makers_that_give_up, 2) == ["ok"] * 2


class Shape:
    def __init__(self, sides: int) -> None:
        self.sides = sides

    @staticmethod
    def doubled(times: int, by: int = 2) -> int:
        return times * by


def with_a_static_method(comm: uni.Communicator) -> int:
    agent = Agent(comm)
    agent.expose(Shape)
    comm.barrier()
    twice: int = agent.remote(1 - comm.rank, Shape, 3).doubled(5, by=3)
    comm.barrier()
    return twice


def test_a_static_method_is_called_without_the_object(world_of):
    assert world_of(with_a_static_method, 2) == [15, 15]


def test_a_proxy_whose_release_was_interrupted_is_released_when_it_is_dropped() -> None:
    released = threading.Event()
    attempts = iter((KeyboardInterrupt, None))

    def release() -> None:
        if next(attempts) is not None:
            raise KeyboardInterrupt
        released.set()

    proxy = Proxy(None, Reference(1, "Counter", 1), release, RealRuntime().finalizer)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        proxy.release()
    del proxy
    assert released.wait(LONG_S)


def test_a_proxy_is_released_once() -> None:
    count: list[int] = []
    proxy = Proxy(None, Reference(1, "Counter", 1), lambda: count.append(1), RealRuntime().finalizer)  # type: ignore[arg-type]
    proxy.release()
    proxy.release()
    del proxy
    assert count == [1]


def test_a_proxy_is_not_copied() -> None:
    """A copy would not keep the object alive."""
    proxy = Proxy(None, Reference(1, "Counter", 1))  # type: ignore[arg-type]
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"pass proxy\.reference"):
            copied(proxy)


def with_a_signal_after_the_answer(comm: uni.Communicator) -> str:
    agent = Agent(comm)
    agent.expose(Counter)
    agent.register("held", lambda: len(agent._objects))
    comm.barrier()
    if comm.rank == 0:
        with pytest.MonkeyPatch.context() as patch:

            def interrupted(*_: object) -> None:
                assert agent.call(1, "held") == 1
                raise KeyboardInterrupt

            patch.setattr("unisono.rpc.agent.Proxy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                agent.remote(1, Counter)
        while agent.call(1, "held"):
            time.sleep(0.001)
    comm.barrier()
    return "ok"


def test_an_instance_is_released_if_a_signal_comes_between_its_answer_and_its_proxy(world_of):
    assert world_of(with_a_signal_after_the_answer, 2) == ["ok"] * 2
