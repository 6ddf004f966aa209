"""The simulated backend without communicators: time, order, credit, faults and endings in exact numbers.

Latency and speed are powers of two, so that every time is exact in binary.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from unisono.config import Config
from unisono.core.envelope import ANY, Lane
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.errors import ClosedError, Deadlock, PeerLost, UsageError
from unisono.messaging.peer_down import PeerDown
from unisono.simulation import (
    Drop,
    Kill,
    Killed,
    Link,
    Network,
    Partition,
    Pause,
    Resume,
    SimBackend,
    SimResult,
    Slow,
    now,
    run,
    sleep,
)

LATENCY = 2.0**-10
SPEED = 2.0**20  # 1 KiB takes as long as the latency
NETWORK = Network(LATENCY, SPEED)
KIB = 1024


class Rank:
    """A backend with blocking verbs."""

    def __init__(self, backend: SimBackend) -> None:
        self.backend = backend
        self.rank, self.size = backend.rank, backend.size
        self.downs: list[tuple[float, PeerDown]] = []
        backend.watch(lambda down: self.downs.append((now(), down)))

    def start_send(self, dst: int, data: bytes, tag: int = 0, **how: Any) -> Request:
        return self.backend.start_send(dst, 1, tag, memoryview(data), **how)

    def start_recv(self, src: Any, tag: Any = 0) -> Request:
        return self.backend.start_recv(src, 1, tag, None)

    def send(self, dst: int, data: bytes, tag: int = 0, **how: Any) -> None:
        self.wait(self.start_send(dst, data, tag, **how), "send")

    def recv(self, src: Any, tag: Any = 0) -> bytes:
        request = self.start_recv(src, tag)
        self.wait(request, "recv")
        return bytes(request.data or b"")

    def wait(self, request: Request, operation: str = "wait", timeout: float | None = None) -> bool:
        event = self.backend.runtime.event()
        request.notify(event.set)
        peers = () if request.peer is ANY else (request.peer,)
        waiting = Waiting(self.rank, peers, operation)  # type: ignore[arg-type]
        is_done = self.backend.runtime.block(event, timeout, lambda: waiting)
        if request.error is not None:
            raise request.error
        return is_done


def simulated(program: Callable[[Rank], Any], n: int, **how: Any) -> SimResult:
    how.setdefault("network", NETWORK)
    return run(lambda backend: program(Rank(backend)), n, **how)


def by_rank(*programs: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
    return lambda me: programs[me.rank](me)


# -- time ------------------------------------------------------------------------------------------------


def test_a_message_takes_latency_and_the_time_of_its_bytes() -> None:
    def receive(me: Rank) -> Any:
        return [(len(me.recv(0)), now()) for _ in range(3)]

    def send(me: Rank) -> Any:
        for nbytes in (0, 1, 3 * KIB):
            me.send(1, bytes(nbytes))
        return now()

    result = simulated(by_rank(send, receive), 2)
    byte = 1 / SPEED
    assert result.results[0] == 0.0, "small sends end at once"
    assert result.results[1] == [
        (0, LATENCY),
        (1, LATENCY + byte),
        (3 * KIB, LATENCY + byte + 3 * LATENCY),
    ]
    assert result.time_s == LATENCY + byte + 3 * LATENCY


def test_a_long_message_waits_for_its_receive_and_then_travels() -> None:
    size, posted_at = 64 * KIB, 1.0

    def receive(me: Rank) -> Any:
        sleep(posted_at)
        assert me.recv(0) == bytes(range(256)) * (size // 256)
        return now()

    def send(me: Rank) -> Any:
        me.send(1, bytes(range(256)) * (size // 256))
        return now()

    result = simulated(by_rank(send, receive), 2)
    # The CTS takes a latency; then the bytes and another latency. The FIN ends the send.
    received_at = posted_at + 2 * LATENCY + size / SPEED
    assert result.results == [received_at + LATENCY, received_at]
    assert [event.kind for event in result.trace if event.kind in ("send", "arrive", "match", "data")] == [
        "send",
        "arrive",
        "match",
        "data",
    ]


def test_a_synchronous_send_is_a_rendezvous_however_short_it_is() -> None:
    def receive(me: Rank) -> None:
        sleep(1.0)
        me.recv(0)

    def send(me: Rank) -> Any:
        me.send(1, b"x", sync=True)
        return now()

    assert simulated(by_rank(send, receive), 2).results[0] == 1.0 + LATENCY, "its CTS"


def test_bulk_bytes_do_not_delay_the_control_lane() -> None:
    def send(me: Rank) -> None:
        me.send(1, bytes(16 * KIB), tag=0)
        me.send(1, b"now", tag=1, lane=Lane.CONTROL)

    def receive(me: Rank) -> Any:
        me.recv(0, 1)
        control = now()
        me.recv(0, 0)
        return control, now()

    control, bulk = simulated(by_rank(send, receive), 2).results[1]
    assert control == LATENCY + 3 / SPEED
    assert bulk == LATENCY + 16 * KIB / SPEED


def test_each_way_has_a_pace_of_its_own() -> None:
    network = Network(LATENCY, SPEED, links={(0, 1): Link(latency_s=0.5)})

    def swap(me: Rank) -> Any:
        me.send(1 - me.rank, b"")
        me.recv(1 - me.rank)
        return now()

    assert simulated(swap, 2, network=network).results == [LATENCY, 0.5]


def test_jitter_delays_and_never_reorders() -> None:
    network = Network(LATENCY, SPEED, jitter_s=1.0)

    def send(me: Rank) -> None:
        for i in range(50):
            me.send(1, bytes([i]), tag=i)
            sleep(0.01)

    def receive(me: Rank) -> Any:
        return [(me.recv(0, ANY)[0], now()) for _ in range(50)]

    arrivals = simulated(by_rank(send, receive), 2, network=network).results[1]
    assert [i for i, _ in arrivals] == list(range(50))
    assert all(i * 0.01 + LATENCY <= at <= i * 0.01 + LATENCY + 50 / SPEED + 1.5 for i, at in arrivals)
    assert len({at for _, at in arrivals}) > 5


def test_a_wait_with_a_limit_ends_by_itself() -> None:
    def wait(me: Rank) -> Any:
        return me.wait(me.start_recv(ANY), timeout=0.25), now()

    assert simulated(wait, 1).results == [(False, 0.25)]


def test_cancelled_timers_do_not_pile_up() -> None:
    def program(me: Rank) -> int:
        for _ in range(5000):
            me.backend.runtime.call_at(1e6, lambda: None).cancel()
        me.backend.runtime.call_at(1.0, lambda: None)
        return len(me.backend.fabric.scheduler._calls)

    result = simulated(program, 1)
    assert result.results[0] < 3000
    assert result.time_s == 0.0


def test_a_poll_takes_virtual_time() -> None:
    def ask(me: Rank) -> Any:
        if me.rank == 0:
            me.send(1, b"x")
            return None
        asked = 0
        while not (request := me.backend.probe(0, 1, 0)).done:
            assert request.cancel()
            me.backend.runtime.deadline(0)
            asked += 1
        return asked

    assert simulated(ask, 2).results[1] > 100


# -- matching, credit, withdrawal ------------------------------------------------------------------------


def test_sends_beyond_the_credit_wait_for_their_receives() -> None:
    config = Config(eager_bytes=KIB, eager_credit_bytes=4 * KIB)

    def send(me: Rank) -> Any:
        requests = [me.start_send(1, bytes([i]) * KIB) for i in range(6)]
        were_done = [request.done for request in requests]
        for request in requests:
            me.wait(request)
        # The credit has come back one latency after the last match.
        sleep(2 * LATENCY)
        return were_done, me.start_send(1, bytes(KIB)).done

    def receive(me: Rank) -> Any:
        sleep(1.0)
        return [me.recv(0)[0] for _ in range(6)]

    result = simulated(by_rank(send, receive), 2, config=config)
    # Three messages of 1 KiB with their envelopes fit into 4 KiB of credit, a fourth does not.
    assert result.results == [([True] * 3 + [False] * 3, True), list(range(6))]


def test_each_lane_has_a_credit_of_its_own() -> None:
    config = Config(eager_bytes=KIB, eager_credit_bytes=2 * KIB)

    def send(me: Rank) -> Any:
        done = [me.start_send(1, bytes(KIB), lane=Lane.BULK).done for _ in range(3)]
        return done, me.start_send(1, bytes(KIB), tag=1, lane=Lane.CONTROL).done

    assert simulated(by_rank(send, lambda me: me.recv(0, 1)), 2, config=config).results[0] == (
        [True, False, False],
        True,
    )


def test_large_messages_can_be_received_in_another_order() -> None:
    sizes = {tag: (tag + 1) * 100 * KIB for tag in range(3)}

    def send(me: Rank) -> None:
        for request in [me.start_send(1, bytes([tag]) * size, tag) for tag, size in sizes.items()]:
            me.wait(request)

    def receive(me: Rank) -> Any:
        return [(tag, me.recv(0, tag) == bytes([tag]) * sizes[tag]) for tag in (2, 0, 1)]

    assert simulated(by_rank(send, receive), 2).results[1] == [(2, True), (0, True), (1, True)]


@pytest.mark.parametrize("nbytes", [0, 5, 100 * KIB])
@pytest.mark.parametrize("sync", [False, True])
def test_a_rank_sends_to_itself_in_no_time(nbytes: int, sync: bool) -> None:
    def alone(me: Rank) -> Any:
        data = bytes(i % 251 for i in range(nbytes))
        sending = me.start_send(0, data, sync=sync)
        assert sending.done is not sync
        received = me.recv(0)
        me.wait(sending)
        return received == data, now()

    assert simulated(alone, 1).results == [(True, 0.0)]


def test_a_buffer_may_be_reused_once_a_small_send_is_done() -> None:
    def send(me: Rank) -> None:
        data = bytearray(b"before")
        me.wait(me.backend.start_send(1, 1, 0, memoryview(data)))
        data[:] = b"after!"

    assert simulated(by_rank(send, lambda me: me.recv(0)), 2).results[1] == b"before"


def test_a_message_longer_than_the_buffer_stays_queued() -> None:
    def receive(me: Rank) -> Any:
        small = me.backend.start_recv(0, 1, 0, memoryview(bytearray(3)))
        with pytest.raises(UsageError, match="stays queued"):
            me.wait(small)
        return me.recv(0)

    assert simulated(by_rank(lambda me: me.send(1, b"four"), receive), 2).results[1] == b"four"


def test_a_withdrawn_receive_leaves_its_message_to_the_next() -> None:
    def receive(me: Rank) -> Any:
        request = me.start_recv(0)
        assert request.cancel()
        assert isinstance(request.error, ClosedError)
        return me.recv(0)

    assert simulated(by_rank(lambda me: me.send(1, b"x"), receive), 2).results[1] == b"x"


@pytest.mark.parametrize("after_s", [0.0, 0.5])
@pytest.mark.parametrize("how", [{"sync": True}, {"nbytes": 64 * KIB}])
def test_a_withdrawn_send_is_never_received(after_s: float, how: dict[str, Any]) -> None:
    nbytes = how.pop("nbytes", 4)

    def send(me: Rank) -> Any:
        request = me.start_send(1, bytes(nbytes), **how)
        sleep(after_s)
        assert request.cancel()
        assert not request.cancel()
        me.send(1, b"next")
        return type(request.error)

    def receive(me: Rank) -> Any:
        sleep(1.0)
        return me.recv(0)

    assert simulated(by_rank(send, receive), 2).results == [ClosedError, b"next"]
    how["nbytes"] = nbytes


def test_a_send_that_was_met_can_no_longer_be_withdrawn() -> None:
    def send(me: Rank) -> Any:
        request = me.start_send(1, bytes(64 * KIB))
        sleep(2.5 * LATENCY)
        assert not request.cancel()
        me.wait(request)

    assert len(simulated(by_rank(send, lambda me: me.recv(0)), 2).raise_first().results[1]) == 64 * KIB


def test_a_probe_finds_an_envelope_before_the_bytes_have_come() -> None:
    def receive(me: Rank) -> Any:
        request = me.backend.probe(ANY, 1, ANY)
        me.wait(request)
        assert request.envelope is not None
        found = (request.envelope.source, request.envelope.tag, request.envelope.nbytes, now())
        me.recv(0, 9)
        return found

    result = simulated(by_rank(lambda me: me.send(1, bytes(64 * KIB), tag=9), receive), 2)
    assert result.results[1] == (0, 9, 64 * KIB, LATENCY)


# -- leaving ---------------------------------------------------------------------------------------------


def test_a_rank_that_leaves_is_missed_after_all_it_sent() -> None:
    def leave(me: Rank) -> None:
        me.send(1, bytes(16 * KIB))

    def stay(me: Rank) -> Any:
        with pytest.raises(PeerLost, match="left") as caught:
            me.recv(0, 7)
        assert caught.value.ranks == (0,)
        gone_at = now()
        return gone_at, len(me.recv(0, 0)), me.downs

    (gone_at, received, downs) = simulated(by_rank(leave, stay), 2).raise_first().results[1]
    assert gone_at == LATENCY + 16 * KIB / SPEED
    assert received == 16 * KIB
    assert downs == [(gone_at, PeerDown(0, "left", left=True))]


def test_a_rank_that_leaves_withdraws_sends_without_a_receive() -> None:
    def leave(me: Rank) -> Any:
        request = me.start_send(1, bytes(64 * KIB))
        me.backend.close()
        return type(request.error), type(me.start_send(1, b"").error), type(me.start_recv(1).error)

    def stay(me: Rank) -> Any:
        sleep(1.0)
        with pytest.raises(PeerLost):
            me.recv(0)
        return me.backend.endpoint.protocol.inbox.is_idle()

    closed = (ClosedError,) * 3
    assert simulated(by_rank(leave, stay), 2).raise_first().results == [closed, True]


def test_sends_to_a_rank_that_left_fail() -> None:
    def stay(me: Rank) -> None:
        with pytest.raises(PeerLost):
            me.send(0, bytes(64 * KIB))
        with pytest.raises(PeerLost):
            me.send(0, b"")

    simulated(by_rank(lambda me: None, stay), 2).raise_first()


# -- faults ----------------------------------------------------------------------------------------------


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


# -- deadlocks and endings -------------------------------------------------------------------------------


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
