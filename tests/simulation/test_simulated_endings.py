"""How a simulation ends: deadlocks, errors, interrupts, and calls that it refuses."""

from __future__ import annotations

import _thread
import threading
import time
from typing import Any

import pytest
from tests.support.simulated_ranks import KIB, LATENCY, SPEED, Rank, by_rank, simulated

from unisono.config import Config
from unisono.core.envelope import ANY
from unisono.core.runtime import Waiting
from unisono.errors import Deadlock, PeerLost, UsageError
from unisono.simulation import Drop, Kill, Killed, Pause, now, run, sleep


def test_a_deadlock_names_each_waiting_rank_and_its_peer() -> None:
    result = simulated(lambda me: me.recv((me.rank + 1) % me.size), 3)
    assert [type(error) for error in result.results] == [Deadlock] * 3
    text = str(result.results[1])
    assert (
        "rank 0 waits for rank 1 in recv; rank 1 waits for rank 2 in recv; rank 2 waits for rank 0 in recv"
        in text
    )
    assert result.time_s == 0.0


def test_two_long_sends_to_each_other_are_a_deadlock() -> None:
    result = simulated(lambda me: me.send(1 - me.rank, bytes(64 * KIB)), 2)
    assert [type(error) for error in result.results] == [Deadlock] * 2


def test_a_wait_that_ends_by_itself_is_no_deadlock() -> None:
    def program(me: Rank) -> Any:
        if me.rank == 0:
            me.wait(me.start_recv(1, 5), timeout=100.0)
            me.send(1, b"late")
            return None
        return me.recv(0), now()

    assert simulated(program, 2).results[1] == (b"late", 100.0 + LATENCY + 4 / SPEED)


def test_housekeeping_does_not_hide_a_deadlock() -> None:
    rounds = []

    def program(me: Rank) -> None:
        event = me.backend.runtime.event()
        waiting = Waiting(me.rank, (), "round")
        while not me.backend.runtime.block(event, 0.5, lambda: waiting, is_limited=False):
            rounds.append(now())
            if len(rounds) > 100:
                return

    result = simulated(program, 1, config=Config(deadlock_after_s=2.0))
    assert isinstance(result.results[0], Deadlock)
    assert rounds == [0.5, 1.0, 1.5, 2.0]


def test_a_program_may_survive_a_deadlock() -> None:
    def program(me: Rank) -> bytes:
        with pytest.raises(Deadlock):
            me.recv(1 - me.rank)
        me.send(1 - me.rank, b"again", tag=1)
        return me.recv(1 - me.rank, 1)

    assert simulated(program, 2).raise_first().results == [b"again"] * 2


def test_a_rank_paused_for_ever_is_lost_and_ends_with_the_others() -> None:
    result = simulated(lambda me: me.recv(1 - me.rank), 2, faults=[Pause(1, 0.5)])
    assert isinstance(result.results[0], PeerLost)
    assert isinstance(result.results[1], Killed)
    assert "never resumed" in str(result.results[1])
    assert 3.0 <= result.time_s < 3.01


def test_an_error_of_one_rank_ends_it_and_the_others_learn_that_it_left() -> None:
    def fail(me: Rank) -> None:
        sleep(1.0)
        raise ZeroDivisionError("mine")

    result = simulated(by_rank(fail, lambda me: me.recv(0)), 2)
    assert isinstance(result.results[0], ZeroDivisionError)
    assert isinstance(result.results[1], PeerLost)
    with pytest.raises(ZeroDivisionError, match="mine"):
        result.raise_first()


def test_faults_after_the_end_change_nothing() -> None:
    result = simulated(lambda me: me.rank, 2, faults=[Kill(0, 100.0), Pause(1, 50.0), Drop(0, 1, 60.0)])
    assert result.results == [0, 1]
    assert result.time_s == 0.0


def test_exactly_one_rank_runs_at_a_time() -> None:
    running: list[int] = []

    def program(me: Rank) -> None:
        for _ in range(20):
            running.append(me.rank)
            time.sleep(0.0001)
            assert running.pop() == me.rank
            assert not running
            sleep(0.0)

    simulated(program, 4).raise_first()


def test_a_thread_of_the_users_own_is_refused() -> None:
    refused = []

    def program(me: Rank) -> None:
        event = me.backend.runtime.event()

        def stray() -> None:
            for action in (
                lambda: me.start_send(0, b""),
                lambda: me.start_recv(0),
                event.set,
                lambda: me.backend.runtime.sleep(1.0),
                lambda: me.backend.runtime.block(event, None, lambda: Waiting(0, (), "")),
            ):
                with pytest.raises(UsageError, match="start"):
                    action()
                refused.append(action)

        thread = threading.Thread(target=stray)
        thread.start()
        thread.join()

    simulated(program, 1).raise_first()
    assert len(refused) == 5


def test_a_callback_must_not_wait() -> None:
    refused = []

    def program(me: Rank) -> None:
        def callback() -> None:
            with pytest.raises(UsageError, match="callback"):
                me.backend.runtime.sleep(1.0)
            refused.append(me.rank)

        me.backend.runtime.call_at(0.5, callback)
        sleep(1.0)

    simulated(program, 1).raise_first()
    assert refused == [0]


def test_a_simulation_inside_another_is_refused() -> None:
    def program(me: Rank) -> None:
        with pytest.raises(UsageError, match="inside"):
            run(lambda backend: None, 1)

    simulated(program, 1).raise_first()
    assert run(lambda backend: 5, 1).results == [5]


def test_a_backend_refuses_calls_after_the_simulation() -> None:
    kept: list[Rank] = []
    simulated(kept.append, 1)
    kept[0].backend.close()
    with pytest.raises(UsageError, match="over"):
        kept[0].start_send(0, b"")


def test_an_error_in_a_callback_comes_out_and_leaves_no_thread() -> None:
    unwound = []

    def program(me: Rank) -> None:
        if me.rank == 0:
            me.backend.runtime.call_at(1.0, lambda: 1 // 0)
        try:
            me.recv(ANY)
        finally:
            unwound.append(me.rank)

    with pytest.raises(ZeroDivisionError):
        simulated(program, 3)
    assert sorted(unwound) == [0, 1, 2]


@pytest.mark.parametrize("in_rank", [False, True])
def test_an_interrupt_ends_everything(in_rank: bool) -> None:
    def program(me: Rank) -> None:
        if me.rank == 0:
            if in_rank:
                raise KeyboardInterrupt
            _thread.interrupt_main()
            while True:
                sleep(1.0)
        me.recv(0)

    with pytest.raises(KeyboardInterrupt):
        simulated(program, 3)


def test_outside_a_simulation_time_is_real() -> None:
    before = time.monotonic()
    sleep(0.001)
    assert before < now() <= time.monotonic()
