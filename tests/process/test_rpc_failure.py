"""Calls to or from ranks that die, stop or are slow; and many calls at once."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from tests.support.paths import ROOT
from tests.support.processes import Failed, forked, run_processes
from tests.support.ranks import PATIENCE_S, run_ranks

import unisono as uni
from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.rpc import Agent
from unisono.simulation import Kill, Network, Pause, sleep

pytestmark = pytest.mark.more

# Twice the bounds of DESIGN.md, section 8: for a dead rank, and for a silent rank.
DEAD_S, SILENT_S = 2 * 0.5, 2 * 3.0


# -- processes -------------------------------------------------------------------------------------------


def caller_and_callee(backend: NativeBackend, pipe: Connection) -> Any:
    """Rank 0 calls rank 1, whose handler reports that it has begun and never returns."""
    comm = Communicator.world(backend)
    agent = Agent(comm)
    if comm.rank == 1:

        @agent.expose
        def never(x: Any) -> None:
            pipe.send("begun")
            time.sleep(600)

        agent.register("echo", lambda x: x)
        comm.barrier()
        pipe.recv()
        return None
    comm.barrier()
    agent.call(1, "echo", 1)
    works = [agent.start(1, "never", np.zeros(100_000)) for _ in range(3)]
    errors = []
    for work in works:
        try:
            work.wait()
        except uni.PeerLost as error:
            errors.append(error.ranks)
    ended = time.monotonic()
    try:
        agent.call(1, "echo", 2)
    except uni.PeerLost as error:
        errors.append(error.ranks)
    return errors, ended


@pytest.mark.parametrize(
    ("kind", "how", "bound_s"),
    [
        *((kind, signal.SIGKILL, DEAD_S) for kind in ("shm", "tcp")),
        *((kind, signal.SIGSTOP, SILENT_S) for kind in ("shm", "tcp")),
        *(
            pytest.param(k, signal.SIGKILL, DEAD_S, marks=pytest.mark.more)
            for k in ("tls", "quic", "gloo", "iroh")
        ),
        *(pytest.param(k, signal.SIGSTOP, SILENT_S, marks=pytest.mark.more) for k in ("tls", "quic", "iroh")),
    ],
)
def test_a_callee_that_is_killed_or_stopped_is_lost_in_time(kind, how, bound_s):
    with forked(caller_and_callee, 2, kind=kind) as ranks:
        for _ in range(3):
            assert ranks.receive(1) == "begun"
        ranks.signal(1, how)
        struck = time.monotonic()
        errors, ended = ranks.result(0)
        assert errors == [(1,)] * 4
        assert ended - struck < bound_s


def caller_is_killed(backend: NativeBackend, pipe: Connection) -> Any:
    comm = Communicator.world(backend)
    agent = Agent(comm)
    cancelled = threading.Event()

    @agent.expose
    async def wait() -> None:
        import asyncio

        try:
            pipe.send("begun")
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    agent.register("echo", lambda x: x)
    comm.barrier()
    if comm.rank == 0:
        agent.call(1, "wait")
    if comm.rank == 1:
        assert cancelled.wait(60)
        return agent.call(2, "echo", 5)  # the other ranks go on
    pipe.recv()
    return None


def test_calls_of_a_killed_caller_are_cancelled():
    with forked(caller_is_killed, 3) as ranks:
        assert ranks.receive(1) == "begun"
        ranks.signal(0, signal.SIGKILL)
        assert ranks.result(1) == 5


def test_the_answer_of_a_rank_that_leaves_at_once_arrives():
    def program(comm: uni.Communicator) -> Any:
        agent = Agent(comm)
        asked = threading.Event()

        @agent.expose
        def last(x: np.ndarray) -> np.ndarray:
            asked.set()
            return x + 1

        comm.barrier()
        if comm.rank == 1:
            assert asked.wait(60)
            return None
        return agent.call(1, "last", np.arange(100_000)).sum()

    for kind in ("shm", "tcp"):
        assert run_processes(program, 2, kind=kind)[0] == np.arange(1, 100_001).sum()


# -- many at once ----------------------------------------------------------------------------------------


@uni.register
@dataclasses.dataclass
class Labelled:
    weight: int
    content: Any = None


def values(draw: random.Random, i: int) -> Any:
    """A value of any kind; one in five has any length, often next to a threshold of frames and blobs."""
    if draw.random() > 0.2:
        return draw.choice([i, str(i), {"i": [i, None, 2.5]}, (i, {i}), Labelled(i), -(2**70) - i])
    length = draw.choice([0, 1, 10, 3_000, 15_359, 15_361, 16_384, 65_536, 65_537, 300_000])
    data = bytes((i + k) % 251 for k in range(7)) * (length // 7)
    kind = draw.randrange(6)
    if kind < 3:
        return [data, bytearray(data), data.hex()][kind]
    return [np.frombuffer(data, np.uint8).copy(), [data, "ü" * length], Labelled(i, [data])][kind - 3]


def is_same(came: Any, sent: Any) -> bool:
    if isinstance(sent, np.ndarray):
        return isinstance(came, np.ndarray) and np.array_equal(came, sent)
    return type(came) is type(sent) and bool(came == sent)


def crowd(comm: uni.Communicator, threads: int, calls: int) -> int:
    """Threads of all ranks call each other, nested, in every form, with any value, while collectives run."""
    agent = Agent(comm)
    notified = itertools.count()

    @agent.expose
    def work(x: Any, hops: list[int]) -> Any:
        return agent.call(hops[0], "work", x, hops[1:]) if hops else [comm.rank, x]

    @agent.expose
    async def work_async(x: Any, hops: list[int]) -> Any:
        return await agent.start(hops[0], "work", x, hops[1:]) if hops else [comm.rank, x]

    @agent.expose
    def each(x: Any, count: int) -> Any:
        for _ in range(count):
            yield [comm.rank, x]

    agent.register("work_inline", lambda x: [comm.rank, x], inline=True)
    agent.register("note", lambda x: next(notified))
    comm.barrier()
    wrong: list[Any] = []
    sent = [0] * comm.size

    def call(draw: random.Random, i: int, x: Any) -> tuple[int, list[Any]]:
        """Call in one of the forms; return the ranks that must have answered, and their answers."""
        hops = [draw.randrange(comm.size) for _ in range(draw.randrange(1, 4))]
        match draw.randrange(8):
            case 0:
                return hops[0], list(agent.stream(hops[0], "each", x, 3, timeout=100))
            case 1:
                return hops[0], [agent.call(hops[0], "work_inline", x=x, timeout=100)]
            case 2:
                agent.notify(hops[0], "note", x)
                with lock:
                    sent[hops[0]] += 1
                return hops[0], []
            case 3:
                return hops[-1], [agent.start(hops[0], "work", x=x, hops=hops[1:], timeout=100).wait()]
            case way:
                name = "work_async" if way == 4 else "work"
                return hops[-1], [agent.call(hops[0], name, x, hops[1:], timeout=100)]

    def caller(number: int) -> None:
        draw = random.Random(f"{comm.rank} {number}")
        try:
            for i in range(calls):
                x = values(draw, i)
                rank, answers = call(draw, i, x)
                wrong.extend(
                    (i, rank, came) for came in answers if came[0] != rank or not is_same(came[1], x)
                )
        except BaseException as error:
            wrong.append(error)

    lock = threading.Lock()

    running = [threading.Thread(target=caller, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    rounds = 0
    while comm.all_reduce(int(any(thread.is_alive() for thread in running))):
        rounds += 1
        sums = comm.all_reduce(np.arange(101) + comm.rank)
        np.testing.assert_array_equal(sums, comm.size * np.arange(101) + sum(range(comm.size)))
    for thread in running:
        thread.join()
    assert not wrong, str(wrong[:3])[:2000]
    expected = int(comm.all_reduce(np.array(sent))[comm.rank])
    until = time.monotonic() + 60
    while (count := next(notified)) < expected:  # each query of the count is a call, too
        expected += 1
        assert time.monotonic() < until, f"{expected - count} notifications are missing"
        time.sleep(0.01)
    comm.barrier()
    return rounds


@pytest.mark.parametrize("where", ["local", "shm", "tcp"])
def test_many_threads_call_each_other_beside_collectives(where):
    size, threads, calls = 4, 4, 40
    if where == "local":
        run_ranks(crowd, size, threads, calls).values()
        return
    for result in run_processes(crowd, size, threads, calls, kind=where):
        assert not isinstance(result, Failed), result


def test_running_handlers_are_bounded_and_other_calls_wait(ranks):
    """A thousand calls for two slots: at most two handlers run at a time, and each call is answered."""

    def program(comm: uni.Communicator) -> Any:
        agent = Agent(comm, handlers=2)
        now, most, lock = [0], [0], threading.Lock()

        @agent.expose
        def busy(i: int) -> int:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.0005)
            with lock:
                now[0] -= 1
            return i

        results = None
        comm.barrier()
        if comm.rank == 0:
            results = uni.wait_all([agent.start(1, "busy", i) for i in range(1000)])
        comm.barrier()
        return results, most[0]

    (results, _), (_, most) = ranks(program, 2).values()
    assert results == list(range(1000))
    assert 1 <= most <= 2


def test_nested_calls_through_one_slot_do_not_deadlock():
    def program(comm: uni.Communicator) -> Any:
        agent = Agent(comm, handlers=1)

        @agent.expose
        def down(n: int) -> int:
            return 0 if n == 0 else 1 + agent.call((comm.rank + 1) % comm.size, "down", n - 1)

        comm.barrier()
        works = [agent.start(1 - comm.rank, "down", 20) for _ in range(5)]
        results = uni.wait_all(works)
        comm.barrier()
        return results

    assert run_ranks(program, 2).values() == [[20] * 5] * 2
    assert run_processes(program, 2) == [[20] * 5] * 2


def deep(comm: uni.Communicator) -> Any:
    agent = Agent(comm)

    @agent.expose
    def down(n: int) -> int:
        return 0 if n == 0 else 1 + agent.call(1 - comm.rank, "down", n - 1, timeout=100)

    agent.register("ready", lambda: True)
    comm.barrier()
    results = []
    if comm.rank == 0:
        results.append(agent.call(1, "down", 1500, timeout=100))
        try:
            agent.call(1, "down", 2500, timeout=100)
        except uni.RemoteError:
            results.append("refused")
        results.append(agent.call(1, "ready"))
    comm.barrier()
    return results


def test_calls_that_are_nested_too_deep_are_refused_at_once():
    """1,024 handlers may wait on a rank; the next call is refused, however many calls are under way."""
    assert run_processes(deep, 2, patience_s=180) == [[1500, "refused", True], []]


# -- lanes -----------------------------------------------------------------------------------------------


def beside_full_lane(comm: uni.Communicator) -> Any:
    """Rank 1 never receives the messages of rank 0: short ones that use up the credit, and a long one."""
    agent = Agent(comm)
    agent.register("double", lambda x: 2 * x)
    comm.barrier()
    results = []
    if comm.rank == 0:
        works = [comm.start.send(np.zeros(1000), 1, tag) for tag in range(400)]
        works.append(comm.start.send(np.zeros(1 << 20), 1, 400))
        results = [agent.call(1, "double", i) for i in range(100)]
        long = np.arange(300_000)
        results.append(int(agent.call(1, "double", long).sum()))
        results.append(sum(not work.done() for work in works) > 0)
        agent.call(1, "take")
        uni.wait_all(works)
    else:
        taking = threading.Event()
        agent.register("take", taking.set)
        taking.wait(60)
        for tag in range(400):
            comm.recv(np.empty(1000), 0, tag)
        comm.recv(np.empty(1 << 20), 0, 400)
    comm.barrier()
    return results


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_messages_that_are_not_received_do_not_delay_calls(kind):
    first, _ = run_processes(beside_full_lane, 2, kind=kind)
    assert first == [*range(0, 200, 2), 300_000 * 299_999, True]


def beside_collectives(comm: uni.Communicator) -> Any:
    agent = Agent(comm)
    released = threading.Event()

    @agent.expose
    def slowly(x: int) -> int:
        assert released.wait(PATIENCE_S)
        return x

    agent.register("at_once", lambda x: x)
    agent.register("release", released.set)
    comm.barrier()
    slow = agent.start(1 - comm.rank, "slowly", comm.rank)
    x = np.full(1000, float(comm.rank + 1))
    for _ in range(200):
        comm.all_reduce(x, "max")
        assert agent.call(1 - comm.rank, "at_once", 7) == 7
    was_slow = not slow.done()
    agent.call(1 - comm.rank, "release")
    echoed = slow.wait()
    comm.barrier()  # the calls of the other rank have ended, too
    return echoed, was_slow, float(x[0])


def test_a_slow_handler_delays_neither_calls_nor_collectives():
    assert run_processes(beside_collectives, 2) == [(0, True, 2.0), (1, True, 2.0)]


def test_a_message_of_more_than_a_gibibyte_is_refused_where_it_is_sent():
    def program(comm: uni.Communicator) -> Any:
        agent = Agent(comm)
        agent.register("size", lambda x: x.nbytes)
        comm.barrier()
        with pytest.raises(uni.UsageError, match=f"allowed: up to {1 << 30}"):
            agent.call(1, "size", np.empty((1 << 30) + 1, np.uint8))
        return agent.call(1, "size", np.zeros(9, np.uint8)), comm.barrier()

    assert run_ranks(program, 2).values() == [(9, None)] * 2


# -- simulated -------------------------------------------------------------------------------------------


def simulated(comm: uni.Communicator) -> Any:
    agent = Agent(comm)

    @agent.expose
    def slowly(x: Any) -> Any:
        sleep(1.0)
        return x

    agent.register("echo", lambda x: x)
    if comm.rank == 0:
        outcome = []
        for dst, name, timeout in [(1, "slowly", 30), (2, "slowly", 30), (2, "slowly", 0.5), (1, "echo", 30)]:
            try:
                outcome.append(agent.call(dst, name, np.arange(9000), timeout=timeout).sum())
            except uni.UnisonoError as error:
                outcome.append(type(error).__name__)
        return outcome
    sleep(20.0)
    return None


@pytest.mark.parametrize("seed", range(5))
def test_simulated_faults_end_calls_and_the_same_seed_repeats_them(seed):
    faults = [Kill(1, at_s=0.5)]
    runs = [
        uni.simulate(simulated, 3, seed=seed, faults=faults, network=Network(jitter_s=1e-5)) for _ in range(2)
    ]
    total = np.arange(9000).sum()
    assert runs[0].results[0] == ["PeerLost", total, "DeadlineExceeded", "PeerLost"]
    assert runs[0].trace_hash == runs[1].trace_hash


def test_a_simulated_rank_that_pauses_answers_later():
    result = uni.simulate(simulated, 3, faults=[Pause(1, at_s=0.5, for_s=1.0)])
    total = np.arange(9000).sum()
    assert result.results[0] == [total, total, "DeadlineExceeded", total]


# -- agents that are never closed ------------------------------------------------------------------------


def forgets(comm: uni.Communicator) -> int:
    agent = Agent(comm)
    agent.register("echo", lambda x: x)
    agent.register("stuck", lambda: time.sleep(600))
    comm.barrier()
    keep.append((comm, agent, agent.start(1 - comm.rank, "stuck")))
    return agent.call(1 - comm.rank, "echo", 5)


keep: list[Any] = []
FORGETFUL = """
import unisono as uni
from tests.process.test_rpc_failure import forgets
with uni.init() as world:
    inner = world.sub(range(world.size))
    assert forgets(inner) == 5
    world.barrier()
"""


STUCK = """
import asyncio, threading, time
import unisono as uni
world = uni.init()
agent = uni.rpc.Agent(world)
begun = threading.Semaphore(0)
other = 1 - world.rank
async def never():
    await asyncio.sleep(600)
def sleeps():
    begun.release()
    time.sleep(600)
def calls():
    begun.release()
    agent.call(other, "never", timeout=600)
for fn in (never, sleeps, calls):
    agent.expose(fn)
world.barrier()
works = [agent.start(other, "calls", timeout=600) for _ in range(300)]
works += [agent.start(other, "sleeps", timeout=600) for _ in range(10)]
for _ in works:
    begun.acquire()
world.barrier()
"""


@pytest.mark.parametrize("text", [FORGETFUL, STUCK], ids=["one that sleeps", "hundreds that call"])
def test_an_unclosed_agent_does_not_keep_a_process_alive(tmp_path, text):
    """Neither the end of the world nor that of the interpreter waits for handlers that never end."""
    program = tmp_path / "forgetful.py"
    program.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "unisono", "run", "-n", "2", str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "UNISONO_FLUSH_S": "0.2", "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr
