"""Costs compared with the closed forms of textbooks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from unisono.plans import LINKS as SHARED
from unisono.plans import Cost, Links, Problem, bound, cost

SIZES = [2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33]
POWERS = [2, 4, 8, 16, 32]
LINKS = Links()
SHM = SHARED["shm"]
# A multiple of every size above, so that chunks are equal.
COUNT = math.lcm(*SIZES)


def costs(problem: Problem, algorithm: str, links: Links = LINKS) -> list[Cost]:
    return [cost(bound(problem, rank, algorithm), links, 1) for rank in range(problem.size)]


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_sends_the_fewest_bytes_in_the_most_rounds(size: int) -> None:
    for each in costs(Problem("all_reduce", size, (COUNT,)), "ring"):
        assert each.rounds == each.messages == 2 * (size - 1)
        assert each.bytes_sent == each.bytes_received == 2 * COUNT * (size - 1) // size
        assert each.bytes_reduced == COUNT * (size - 1) // size


@pytest.mark.parametrize("size", SIZES)
def test_doubling_takes_the_logarithm_in_rounds(size: int) -> None:
    found = costs(Problem("all_reduce", size, (COUNT,)), "doubling")
    assert max(each.rounds for each in found) == math.ceil(math.log2(size))
    if size in POWERS:
        assert {each.bytes_sent for each in found} == {COUNT * int(math.log2(size))}


@pytest.mark.parametrize("size", SIZES)
def test_halving_doubling_sends_as_little_as_a_ring_in_few_rounds(size: int) -> None:
    plans = [
        bound(Problem("all_reduce", size, (COUNT * 32,)), rank, "halving_doubling") for rank in range(size)
    ]
    depth = int(math.log2(size))
    assert len(plans[0].rounds) == 2 * depth + (0 if size in POWERS else 2)
    sent = [cost(plan, LINKS, 1).bytes_sent for plan in plans]
    if size in POWERS:
        assert set(sent) == {2 * COUNT * 32 * (size - 1) // size}
    else:
        # No rank sends more than twice the vector plus what it passes to the smaller blocks.
        assert max(sent) <= 3 * COUNT * 32


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["ring", "pairwise", "ordered"])
def test_reduce_scatters_send_every_chunk_but_the_own(size: int, algorithm: str) -> None:
    for each in costs(Problem("reduce_scatter", size, (10,) * size), algorithm):
        assert each.bytes_sent == each.bytes_reduced == 10 * (size - 1)
        assert each.rounds == (1 if algorithm == "ordered" else size - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("algorithm", "rounds"), [("ring", "size - 1"), ("dissemination", "log"), ("flat", "one")]
)
def test_all_gathers_receive_every_block_but_the_own(size: int, algorithm: str, rounds: str) -> None:
    expected = {"size - 1": size - 1, "log": math.ceil(math.log2(size)), "one": 1}[rounds]
    for each in costs(Problem("all_gather", size, (10,) * size), algorithm):
        assert each.bytes_received == each.bytes_sent == 10 * (size - 1)
        assert each.rounds == expected


@pytest.mark.parametrize("size", SIZES)
def test_trees_take_the_logarithm_and_send_the_vector_once_to_each(size: int) -> None:
    for collective in ("broadcast", "reduce"):
        problem = Problem(collective, size, (100,), root=size - 1)
        assert len(bound(problem, 0, "tree").rounds) == math.ceil(math.log2(size))
        assert sum(each.bytes_sent for each in costs(problem, "tree")) == 100 * (size - 1)
        assert max(each.messages for each in costs(Problem("broadcast", size, (100,)), "tree")) == math.ceil(
            math.log2(size)
        )


@pytest.mark.parametrize("size", SIZES)
def test_a_chain_sends_the_vector_once_through_every_rank(size: int) -> None:
    problem = Problem("broadcast", size, (5 * 16 * 1024,))
    found = costs(problem, "chain")
    assert [each.bytes_sent for each in found] == [5 * 16 * 1024] * (size - 1) + [0]
    assert len(bound(problem, 0, "chain").rounds) == size - 1


def test_segments_are_pipelined_through_a_chain() -> None:
    links = Links(latency_s=1.0, message_s=0.0, bytes_per_s=16 * 1024, reduce_bytes_per_s=1e12)
    for pieces, longer in ((1, 0), (1, 1), (5, 0), (64, 0)):
        problem = Problem("broadcast", 4, (pieces * 16 * 1024 + longer,))
        # A piece takes one second after a latency; the last piece starts after all others.
        found = max(each.time_s for each in costs(problem, "chain", links))
        assert found == pytest.approx((3 + pieces - 1) * 2.0, rel=1e-3)
    # More than 64 pieces would save nothing.
    found = costs(Problem("broadcast", 4, (128 * 16 * 1024,)), "chain", links)[1].time_s
    assert found == pytest.approx((3 + 63) * 3.0)


@pytest.mark.parametrize("size", POWERS)
def test_dissemination_moves_half_the_blocks_in_each_round_of_an_all_to_all(size: int) -> None:
    for each in costs(Problem("all_to_all", size, (10,) * size * size), "dissemination"):
        assert each.messages == int(math.log2(size))
        assert each.bytes_sent == 10 * size // 2 * int(math.log2(size))


def test_the_time_of_a_round_is_latency_handling_and_the_slower_direction() -> None:
    links = Links(latency_s=1.0, message_s=0.25, bytes_per_s=100.0, reduce_bytes_per_s=1000.0, crowding=1.0)
    one, other = (bound(Problem("all_reduce", 2, (1000,)), rank, "doubling") for rank in (0, 1))
    # 1000 bytes each way at the same time, then 1000 bytes to reduce.
    assert cost(one, links, 1).time_s == pytest.approx(1.0 + 0.25 + 10.0 + 1.0)
    assert cost(one, links, 1).time_s == cost(other, links, 1).time_s
    ring = bound(Problem("all_reduce", 2, (1000,)), 0, "ring")
    # Twice half the bytes; the reduction overlaps a transfer.
    assert cost(ring, links, 1).time_s == pytest.approx(2 * (1.0 + 0.25 + 5.0))


def test_several_messages_at_once_are_handled_one_by_one_and_crowd_the_link() -> None:
    links = Links(latency_s=1.0, message_s=0.25, bytes_per_s=100.0, crowding=1.5)
    root, leaf = (bound(Problem("broadcast", 4, (100,)), rank, "flat") for rank in (0, 1))
    assert cost(root, links, 1).time_s == pytest.approx(1.0 + 3 * 0.25 + 1.5 * 3.0)
    assert cost(leaf, links, 1).time_s == pytest.approx(1.0 + 0.25 + 1.0)


def test_a_wait_takes_until_the_awaited_message_has_arrived() -> None:
    links = Links(latency_s=1.0, message_s=0.0, bytes_per_s=1e9)
    problem = Problem("broadcast", 8, (1,))
    # Rank 7 gets its data in the last of three rounds; rank 4 in the first, and then sends until the end.
    assert [round(cost(bound(problem, rank, "tree"), links, 1).time_s) for rank in (0, 4, 7)] == [3, 3, 3]


def test_messages_between_hosts_take_longer_and_share_the_host_link() -> None:
    links = Links(inter_latency_s=2.0, inter_bytes_per_s=10.0, inter_message_s=0.5, reduce_bytes_per_s=1e12)
    plan = bound(Problem("all_reduce", 2, (10,), hosts=(0, 1)), 0, "doubling")
    assert cost(plan, links, 1).time_s == pytest.approx(2.0 + 0.5 + 1.0)
    assert cost(plan, links, 1, crossing=[4]).time_s == pytest.approx(2.0 + 0.5 + 4.0)


def test_bytes_follow_the_item_size() -> None:
    plan = bound(Problem("all_reduce", 4, (1000,)), 0, "ring")
    assert cost(plan, LINKS, 8).bytes_sent == 8 * cost(plan, LINKS, 1).bytes_sent


def test_an_empty_collective_costs_no_messages() -> None:
    assert costs(Problem("all_reduce", 4, (0,)), "ring")[0] == Cost()


def test_a_direct_read_costs_the_sender_nothing() -> None:
    """Over shared memory a flat broadcast takes as long as one peer's copy, however many peers there are."""
    problem = Problem("broadcast", 8, (1 << 20,))
    flat = [cost(bound(problem, rank, "flat"), SHM, 4).time_s for rank in range(8)]
    wire_s = (4 << 20) / SHM.bytes_per_s
    assert flat[0] < 0.1 * wire_s
    assert flat[1] == pytest.approx(wire_s, rel=0.1)
    short = Problem("broadcast", 8, (10,))
    sent = replace(SHM, fetch_bytes=0)
    assert cost(bound(short, 0, "flat"), SHM, 4) == cost(bound(short, 0, "flat"), sent, 4)
