"""Faults of simulated ranks and links: killed, paused, silent, cut off and slow, in exact numbers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.simulated_ranks import KIB, LATENCY, SPEED, Rank, by_rank, simulated

from unisono.config import Config
from unisono.core.envelope import ANY
from unisono.errors import PeerLost
from unisono.simulation import Drop, Kill, Killed, Partition, Pause, Resume, Slow, now, sleep


def test_a_killed_rank_unwinds_where_it_waits_and_the_others_learn_of_it_after_a_latency() -> None:
    unwound = []

    def die(me: Rank) -> None:
        try:
            me.recv(1)
        finally:
            unwound.append(now())

    def live(me: Rank) -> Any:
        with pytest.raises(PeerLost) as caught:
            me.recv(0)
        return caught.value.ranks, caught.value.cause, now()

    result = simulated(by_rank(die, live), 2, faults=[Kill(0, 0.5)])
    assert isinstance(result.results[0], Killed)
    assert "killed at 0.5 s" in str(result.results[0])
    assert unwound == [0.5]
    assert result.results[1] == ((0,), "killed at 0.5 s (simulated)", 0.5 + LATENCY)


def test_a_rank_killed_at_a_step_does_not_take_it() -> None:
    def die(me: Rank) -> None:
        for i in range(10):
            me.send(1, bytes([i]))

    def live(me: Rank) -> Any:
        received = [me.recv(0)[0] for _ in range(3)]
        with pytest.raises(PeerLost):
            me.recv(0)
        return received

    result = simulated(by_rank(die, live), 2, faults=[Kill(0, at_step=4)])
    assert isinstance(result.results[0], Killed)
    assert result.results[1] == [0, 1, 2], "what was sent before still arrives"


def test_a_killed_rank_cannot_go_on_even_if_it_tries() -> None:
    tries = []

    def die(me: Rank) -> str:
        for _ in range(3):
            try:
                me.send(1, b"")
            except BaseException as error:
                tries.append(type(error))
        with pytest.raises(Killed):
            sleep(1.0)
        me.backend.close()
        return "unwound"

    result = simulated(by_rank(die, lambda me: None), 2, faults=[Kill(0, at_step=1)])
    assert tries == [Killed] * 3
    assert result.results[0] == "unwound"
    assert "send" not in [event.kind for event in result.trace]


def test_bytes_on_their_way_outlive_their_sender() -> None:
    size = 64 * KIB

    def send(me: Rank) -> None:
        data = bytearray(b"a" * size)
        try:
            me.wait(me.backend.start_send(1, 1, 0, memoryview(data)))
        finally:
            data[:] = b"z" * size

    result = simulated(by_rank(send, lambda me: me.recv(0)), 2, faults=[Kill(0, 3 * LATENCY)])
    assert isinstance(result.results[0], Killed)
    assert result.results[1] == b"a" * size


@pytest.mark.parametrize("at", [0.5 * LATENCY, 1.5 * LATENCY])
def test_a_message_whose_bytes_never_left_is_lost_with_its_sender(at: float) -> None:
    def receive(me: Rank) -> Any:
        with pytest.raises(PeerLost) as caught:
            me.recv(0)
        return caught.value.ranks, me.backend.endpoint.protocol.inbox.is_idle()

    result = simulated(by_rank(lambda me: me.send(1, bytes(64 * KIB)), receive), 2, faults=[Kill(0, at)])
    assert result.raise_first().results[1] == ((0,), True)


def test_a_short_pause_only_delays() -> None:
    def send(me: Rank) -> Any:
        for _ in range(4):
            me.send(1, b"x", sync=True)
            sleep(0.25)
        return [down for _, down in me.downs if not down.left]

    def receive(me: Rank) -> Any:
        return [(me.recv(0), now())[1] for _ in range(4)]

    result = simulated(by_rank(send, receive), 2, faults=[Pause(1, 0.125, 2.0)]).raise_first()
    assert result.results[0] == []
    assert result.results[1][0] == 3 * LATENCY + 1 / SPEED
    assert result.results[1][1] == 2.125 + 2 * LATENCY + 1 / SPEED, "what came meanwhile is there at once"


def test_a_paused_rank_neither_computes_nor_times_out() -> None:
    ticks = []

    def tick(me: Rank) -> Any:
        me.backend.runtime.call_at(1.0, lambda: ticks.append(now_of(me)))
        while now() < 3:
            sleep(0.25)
            ticks.append(now())
        return me.wait(me.start_recv(ANY), timeout=0.0)

    def now_of(me: Rank) -> float:
        return me.backend.runtime.now()

    simulated(tick, 1, faults=[Pause(0, 0.6, 1.0)]).raise_first()
    assert not [t for t in ticks if 0.6 <= t < 1.6]
    assert ticks[:4] == [0.25, 0.5, 1.6, 1.6]


def test_pauses_overlap_and_a_resume_ends_all() -> None:
    def nap(me: Rank) -> float:
        sleep(0.5)
        return now()

    both = [Pause(0, 0.25, 1.0), Pause(0, 0.5, 1.0)]
    assert simulated(nap, 1, faults=both).results == [1.5]
    assert simulated(nap, 1, faults=[*both, Resume(0, 0.75)]).results == [0.75]
    assert simulated(nap, 1, faults=[Resume(0, 0.25), Pause(0, 0.375), Resume(0, 2.0)]).results == [2.0]


def test_a_rank_paused_at_a_step_stands_still_before_it() -> None:
    def send(me: Rank) -> None:
        for i in range(3):
            me.send(1, bytes([i]))

    def receive(me: Rank) -> Any:
        return [(me.recv(0), now())[1] for _ in range(3)]

    times = simulated(by_rank(send, receive), 2, faults=[Pause(0, for_s=1.0, at_step=2)]).results[1]
    byte = 1 / SPEED
    assert times == [LATENCY + byte, 1 + LATENCY + byte, 1 + LATENCY + 2 * byte]


def test_a_silent_rank_is_lost_to_all_and_finds_them_lost() -> None:
    def wait(me: Rank) -> Any:
        with pytest.raises(PeerLost) as caught:
            me.recv(0 if me.rank == 1 else 1)
        lost_at = now()
        sleep(10 - now())
        return lost_at, caught.value.cause, sorted((at, down.rank) for at, down in me.downs)

    results = simulated(wait, 3, faults=[Pause(1, 1.0, 4.0)]).raise_first().results
    assert results[0] == results[2] == (3.5, "silent for 2.5 s", [(3.5, 1)])
    assert results[1] == (5.0, "gave rank 1 up after 2.5 s of silence", [(5.0, 0), (5.0, 2)])


def test_silence_of_exactly_the_limit_is_fatal_and_less_is_not() -> None:
    def look(me: Rank) -> Any:
        sleep(8)
        return [down.rank for _, down in me.downs]

    config = Config(silence_s=2.0)
    assert simulated(look, 2, faults=[Pause(1, 1.0, 2.0)], config=config).results == [[1], [0]]
    assert simulated(look, 2, faults=[Pause(1, 1.0, 2.0 - 2**-20)], config=config).results == [[], []]
    # A pause and a cut that overlap count as one silence.
    faults = [Pause(1, 1.0, 1.25), Drop(1, 0, 2.0, 1.5)]
    assert simulated(look, 2, faults=faults, config=config).results == [[1], [0]]


def test_a_short_cut_holds_messages_until_it_heals() -> None:
    def send(me: Rank) -> None:
        sleep(0.5)
        for i in range(3):
            me.send(1, bytes([i]))

    def receive(me: Rank) -> Any:
        return [(me.recv(0)[0], now()) for _ in range(3)]

    for fault in (Drop(0, 1, 0.25, 1.0), Partition([[0], [1]], 0.25, 1.0)):
        received = simulated(by_rank(send, receive), 2, faults=[fault]).raise_first().results[1]
        assert received == [(i, 1.25 + LATENCY) for i in range(3)]


def test_a_drop_closes_one_way_only() -> None:
    def swap(me: Rank) -> Any:
        me.send(1 - me.rank, b"x")
        me.recv(1 - me.rank)
        return now()

    times = simulated(swap, 2, faults=[Drop(0, 1, 0.0, 1.0)]).raise_first().results
    assert times == [LATENCY + 1 / SPEED, 1.0 + LATENCY]


def test_no_message_passes_after_a_declared_death_even_if_the_network_heals() -> None:
    def program(me: Rank) -> Any:
        me.send(1 - me.rank, b"too late")
        sleep(6)
        assert len(me.downs) == 1
        with pytest.raises(PeerLost):
            me.send(1 - me.rank, b"")
        with pytest.raises(PeerLost):
            me.recv(1 - me.rank)

    simulated(program, 2, faults=[Partition([[0], [1]], 0.0, 4.0)]).raise_first()


def test_a_partition_lets_each_side_lose_the_other() -> None:
    def look(me: Rank) -> Any:
        sleep(8)
        mates = [rank for rank in range(4) if rank // 2 == me.rank // 2 and rank != me.rank]
        me.send(mates[0], b"still here")
        assert me.recv(mates[0]) == b"still here"
        return sorted((at, down.rank) for at, down in me.downs)

    results = simulated(look, 4, faults=[Partition([[0, 1], [2, 3]], 1.0)]).raise_first().results
    assert results == [[(3.5, 2), (3.5, 3)]] * 2 + [[(3.5, 0), (3.5, 1)]] * 2


def test_a_slow_link_takes_longer_for_what_is_sent_meanwhile() -> None:
    def send(me: Rank) -> None:
        for _ in range(3):
            me.send(1, bytes(KIB))
            sleep(1.0)

    def receive(me: Rank) -> Any:
        return [(me.recv(0), now())[1] for _ in range(3)]

    faults = [Slow(0, 1, 8, 0.5, 1.0), Slow(0, 1, 2, 0.5, 1.0), Slow(1, 0, 100, 0.0)]
    times = simulated(by_rank(send, receive), 2, faults=faults).results[1]
    assert times == [2 * LATENCY, 1.0 + 16 * 2 * LATENCY, 2.0 + 2 * LATENCY]


def test_links_and_partitions_can_fail_at_a_step() -> None:
    def send(me: Rank) -> Any:
        times = []
        for _ in range(2):
            me.send(1, b"", sync=True)
            times.append(now())
        return times

    def receive(me: Rank) -> None:
        me.wait(me.start_recv(0))
        me.wait(me.start_recv(0))

    assert simulated(by_rank(send, receive), 2).results[0] == [2 * LATENCY, 4 * LATENCY]
    drop = Drop(0, 1, for_s=1.0, at_step=2)
    assert simulated(by_rank(send, receive), 2, faults=[drop]).results[0][1] == 2 * LATENCY + 1 + 2 * LATENCY
    # The second send is the third operation: a receive and a send come before.
    cut = Partition([[0], [1]], for_s=1.0, at_step=3)
    assert simulated(by_rank(send, receive), 2, faults=[cut]).results[0][1] == 2 * LATENCY + 1 + 2 * LATENCY


def test_a_pause_can_end_at_a_step_of_another_rank() -> None:
    def send(me: Rank) -> None:
        me.send(1, b"")
        me.send(1, b"")

    def receive(me: Rank) -> Any:
        sleep(1.0)
        me.recv(0)
        me.recv(0)
        return now()

    faults = [Pause(0, at_step=2), Resume(0, at_step=3)]
    assert simulated(by_rank(send, receive), 2, faults=faults).results[1] == 1.0 + LATENCY
