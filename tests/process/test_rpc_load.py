"""Calls of every kind and size, and many at once: no value is lost, mixed up, late or kept in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.calls import run
from tests.support.ranks import PATIENCE_S

import unisono as uni
from unisono._native import CERTAIN_BLOB_BYTES, FRAME_BLOB_BYTES, FRAME_BYTES_MAX
from unisono.core.envelope import Tags
from unisono.rpc import Agent
from unisono.rpc.blobs import OutboundBlobs
from unisono.rpc.peers import QUEUE_MAX
from unisono.rpc.transport import MailboxTransport

CONTEXT = 0x5EED  # of no communicator
LINKS = ["local", "shm", "tcp"]
MORE_LINKS = [pytest.param(kind, marks=pytest.mark.more) for kind in ("rings", "tls", "quic", "gloo", "iroh")]


# -- kinds and sizes -------------------------------------------------------------------------------------


def ramp(length: int, seed: int) -> bytes:
    return ((np.arange(length) * 7 + seed) % 251).astype(np.uint8).tobytes()


KINDS: dict[str, Callable[[int, int], Any]] = {
    "bytes": ramp,
    "bytearray": lambda n, seed: bytearray(ramp(n, seed)),
    "text": lambda n, seed: "".join(chr(32 + (i + seed) % 90) for i in range(n)),
    "text in UTF-8": lambda n, seed: "".join(chr(200 + (i + seed) % 90) for i in range(n // 2)),
    "array": lambda n, seed: np.frombuffer(ramp(n, seed), np.uint8).copy(),
    "ints": lambda n, seed: [i + seed for i in range(n // 3)],
    "texts": lambda n, seed: {f"{i}": ["t" * 50, seed, None] for i in range(n // 60)},
}
# Lengths around every threshold of the frame, of the eager protocol and of the links.
THRESHOLDS = (
    128,
    256,
    1024,
    2944,
    4096,
    7040,
    FRAME_BLOB_BYTES,
    FRAME_BYTES_MAX,
    32_768,
    65_536,
    131_072,
    262_144,
)
LENGTHS = [0, 1, *(at + step for at in THRESHOLDS for step in (-1, 0, 1)), 1_000_003]


def same(got: Any, sent: Any) -> bool:
    if isinstance(sent, np.ndarray):
        return got.dtype == sent.dtype and np.array_equal(got, sent) and got.flags.writeable
    return type(got) is type(sent) and bool(got == sent)


def every_kind(comm: uni.Communicator, lengths: list[int]) -> int:
    agent = Agent(comm)
    agent.register("echo", lambda *args, **kwargs: (args, kwargs))

    @agent.expose
    async def later(x: Any) -> Any:
        return x

    @agent.expose
    def each(x: Any, count: int) -> Any:
        for i in range(count):
            yield i, x

    comm.barrier()
    checked, other = 0, 1 - comm.rank
    for name, make in KINDS.items():
        for length in lengths:
            value = make(length, comm.rank)
            (first, inner), named = agent.call(other, "echo", value, [1, {"deep": (value,)}], key=value)
            assert same(first, value), (name, length)
            assert inner[0] == 1
            assert same(inner[1]["deep"][0], value), (name, length)
            assert same(named["key"], value), (name, length)
            assert same(agent.start(other, "later", value).wait(), value), (name, length)
            checked += 1
        value = make(max(lengths) // 8, comm.rank)
        items = list(agent.stream(other, "each", value, 20))
        assert [i for i, _ in items] == list(range(20))
        assert all(same(item, value) for _, item in items)
        for i, (args, _) in enumerate(agent.call_all("echo", value, comm.rank)):
            assert same(args[0], value), (name, i)
    comm.barrier()
    return checked


@pytest.mark.parametrize("kind", [*LINKS, *MORE_LINKS])
def test_every_kind_of_every_length_arrives_as_it_left(kind: str) -> None:
    lengths = LENGTHS if kind in LINKS else LENGTHS[1::5]
    assert run(kind, every_kind, 2, lengths) == [len(KINDS) * len(lengths)] * 2


def test_every_kind_arrives_in_virtual_time() -> None:
    lengths = LENGTHS[::9]
    assert uni.simulate(every_kind, 2, lengths).results == [len(KINDS) * len(lengths)] * 2


# -- blobs beside their frame ------------------------------------------------------------------------------


def receives_after_reading(comm: uni.Communicator, lengths: list[int]) -> list[bool]:
    """Rank 0 sends frames, each with a blob. For each blob: whether it is here once its frame was read."""
    backend = comm._group.backend
    mailbox = backend.mailbox(CONTEXT, Tags.RPC)
    assert mailbox is not None
    transport = MailboxTransport(mailbox, backend.runtime)
    frames: list[bytes] = []
    transport.start(lambda source, frame: frames.append(frame))
    comm.barrier()
    if comm.rank == 0:
        for number, length in enumerate(lengths, 1):
            blobs = OutboundBlobs(number, [memoryview(ramp(length, number))])
            assert transport.send(1, bytes([number]), 1 << 20, outbound=blobs)
    comm.barrier()  # its messages travel in the lane of blobs, behind these
    were_here = []
    for number, length in enumerate(lengths if comm.rank == 1 else [], 1):
        while len(frames) < number:
            transport.read()
        errors: list[BaseException | None] = []
        memory = bytearray(length)
        transport.receive(0, number, memory, errors.append)
        were_here.append(bool(errors))
        while not errors:
            transport.read()
        assert errors == [None]
        assert memory == ramp(length, number)
        memory.append(0)  # it is lent to the mailbox no longer
    comm.barrier()
    transport.close()
    return were_here


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_blob_that_is_sent_eagerly_is_here_when_its_frame_is_read(kind: str) -> None:
    """So one read brings a call with its arguments. Shared memory has no eager message above 16 KiB."""
    eager = [FRAME_BLOB_BYTES, FRAME_BYTES_MAX, *([CERTAIN_BLOB_BYTES] if kind == "tcp" else [])]
    lengths = [*eager, CERTAIN_BLOB_BYTES + 1]
    assert run(kind, receives_after_reading, 2, lengths)[1] == [True] * len(eager) + [False]


def reads_per_call(comm: uni.Communicator, nbytes: int, calls: int) -> float:
    """How often the threads of this rank return from reading with messages, for each call of rank 0."""
    agent = Agent(comm)
    agent.register("echo", lambda x: x)
    transport = agent._transport
    assert isinstance(transport, MailboxTransport)
    value = ramp(nbytes, comm.rank)
    comm.barrier()
    if comm.rank == 0:
        assert agent.call(1, "echo", value) == value
    comm.barrier()
    before = transport._mailbox.batches()
    for _ in range(calls if comm.rank == 0 else 0):
        agent.call(1, "echo", value)
    comm.barrier()
    return (transport._mailbox.batches() - before) / calls


def test_a_call_with_16_kib_is_read_at_once_on_both_sides() -> None:
    """Not once more for its blob, unless a busy machine delays a thread between the blob and the frame."""
    assert max(run("tcp", reads_per_call, 2, 16 << 10, 300)) < 1.25


# -- many at once ----------------------------------------------------------------------------------------


def in_flight(comm: uni.Communicator, threads: int, flight: int, total: int) -> int:
    """Threads of rank 0 keep calls under way to rank 1, or to all other ranks if there are more."""
    agent = Agent(comm)
    agent.register("echo", lambda x, *rest: (x, comm.rank))
    comm.barrier()
    wrong: list[Any] = []

    def caller(number: int) -> None:
        try:
            waiting: list[tuple[Any, int, uni.Work[Any]]] = []
            for i in range(total):
                dst = 1 if comm.size == 2 else i % comm.size
                x = (number, i) if i % 10 else np.arange(i % 5000) + number
                waiting.append((x, dst, agent.start(dst, "echo", x, "rest" * (i % 7), timeout=PATIENCE_S)))
                assert len(agent._peers[dst].calls) <= QUEUE_MAX + threads
                if len(waiting) >= flight or i == total - 1:
                    for sent, asked, work in waiting:
                        came, rank = work.wait()
                        if rank != asked or not np.array_equal(came, sent):
                            wrong.append((sent, came, asked, rank))
                    waiting.clear()
        except BaseException as error:
            wrong.append(error)

    if comm.rank == 0:
        running = [threading.Thread(target=caller, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not wrong, wrong[:3]
        assert not any(peer.calls or peer.admissions for peer in agent._peers)
    comm.barrier()
    assert not any(agent._server._tables)
    comm.barrier()
    return threads * total


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize(("threads", "flight"), [(1, 64), (8, 64), (1, 5000), (8, 5000)])
@pytest.mark.parametrize("size", [2, 3])
def test_calls_under_way_are_all_answered_and_their_number_is_bounded(
    kind: str, threads: int, flight: int, size: int
) -> None:
    total = max(flight, 2000) // threads
    assert run(kind, in_flight, size, threads, flight // threads, total) == [threads * total] * size


# Twice the documented lateness of a deadline, because every core is busy.
LATE_S = 0.6


def expire_among_many(comm: uni.Communicator) -> int:
    """Some of 5,000 calls are never answered: they expire at their deadline, and the others are answered."""
    agent = Agent(comm, handlers=200)
    stuck = threading.Event()
    agent.register("double", lambda x: 2 * x)
    agent.register("stuck", lambda: stuck.wait(PATIENCE_S))
    comm.barrier()
    ended: list[float] = []
    if comm.rank == 0:
        works, late = [], []
        for i in range(5_000):
            if i % 50 == 0:
                late.append(work := agent.start(1, "stuck", timeout=LATE_S))
                began = time.monotonic()
                work.on_done(lambda began=began: ended.append(time.monotonic() - began))  # type: ignore[attr-defined,misc]
            works.append(agent.start(1, "double", i))
        assert uni.wait_all(works) == [2 * i for i in range(5_000)]
        for work in late:
            with pytest.raises(uni.DeadlineExceeded):
                work.wait()
        assert max(ended) < 2 * LATE_S, sorted(ended)[-3:]
    comm.barrier()
    stuck.set()
    comm.barrier()
    return len(ended)


@pytest.mark.parametrize("kind", LINKS)
def test_deadlines_are_kept_among_many_calls(kind: str) -> None:
    assert run(kind, expire_among_many, 2) == [100, 0]


def busy_callee(comm: uni.Communicator, how: str) -> int:
    """The main thread of rank 1 computes; its handlers still run, and deadlines are kept."""
    agent = Agent(comm)
    over, stuck = threading.Event(), threading.Event()
    agent.register("double", lambda x: 2 * x)
    agent.register("stuck", lambda: stuck.wait(PATIENCE_S))
    agent.register("over", over.set)
    comm.barrier()
    served = 0
    if comm.rank == 0:
        began, ended = time.monotonic(), []
        late = [agent.start(1, "stuck", timeout=LATE_S) for _ in range(3)]
        for work in late:
            work.on_done(lambda: ended.append(time.monotonic() - began))  # type: ignore[attr-defined]
        for i in range(100):
            assert agent.call(1, "double", i) == 2 * i
        works = [agent.start(1, "double", np.full(3000, i)) for i in range(200)]
        for i, came in enumerate(uni.wait_all(works)):
            assert (came == 2 * i).all()
            served += 1
        for work in late:
            with pytest.raises(uni.DeadlineExceeded):
                work.wait()
        assert all(LATE_S <= after < 2 * LATE_S for after in ended), ended
        agent.call(1, "over")
    else:
        matrix = np.ones((200, 200))
        while how != "barrier" and not over.is_set():
            _ = matrix @ matrix if how == "numpy" else sum(range(100_000))
    comm.barrier()
    stuck.set()
    comm.barrier()
    return served


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("how", ["barrier", "numpy", "python"])
def test_calls_are_served_while_the_main_thread_is_busy(kind: str, how: str) -> None:
    assert run(kind, busy_callee, 2, how) == [200, 0]


def never_waits(comm: uni.Communicator, path: str) -> int:
    """Rank 0 starts calls and then makes no further call of the library until all handlers have run."""
    agent = Agent(comm)
    came: list[int] = []

    @agent.expose
    def note(i: int) -> None:
        came.append(i)
        if len(came) == 100:
            Path(path).touch()

    comm.barrier()
    if comm.rank == 0:
        works = [agent.start(1, "note", i) for i in range(100)]
        until = time.monotonic() + PATIENCE_S
        while not Path(path).exists():
            assert time.monotonic() < until, "a call that no thread waits for was not sent"
        uni.wait_all(works)
    comm.barrier()
    return len(set(came))


def waited_for_twice(comm: uni.Communicator) -> float:
    """The longest time from the end of a call until the last of three threads has its value."""
    agent = Agent(comm)
    release = threading.Event()

    @agent.expose
    def waits() -> float:
        release.wait(PATIENCE_S)
        release.clear()
        return time.monotonic()  # the same clock for both ranks

    @agent.expose
    def lasts() -> None:
        time.sleep(0.2)

    agent.register("release", release.set)
    comm.barrier()
    late = 0.0
    if comm.rank == 0:
        for _ in range(3):
            work, came = agent.start(1, "waits"), []
            threads = [
                threading.Thread(target=lambda w=work, c=came: c.append(-w.wait() + time.monotonic()))
                for _ in range(3)
            ]
            reads = threading.Thread(target=agent.call, args=(1, "lasts"))  # this thread reads for all
            reads.start()
            time.sleep(0.02)
            for thread in threads:
                thread.start()
            time.sleep(0.05)
            agent.notify(1, "release")
            for thread in (*threads, reads):
                thread.join(PATIENCE_S)
            assert len(came) == 3
            late = max(late, *came)
    comm.barrier()
    return late


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
def test_every_thread_that_waits_for_a_call_is_woken(kind: str) -> None:
    assert run(kind, waited_for_twice, 2)[0] < 0.5


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_started_calls_are_sent_although_no_thread_waits(kind: str, tmp_path: Path) -> None:
    assert run(kind, never_waits, 2, str(tmp_path / "all")) == [0, 100]
