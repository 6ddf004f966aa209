"""All kinds of calls of the engine at once, from several threads per rank, one communicator per thread.

`make sanitize` runs this with a module under ASan and UBSan, and with one under TSan: every verb is called,
waited for, polled, dropped, cancelled, adopted and never waited for, while other threads do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, world
from tests.support.processes import forked
from tests.support.ranks import PATIENCE_S, run_each
from tests.support.waiter import Waiter

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.core.work import Work
from unisono.errors import DeadlineExceeded, PeerAborted, UnisonoError
from unisono.messaging.backend import Backend

__all__ = ["world"]

Array = np.ndarray[Any, Any]
THREADS = 3
ROUNDS, ROUNDS_LONG = 25, 500
# Counts on both sides of two thresholds: short calls poll with the GIL held, and short messages are sent
# eagerly.
COUNTS = (0, 1, 7, 1021, 2048, 2049, 20_003)

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """Ignore the logs of hundreds of communicators that close with works that no thread has waited for."""
    logger = logging.getLogger("unisono")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


# -- the verbs and their results --------------------------------------------------------------------------


def given(rank: int, count: int, turn: int) -> Array:
    return np.arange(count, dtype=np.int64) * 3 + 7 * rank + turn


class Verb:
    """A verb, its arguments, which depend on rank, count and turn, and the expected results of all ranks."""

    def __init__(self, comm: Communicator, count: int, turn: int) -> None:
        self.size, self.rank = comm.size, comm.rank
        self.count, self.root = count, turn % comm.size
        self.all = [given(rank, count, turn) for rank in range(comm.size)]
        self.by_rank = [
            np.stack([given(rank + 11 * other, count, turn) for other in range(comm.size)])
            for rank in range(comm.size)
        ]

    def call(self, on: Any, name: str, **how: Any) -> Any:
        """Call the verb on a communicator or on its `start`."""
        mine = self.all[self.rank].copy()
        if name == "barrier":
            return on.barrier(**how)
        if name in ("broadcast", "reduce", "gather"):
            return getattr(on, name)(mine, root=self.root, **how)
        if name in ("reduce_scatter", "all_to_all"):
            return getattr(on, name)(self.by_rank[self.rank].copy(), **how)
        if name == "mean":
            return on.all_reduce(np.full(self.count, 2.0 * self.rank, np.float16), op="mean", **how)
        if name == "number":
            return on.all_reduce(self.rank + 1, **how)
        if name == "out":
            return on.all_gather(mine, out=np.empty((self.size, self.count), np.int64), **how)
        return getattr(on, name)(mine, **how)

    def check(self, name: str, result: Any) -> None:
        """Compare a result with NumPy's."""
        is_root = self.rank == self.root
        total: Array = np.sum(self.all, axis=0)
        awaited: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: total,
            "reduce": lambda: total if is_root else None,
            "broadcast": lambda: self.all[self.root],
            "all_gather": lambda: np.stack(self.all),
            "out": lambda: np.stack(self.all),
            "gather": lambda: np.stack(self.all) if is_root else None,
            "reduce_scatter": lambda: np.sum([each[self.rank] for each in self.by_rank], axis=0),
            "all_to_all": lambda: np.stack([each[self.rank] for each in self.by_rank]),
            "scan": lambda: np.sum(self.all[: self.rank + 1], axis=0),
            "exscan": lambda: np.sum(self.all[: self.rank], axis=0) if self.rank else np.zeros(self.count),
            "mean": lambda: np.full(self.count, self.size - 1.0, np.float16),
            "number": lambda: self.size * (self.size + 1) // 2,
            "barrier": lambda: None,
        }
        right = awaited[name]()
        assert (result is None) == (right is None), (name, result)
        assert right is None or np.array_equal(result, right), (name, self.count, result, right)


COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "out",
    "gather",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "exscan",
    "mean",
    "number",
    "barrier",
)


# -- ways to wait -----------------------------------------------------------------------------------------


def polled(work: Work[Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not work.done():
        assert time.monotonic() < deadline, "the work does not end"
    return work.wait(0)


def waited_elsewhere(work: Work[Any]) -> Any:
    """Two threads wait for the work."""
    other = Waiter(work.wait)
    result = work.wait(PATIENCE_S)
    assert other.result() is result or np.array_equal(other.result(), result)
    return result


def waited_in_vain_first(work: Work[Any]) -> Any:
    """Python adopts the operation, unless it ends at once."""
    with contextlib.suppress(DeadlineExceeded):
        return work.wait(0)
    return work.wait(PATIENCE_S)


def called_back(work: Work[Any]) -> Any:
    called = threading.Event()
    work.add_done_callback(lambda _: called.set())
    assert called.wait(PATIENCE_S)
    return work.wait(0)


def awaited(work: Work[Any]) -> Any:
    async def main() -> Any:
        return await work

    return asyncio.run(main())


def waited_with_others(work: Work[Any]) -> Any:
    assert uni.wait_any([work, work], PATIENCE_S) in (0, 1)
    return work.wait()


STARTED: tuple[Callable[[Work[Any]], Any], ...] = (
    lambda work: work.wait(),
    lambda work: work.wait(PATIENCE_S),
    lambda work: uni.wait_all([work])[0],
    polled,
    waited_elsewhere,
    waited_in_vain_first,
    called_back,
    awaited,
    waited_with_others,
)


def dropped_elsewhere(work: Work[Any]) -> None:
    """Another thread drops the last reference."""
    box = [work]
    del work
    Waiter(box.clear).result()


def collective(comm: Communicator, choice: random.Random, turn: int) -> None:
    verb, name = Verb(comm, choice.choice(COUNTS), turn), choice.choice(COLLECTIVES)
    way = choice.randrange(len(STARTED) + 3)
    if way < len(STARTED):
        verb.check(name, STARTED[way](verb.call(comm.start, name)))
    elif way == len(STARTED):
        verb.check(name, verb.call(comm, name))
    elif way == len(STARTED) + 1:
        verb.check(name, verb.call(comm, name, timeout=PATIENCE_S))
    else:
        dropped_elsewhere(verb.call(comm.start, name, timeout=PATIENCE_S))
        comm.barrier()


def messages(comm: Communicator, choice: random.Random, turn: int) -> None:
    """A ring of messages. The turn decides how they are sent and received, the same on all ranks."""
    count, size, rank = choice.choice(COUNTS), comm.size, comm.rank
    way, is_exchange = choice.randrange(len(STARTED)), choice.random() < 0.3
    left, right = (rank - 1) % size, (rank + 1) % size
    mine, theirs = given(rank, count, turn), np.zeros(count, np.int64)
    if is_exchange:
        status = comm.sendrecv(mine, right, theirs, left, tag=turn, timeout=PATIENCE_S)
    else:
        receiving = comm.start.recv(theirs, src=left if turn % 2 else uni.ANY, tag=turn, timeout=PATIENCE_S)
        sending = comm.start.send(mine, dst=right, tag=turn)
        status = STARTED[way](receiving)
        STARTED[(way + turn) % len(STARTED)](sending)
    assert status == (left, turn, 8 * count)
    assert np.array_equal(theirs, given(left, count, turn))


def in_vain(comm: Communicator, choice: random.Random, turn: int) -> None:
    """Receives to which no message is sent: cancelled, expired, dropped."""
    way, buffer, tag = choice.randrange(4), np.zeros(3), 1_000_000 + turn
    src = (comm.rank + 1) % comm.size
    if way == 0:
        assert comm.start.recv(buffer, src=src, tag=tag).cancel()
    elif way == 1:
        with pytest.raises(DeadlineExceeded):
            comm.recv(buffer, src=src, tag=tag, timeout=0.002)
    elif way == 2:
        work = comm.start.recv(buffer, src=src, tag=tag, timeout=0.002)
        with pytest.raises(DeadlineExceeded):
            STARTED[choice.randrange(3)](work)
    else:
        work = comm.start.recv(buffer, src=src, tag=tag)
        waiter = Waiter(work.wait)
        work.cancel()
        with pytest.raises(PeerAborted):
            waiter.result()


def group(comm: Communicator, choice: random.Random, turn: int) -> None:
    """A new communicator, with a work that is under way when the communicator closes."""
    row = comm.split(color=turn % 2 if comm.rank else 0, key=-comm.rank)
    assert row is not None
    left_behind = row.start.recv(np.zeros(3), src=0, tag=5)
    verb = Verb(row, 33, turn)
    verb.check("all_reduce", verb.call(row, "all_reduce"))
    row.close()
    with pytest.raises(UnisonoError):
        left_behind.wait(PATIENCE_S)


def storm(comm: Communicator, seed: int, rounds: int) -> None:
    """The same random calls on all ranks of a communicator."""
    choice = random.Random(seed)
    for turn in range(rounds):
        choice.choice((collective, collective, messages, in_vain, group))(comm, choice, turn)


def rows_of(comm: Communicator) -> list[Communicator]:
    """The communicators of all ranks, one list per thread."""
    return [row for row in (comm.split(color=0, key=comm.rank) for _ in range(THREADS)) if row is not None]


def storm_on_threads(comm: Communicator, seed: int, rounds: int = ROUNDS) -> None:
    """Run the storm on several threads, which share the engine of a rank."""
    rows = rows_of(comm)

    def one(row: Communicator) -> None:
        storm(row, seed + rows.index(row), rounds)
        row.barrier()  # so that no rank waits for a rank that has left
        row.close()

    run_each(one, rows).values()


@pytest.mark.parametrize("stall_query_s", [0.25, 0.001])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_threads_call_every_verb_in_every_way(
    world: MakeWorld, kind: str, stall_query_s: float, request: pytest.FixtureRequest
):
    rounds = ROUNDS_LONG if request.config.getoption("--long") else ROUNDS
    comms = world(3, kind, stall_query_s=stall_query_s, stall_log_s=4 * stall_query_s, deadlock_after_s=0)
    run_each(lambda comm: storm_on_threads(comm, 100, rounds), comms).values()


# -- ends -------------------------------------------------------------------------------------------------


def storm_until_it_ends(comm: Communicator, seed: int) -> type[BaseException]:
    """Storm until the communicator is closed or a rank is lost; return the error."""
    for turn in range(seed, 1_000_000):
        try:
            storm(comm, turn, 1)
        except (UnisonoError, AssertionError) as error:  # a wait meant to expire has failed instead
            return type(error)
    raise AssertionError("the work does not end")


def threads_until_it_ends(rows: list[Communicator]) -> list[type[BaseException]]:
    return run_each(lambda row: storm_until_it_ends(row, 1000 * rows.index(row)), rows).values()


@pytest.mark.parametrize("turn", range(3))
def test_worlds_close_while_works_are_under_way(world: MakeWorld, turn: int):
    comms = world(2, deadlock_after_s=0)
    rows = run_each(rows_of, comms).values()
    ranks = [Waiter(lambda mine=mine: threads_until_it_ends(mine)) for mine in rows]
    time.sleep(0.3 + 0.1 * turn)
    run_each(lambda comm: comm.close(), comms).values()
    assert [len(rank.result()) for rank in ranks] == [THREADS, THREADS]


def test_a_killed_peer_ends_all_works_of_the_others():
    def program(backend: Backend, pipe: Connection) -> int:
        with Communicator.world(backend) as comm:
            rows = rows_of(comm)
            pipe.send("ready")
            return len(threads_until_it_ends(rows))

    with forked(program, 3) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "ready"
        time.sleep(0.3)
        ranks.signal(2, signal.SIGKILL)
        assert [ranks.result(rank, PATIENCE_S) for rank in range(2)] == [THREADS, THREADS]
        assert [ranks.code(rank) for rank in range(2)] == [0, 0]


def test_children_are_forked_in_a_storm(world: MakeWorld):
    """A child is forked while works of its parent are under way: it drops them and exits."""
    comms = world(2, deadlock_after_s=0)
    kept = [comm.start.recv(np.zeros(3), src=0, tag=99) for comm in comms]
    ranks = [Waiter(lambda comm=comm: storm_on_threads(comm, 7)) for comm in comms]
    codes = []
    while any(rank.is_alive() for rank in ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.alarm(60)
            kept.clear()
            comms.clear()
            os._exit(7)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        time.sleep(0.05)
    for rank in ranks:
        rank.result()
    for work in kept:
        assert work.cancel()
    assert set(codes) == {7}


def struck(after_s: float, wait: Callable[[], Any]) -> None:
    """Wait until a SIGINT arrives."""
    striker = threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        striker.start()
        wait()
        time.sleep(PATIENCE_S)
    finally:
        striker.join()


def test_ctrl_c_in_every_kind_of_wait(world: MakeWorld):
    comms = world(2, stall_query_s=0.02, stall_log_s=0.02, deadlock_after_s=0)
    buffer = np.zeros(3)
    for turn in range(24):
        work = comms[1].start.recv(buffer, src=0, tag=turn)
        waits: tuple[Callable[[], Any], ...] = (
            work.wait,
            lambda work=work: uni.wait_any([work]),
            lambda work=work: polled(work),
            lambda turn=turn: comms[1].recv(np.zeros(3), src=0, tag=1000 + turn),
        )
        with pytest.raises(KeyboardInterrupt):
            struck(0.005 * (turn % 7), waits[turn % 4])
        comms[0].send(np.arange(3.0) + turn, dst=1, tag=turn)
        assert work.wait(PATIENCE_S) == (0, turn, 24)
        assert buffer.tolist() == [turn, turn + 1, turn + 2]


LAST_WORDS = """
import threading, time, warnings
import unisono as uni
from tests.process.test_call_storm import storm_until_it_ends

warnings.simplefilter("ignore")
comm = uni.init(backend="native")
for index in range(3):
    row = comm.split(color=0)
    threading.Thread(target=storm_until_it_ends, args=(row, 1000 * index), daemon=True).start()
time.sleep(0.3)
print("last line")
"""


def test_an_interpreter_ends_in_a_storm():
    ended = subprocess.run(
        [sys.executable, "-c", LAST_WORDS], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "last line\n"), ended.stderr
