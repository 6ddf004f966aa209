"""Agents of several groups, and how agents end."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.support.calls import LONG_S, echo
from tests.support.ranks import reference_local

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
