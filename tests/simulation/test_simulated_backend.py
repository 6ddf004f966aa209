"""The simulated backend without communicators: time, order, credit and leaving in exact numbers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.simulated_ranks import KIB, LATENCY, SPEED, Rank, by_rank, simulated

from unisono.config import Config
from unisono.core.envelope import ANY, Lane
from unisono.errors import ClosedError, PeerLost, UsageError
from unisono.messaging.peer_down import PeerDown
from unisono.simulation import Link, Network, now, sleep

# -- time ----------------------------------------------------------------------------------------------


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


# -- matching, credit, withdrawal ----------------------------------------------------------------------


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


# -- leaving -------------------------------------------------------------------------------------------


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
