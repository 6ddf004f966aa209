"""The receiving side of the protocol, compared with a model and under threads: order, refusals, probes."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.ranks import PATIENCE_S, reference_local, run_each

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.config import Config
from unisono.core.dtypes import DTYPES
from unisono.core.envelope import ANY, UNTYPED, Envelope, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, PeerLost, UsageError
from unisono.messaging.actions import Frame, Kind
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol

MANY = settings(derandomize=True, deadline=None, database=None, max_examples=400)
FLOAT, DOUBLE = DTYPES["float32"].code, DTYPES["float64"].code


class Rank(Endpoint):
    """Rank 0. The test plays its peers, which send the data as soon as a CTS arrives."""

    def __init__(self) -> None:
        super().__init__(Protocol(0, Config()), self._answer)
        self.sent: list[tuple[int, Frame]] = []
        self.bytes_of: dict[tuple[int, int], bytes] = {}
        self.next_id = 1

    def eager(self, envelope: Envelope) -> None:
        self.arrive(envelope.source, Frame(Kind.EAGER, envelope=envelope, data=bytes(envelope.nbytes)))

    def rts(self, envelope: Envelope) -> int:
        number, self.next_id = self.next_id, self.next_id + 1
        self.bytes_of[envelope.source, number] = bytes(envelope.nbytes)
        self.arrive(envelope.source, Frame(Kind.RTS, rendezvous_id=number, envelope=envelope))
        return number

    def get(self, source, context, tag, into=None, dtype=UNTYPED) -> Request:
        return self.receive(source, context, tag, into, dtype)

    def is_idle(self) -> bool:
        return self.protocol.inbox.is_idle() and not self.protocol._receives

    def _answer(self, outgoing):
        frame = outgoing.frame
        self.sent.append((outgoing.peer, frame))
        if frame.kind is not Kind.CTS or (outgoing.peer, frame.rendezvous_id) not in self.bytes_of:
            return ()
        data = self.bytes_of.pop((outgoing.peer, frame.rendezvous_id))
        return self.take(outgoing.peer, Frame(Kind.DATA, rendezvous_id=frame.rendezvous_id, data=data))


# -- compared with a model -------------------------------------------------------------------------------


@dataclass
class Ask:
    """A receive or probe in the model."""

    source: object
    context: int
    tag: object
    limit: int | None
    dtype: int
    is_probe: bool
    request: Request
    outcome: object = None

    def fits(self, e: Envelope) -> bool:
        return (
            self.context == e.context
            and self.source in (ANY, e.source)
            and (self.tag == e.tag or (self.tag is ANY and 0 <= e.tag < 2**31))
        )

    def takes(self, e: Envelope) -> bool:
        if self.limit is None:
            return True
        types = {self.dtype, e.dtype}
        return e.nbytes <= self.limit and (len(types) == 1 or bool(types & {UNTYPED, DTYPES["uint8"].code}))


class Model:
    """An inbox as two lists."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.queue: list[tuple[Envelope, int]] = []  # with the id of the RTS, or 0
        self.down: set[int] = set()
        self.everything: list[Ask] = []

    def arrive(self, envelope, rendezvous_id):
        for ask in [a for a in self.asks if a.fits(envelope)]:
            self.asks.remove(ask)
            if ask.is_probe:
                ask.outcome = ("saw", envelope)
            elif not ask.takes(envelope):
                ask.outcome = ("refused", envelope)
            else:
                ask.outcome = ("got", envelope)
                return
        self.queue.append((envelope, rendezvous_id))

    def ask(self, ask: Ask) -> None:
        self.everything.append(ask)
        found = next(((e, n) for e, n in self.queue if ask.fits(e)), None)
        if found is None:
            if ask.source in self.down:
                ask.outcome = ("lost",)
            else:
                self.asks.append(ask)
        elif ask.is_probe:
            ask.outcome = ("saw", found[0])
        elif not ask.takes(found[0]):
            ask.outcome = ("refused", found[0])
        else:
            self.queue.remove(found)
            ask.outcome = ("got", found[0])


def outcome(ask: Ask) -> object:
    """The outcome of the real request, in the model's terms."""
    request = ask.request
    if not request.done:
        return None
    match request.error:
        case None:
            return ("saw" if ask.is_probe else "got", request.envelope)
        case UsageError():
            return ("refused", request.envelope)
        case PeerLost():
            return ("lost",)
        case ClosedError():
            return ("withdrawn",)
    return request.error


SOURCES = st.integers(1, 3)
TAGS = st.sampled_from([0, 1, Tags.collective(0, 0)])
SIZES = st.integers(0, 3)
TYPES = st.sampled_from([FLOAT, DOUBLE, UNTYPED])
WILD = st.just(ANY)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("eager"), SOURCES, st.integers(0, 1), TAGS, SIZES, TYPES),
        st.tuples(st.just("rts"), SOURCES, st.integers(0, 1), TAGS, SIZES, TYPES),
        st.tuples(
            st.just("receive"), SOURCES | WILD, st.integers(0, 1), TAGS | WILD, SIZES | st.none(), TYPES
        ),
        st.tuples(st.just("probe"), SOURCES | WILD, st.integers(0, 1), TAGS | WILD),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("take back"), st.integers(0, 40)),
        st.tuples(st.just("down"), SOURCES),
    ),
    max_size=40,
)


def play(rank: Rank, model: Model, number: int, verb: str, words: list) -> None:
    match verb:
        case "eager" | "rts" if words[0] not in model.down:
            envelope = Envelope(*words, str(number).encode())
            rendezvous_id = rank.rts(envelope) if verb == "rts" else rank.eager(envelope) or 0
            model.arrive(envelope, rendezvous_id)
        case "receive":
            source, context, tag, limit, dtype = words
            into = None if limit is None else memoryview(bytearray(limit))
            request = rank.get(source, context, tag, into, dtype)
            model.ask(Ask(source, context, tag, limit, dtype, False, request))
        case "probe":
            request = rank.probe(*words)
            model.ask(Ask(*words, None, UNTYPED, True, request))
        case "cancel" if model.everything:
            ask = model.everything[words[0] % len(model.everything)]
            assert ask.request.cancel() is (ask in model.asks)
            if ask in model.asks:
                model.asks.remove(ask)
                ask.outcome = ("withdrawn",)
        case "take back" if offered := [entry for entry in model.queue if entry[1]]:
            envelope, rendezvous_id = offered[words[0] % len(offered)]
            model.queue.remove((envelope, rendezvous_id))
            rank.arrive(envelope.source, Frame(Kind.WITHDRAW, rendezvous_id=rendezvous_id))
        case "down":
            rank.peer_down(PeerDown(words[0], "killed"))
            model.down.add(words[0])
            for ask in [a for a in model.asks if a.source == words[0]]:
                model.asks.remove(ask)
                ask.outcome = ("lost",)
            model.queue = [entry for entry in model.queue if not entry[1] or entry[0].source != words[0]]


@MANY
@given(STEPS)
def test_an_inbox_equals_the_model_of_two_lists(steps):
    rank, model = Rank(), Model()
    for number, (verb, *words) in enumerate(steps):
        play(rank, model, number, verb, words)
        assert [outcome(a) for a in model.everything] == [a.outcome for a in model.everything]
        assert rank.is_idle() is (not model.asks and not model.queue)
    for ask in model.asks:
        assert ask.request.cancel()
    for envelope, _ in model.queue:
        assert rank.get(envelope.source, envelope.context, envelope.tag).envelope == envelope
    assert rank.is_idle()


@MANY
@given(STEPS)
def test_messages_with_one_source_and_tag_are_received_in_the_order_they_came(steps):
    """The same without the model: sequence numbers only grow, and no message is received twice."""
    rank, model = Rank(), Model()
    for number, (verb, *words) in enumerate(steps):
        play(rank, model, number, verb, words)
    got = [a for a in model.everything if a.request.done and not a.request.error and not a.is_probe]
    numbers = [int(ask.request.envelope.header) for ask in got]
    assert len(set(numbers)) == len(numbers)
    exact = defaultdict(list)
    for ask, number in zip(got, numbers, strict=True):
        if ANY not in (ask.source, ask.tag) and ask.limit is None:
            exact[ask.source, ask.context, ask.tag].append(number)
    for received in exact.values():
        assert received == sorted(received)


# -- one by one ------------------------------------------------------------------------------------------


def arrive(rank: Rank, number: int, source=1, tag=0, nbytes=0) -> None:
    rank.eager(Envelope(source, 0, tag, nbytes, header=str(number).encode()))


def number_of(request: Request) -> int:
    assert request.error is None
    return int(request.envelope.header)


def test_a_message_that_is_too_long_stays_for_the_next():
    rank = Rank()
    arrive(rank, 7, nbytes=9)
    small = rank.get(1, 0, 0, memoryview(bytearray(8)))
    assert isinstance(small.error, UsageError)
    assert small.envelope.nbytes == 9
    assert number_of(rank.get(1, 0, 0, memoryview(bytearray(9)))) == 7
    assert rank.is_idle()


def test_a_message_that_is_too_long_is_matched_by_the_next_receive():
    rank = Rank()
    small, large = (rank.get(1, 0, 0, memoryview(bytearray(limit))) for limit in (8, 9))
    arrive(rank, 7, nbytes=9)
    assert isinstance(small.error, UsageError)
    assert small.envelope.nbytes == 9, "the header of a refused message can still be read"
    assert number_of(large) == 7


def test_probes_see_the_message_that_a_receive_would_get():
    rank = Rank()
    early = [rank.probe(ANY, 0, ANY), rank.probe(1, 0, 5), rank.probe(2, 0, ANY)]
    arrive(rank, 1, tag=5)
    arrive(rank, 2, tag=6)
    late = rank.probe(1, 0, ANY)
    assert [probe.done for probe in early] == [True, True, False]
    assert {probe.envelope.tag for probe in (*early[:2], late)} == {5}
    assert number_of(rank.get(ANY, 0, ANY)) == 1
    assert number_of(rank.get(ANY, 0, ANY)) == 2
    assert early[2].cancel()
    assert rank.is_idle()


def test_messages_of_a_peer_that_left_can_still_be_received():
    rank = Rank()
    waiting, anyone = rank.get(1, 0, 9), rank.get(ANY, 0, 9)
    arrive(rank, 1)
    rank.peer_down(PeerDown(1, "killed"))
    rank.peer_down(PeerDown(1, "reported twice"))
    assert isinstance(waiting.error, PeerLost)
    assert waiting.error.ranks == (1,)
    assert waiting.error.cause == "killed"
    assert not anyone.done, "another rank may still serve it"
    assert number_of(rank.get(1, 0, 0)) == 1
    assert isinstance(rank.get(1, 0, 0).error, PeerLost)
    assert isinstance(rank.probe(1, 0, 0).error, PeerLost)
    assert anyone.cancel()


def test_closing_ends_what_waits_once():
    rank = Rank()
    receive, probe, send = rank.get(1, 0, 9), rank.probe(1, 0, 9), rank.get(2, 0, 9)
    arrive(rank, 1)
    rank.rts(Envelope(1, 0, 0, 5))
    assert rank.close()
    assert not rank.close()
    for request in (receive, probe, send, rank.get(1, 0, 0)):
        assert isinstance(request.error, ClosedError)
        assert "rank 0 is closed" in str(request.error)
    arrive(rank, 2)
    rank.rts(Envelope(1, 0, 0, 5))
    assert rank.is_idle()


def test_a_request_ends_once_and_notifies_all_callbacks():
    request, told = Request(1), []
    request.notify(lambda: told.append("early"))
    request.complete(None, b"")
    request.notify(lambda: told.append("late"))
    assert told == ["early", "late"]
    assert not request.cancel()
    with pytest.raises(AssertionError, match="ends once"):
        request.fail(ValueError())


def test_callbacks_of_a_message_may_use_the_inbox():
    """Callbacks run without the lock: a receive may post the next, a refusal may close."""
    rank, received = Rank(), []

    def listen() -> None:
        request = rank.get(ANY, 0, ANY)

        def on_done() -> None:
            if request.error is None:
                received.append(number_of(request))
                listen()

        request.notify(on_done)

    listen()
    for number in range(50):
        arrive(rank, number)
    assert received == list(range(50))
    rank.close()


# -- under threads ---------------------------------------------------------------------------------------


def test_threads_lose_nothing_and_keep_the_order():
    """Four senders with two tags each; four receivers with one source each, and one for any source."""
    rank, count = Rank(), 300

    def send(source: int) -> None:
        for number in range(count):
            for tag in (0, 1):
                arrive(rank, number, source=source, tag=tag)

    def receive(source: object, tag: int, number: int) -> list[tuple[int, int]]:
        taken = []
        for _ in range(number):
            done = threading.Event()
            request = rank.get(source, 0, tag)
            request.notify(done.set)
            assert done.wait(PATIENCE_S)
            taken.append((request.envelope.source, number_of(request)))
        return taken

    jobs = [lambda s=s: send(s) for s in range(1, 5)]
    jobs += [lambda s=s: receive(s, 0, count) for s in range(1, 5)]
    jobs += [lambda: receive(ANY, 1, 4 * count)]
    results = run_each(lambda job: job(), jobs).values()
    for source in range(1, 5):
        assert results[3 + source] == [(source, number) for number in range(count)]
        assert [n for s, n in results[8] if s == source] == list(range(count))
    assert rank.is_idle()


def test_cancelling_races_with_arriving_and_one_of_them_wins():
    rank, rounds = Rank(), 400
    turn = threading.Barrier(2)
    requests: list[Request] = []

    def receiver() -> list[bool]:
        withdrawn = []
        for _ in range(rounds):
            requests.append(rank.get(1, 0, 0))
            turn.wait(PATIENCE_S)
            withdrawn.append(requests[-1].cancel())
            turn.wait(PATIENCE_S)
            if withdrawn[-1]:  # then the message can still be received
                assert rank.get(1, 0, 0).done
            turn.wait(PATIENCE_S)
        return withdrawn

    def sender() -> None:
        for number in range(rounds):
            turn.wait(PATIENCE_S)
            arrive(rank, number)
            turn.wait(PATIENCE_S)
            turn.wait(PATIENCE_S)

    withdrawn, _ = run_each(lambda job: job(), [receiver, sender]).values()
    for request, was_withdrawn in zip(requests, withdrawn, strict=True):
        assert request.done
        assert (request.error is not None) is was_withdrawn
    assert rank.is_idle()


# -- in a world ------------------------------------------------------------------------------------------


def test_a_world_that_is_done_leaves_nothing_in_any_inbox():
    def program(comm):
        row = comm.split(comm.rank % 2)
        for tag in range(5):
            comm.sendrecv(np.arange(tag), (comm.rank + 1) % comm.size, np.empty(tag, np.int64), ANY, tag)
        with pytest.raises(uni.DeadlineExceeded):
            comm.recv(np.empty(1), src=comm.rank, timeout=0)
        assert comm.probe(timeout=0) is None
        row.all_reduce(np.ones(2000))
        comm.barrier()
        row.close()
        return comm.backend.endpoint

    def idle(endpoint) -> bool:
        with endpoint.lock:
            matcher = endpoint.protocol.inbox.matcher
            waiting = [p for p in matcher.all_posted() if p.tag != Tags.CONTROL]
            return not waiting and not list(matcher.all_unexpected())

    comms = reference_local(4)
    endpoints = run_each(program, comms).values()
    assert all(map(idle, endpoints))
    for comm in comms:
        comm.close()
    assert all(endpoint.protocol.inbox.is_idle() for endpoint in endpoints)


@pytest.mark.parametrize("kind", ["communicator", "backend"])
def test_a_rank_that_is_dropped_leaves_even_if_it_is_collected_under_a_lock(kind):
    """The collector runs in any thread that allocates, also in one that holds the lock of an inbox."""

    def forget() -> None:
        backends = LocalBackend.create(2)
        hub = backends[0]._hub
        places = [uni.Communicator.world(b) for b in backends] if kind == "communicator" else backends
        del backends
        with hub.endpoints[0].lock:
            places.pop()
            gc.collect()
        request, done = hub.endpoints[0].receive(1, 1, 0, None, UNTYPED), threading.Event()
        request.notify(done.set)
        assert done.wait(PATIENCE_S)
        assert isinstance(request.error, PeerLost)
        assert "left" in str(request.error)
        places.pop().close()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_wait_for_a_rank_that_is_dropped_ends_with_the_cause():
    def program(comm):
        if comm.rank == 0:
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                comm.recv(np.empty(1), src=1, timeout=PATIENCE_S)

    comms = uni.local(2)
    place = [comms[0]]
    del comms
    gc.collect()
    with place[0]:
        run_each(program, place).values()
