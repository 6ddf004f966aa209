"""Views on some ranks of another backend: ranks, refusals, and the translation of sources and errors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S, reference_local, run_each

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.backends.sub import SubBackend
from unisono.config import Config
from unisono.core.dtypes import DTYPES
from unisono.core.envelope import ANY, Envelope
from unisono.core.request import HeaderMismatch, Request
from unisono.errors import ClosedError, PeerLost, UsageError
from unisono.messaging.backend import Capabilities
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import Stage

CONTEXT = 78


def views(members: list[int], size: int = 6, *, ordered: bool = False) -> list[SubBackend]:
    world = LocalBackend.create(size)
    return [SubBackend(world[member], members, ordered=ordered) for member in members]


def met(request: Request) -> Envelope:
    ended = threading.Event()
    request.notify(ended.set)
    assert ended.wait(PATIENCE_S)
    assert request.envelope is not None
    return request.envelope


def close_all(members: list[SubBackend]) -> None:
    for view in members:
        view.parent.close()


# -- numbers ----------------------------------------------------------------------------------------------


def test_members_are_numbered_in_the_parents_order_and_counted_once() -> None:
    parent = LocalBackend.create(6)[4]
    view = SubBackend(parent, [5, 1, 4, 1])
    assert (view.members, view.rank, view.size) == ((1, 4, 5), 1, 3)
    assert [view.to_global(rank) for rank in range(3)] == [1, 4, 5]
    assert [view.to_local(rank) for rank in range(6)] == [None, 0, None, None, 1, 2]


def test_members_may_be_numbered_as_given() -> None:
    parent = LocalBackend.create(6)[4]
    view = SubBackend(parent, [5, 1, 4], ordered=True)
    assert (view.members, view.rank) == ((5, 1, 4), 2)
    assert [view.to_local(rank) for rank in (5, 1, 4, 0)] == [0, 1, 2, None]


@pytest.mark.parametrize(
    ("members", "ordered", "text"),
    [
        ([], False, "members is empty"),
        ([0, 6], False, "member=6; allowed: ranks 0 to 5"),
        ([0, -1], False, "member=-1"),
        ([0, True], False, "member=True"),
        ([0, 1.0], False, "member=1.0"),
        ([0, "1"], False, "member='1'"),
        ([0, ANY], False, "member=unisono.ANY; allowed: ranks 0 to 5"),
        ([1, 2], False, r"rank 0 is not among the members \[1, 2\]"),
        ([0, 1, 0], True, "name a rank twice"),
    ],
)
def test_members_that_make_no_view_are_refused(members: list[Any], ordered: bool, text: str) -> None:
    parent = LocalBackend.create(6)[0]
    with pytest.raises(UsageError, match=text):
        SubBackend(parent, members, ordered=ordered)


def test_a_view_on_a_view_stands_on_the_real_backend() -> None:
    world = LocalBackend.create(8)
    outer = SubBackend(world[5], [1, 3, 5, 7])
    inner = SubBackend(outer, [3, 2, 0], ordered=True)
    assert inner.parent is world[5]
    assert (inner.members, inner.rank) == ((7, 5, 1), 1)
    third = SubBackend(inner, [2, 1])
    assert (third.members, third.rank, third.parent) == ((5, 1), 0, world[5])


@pytest.mark.parametrize("rank", [3, -1, True, None])
def test_a_rank_beyond_the_view_is_refused(rank: Any) -> None:
    view = SubBackend(LocalBackend.create(6)[4], [5, 1, 4])
    with pytest.raises(UsageError, match="allowed: ranks 0 to 2"):
        view.to_global(rank)


# -- traffic ----------------------------------------------------------------------------------------------


def test_sources_and_peers_are_the_views_own_numbers() -> None:
    first, second, third = members = views([5, 0, 3], ordered=True)
    request = second.start_recv(ANY, CONTEXT, 1, None)
    sending = third.start_send(1, CONTEXT, 1, memoryview(b"hello"))
    assert (request.peer, sending.peer) == (ANY, 1)
    assert met(request).source == 2
    first.start_send(2, CONTEXT, 2, memoryview(bytes(50)))
    assert met(third.probe(0, CONTEXT, 2)).source == 0
    short = third.start_recv(0, CONTEXT, 2, memoryview(bytearray(9)))
    assert isinstance(short.error, UsageError)
    assert short.envelope is not None
    assert short.envelope.source == 0
    close_all(members)


def test_losses_are_reported_with_the_views_ranks_and_only_of_members() -> None:
    world = LocalBackend.create(6)
    view = SubBackend(world[3], [5, 0, 3], ordered=True)
    reported: list[PeerDown] = []
    view.watch(reported.append)
    pending = view.start_recv(0, CONTEXT, 1, None)
    send = view.start_send(0, CONTEXT, 1, memoryview(bytes(1 << 20)))
    world[4].close()
    assert reported == []
    world[5].kill("power cut")
    assert reported == [PeerDown(0, "power cut")]
    for request in (pending, send):
        with pytest.raises(PeerLost, match="rank 0 is gone: power cut") as caught:
            raise request.error or AssertionError
        assert caught.value.ranks == (0,)
    world[0].close()
    assert reported[1:] == [PeerDown(1, "left", left=True)]
    for backend in world:
        backend.close()


def test_closing_a_view_leaves_the_parent_alone() -> None:
    first, second = members = views([2, 4])
    first.close()
    request = second.start_recv(0, CONTEXT, 0, None)
    assert first.start_send(1, CONTEXT, 0, memoryview(b"still here")).error is None
    assert met(request).nbytes == 10
    first.parent.close()
    assert isinstance(first.start_recv(1, CONTEXT, 0, None).error, ClosedError)
    close_all(members)


def test_a_view_and_its_parent_share_messages_of_one_context() -> None:
    world = LocalBackend.create(3)
    view = SubBackend(world[2], [0, 2])
    request = world[0].start_recv(2, CONTEXT, 4, None)
    view.start_send(0, CONTEXT, 4, memoryview(b"to the parent"))
    assert met(request).source == 2
    for backend in world:
        backend.close()


def test_cancelling_goes_through() -> None:
    first, second = members = views([1, 2])
    request = first.start_recv(1, CONTEXT, 0, None)
    assert request.cancel()
    assert not request.cancel()
    large = second.start_send(0, CONTEXT, 0, memoryview(bytes(1 << 20)))
    assert large.cancel()
    assert not first.probe(1, CONTEXT, 0).done
    close_all(members)


# -- capabilities of the parent ---------------------------------------------------------------------------


class Fancy(LocalBackend):
    """A parent with every capability: own collectives, which always fail, device memory, three hosts."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("fancy", True, True, False, False, True)

    def run_collective(self, problem: Any, stage: Stage) -> Request | None:
        self.asked = (problem, stage)
        if problem is None:
            return None
        request = Request(self.rank)
        request.fail(HeaderMismatch(3, b"another call"))
        return request

    def end_group(self, context: int) -> None:
        self.ended = context

    def hosts(self) -> tuple[int, ...]:
        return (7, 7, 8, 8, 9, 9)


def test_a_view_has_the_parents_abilities() -> None:
    config = Config(segment_bytes=4096)
    parent = Fancy.create(6, config)[5]
    view = SubBackend(parent, [5, 0, 3], ordered=True)
    assert view.capabilities == parent.capabilities
    assert view.hosts() == (0, 1, 2)
    assert SubBackend(parent, [5, 3, 4, 2], ordered=True).hosts() == (0, 1, 0, 1)
    assert SubBackend(parent, [4, 5]).hosts() == ()
    assert view.config is config
    assert view.runtime is parent.runtime
    assert SubBackend(LocalBackend.create(2)[0], [0]).hosts() == ()


def test_the_parents_collectives_get_the_members_and_answer_with_the_views_ranks() -> None:
    parent = Fancy.create(6)[5]
    view = SubBackend(parent, [5, 0, 3], ordered=True)
    stage = Stage(CONTEXT, 1, DTYPES["float32"], None, {}, b"a call")
    assert view.run_collective(None, stage) is None
    request = view.run_collective("a problem", stage)
    problem, asked = parent.asked
    assert (problem, asked) == ("a problem", replace(stage, rank_map=view.rank_map))
    assert asked.rank_map.peers == (5, 0, 3)
    assert request is not None
    assert isinstance(request.error, HeaderMismatch)
    assert request.error.peer == 2
    view.end_group(CONTEXT)
    assert parent.ended == CONTEXT


# -- errors of groups name world ranks --------------------------------------------------------------------


def test_errors_in_groups_of_groups_name_world_ranks() -> None:
    """Ranks 5, 3 and 1 of the world, in this order, two levels down."""

    def program(world: uni.Communicator) -> Any:
        odd = world.split(world.rank % 2 if world.rank % 2 else None)
        if odd is None:
            world.send(b"ready", 3)
            return None
        inner = odd.split(0, key=-odd.rank)
        assert inner is not None
        if world.rank == 3:
            for peer in (0, 1, 2, 4, 5):
                world.recv_bytes(peer)
            world.backend.kill("gone fishing")  # type: ignore[attr-defined]
            return None
        world.send(b"ready", 3)
        waits = [
            lambda: inner.recv_bytes(1),
            lambda: inner.all_reduce(np.ones(3)),
            lambda: odd.recv_bytes(1),
            lambda: inner.send(np.ones(1 << 16), 1),
        ]
        errors = []
        for wait in waits:
            with pytest.raises(PeerLost) as caught:
                wait()
            errors.append(caught.value)
        return [error.ranks for error in errors], all("rank 3 is gone" in str(error) for error in errors)

    worlds = reference_local(6)
    ended = run_each(program, worlds).values()
    assert ended[1] == ended[5] == ([(3,)] * 4, True)
    for world in worlds:
        world.close()


def test_a_deadline_in_a_group_names_the_world_rank_that_is_absent() -> None:
    def program(world: uni.Communicator) -> Any:
        group = world.split(0 if world.rank % 2 else None)
        if group is None:
            return None
        if world.rank != 5:
            with pytest.raises(uni.DeadlineExceeded) as caught:
                group.all_reduce(np.ones(5), timeout=0.2, algorithm="ring")
            group.send(b"done", 2)
            return caught.value.waiting_on
        for peer in (0, 1):
            group.recv_bytes(peer)
        return (5,)

    worlds = uni.local(6, Config(stall_query_s=0.05))
    ended = run_each(program, worlds).values()
    assert [ended[1], ended[3], ended[5]] == [(5,), (5,), (5,)]
    for world in worlds:
        world.close()


def test_a_communicator_on_a_view_counts_from_its_own_zero() -> None:
    """Its world is the view: the ranks of the parent appear nowhere."""
    world = LocalBackend.create(5)
    views = [SubBackend(world[member], [4, 2, 1], ordered=True) for member in (4, 2, 1)]

    def program(comm: uni.Communicator) -> Any:
        total = comm.all_reduce(comm.rank)
        if comm.rank == 1:
            comm.backend.parent.close()  # type: ignore[attr-defined]
            return total, (1,)
        with pytest.raises(PeerLost) as caught:
            comm.recv_bytes(1)
        return total, caught.value.ranks

    comms = [uni.Communicator.world(view) for view in views]
    assert run_each(program, comms).values() == [(3, (1,))] * 3
    for backend in world:
        backend.close()
