"""The rendezvous of two ranks: its tables, frames that cross, ends in every state, frames in any order."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque

import pytest

from unisono.config import Config
from unisono.core.envelope import ANY, UNTYPED, Envelope, Lane
from unisono.core.request import Request
from unisono.errors import ClosedError, PeerLost, ProtocolError
from unisono.messaging.actions import Action, End, Frame, Kind, Transmit, finish
from unisono.messaging.credit import ENVELOPE_BYTES
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol
from unisono.messaging.rendezvous import (
    RECEIVE_TABLE,
    SEND_TABLE,
    ReceiveEvent,
    ReceiveState,
    SendEvent,
    SendState,
)

CONFIG = Config(eager_bytes=100, eager_credit_bytes=4 * (100 + ENVELOPE_BYTES))
CONTEXT, TAG = 7, 3


class Wire:
    """Two ranks and the frames between them, by direction and lane, which the test delivers."""

    def __init__(self, piece_bytes: int = 1000) -> None:
        self.ranks = [Endpoint(Protocol(r, CONFIG, piece_bytes), self._carry) for r in range(2)]
        self.under_way: dict[tuple[int, Lane], deque[Frame]] = {
            (source, lane): deque() for source in range(2) for lane in Lane
        }
        self.kinds: list[Kind] = []

    def _carry(self, outgoing: Transmit) -> tuple[()]:
        frame = outgoing.frame._replace(data=bytes(outgoing.frame.data))
        self.kinds.append(frame.kind)
        self.under_way[outgoing.source, frame.lane].append(frame)
        return ()

    def deliver(self, source: int, lane: Lane = Lane.BULK) -> Kind:
        frame = self.under_way[source, lane].popleft()
        self.ranks[1 - source].arrive(source, frame)
        return frame.kind

    def deliver_all(self) -> None:
        while waiting := [key for key, frames in self.under_way.items() if frames]:
            self.deliver(*waiting[0])

    def send(self, data: bytes, tag: int = TAG, lane: Lane = Lane.BULK, sync: bool = False) -> Request:
        envelope = Envelope(0, CONTEXT, tag, len(data))
        return self.ranks[0].send(1, envelope, memoryview(data), lane, sync)

    def recv(self, source: object = 0, tag: object = TAG, into: memoryview | None = None) -> Request:
        return self.ranks[1].receive(source, CONTEXT, tag, into, UNTYPED)


def ramp(nbytes: int, start: int = 1) -> bytes:
    return bytes((start + i * 7) % 251 for i in range(nbytes))


# -- the tables -------------------------------------------------------------------------------------------


def test_what_a_user_or_a_death_may_cause_is_possible_in_every_state():
    for state in set(SendState) - {SendState.OVER}:
        for event in (SendEvent.CANCEL, SendEvent.PEER_DOWN, SendEvent.CLOSE):
            assert (state, event) in SEND_TABLE, (state, event)
    for state in set(ReceiveState) - {ReceiveState.OVER}:
        for event in (ReceiveEvent.PEER_DOWN, ReceiveEvent.CLOSE):
            assert (state, event) in RECEIVE_TABLE or state is ReceiveState.CLOSING, (state, event)


@pytest.mark.parametrize(
    ("table", "over"), [(SEND_TABLE, SendState.OVER), (RECEIVE_TABLE, ReceiveState.OVER)]
)
def test_every_state_is_reached_and_left_and_nothing_follows_the_end(table, over):
    first = type(over)(1)
    befores, afters = {state for state, _ in table}, {after for after, _ in table.values()}
    assert befores == set(type(over)) - {over}
    assert afters | {first} == set(type(over))
    assert {event for _, event in table} == set(type(next(iter(table))[1]))


# -- memory that is lent ----------------------------------------------------------------------------------


def lenders() -> list[Endpoint]:
    """Two ranks that share a lock and read each other's memory."""
    lock, ranks = threading.Lock(), list[Endpoint]()

    def carry(outgoing: Transmit) -> list[Action]:
        return ranks[outgoing.peer].take(outgoing.source, outgoing.frame)

    ranks += [Endpoint(Protocol(r, CONFIG, shares_memory=True), carry, lock) for r in range(2)]
    return ranks


def lend(ranks: list[Endpoint], data: bytearray, tag: int = TAG, sync: bool = False) -> Request:
    return ranks[0].send(1, Envelope(0, CONTEXT, tag, len(data)), memoryview(data), Lane.BULK, sync)


@pytest.mark.parametrize("nbytes", [0, 1, 100, 101, 4099])
@pytest.mark.parametrize("is_posted", [False, True])
def test_a_lent_message_is_copied_before_its_send_ends_and_without_the_lock(nbytes, is_posted):
    ranks, data, memory = lenders(), bytearray(ramp(nbytes)), bytearray(nbytes + 3)
    seen: list[tuple[bytes, bool]] = []
    if is_posted:
        request = ranks[1].receive(0, CONTEXT, TAG, memoryview(memory), UNTYPED)
    send = Request(1)
    envelope = Envelope(0, CONTEXT, TAG, nbytes)
    with ranks[0].lock:
        ends = ranks[0].run(ranks[0].protocol.send(1, envelope, memoryview(data), send, Lane.BULK, True))
    assert not send.done
    assert not any(memory), "no byte is copied under the lock"
    send.notify(lambda: seen.append((bytes(memory), ranks[0].lock.locked())))
    finish(ends)
    if not is_posted:
        assert not send.done
        request = ranks[1].receive(0, CONTEXT, TAG, memoryview(memory), UNTYPED)
    assert seen == [(ramp(nbytes) + bytes(3), False)]
    assert (request.done, request.error, request.envelope) == (True, None, envelope)
    assert not ranks[0].protocol.is_sending()
    assert ranks[1].protocol.inbox.is_idle()


@pytest.mark.parametrize("how", ["cancel", "close", "death"])
def test_memory_is_never_read_after_its_loan_has_ended(how):
    ranks, data = lenders(), bytearray(ramp(4099))
    send = lend(ranks, data)
    if how == "cancel":
        assert send.cancel()
    elif how == "close":  # the receiver has not been notified
        ranks[0].close()
    else:
        ranks[1].peer_down(PeerDown(0, "gone"))
    assert send.done is (how != "death")
    assert ranks[1].protocol.inbox.is_idle()
    request = ranks[1].receive(0, CONTEXT, TAG, None, UNTYPED)
    assert request.data is None
    if how == "death":
        assert isinstance(request.error, PeerLost)
        return
    assert isinstance(send.error, ClosedError)
    assert not request.done
    if how == "cancel":
        lend(ranks, bytearray(ramp(777, 5)))
        assert request.data == ramp(777, 5)


def test_an_offer_beyond_the_limit_breaks_the_protocol_and_leaves_a_state_that_can_end(monkeypatch):
    monkeypatch.setattr("unisono.messaging.protocol.RTS_MAX", 3)
    rank = Wire().ranks[1]
    for number in range(1, 7):
        rank.arrive(0, Frame(Kind.RTS, Lane.BULK, number, Envelope(0, CONTEXT, TAG, 5000)))
    with pytest.raises(ProtocolError, match="7 RTS; allowed: 3"):
        rank.arrive(0, Frame(Kind.RTS, Lane.BULK, 7, Envelope(0, CONTEXT, TAG, 5000)))
    rank.peer_down(PeerDown(0, "broke the protocol"))
    assert rank.protocol.inbox.is_idle()


# -- frames that cross ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 100, 101, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("has_buffer", [False, True])
def test_a_message_arrives_whole_on_both_sides_of_every_threshold(nbytes, sync, has_buffer):
    wire, data = Wire(), ramp(nbytes)
    memory = bytearray(nbytes + 3)
    request = wire.recv(into=memoryview(memory) if has_buffer else None)
    send = wire.send(data, sync=sync)
    assert send.done is (nbytes <= 100 and not sync)
    wire.deliver_all()
    assert send.error is request.error is None
    assert send.done
    assert bytes(memory if has_buffer else request.data) == (data + bytes(3) if has_buffer else data)
    pieces = max(1, -(-nbytes // 1000))
    by_rendezvous = [Kind.RTS, Kind.CTS, *[Kind.DATA] * pieces, Kind.FIN]
    assert [kind for kind in wire.kinds if kind is not Kind.CREDIT] == (
        by_rendezvous if sync or nbytes > 100 else [Kind.EAGER]
    )


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 1500])
def test_a_short_send_ends_at_its_cts_and_its_memory_is_free_while_a_copy_travels(nbytes):
    protocol, data, request = Protocol(0, CONFIG, 1000), bytearray(ramp(nbytes)), Request(1)
    protocol.send(1, Envelope(0, CONTEXT, TAG, nbytes), memoryview(data), request, Lane.BULK, True)
    actions = protocol.arrive(1, Frame(Kind.CTS, rendezvous_id=1))
    data[:] = bytes(nbytes)
    frames = [action.frame for action in actions if isinstance(action, Transmit)]
    ends = [action for action in actions if isinstance(action, End)]
    assert [frame.kind for frame in frames] == [Kind.DATA] * max(1, -(-nbytes // 1000))
    is_short = nbytes <= 100
    assert ends == ([End(request)] if is_short else [])
    assert b"".join(frame.data for frame in frames) == (ramp(nbytes) if is_short else bytes(nbytes))
    assert protocol.is_sending(), "a rank that leaves waits for the FIN"
    assert protocol.withdraw(request) == []
    assert protocol.arrive(1, Frame(Kind.FIN, rendezvous_id=1)) == ([] if is_short else [End(request)])
    assert not protocol.is_sending()


def test_a_cts_that_crosses_a_withdrawal_posts_the_receive_again_in_its_old_place():
    wire = Wire()
    first, second = wire.recv(), wire.recv()
    send = wire.send(ramp(200))
    assert wire.deliver(0) is Kind.RTS
    assert send.cancel()
    assert isinstance(send.error, ClosedError)
    later = wire.send(ramp(200, 5))
    wire.deliver_all()
    assert Kind.RTS_GONE in wire.kinds
    assert later.done
    # The second RTS arrived while only the second receive was posted.
    assert bytes(second.data) == ramp(200, 5)
    assert not first.done
    wire.send(ramp(50, 9))
    wire.send(ramp(50, 11))
    wire.deliver_all()
    assert bytes(first.data) == ramp(50, 9)


def test_a_receive_posted_again_takes_what_has_been_queued_meanwhile():
    wire = Wire()
    receive, send = wire.recv(), wire.send(ramp(200))
    wire.deliver(0)
    assert send.cancel()
    wire.send(ramp(10, 4))
    wire.deliver_all()
    assert bytes(receive.data) == ramp(10, 4)


def test_a_receive_that_is_cancelled_after_its_cts_ends_when_the_rts_turns_out_to_be_gone():
    wire = Wire()
    receive, send = wire.recv(), wire.send(ramp(200))
    wire.deliver(0)
    assert send.cancel()
    assert not receive.cancel(), "the data may still arrive"
    assert not receive.cancel()
    wire.send(ramp(10))
    wire.deliver_all()
    assert isinstance(receive.error, ClosedError)
    assert bytes(wire.recv().data) == ramp(10)


def test_a_receive_that_is_cancelled_after_its_cts_is_served_if_the_bytes_come():
    wire = Wire()
    receive, send = wire.recv(), wire.send(ramp(1200))
    wire.deliver(0)
    assert not receive.cancel()
    wire.deliver_all()
    assert send.done
    assert not send.cancel()
    assert bytes(receive.data) == ramp(1200)


def test_an_rts_that_is_withdrawn_in_the_queue_is_never_seen_again():
    wire = Wire()
    send = wire.send(ramp(200))
    wire.deliver(0)
    assert send.cancel()
    wire.deliver_all()
    assert not wire.ranks[1].probe(ANY, CONTEXT, ANY).done


def test_credit_comes_back_with_any_frame_and_at_a_quarter_without_one():
    wire = Wire()
    sends = [wire.send(ramp(100)) for _ in range(5)]
    assert [send.done for send in sends] == [True] * 4 + [False]
    wire.deliver_all()
    assert not wire.send(ramp(1)).done
    wire.recv()
    wire.deliver_all()
    assert Kind.CREDIT in wire.kinds
    assert wire.send(ramp(1)).done


def test_a_lane_that_is_full_does_not_fill_the_other():
    wire = Wire()
    while wire.send(ramp(100)).done:
        pass
    assert wire.send(ramp(100), lane=Lane.CONTROL).done


# -- ends in every state ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "steps"), [*((1500, steps) for steps in range(5)), *((77, steps) for steps in range(4))]
)
@pytest.mark.parametrize("end", ["peer down", "close"])
@pytest.mark.parametrize("side", [0, 1])
def test_both_requests_end_once_whenever_a_rank_leaves(nbytes, steps, end, side):
    """After each frame of a rendezvous of two pieces, and of a short one: RTS, CTS, DATA, DATA, FIN."""
    wire = Wire()
    receive, send = wire.recv(), wire.send(ramp(nbytes), sync=True)
    for source in (0, 1, 0, 0)[:steps]:
        wire.deliver(source)
    mine, other = wire.ranks[side], wire.ranks[1 - side]
    if end == "close":
        assert mine.close()
        mine.cut()
        for lane in Lane:
            wire.under_way[1 - side, lane].clear()  # the rank's transport is closed
        while wire.under_way[side, Lane.BULK]:
            wire.deliver(side)
    else:
        wire.deliver_all()
    other.peer_down(PeerDown(side, "gone", left=end == "close"))
    mine.peer_down(PeerDown(1 - side, "gone"))
    assert send.done
    assert receive.done
    for request in (send, receive):
        assert request.error is None or isinstance(request.error, ClosedError | PeerLost)
    if receive.error is None:
        assert bytes(receive.data) == ramp(nbytes)
    for rank in wire.ranks:
        assert not rank.protocol.is_sending()
        assert rank.protocol.inbox.is_idle()


def test_a_rank_that_closes_sends_what_was_matched_and_withdraws_the_rest():
    wire = Wire()
    receive, matched, unmatched = wire.recv(), wire.send(ramp(200)), wire.send(ramp(200), tag=9)
    wire.deliver(0)
    wire.deliver(1)
    wire.ranks[0].close()
    assert isinstance(unmatched.error, ClosedError)
    assert wire.ranks[0].protocol.is_sending()
    wire.deliver_all()
    assert not wire.ranks[0].protocol.is_sending()
    assert matched.error is None
    assert bytes(receive.data) == ramp(200)


def test_a_closed_rank_ends_a_receive_only_when_no_piece_is_being_written():
    wire = Wire()
    receive, send = wire.recv(into=memoryview(bytearray(1500))), wire.send(ramp(1500))
    wire.deliver(0)
    wire.deliver(1)
    first, second = wire.under_way[0, Lane.BULK]
    protocol = wire.ranks[1].protocol
    memory = protocol.place(0, first, 1000)
    wire.ranks[1].close()
    assert not receive.done, "the transport is writing into its memory"
    memory[:] = first.data
    wire.ranks[1].placed(0, first, 1000)
    assert isinstance(receive.error, ClosedError)
    assert protocol.place(0, second, 500) is None
    wire.ranks[0].peer_down(PeerDown(1, "left", left=True))
    assert isinstance(send.error, PeerLost)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.CTS, rendezvous_id=1),
        Frame(Kind.FIN, rendezvous_id=1),
        Frame(Kind.CREDIT, credit=(1, 0)),
        Frame(Kind.GOODBYE),
    ],
)
def test_a_frame_that_is_impossible_in_its_state_breaks_the_protocol(frame):
    wire = Wire()
    with pytest.raises(ProtocolError):
        wire.ranks[0].arrive(1, frame)
    wire.send(ramp(200))
    if frame.kind is Kind.CTS:
        wire.ranks[0].arrive(1, frame)  # the RTS has id 1
    with pytest.raises(ProtocolError):
        wire.ranks[0].arrive(1, frame)


# -- any order of frames ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_all_messages_arrive_in_order_with_any_order_of_lanes_and_any_cancellations(seed):
    """Random sends, receives, wildcards and cancellations; frames of different lanes in any order."""
    rng, wire = random.Random(seed), Wire()
    sends: list[tuple[Request, int, int]] = []
    receives: list[tuple[Request, int]] = []
    for number in itertools.count():
        match rng.choice(("send", "send", "recv", "recv", "frame", "frame", "frame", "cancel")):
            case "send":
                tag, nbytes = rng.randrange(2), rng.choice((1, 99, 101, 1000, 2001))
                lane = Lane(tag)
                header = number.to_bytes(4, "little")
                envelope = Envelope(0, CONTEXT, tag, nbytes, header=header)
                data = memoryview(ramp(nbytes, number))
                send = wire.ranks[0].send(1, envelope, data, lane, rng.random() < 0.2)
                sends.append((send, tag, number))
            case "recv":
                tag = rng.randrange(2)
                receives.append((wire.recv(rng.choice((0, ANY)), tag), tag))
            case "frame":
                if waiting := [key for key, frames in wire.under_way.items() if frames]:
                    wire.deliver(*rng.choice(waiting))
            case "cancel":
                requests = [request for request, *_ in (*sends, *receives)]
                if requests:
                    rng.choice(requests).cancel()
        if number > 150:
            break
    wire.deliver_all()
    while any(not send.done for send, *_ in sends):
        receives += [(wire.recv(0, tag), tag) for tag in range(2)]
        wire.deliver_all()
    for tag in range(2):
        sent = [number for send, of, number in sends if of == tag and send.error is None]
        got = [r for r, of in receives if of == tag and r.done and r.error is None]
        numbers = [int.from_bytes(request.envelope.header, "little") for request in got]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= set(sent), "a withdrawn message was received"
        for request, number in zip(got, numbers, strict=True):
            assert bytes(request.data) == ramp(request.envelope.nbytes, number)
