"""Agents of several groups, and how agents end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.calls import LONG_S, WORLDS, echo
from tests.support.ranks import PATIENCE_S, reference_local, wait_until

import unisono as uni
from unisono.rpc import Agent


def in_groups(comm: uni.Communicator) -> str:
    """Agents of the world, its halves and a sub expose the same names: no call reaches another group."""
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
        assert work.wait(LONG_S) == 5  # the running call is finished
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


def notified_before_the_end(comm: uni.Communicator, nbytes: int) -> int:
    """Rank 0 closes its agent after its notifications, rank 1 when it hears of that, before they have run."""
    agent, came = Agent(comm, handlers=1), []

    @agent.expose
    def take(data: bytes) -> None:
        time.sleep(0.002)
        came.append(len(data))

    comm.barrier()
    if comm.rank == 0:
        for _ in range(20):
            agent.notify(1, "take", bytes(nbytes))
    else:
        wait_until(lambda: agent._peers[0].error is not None, "rank 0 has closed its agent")
    agent.close()
    comm.barrier()
    return came.count(nbytes)


@pytest.mark.parametrize("nbytes", [10, 20_000, 1_000_000])
def test_no_notification_is_lost_when_agents_close(world_of, nbytes):
    assert world_of(notified_before_the_end, 2, nbytes)[1] == 20


def closed_by_a_handler(comm: uni.Communicator) -> float:
    agent = Agent(comm)

    @agent.expose
    async def close() -> None:
        agent.close()

    comm.barrier()
    began = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(uni.PeerLost):
            agent.call(1, "close")
    took = time.monotonic() - began
    comm.barrier()
    return took


def test_an_async_handler_that_closes_its_agent_does_not_wait_for_itself(world_of):
    assert world_of(closed_by_a_handler, 2)[0] < uni.Config().flush_s / 2


def test_a_call_of_all_ranks_that_cannot_be_started_leaves_none_behind(monkeypatch):
    (comm,) = uni.local(1)
    with comm:
        agent = Agent(comm)
        release = threading.Event()
        agent.register("waits", lambda: release.wait(PATIENCE_S))
        started = []

        def start(self: Agent, dst: int, name: str, **options: Any) -> Any:
            if started:
                raise uni.ClosedError("as told")
            started.append(real(self, dst, name, **options))
            return started[0]

        real = Agent.start
        monkeypatch.setattr(Agent, "start", start)
        monkeypatch.setattr(type(agent._peers), "__len__", lambda self: 2)
        with pytest.raises(uni.ClosedError, match="as told"):
            agent.call_all("waits")
        with pytest.raises(uni.PeerAborted, match="cancelled"):
            started[0].wait()
        release.set()


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


def uses_a_forked_agent(comm: uni.Communicator) -> str:
    """A child of rank 0 uses what belongs to its parent."""
    agent = Agent(comm)
    release = threading.Event()

    @agent.expose
    def waits() -> int:
        release.wait(PATIENCE_S)
        return 5

    @agent.expose
    def items() -> Iterator[int]:
        release.wait(PATIENCE_S)
        yield from range(2)

    agent.register("release", release.set)
    comm.barrier()
    said = b""
    if comm.rank == 0:
        work, stream = agent.start(1, "waits"), agent.stream(1, "items")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            began = time.monotonic()
            try:
                for use in (
                    lambda: agent.call(1, "waits"),
                    lambda: agent.start(1, "waits"),
                    lambda: agent.notify(1, "waits"),
                    lambda: agent.call_all("waits"),
                    lambda: next(agent.stream(1, "waits")),
                    work.wait,
                    stream.__next__,
                ):
                    with pytest.raises(uni.ClosedError, match="belongs to the parent"):
                        use()
                agent.close()
                assert time.monotonic() - began < 5
                os.write(writer, b"refused")
            except BaseException as error:
                os.write(writer, repr(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reader, 10_000)
        os.close(reader)
        os.close(writer)
        agent.call(1, "release")
        assert work.wait() == 5
        assert list(stream) == [0, 1]
    comm.barrier()
    return said.decode()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_forked_child_is_told_that_the_agent_is_its_parents(kind):
    assert WORLDS[kind](uses_a_forked_agent, 2) == ["refused", ""]
