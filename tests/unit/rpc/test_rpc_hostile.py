"""Hostile names and random frames cause only errors, and other callers are still served."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.fuzz.rpc_frames import corpus, mutated
from tests.support.engines import MakeWorld, world
from tests.support.ranks import wait_until

import unisono as uni
from unisono._native import CERTAIN_BLOB_BYTES, frame_value, pack_frame
from unisono.comm.communicator import Communicator
from unisono.comm.control_messages import ServiceFound
from unisono.core.envelope import Lane, Tags
from unisono.rpc import Agent
from unisono.rpc.blobs import UnreadBlobs
from unisono.rpc.frame import ANSWER, ASK, FAILURE, GOODBYE, ITEM, Frame, open_frame, pack, texts_of
from unisono.rpc.registry import Registry
from unisono.rpc.streams import WINDOW

__all__ = ["world"]

NAMES = 100_000
FRAMES = 20_000


def hostile_names(seed: int, count: int):
    """Names of attributes, paths, modules and dunders, source code, and random text."""
    draw = random.Random(seed)
    words = [
        "os",
        "system",
        "echo",
        "eval",
        "import",
        "builtins",
        "class",
        "init",
        "globals",
        "..",
        "/",
        "self",
        "\0",
    ]
    shapes = ["{}", "__{}__", "{}.{}", "echo.{}", "echo.__{}__", "{}({})", " {}", "{}\n", "ECHO{}", "../{}"]
    for _ in range(count):
        if draw.random() < 0.5:
            shape = draw.choice(shapes)
            yield shape.format(*(draw.choice(words) for _ in range(shape.count("{}"))))
        else:
            yield "".join(chr(draw.choice([draw.randrange(128), draw.randrange(0xD7FF)])) for _ in range(9))


def test_hostile_names_find_nothing():
    registry = Registry()
    registry.add("echo", lambda: None)
    for name in hostile_names(1, NAMES):
        assert name == "echo" or registry.find(name) is None


def test_hostile_names_are_answered_with_an_error():
    (comm,) = uni.local(1)
    with comm:
        agent = Agent(comm)
        agent.register("echo", lambda: "echo")
        called = [name for name in hostile_names(2, 2000) if name != "echo"]
        works = [agent.start(0, name) for name in called]
        for work in works:
            with pytest.raises(uni.NotExposed):
                work.wait()
        assert agent.call(0, "echo") == "echo"


def test_frames_of_noise_are_errors_only():
    """An agent that serves dispatches the frames: nothing raises, and the calls of other ranks go on."""
    a, b, c = uni.local(3)
    with a, b, c:
        agents = [Agent(a), Agent(b)]
        ran = threading.Event()
        for agent in agents:
            agent.register("echo", lambda *args, **kwargs: ran.set() or [list(args), kwargs])
        assert agents[0].call(1, "echo", 1) == [[1], {}]
        draw = random.Random(7)
        seeds = corpus()
        for _ in range(FRAMES):
            agents[1]._dispatcher.on_frame(2, mutated(draw, seeds))
        assert agents[0].call(1, "echo", 2) == [[2], {}]
        assert agents[1].call(0, "echo", 3) == [[3], {}]


def test_the_frames_of_the_corpus_are_valid_and_of_every_kind():
    assert {open_frame(data).kind for data in corpus()} == set(range(9))
    for data in corpus():
        frame = open_frame(data)
        if not frame.blob_bytes:
            value = frame_value(data)
            again = pack_frame(
                frame.kind, frame.call, frame.number, frame.name, frame.timeout_s, frame.count, value
            )
            assert again == (data, ())


# -- a rank that does not read ----------------------------------------------------------------------------


Send = Callable[[bytes], None]
Read = Callable[[Callable[[list[Frame]], bool]], list[Frame]]


def asked(number: int, name: str, *args: Any, window: int = 0) -> bytes:
    """The frame of a call, as an agent sends it."""
    return pack(ASK, number, number, (args, {}), None, name, None, window)[0]


def server_and_silent_rank(
    comms: list[Communicator],
) -> tuple[Agent, Send, Read]:
    """The agent of rank 0; functions that send to it from rank 1, which has no agent, and read there."""
    agent, silent = Agent(comms[0]), comms[1].backend

    def send(frame: bytes) -> None:
        silent.start_send(0, agent._context, Tags.RPC, memoryview(frame), lane=Lane.CONTROL)

    def read(has_all: Callable[[list[Frame]], bool]) -> list[Frame]:
        requests = [silent.start_recv(0, agent._context, Tags.RPC, None) for _ in range(FRAMES)]

        def frames() -> list[Frame]:
            return [open_frame(bytes(request.data or b"")) for request in requests if request.done]

        wait_until(lambda: has_all(frames()), "all frames come")
        found = frames()
        for request in requests:
            request.cancel()
        return found

    comms[1]._group.control.send([0], ServiceFound(agent._context, "silent"))
    wait_until(lambda: agent._peers[1].name == "silent", "rank 0 takes it for an agent")
    return agent, send, read


@pytest.fixture
def pair(world: MakeWorld) -> Callable[[str], list[Communicator]]:
    return lambda kind: uni.local(2) if kind == "local" else world(2, kind)


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
def test_no_item_of_a_stream_is_lost_while_its_reader_reads_nothing(
    pair: Callable[[str], list[Communicator]], kind: str
) -> None:
    """More than 32 MiB of items wait for a reader that is busy elsewhere; then it reads them all."""
    streams = 600
    agent, send, read = server_and_silent_rank(comms := pair(kind))
    blob = random.Random(1).randbytes(1900)

    def items(number: int) -> Iterator[list[Any]]:
        for index in range(WINDOW):
            yield [number, index, blob, blob[:90]]

    agent.register("items", items)
    for number in range(1, streams + 1):
        send(asked(number, "items", number, window=WINDOW))
    wait_until(lambda: not any(agent._server._tables), "all streams have ended there")
    came: dict[int, list[int]] = {number: [] for number in range(1, streams + 1)}
    for frame in read(lambda frames: len(frames) == streams * (WINDOW + 1)):
        if frame.kind == ITEM:
            came[frame.call].append(frame.count)
        else:
            assert frame.kind == ANSWER
            assert frame_value(frame.data) == WINDOW
    assert all(sorted(found) == list(range(WINDOW)) for found in came.values())
    agent.close()
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("indices", [range(WINDOW + 1), (1, 1), (2**60,)], ids=["more", "twice", "far"])
def test_items_that_no_reader_asked_for_end_the_stream(indices: Sequence[int]) -> None:
    """A rank cannot fill the memory of one that reads slowly."""
    agent, send, _ = server_and_silent_rank(comms := uni.local(2))
    stream = agent.stream(1, "items")
    (number,) = agent._peers[1].calls
    for index in indices:
        send(pack(ITEM, number, number, index, count=index)[0])
    with pytest.raises(uni.ProtocolError, match="did not ask for"):
        list(stream)
    agent.close()
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
def test_a_call_to_a_rank_that_reads_nothing_fails_as_busy(
    pair: Callable[[str], list[Communicator]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.rpc.client.UNSENT_ASKS_MAX", 1 << 20)
    agent, _, _ = server_and_silent_rank(comms := pair(kind))
    texts = ["x" * 128] * 16
    works = []
    for _ in range(1000):  # beyond the credit of the lane and the limit, with calls that no thread waits for
        works += [agent.start(1, "f", *texts, timeout=None) for _ in range(10)]
        if works[-1].done():
            break
        for work in works[-10:]:
            work.cancel()
    with pytest.raises(uni.RemoteError, match="rank 1 has too much to read: the call was not sent"):
        works[-1].wait()

    def notify_until_refused() -> None:
        """More than one refusal: while the other engine still receives frames, a few more can be sent."""
        for _ in range(10_000):
            agent.notify(1, "f", *texts)

    def stream_until_refused() -> None:
        for _ in range(100):
            with pytest.raises(uni.RemoteError, match="not sent"):
                notify_until_refused()
            with contextlib.suppress(uni.DeadlineExceeded):  # the call was sent, and is never answered
                next(agent.stream(1, "f", *texts, timeout=0.2))

    with pytest.raises(uni.RemoteError, match="not sent"):
        notify_until_refused()
    with pytest.raises(uni.RemoteError, match="not sent"):
        stream_until_refused()
    agent.close()
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
def test_a_rank_that_calls_without_end_and_reads_nothing_is_dropped_once_and_notified(
    pair: Callable[[str], list[Communicator]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("unisono.rpc.peers.UNSENT_BYTES_MAX", 1 << 20)
    agent, send, read = server_and_silent_rank(comms := pair(kind))
    agent.register("f", lambda: "x" * 1900)
    mine = agent.start(1, "f", timeout=None)
    numbers = itertools.count(1)
    while not agent._peers[1].is_given_up:
        for _ in range(500):
            send(asked(next(numbers), "f"))
        wait_until(lambda: not any(agent._server._tables), "all are answered")
    with pytest.raises(uni.PeerLost, match="waited to be read"):
        mine.wait(timeout=20)
    frames = read(lambda frames: any(frame.kind == GOODBYE for frame in frames))
    assert all(frame.kind in (ASK, ANSWER, FAILURE, GOODBYE) for frame in frames)
    why = [texts_of(frame, 1)[0] for frame in frames if frame.kind == GOODBYE]
    assert ["waited to be read" in each for each in why] == [True]
    assert sum("given up" in record.message for record in caplog.records) == 1
    agent.close()
    for comm in comms:
        comm.close()


LONG = memoryview(bytes(CERTAIN_BLOB_BYTES + 1))


class _Slow:
    """Blobs that are read when the test allows it."""

    def __init__(self) -> None:
        self.done, self.checks, self.is_cancelled = False, 0, False


class _Lent:
    def __init__(self, slow: _Slow) -> None:
        self._slow = slow

    @property
    def done(self) -> bool:
        self._slow.checks += 1
        return self._slow.done

    def cancel(self) -> bool:
        self._slow.is_cancelled = True
        return False


def test_unread_answers_are_counted_for_each_caller() -> None:
    """One caller leaves 3,000 answers unread: only this caller is refused; no call checks all answers."""
    unread, limit = UnreadBlobs(2), 2048
    kept = [_Slow() for _ in range(3000)]
    for call, slow in enumerate(kept, 1):
        unread.add(0, call, 10 * call, [LONG]).on_lent([_Lent(slow)])
    before = sum(slow.checks for slow in kept)
    for _ in range(1000):
        assert unread.has_more_than(0, limit)
        assert not unread.has_more_than(1, limit)
    assert sum(slow.checks for slow in kept) - before <= 8 * 1000
    for slow in kept[:1500]:
        slow.done = True
    assert not all(unread.has_more_than(0, limit) for _ in range(1000)), "it has read enough of them"
    assert all(10 * call in unread._by_rank[0] for call in range(1501, 3001))


def test_a_call_that_is_cancelled_withdraws_all_its_blobs_whenever_they_are_lent() -> None:
    unread, kept = UnreadBlobs(1), [_Slow() for _ in range(6)]
    made = [unread.add(0, number // 3, number, [LONG]) for number in range(6)]
    for number in range(5):
        made[number].on_lent([_Lent(kept[number])])
    unread.cancel(0, 1)
    made[5].on_lent([_Lent(kept[5])])
    assert [slow.is_cancelled for slow in kept] == [False] * 3 + [True] * 3
    for slow in kept:
        slow.done = True
    assert unread.are_all_read()
    unread.has_more_than(0, 0)
    assert not unread._by_rank[0]
    assert not unread._by_call[0]
