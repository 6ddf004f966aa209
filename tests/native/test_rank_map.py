"""The map of ranks to peers: one object for both directions, in Python and in the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.ranks import run_ranks

import unisono as uni
from unisono._native import RankMap
from unisono.backends.local import LocalBackend
from unisono.backends.sub import SubBackend

NATIVE = pytest.mark.on_every_link


@pytest.mark.parametrize("peers", [(0,), (4, 0, 7), (2, 1, 0), (9,), (3, 11, 5, 4)])
def test_both_directions_are_inverse_to_each_other(peers: tuple[int, ...]) -> None:
    ranks = RankMap(peers)
    assert len(ranks) == len(peers)
    assert ranks.peers == peers
    assert [ranks.to_global(rank) for rank in range(len(peers))] == list(peers)
    assert [ranks.to_local(peer) for peer in peers] == list(range(len(peers)))
    strangers = set(range(13)) - set(peers)
    assert all(ranks.to_local(peer) is None for peer in (*strangers, -1, 2**40))
    assert ranks.peers_of(list(reversed(range(len(peers))))) == tuple(reversed(peers))


def test_ranks_that_do_not_exist_are_refused() -> None:
    ranks = RankMap([5, 2])
    for rank in (-1, 2, 2**40):
        with pytest.raises(IndexError):
            ranks.to_global(rank)
    with pytest.raises(IndexError):
        ranks.peers_of([0, 2])
    for peers in ([1, -1], [3, 3]):
        with pytest.raises(ValueError, match="rank"):
            RankMap(peers)


def test_a_part_of_another_map_leads_to_its_ranks() -> None:
    inner, outer = RankMap([7, 2, 5]), RankMap([2, 3, 5, 7])
    assert inner.within(outer).peers == (3, 0, 2)
    assert inner.within(RankMap(range(8))) is inner
    assert outer.within(outer).peers == (0, 1, 2, 3)


def test_only_a_view_has_ranks_that_are_no_peers() -> None:
    world = LocalBackend.create(6)
    view = SubBackend(world[4], [5, 4, 1], ordered=True)
    inner = SubBackend(view, [2, 1], ordered=True)
    assert world[4].rank_map.peers == (0, 1, 2, 3, 4, 5)
    assert (view.rank_map.peers, view.members) == ((5, 4, 1), (5, 4, 1))
    assert inner.rank_map.peers == (1, 4)
    for backend in world:
        backend.close()


@NATIVE
def test_groups_of_groups_speak_their_own_ranks_and_name_those_of_the_world() -> None:
    def program(comm: uni.Communicator) -> Any:
        outer = comm.split(comm.rank % 2, -comm.rank)
        assert outer is not None
        inner = outer.sub([0, 2]) if outer.rank != 1 else None
        if inner is None:
            return outer._group.world_ranks
        other, buf = 1 - inner.rank, np.zeros(3)
        status = inner.sendrecv(np.arange(3.0) + comm.rank, other, buf, other)
        wild = np.zeros(1)
        sent = inner.start.send(np.array([10.0 * comm.rank]), other, 7)
        met = inner.recv(wild, uni.ANY, 7)
        sent.wait()
        assert (status.source, met.source) == (other, other)
        with pytest.raises(uni.DeadlineExceeded) as late:
            inner.recv(buf, other, 9, timeout=0.05)
        gathered = inner.all_gather(comm.rank).tolist()
        return inner._group.world_ranks, buf.tolist(), wild.tolist(), late.value.waiting_on, gathered

    def want(rank: int) -> Any:
        outer = [r for r in (5, 4, 3, 2, 1, 0) if r % 2 == rank % 2]
        if rank == outer[1]:
            return tuple(outer)
        pair = (outer[0], outer[2])
        peer = pair[1] if rank == pair[0] else pair[0]
        return pair, [peer, peer + 1.0, peer + 2.0], [10.0 * peer], (peer,), list(pair)

    assert run_ranks(program, 6).values() == [want(rank) for rank in range(6)]
