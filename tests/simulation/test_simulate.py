"""`uni.simulate`: communicators in virtual time, with and without faults."""

from __future__ import annotations

import gc
import re
import warnings
from typing import Any

import numpy as np
import pytest
from tests.support.paths import ROOT

import unisono as uni
from unisono.simulation import Drop, Kill, Killed, Network, Partition, Pause, Slow, now, sleep

NETWORK = Network(latency_s=1e-3, bytes_per_s=1e9)


def ramp(count: int, rank: int) -> Any:
    return (np.arange(count) % 97 + 1).astype(np.float32) * (rank + 1)


def reduce_often(world: uni.Communicator, rounds: int, count: int = 1021) -> Any:
    """Reduce a ramp every tenth of a second, and check every result."""
    expected = sum(ramp(count, rank) for rank in range(world.size))
    for _ in range(rounds):
        assert np.array_equal(world.all_reduce(ramp(count, world.rank)), expected)
        sleep(0.1)
    return rounds


def outcomes(result: Any) -> list[Any]:
    """The result of each rank, or the type of its error and the ranks that it names."""
    return [
        (type(r), getattr(r, "ranks", None)) if isinstance(r, BaseException) else r for r in result.results
    ]


def test_simulated_ranks_compute_what_real_ones_do() -> None:
    def program(world: uni.Communicator, scale: int) -> Any:
        row = world.split(world.rank % 2, -world.rank)
        gathered = world.all_gather(np.full(3, world.rank * scale))
        total = row.all_reduce(world.rank)
        return gathered[:, 0].tolist(), row.rank, total, world.broadcast_object({"from": world.rank}, 1)

    result = uni.simulate(program, 5, 10).raise_first()
    assert result.results[3] == ([0, 10, 20, 30, 40], 0, 4, {"from": 1})
    assert result.results[4] == ([0, 10, 20, 30, 40], 0, 6, {"from": 1})


def test_an_error_in_a_fold_of_objects_is_one_of_its_rank_alone() -> None:
    def program(world: uni.Communicator) -> Any:
        def picky(a: list[int], b: list[int]) -> list[int]:
            if world.rank == 2:
                raise ZeroDivisionError("here")
            return a + b

        try:
            folded = world.all_reduce_object([world.rank], picky)
        except ZeroDivisionError:
            folded = None
        return folded, world.all_to_all_object([(world.rank, r) for r in range(world.size)])

    exchanged = [[(source, rank) for source in range(3)] for rank in range(3)]
    wanted = [([0, 1, 2], exchanged[0]), ([0, 1, 2], exchanged[1]), (None, exchanged[2])]
    assert uni.simulate(program, 3).raise_first().results == wanted


def test_messages_of_all_sizes_between_two_ranks() -> None:
    def program(world: uni.Communicator) -> Any:
        peer = 1 - world.rank
        for count in (0, 1, 4095, 4096, 4097, 1_000_003):
            into = np.zeros(count, np.float32)
            world.sendrecv(ramp(count, world.rank), peer, into, peer, tag=3)
            assert np.array_equal(into, ramp(count, peer))
        return now()

    result = uni.simulate(program, 2, network=NETWORK).raise_first()
    assert result.time_s > 4_000_012 / 1e9


@pytest.mark.parametrize("count", [65_536, 65_539, 262_147])
def test_the_last_short_piece_may_arrive_before_the_first_long_one(count: int) -> None:
    def program(world: uni.Communicator) -> None:
        expected = [ramp(count, rank) for rank in range(world.size)]
        assert np.array_equal(world.all_gather(ramp(count, world.rank)), expected)
        assert np.array_equal(world.all_reduce(ramp(count, world.rank), algorithm="ring"), sum(expected))

    uni.simulate(program, 4, network=NETWORK).raise_first()


@pytest.mark.parametrize("at_s", [0.0, 1e-4, 0.1005, 0.25, 0.3015])
def test_every_survivor_names_the_killed_rank(at_s: float) -> None:
    result = uni.simulate(reduce_often, 4, 10, seed=7, network=NETWORK, faults=[Kill(2, at_s)])
    lost = (uni.PeerLost, (2,))
    assert outcomes(result) == [lost, lost, (Killed, None), lost]
    assert "killed at" in str(result.results[0])
    assert result.time_s < at_s + 0.5


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_a_rank_may_die_at_any_step(algorithm: str) -> None:
    def program(world: uni.Communicator) -> str:
        for _ in range(2):
            world.all_reduce(ramp(1021, world.rank), algorithm=algorithm)
        return "through"

    deaths = 0
    for step in range(1, 60):
        result = uni.simulate(program, 4, network=NETWORK, faults=[Kill(1, at_step=step)])
        is_dead = isinstance(result.results[1], Killed)
        deaths += is_dead
        for rank, outcome in enumerate(outcomes(result)):
            # A rank that needed nothing more from the dead rank completed the call.
            if rank != 1:
                assert outcome in ("through", (uni.PeerLost, (1,))), (step, rank, outcome)
        if not is_dead:
            assert result.results == ["through"] * 4
            break
    assert deaths > 5


def test_a_rank_that_dies_while_no_rank_waits_is_declared_dead_too() -> None:
    def program(world: uni.Communicator) -> Any:
        work = world.start.all_reduce(ramp(300_000, world.rank))
        sleep(5.0)
        return float(work.wait()[0])

    for step in (5, 9, 13):
        result = uni.simulate(program, 4, network=NETWORK, faults=[Kill(3, at_step=step)])
        assert isinstance(result.results[3], Killed)
        assert outcomes(result)[:3] == [(uni.PeerLost, (3,))] * 3


@pytest.mark.parametrize("step", range(1, 8))
def test_leftovers_of_a_rank_that_gave_up_are_no_mismatch(step: int) -> None:
    def program(world: uni.Communicator) -> None:
        world.all_reduce(ramp(10_000, world.rank), algorithm="ring")

    # Rank 1 learns of the death while rank 2 is paused, withdraws its pending messages, and leaves.
    network = Network(1e-5, 1e8, 1e-3)
    faults = [Kill(0, 0.1), Pause(2, for_s=2.0, at_step=step)]
    result = uni.simulate(program, 3, seed=3067, network=network, faults=faults)
    for rank in (1, 2):
        assert result.results[rank] is None or isinstance(result.results[rank], uni.PeerLost)


def test_works_that_a_killed_rank_had_started_cause_no_warning() -> None:
    def program(world: uni.Communicator) -> None:
        works = [world.start.all_reduce(ramp(1021, world.rank)) for _ in range(3)]
        world.barrier()
        uni.wait_all(works)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = uni.simulate(program, 3, network=NETWORK, faults=[Kill(1, 0.0005)])
        assert isinstance(result.results[1], Killed)
        del result
        gc.collect()
    assert not [str(warning.message) for warning in warned]


def test_a_pause_shorter_than_the_silence_limit_only_delays() -> None:
    calm = uni.simulate(reduce_often, 4, 10, network=NETWORK).raise_first()
    paused = uni.simulate(reduce_often, 4, 10, network=NETWORK, faults=[Pause(1, 0.25, 2.0)]).raise_first()
    assert paused.results == [10] * 4
    assert paused.time_s > calm.time_s + 1.8


def test_a_pause_longer_than_the_silence_limit_is_a_death() -> None:
    result = uni.simulate(reduce_often, 4, 100, network=NETWORK, faults=[Pause(1, 0.25, 4.0)])
    lost = (uni.PeerLost, (1,))
    assert outcomes(result) == [lost, (uni.PeerLost, (0, 2, 3)), lost, lost]
    assert "silent for 2.5 s" in str(result.results[0])
    assert "gave rank 1 up" in str(result.results[1])
    assert result.time_s < 4.5


def test_a_short_partition_only_delays() -> None:
    fault = Partition([[0, 1], [2, 3]], 0.25, 2.0)
    result = uni.simulate(reduce_often, 4, 10, network=NETWORK, faults=[fault]).raise_first()
    assert result.results == [10] * 4


def test_a_long_partition_lets_each_side_lose_the_other() -> None:
    fault = Partition([[0, 1], [2, 3]], 0.25, 10.0)
    result = uni.simulate(reduce_often, 4, 100, network=NETWORK, faults=[fault])
    for rank, outcome in enumerate(result.results):
        assert isinstance(outcome, uni.PeerLost)
        others = {2, 3} if rank < 2 else {0, 1}
        assert set(outcome.ranks) <= others
    assert 2.75 <= result.time_s < 3.5


def test_a_one_way_drop_ends_as_a_death_that_all_agree_on() -> None:
    result = uni.simulate(reduce_often, 4, 100, network=NETWORK, faults=[Drop(0, 3, 0.25)])
    assert outcomes(result)[1:] == [(uni.PeerLost, (0,))] * 3
    assert isinstance(result.results[0], uni.PeerLost)


def test_a_slow_link_slows_everybody() -> None:
    calm = uni.simulate(reduce_often, 4, 10, network=NETWORK).raise_first()
    slow = uni.simulate(reduce_often, 4, 10, network=NETWORK, faults=[Slow(0, 1, 100, 0.0)]).raise_first()
    assert slow.time_s > calm.time_s + 0.5


def test_receives_that_wait_for_each_other_are_a_deadlock_at_once() -> None:
    def program(world: uni.Communicator) -> None:
        world.recv(np.zeros(4), 1 - world.rank, tag=5)

    result = uni.simulate(program, 2)
    assert [type(r) for r in result.results] == [uni.Deadlock] * 2
    text = str(result.results[0])
    assert 'rank 0 waits for rank 1 in recv on "world"; rank 1 waits for rank 0 in recv on "world"' in text
    assert result.time_s < 1.0


def test_different_collectives_are_a_mismatch_and_no_deadlock() -> None:
    def program(world: uni.Communicator) -> None:
        if world.rank == 2:
            world.broadcast(np.zeros(1021, np.float32), 0)
        else:
            world.all_reduce(np.zeros(1021, np.float32))

    result = uni.simulate(program, 4, network=NETWORK)
    assert [type(r) for r in result.results] == [uni.CollectiveMismatch] * 4
    assert result.time_s < 1.0


def test_deadlines_are_virtual() -> None:
    def program(world: uni.Communicator) -> Any:
        if world.rank == 0:
            with pytest.raises(uni.DeadlineExceeded) as caught:
                world.recv(np.zeros(1), 1, timeout=1000.0)
            assert caught.value.waiting_on == (1,)
            return now()
        sleep(2000.0)
        return now()

    assert uni.simulate(program, 2).raise_first().results == [1000.0, 2000.0]


def test_loops_that_poll_without_waiting_end() -> None:
    def program(world: uni.Communicator) -> Any:
        work = world.start.all_reduce(ramp(1021, world.rank))
        asked = 0
        while not work.done():
            asked += 1
        work.wait()
        if world.rank == 0:
            sleep(1.0)
            world.send(np.ones(1), 1)
            return asked
        while world.probe(0, timeout=0) is None:
            asked += 1
        world.recv(np.zeros(1), 0)
        return asked

    assert all(asked > 10 for asked in uni.simulate(program, 2, network=NETWORK).raise_first().results)


def test_every_seed_gives_the_same_bits() -> None:
    def program(world: uni.Communicator) -> bytes:
        x = np.random.default_rng(world.rank).standard_normal(1021).astype(np.float32)
        return bytes(world.all_reduce(x).tobytes())

    network = Network(1e-4, 1e8, jitter_s=1e-3)
    results = [uni.simulate(program, 5, seed=seed, network=network).raise_first() for seed in range(10)]
    assert len({bits for result in results for bits in result.results}) == 1
    assert len({result.trace_hash for result in results}) == 10


def test_sixty_four_ranks() -> None:
    result = uni.simulate(reduce_often, 64, 4, 256, faults=[Kill(40, 0.25)])
    lost = (uni.PeerLost, (40,))
    assert outcomes(result) == [lost] * 40 + [(Killed, None)] + [lost] * 23


def test_many_ranks_lose_many() -> None:
    faults = [Kill(rank, 0.1 + rank * 0.001) for rank in range(1, 32, 2)]
    result = uni.simulate(reduce_often, 32, 5, 64, network=NETWORK, faults=faults)
    for rank in range(0, 32, 2):
        lost = result.results[rank]
        assert isinstance(lost, uni.PeerLost)
        assert lost.ranks
        assert all(dead % 2 for dead in lost.ranks)


def test_the_program_in_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    document = (ROOT / "docs/simulation.md").read_text()
    program = re.search(r"```python\n(.*?)```", document, re.DOTALL)
    assert program is not None
    exec(compile(program[1], "docs/simulation.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert "rank 5 killed at 0.002 s (simulated)" in said[0]
    assert "send" in said[1]


def test_a_deadlock_within_a_group_names_world_ranks() -> None:
    def program(world: uni.Communicator) -> None:
        odd = world.split(world.rank % 2)
        if world.rank == 5:
            world.recv(np.zeros(1), 3)
        odd.barrier()

    result = uni.simulate(program, 6)
    assert [isinstance(r, uni.Deadlock) for r in result.results] == [False, True] * 3
    assert "rank 3 waits for rank 5 in barrier" in str(result.results[5])
    assert "rank 5 waits for rank 3 in recv" in str(result.results[5])
