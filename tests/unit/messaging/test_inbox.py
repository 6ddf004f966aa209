"""An inbox beside a model, and under threads: order, refusals, probes, withdrawals, peers that go."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.ranks import PATIENCE_S, run_each

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.core.dtypes import DTYPES
from unisono.core.envelope import ANY, UNTYPED, Envelope, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, PeerLost, UsageError
from unisono.messaging.backend import PeerDown
from unisono.messaging.inbox import InboundMessage, Inbox

MANY = settings(derandomize=True, deadline=None, database=None, max_examples=400)
FLOAT, DOUBLE = DTYPES["float32"].code, DTYPES["float64"].code


class Note(InboundMessage):
    """A message that writes down what happens to it."""

    def __init__(self, name: object) -> None:
        self.name = name
        self.delivered: list[Request] = []
        self.refused: list[Exception] = []

    def deliver(self, posted, envelope):
        self.delivered.append(posted.request)
        posted.request.complete(envelope, str(self.name).encode())

    def refuse(self, error):
        self.refused.append(error)


# -- beside a model --------------------------------------------------------------------------------------


@dataclass
class Ask:
    """A receive or probe, as the model sees it."""

    source: object
    context: int
    tag: object
    room: int | None
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
        if self.room is None:
            return True
        types = {self.dtype, e.dtype}
        return e.nbytes <= self.room and (len(types) == 1 or bool(types & {UNTYPED, DTYPES["uint8"].code}))


class Model:
    """The inbox as two lists."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.queue: list[tuple[Envelope, Note]] = []
        self.down: set[int] = set()
        self.everything: list[Ask] = []

    def arrive(self, envelope, note):
        for ask in [a for a in self.asks if a.fits(envelope)]:
            self.asks.remove(ask)
            if ask.is_probe:
                ask.outcome = ("saw", envelope)
            elif not ask.takes(envelope):
                ask.outcome = ("refused", envelope)
            else:
                ask.outcome = ("got", envelope, note.name)
                return
        self.queue.append((envelope, note))

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
            ask.outcome = ("got", found[0], found[1].name)


def outcome(request: Request) -> object:
    """How the real request ended, in the model's words."""
    if not request.done:
        return None
    match request.error:
        case None:
            if request.data is None:
                return ("saw", request.envelope)
            return ("got", request.envelope, int(request.data))
        case UsageError():
            return ("refused", request.envelope)
        case PeerLost():
            return ("lost",)
        case ClosedError():
            return ("withdrawn",)
    return request.error


SOURCES = st.integers(0, 2)
TAGS = st.sampled_from([0, 1, Tags.collective(0, 0)])
SIZES = st.integers(0, 3)
TYPES = st.sampled_from([FLOAT, DOUBLE, UNTYPED])
WILD = st.just(ANY)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), SOURCES, st.integers(0, 1), TAGS, SIZES, TYPES),
        st.tuples(st.just("arrive"), SOURCES, st.integers(0, 1), TAGS, SIZES, TYPES),
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


def play(inbox: Inbox, model: Model, number: int, verb: str, words: list) -> None:
    match verb:
        case "arrive":
            envelope, note = Envelope(*words), Note(number)
            inbox.arrive(envelope, note)
            model.arrive(envelope, note)
        case "receive":
            source, context, tag, room, dtype = words
            into = None if room is None else memoryview(bytearray(room))
            request = inbox.receive(source, context, tag, into, dtype)
            model.ask(Ask(source, context, tag, room, dtype, False, request))
        case "probe":
            request = inbox.probe(*words)
            model.ask(Ask(*words, None, UNTYPED, True, request))
        case "cancel" if model.everything:
            ask = model.everything[words[0] % len(model.everything)]
            assert ask.request.cancel() is (ask in model.asks)
            if ask in model.asks:
                model.asks.remove(ask)
                ask.outcome = ("withdrawn",)
        case "take back" if model.queue:
            envelope, note = model.queue.pop(words[0] % len(model.queue))
            assert inbox.withdraw_message(note)
            assert not inbox.withdraw_message(note)
        case "down":
            inbox.peer_down(PeerDown(words[0], "killed"))
            model.down.add(words[0])
            for ask in [a for a in model.asks if a.source == words[0]]:
                model.asks.remove(ask)
                ask.outcome = ("lost",)


@MANY
@given(STEPS)
def test_an_inbox_does_what_two_lists_would_do(steps):
    inbox, model = Inbox(0), Model()
    for number, (verb, *words) in enumerate(steps):
        play(inbox, model, number, verb, words)
        assert [outcome(a.request) for a in model.everything] == [a.outcome for a in model.everything]
        assert inbox.is_idle() is (not model.asks and not model.queue)
    for ask in model.asks:
        assert ask.request.cancel()
    for _, note in model.queue:
        assert inbox.withdraw_message(note)
        assert not note.delivered
    assert inbox.is_idle()


@MANY
@given(STEPS)
def test_messages_with_one_source_and_tag_are_received_in_the_order_they_came(steps):
    """Said once more without the model: numbers only grow, and nothing is received twice."""
    inbox, model = Inbox(0), Model()
    for number, (verb, *words) in enumerate(steps):
        play(inbox, model, number, verb, words)
    got = [a.request for a in model.everything if a.request.done and a.request.data]
    numbers = [int(request.data) for request in got]
    assert len(set(numbers)) == len(numbers)
    exact = defaultdict(list)
    for ask in model.everything:
        if ask.request.done and ask.request.data and ANY not in (ask.source, ask.tag) and ask.room is None:
            exact[ask.source, ask.context, ask.tag].append(int(ask.request.data))
    for received in exact.values():
        assert received == sorted(received)


# -- one by one ------------------------------------------------------------------------------------------


def arrive(inbox: Inbox, name: object, source=1, tag=0, nbytes=0) -> Note:
    note = Note(name)
    inbox.arrive(Envelope(source, 0, tag, nbytes), note)
    return note


def test_a_message_that_is_too_long_stays_for_the_next():
    inbox = Inbox(0)
    arrive(inbox, 7, nbytes=9)
    small = inbox.receive(1, 0, 0, memoryview(bytearray(8)))
    assert isinstance(small.error, UsageError)
    assert small.envelope.nbytes == 9
    assert inbox.receive(1, 0, 0, memoryview(bytearray(9))).data == b"7"
    assert inbox.is_idle()


def test_a_message_that_is_too_long_goes_on_to_the_receive_behind():
    inbox = Inbox(0)
    small, large = (inbox.receive(1, 0, 0, memoryview(bytearray(room))) for room in (8, 9))
    arrive(inbox, 7, nbytes=9)
    assert isinstance(small.error, UsageError)
    assert small.envelope.nbytes == 9, "who was refused can still be asked for its header"
    assert large.data == b"7"


def test_probes_see_the_message_that_a_receive_would_get():
    inbox = Inbox(0)
    early = [inbox.probe(ANY, 0, ANY), inbox.probe(1, 0, 5), inbox.probe(2, 0, ANY)]
    arrive(inbox, 1, tag=5)
    arrive(inbox, 2, tag=6)
    late = inbox.probe(1, 0, ANY)
    assert [probe.done for probe in early] == [True, True, False]
    assert {probe.envelope.tag for probe in (*early[:2], late)} == {5}
    assert inbox.receive(ANY, 0, ANY, None).data == b"1"
    assert inbox.receive(ANY, 0, ANY, None).data == b"2"
    assert early[2].cancel()
    assert inbox.is_idle()


def test_what_a_peer_sent_before_it_went_can_still_be_received():
    inbox = Inbox(0)
    waiting, anyone = inbox.receive(1, 0, 9, None), inbox.receive(ANY, 0, 9, None)
    arrive(inbox, 1)
    inbox.peer_down(PeerDown(1, "killed"))
    inbox.peer_down(PeerDown(1, "told twice"))
    assert isinstance(waiting.error, PeerLost)
    assert waiting.error.ranks == (1,)
    assert waiting.error.cause == "killed"
    assert not anyone.done, "another rank may still serve it"
    assert inbox.receive(1, 0, 0, None).data == b"1"
    assert isinstance(inbox.receive(1, 0, 0, None).error, PeerLost)
    assert isinstance(inbox.probe(1, 0, 0).error, PeerLost)
    assert anyone.cancel()


def test_closing_ends_both_sides_once():
    inbox = Inbox(0)
    receive, probe = inbox.receive(1, 0, 9, None), inbox.probe(1, 0, 9)
    queued = arrive(inbox, 1)
    inbox.close(ClosedError("shut"), PeerLost("gone", ranks=(0,)))
    inbox.close(ClosedError("again"), PeerLost("again"))
    assert receive.error.what == probe.error.what == "shut"
    assert [e.what for e in queued.refused] == ["gone"]
    assert [e.what for e in arrive(inbox, 2).refused] == ["gone"]
    assert isinstance(inbox.receive(1, 0, 0, None).error, ClosedError)
    assert inbox.is_idle()


def test_a_request_ends_once_and_tells_everyone():
    request, told = Request(1), []
    request.notify(lambda: told.append("early"))
    request.complete(None, b"")
    request.notify(lambda: told.append("late"))
    assert told == ["early", "late"]
    assert not request.cancel()
    with pytest.raises(AssertionError, match="ends once"):
        request.fail(ValueError())


def test_what_a_message_sets_off_may_use_the_inbox():
    """Callbacks run without the lock: a receive may post the next, a refusal may close."""
    inbox, received = Inbox(0), []

    def listen() -> None:
        request = inbox.receive(ANY, 0, ANY, None)

        def on_done() -> None:
            if request.error is None:
                received.append(request.data)
                listen()

        request.notify(on_done)

    listen()
    for number in range(50):
        arrive(inbox, number)
    assert received == [str(number).encode() for number in range(50)]
    inbox.close(ClosedError("shut"), PeerLost("gone"))


# -- under threads ---------------------------------------------------------------------------------------


def test_threads_lose_nothing_and_keep_the_order():
    """Four senders with two tags each, four receivers that take from one of them each, one that takes any."""
    inbox, count = Inbox(0), 300

    def send(source: int) -> None:
        for number in range(count):
            for tag in (0, 1):
                arrive(inbox, number, source=source, tag=tag)

    def receive(source: object, tag: int, number: int) -> list[tuple[int, int]]:
        taken = []
        for _ in range(number):
            done = threading.Event()
            request = inbox.receive(source, 0, tag, None)
            request.notify(done.set)
            assert done.wait(PATIENCE_S)
            taken.append((request.envelope.source, int(request.data)))
        return taken

    jobs = [lambda s=s: send(s) for s in range(4)]
    jobs += [lambda s=s: receive(s, 0, count) for s in range(4)]
    jobs += [lambda: receive(ANY, 1, 4 * count)]
    results = run_each(lambda job: job(), jobs).values()
    for source in range(4):
        assert results[4 + source] == [(source, number) for number in range(count)]
        assert [n for s, n in results[8] if s == source] == list(range(count))
    assert inbox.is_idle()


def test_cancelling_races_with_arriving_and_one_of_them_wins():
    inbox, rounds = Inbox(0), 400
    turn = threading.Barrier(2)
    requests: list[Request] = []

    def receiver() -> list[bool]:
        withdrawn = []
        for _ in range(rounds):
            requests.append(inbox.receive(1, 0, 0, None))
            turn.wait(PATIENCE_S)
            withdrawn.append(requests[-1].cancel())
            turn.wait(PATIENCE_S)
            if withdrawn[-1]:  # then the message is still there
                assert inbox.receive(1, 0, 0, None).data is not None
            turn.wait(PATIENCE_S)
        return withdrawn

    def sender() -> None:
        for number in range(rounds):
            turn.wait(PATIENCE_S)
            arrive(inbox, number)
            turn.wait(PATIENCE_S)
            turn.wait(PATIENCE_S)

    withdrawn, _ = run_each(lambda job: job(), [receiver, sender]).values()
    for request, was_withdrawn in zip(requests, withdrawn, strict=True):
        assert request.done
        assert (request.error is not None) is was_withdrawn
    assert inbox.is_idle()


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
        return comm.backend._hub.inboxes[comm.rank]

    def idle(inbox) -> bool:
        with inbox._lock:
            waiting = [p for p in inbox._matcher.all_posted() if p.tag != Tags.CONTROL]
            return not waiting and not list(inbox._matcher.all_unexpected())

    comms = uni.local(4)
    inboxes = run_each(program, comms).values()
    assert all(map(idle, inboxes))
    for comm in comms:
        comm.close()
    assert all(inbox.is_idle() for inbox in inboxes)


@pytest.mark.parametrize("kind", ["communicator", "backend"])
def test_a_forgotten_rank_leaves_even_if_the_collector_strikes_under_a_lock(kind):
    """The collector runs in whatever thread allocates, also in one that has just entered an inbox."""

    def forget() -> None:
        backends = LocalBackend.create(2)
        hub = backends[0]._hub
        places = [uni.Communicator.world(b) for b in backends] if kind == "communicator" else backends
        del backends
        with hub.inboxes[0]._lock:
            places.pop()
            gc.collect()
        request, done = hub.inboxes[0].receive(1, 1, 0, None), threading.Event()
        request.notify(done.set)
        assert done.wait(PATIENCE_S)
        assert isinstance(request.error, PeerLost)
        assert "left" in str(request.error)
        places.pop().close()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_wait_for_a_rank_that_is_forgotten_ends_with_the_cause():
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
