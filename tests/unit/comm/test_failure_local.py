"""Failure among in-process ranks: who dies, leaves, gives up, hangs or interrupts, and what all hear of it.

Every survivor hears within half a second; the tests allow a second, and what a loaded machine takes from us.
"""

from __future__ import annotations

import functools
import gc
import inspect
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.metronome import Metronome
from tests.support.ranks import PATIENCE_S, reference_local, run_each, run_ranks

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.comm.control_messages import Goodbye, GroupFailure, StallQuery
from unisono.config import Config
from unisono.core.envelope import Lane, Tags
from unisono.core.request import Request
from unisono.errors import (
    ClosedError,
    CollectiveMismatch,
    DeadlineExceeded,
    Deadlock,
    PeerAborted,
    PeerLost,
    UnisonoError,
)
from unisono.plans import CATALOG

HEARD_WITHIN_S = 1.0
CTRL_C_WITHIN_S = 0.4
# Short segments and little credit: many messages, many points at which to die.
SMALL = Config(segment_bytes=256, eager_bytes=128, eager_credit_bytes=1024, window_segments=2)
NAMED = {
    collective: [name for name, entry in entries.items() if not entry.needs_hosts]
    for collective, entries in CATALOG.items()
}


def seeds(number: int, together: int) -> pytest.MarkDecorator:
    """The first few seeds in `make test`; tests/simulation/test_random_deaths.py has more of them."""
    others = [pytest.param(first, marks=pytest.mark.more) for first in range(together, number, together)]
    return pytest.mark.parametrize("first", [0, *others])


@pytest.fixture(scope="module", autouse=True)
def metronome() -> Iterator[Metronome]:
    """Beats through all the tests."""
    global _metronome
    _metronome = Metronome()
    yield _metronome
    _metronome.is_over = True
    _metronome.join()


_metronome: Metronome


class Fragile(LocalBackend):
    """A rank that dies when it begins its `fatal`-th send or receive."""

    fatal: int | None = None
    died_at: float | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun = 0
        self._counting = threading.Lock()

    def start_send(self, *args: Any, **how: Any) -> Request:
        self._begin()
        return super().start_send(*args, **how)

    def start_recv(self, *args: Any, **how: Any) -> Request:
        self._begin()
        return super().start_recv(*args, **how)

    def _begin(self) -> None:
        with self._counting:  # any thread that brings a message may begin the next receive
            self.begun += 1
            is_fatal = self.begun == self.fatal
        if is_fatal:
            self.died_at = time.monotonic()
            self.kill()


def fragile_worlds(size: int, fatal: dict[int, int], config: Config = SMALL) -> list[uni.Communicator]:
    backends = Fragile.create(size, config)
    worlds = [uni.Communicator.world(backend) for backend in backends]
    for rank, step in fatal.items():
        # Counted from here: what a communicator does to begin is not part of the program.
        backends[rank].fatal = backends[rank].begun + step  # type: ignore[attr-defined]
    return worlds


def backend_of(comm: uni.Communicator) -> Any:
    return comm.backend


def close_all(worlds: list[uni.Communicator]) -> None:
    for world in worlds:
        world.close()


def is_in_time(begun: float, ended: float) -> bool:
    late_s: float = _metronome.fair_s(begun, ended)
    return late_s < HEARD_WITHIN_S


@contextmanager
def heard_in_time() -> Iterator[None]:
    """What happens inside ends soon."""
    begun = time.monotonic()
    yield
    assert is_in_time(begun, time.monotonic())


def ended_by(kind: type[UnisonoError], fn: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        fn()
    return caught.value


# -- a program of random collectives, with the right answers -----------------------------------------------


def ramp(count: int, rank: int, turn: int) -> np.ndarray[Any, Any]:
    return ((np.arange(count) * 5 + rank * 3 + turn) % 13).astype(np.float64)


def one_collective(comm: uni.Communicator, rng: random.Random, turn: int) -> None:
    """A collective that all ranks choose alike, checked against NumPy."""
    size, rank = comm.size, comm.rank
    verb = rng.choice(list(NAMED))
    name = rng.choice(["auto", *NAMED[verb]])
    count, root = rng.choice([0, 1, 7, 100, 600]), rng.randrange(size)
    rows = np.stack([ramp(count * size, r, turn).reshape(size, count) for r in range(size)])
    x, total = rows[rank], rows.sum(0)
    expected: Any = None
    match verb:
        case "all_reduce":
            got, expected = comm.all_reduce(x.copy(), algorithm=name), total
        case "reduce":
            got = comm.reduce(x.copy(), root, algorithm=name)
            expected = total if rank == root else None
        case "broadcast":
            got, expected = comm.broadcast(x.copy(), root, algorithm=name), rows[root]
        case "all_gather":
            got, expected = comm.all_gather(x, algorithm=name), rows
        case "gather":
            got = comm.gather(x, root, algorithm=name)
            expected = rows if rank == root else None
        case "scatter":
            got = comm.scatter(x if rank == root else None, root, algorithm=name)
            expected = rows[root, rank]
        case "reduce_scatter":
            got, expected = comm.reduce_scatter(x, algorithm=name), total[rank]
        case "all_to_all":
            got, expected = comm.all_to_all(x, algorithm=name), rows[:, rank]
        case "scan":
            got, expected = comm.scan(x, algorithm=name), rows[: rank + 1].sum(0)
        case "exscan":
            got, expected = comm.exscan(x, algorithm=name), rows[:rank].sum(0)
        case "barrier":
            got = comm.barrier(algorithm=name)
        case _:
            raise AssertionError(verb)
    if expected is None:
        assert got is None, verb
    else:
        np.testing.assert_array_equal(got, expected, err_msg=f"{verb} by {name}")


def survive(comm: uni.Communicator, seed: int, turns: int = 400) -> tuple[float, UnisonoError] | None:
    """Run collectives until one fails; when that was, and how."""
    rng = random.Random(seed)
    try:
        for turn in range(turns):
            one_collective(comm, rng, turn)
    except UnisonoError as error:
        return time.monotonic(), error
    return None


def survive_and_leave(comm: uni.Communicator, seed: int) -> tuple[float, UnisonoError]:
    """The same in a block that the error leaves; also when it was over before this rank began."""
    heard: tuple[float, UnisonoError] | None = None
    try:
        with comm:
            heard = survive(comm, seed)
            raise heard[1] if heard is not None else AssertionError("nobody died")
    except UnisonoError as error:
        return heard or (time.monotonic(), error)


# -- a rank dies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [False, True], ids=["who hears stays", "who hears leaves"])
@seeds(64, 8)
def test_every_survivor_hears_which_rank_died_wherever_it_died(first: int, leaves: bool) -> None:
    """And hears of nobody else, although others leave because of it; what completed was right."""
    for seed in range(first, first + 8):
        rng = random.Random(f"victims {seed}")
        size = rng.randint(2, 8)
        victim = rng.randrange(size)
        worlds = fragile_worlds(size, {victim: rng.randint(1, 150)})

        live = survive_and_leave if leaves else survive
        ended = run_each(lambda comm, seed=seed, live=live: live(comm, seed), worlds).values()
        died_at = backend_of(worlds[victim]).died_at
        assert isinstance(ended[victim][1], ClosedError), f"seed {seed}: the dead hears of its own end"
        for rank, (heard_at, error) in enumerate(ended):
            if rank != victim:
                assert isinstance(error, PeerLost), f"seed {seed}, rank {rank}: {error!r}"
                assert error.ranks == (victim,), f"seed {seed}, rank {rank}: {error}"
                assert is_in_time(died_at, heard_at), f"seed {seed}, rank {rank}: too late"
        close_all(worlds)


@seeds(24, 8)
def test_two_deaths_are_both_reported_and_no_other_rank_is_blamed(first: int) -> None:
    for seed in range(first, first + 8):
        rng = random.Random(f"two victims {seed}")
        size = rng.randint(3, 8)
        victims = rng.sample(range(size), 2)
        step = rng.randint(1, 120)
        worlds = fragile_worlds(size, {victims[0]: step, victims[1]: step + rng.randint(0, 3)})
        ended = run_each(lambda comm, seed=seed: survive(comm, seed), worlds).values()
        dead = {rank for rank in victims if backend_of(worlds[rank]).died_at is not None}
        assert dead, f"seed {seed}: nobody died"
        for rank, (_, error) in enumerate(ended):
            if rank not in dead:
                assert isinstance(error, PeerLost), f"seed {seed}, rank {rank}: {error!r}"
                assert set(error.ranks) <= dead, f"seed {seed}, rank {rank}: {error}"
                # Whoever asks later hears of all: nothing of it is forgotten.
                again = ended_by(PeerLost, worlds[rank].barrier)
                assert set(again.ranks) == dead, f"seed {seed}, rank {rank}: {again}"
        close_all(worlds)


@pytest.mark.parametrize("verb", ["recv", "probe", "recv from ANY", "send", "sendrecv", "recv_bytes"])
def test_a_death_ends_messages_that_need_the_dead(verb: str) -> None:
    calls: dict[str, Callable[[uni.Communicator], Any]] = {
        "recv": lambda c: c.recv(np.empty(3), 2),
        "probe": lambda c: c.probe(2),
        "recv from ANY": lambda c: c.recv(np.empty(3)),
        "send": lambda c: c.send(np.ones(100_000), 2),
        "sendrecv": lambda c: c.sendrecv(np.ones(100_000), 2, np.empty(3), 2),
        "recv_bytes": lambda c: c.recv_bytes(2, 9),
    }
    begun = threading.Barrier(3)

    def live(comm: uni.Communicator) -> Any:
        begun.wait(PATIENCE_S)
        if comm.rank == 2:
            backend_of(comm).kill("out of memory")
            return None
        with heard_in_time():
            return [ended_by(PeerLost, lambda: calls[verb](comm))]

    worlds = reference_local(3)
    for (error,) in run_each(live, worlds).values()[:2]:
        assert error.ranks == (2,)
        assert "rank 2" in str(error)
        assert "out of memory" in str(error)
    # Those who live still talk.
    pair = [worlds[0].start.recv_bytes(1), worlds[1].start.send(b"alive", 0)]
    assert uni.wait_all(pair, PATIENCE_S)[0] == b"alive"
    close_all(worlds)


def test_a_death_ends_started_works_that_nobody_waits_for() -> None:
    worlds = reference_local(3)
    works = [world.start.all_reduce(np.ones(10)) for world in worlds[:2]]
    receive = worlds[0].start.recv_bytes(2)
    with heard_in_time():
        backend_of(worlds[2]).kill()
        for work in (*works, receive):
            assert ended_by(PeerLost, lambda work=work: work.wait(PATIENCE_S)).ranks == (2,)
    close_all(worlds)


def test_a_death_ends_groups_of_the_dead_and_leaves_the_others() -> None:
    def live(world: uni.Communicator) -> Any:
        pair = world.split(world.rank // 2)
        assert pair is not None
        if world.rank == 3:
            world.recv_bytes(0)
            backend_of(world).kill()
            return None
        if world.rank == 0:
            for other in (1, 2):
                world.recv_bytes(other)
            world.send(b"die", 3)
        else:
            world.send(b"split has ended here", 0)
        if world.rank == 2:
            return ended_by(PeerLost, pair.barrier).ranks
        ended_by(PeerLost, lambda: world.recv_bytes(3, 7))
        return pair.all_reduce(world.rank)

    worlds = reference_local(4)
    assert run_each(live, worlds).values() == [1, 1, (3,), None]
    close_all(worlds)


# -- a rank leaves ----------------------------------------------------------------------------------------


def test_a_wait_for_a_rank_that_leaves_ends_with_the_cause() -> None:
    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            comm.recv_bytes(0)
            comm.close()
            return None
        waits = {
            0: lambda: comm.recv_bytes(1),
            2: lambda: comm.probe(1),
            3: lambda: comm.all_reduce(np.ones(5)),
        }
        if comm.rank == 0:
            comm.send(b"you may go", 1)
        with heard_in_time():
            error = ended_by(PeerLost, waits[comm.rank])
        return error.ranks, "left" in error.cause

    worlds = uni.local(4)
    assert run_each(live, worlds).values() == [((1,), True), None, ((1,), True), ((1,), True)]
    close_all(worlds)


@pytest.mark.parametrize("first", list(Lane))
def test_a_rank_has_left_when_both_lanes_say_so(first: Lane) -> None:
    """Data and the word that ours were taken travel in different lanes: one farewell may overtake either."""
    worlds = uni.local(2)
    group = worlds[0]._group
    work = worlds[0].start.recv_bytes(1)
    group.on_control_message(1, Goodbye(group.context, first))
    ended_by(DeadlineExceeded, lambda: work.wait(0.05))
    group.on_control_message(1, Goodbye(group.context, Lane(1 - first)))
    assert "left" in ended_by(PeerLost, lambda: work.wait(PATIENCE_S)).cause
    close_all(worlds)


def test_what_was_sent_before_leaving_stays_receivable() -> None:
    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            for i in range(5):
                comm.send(np.array([i]), 0, tag=i % 2)
            return None
        ended_by(PeerLost, lambda: comm.recv_bytes(1, 9))  # it has left for sure
        got = np.empty(1, np.int64)
        order = []
        for tag in (1, 0, 1, 0, 0):
            comm.recv(got, 1, tag)
            order.append(int(got[0]))
        ended_by(PeerLost, lambda: comm.recv(got, 1))
        return order

    assert run_ranks(live, 2)[0] == [1, 0, 3, 2, 4]


@pytest.mark.parametrize("collective", list(NAMED))
def test_a_rank_that_has_done_its_part_may_leave(collective: str) -> None:
    """No rank waits for the others to be done, and none fails because one was faster."""

    class Chosen(random.Random):
        """Random, but always this collective."""

        def choice(self, seq: Any) -> Any:
            return collective if collective in seq else super().choice(seq)

    for seed in range(12):
        rng = random.Random(f"{collective} {seed}")
        size = rng.randint(2, 7)
        ended = run_ranks(lambda comm, seed=seed: one_collective(comm, Chosen(seed), 0), size, config=SMALL)
        assert list(ended) == [None] * size, f"seed {seed}: {ended}"


def test_leaving_a_group_is_not_leaving_the_world() -> None:
    def live(world: uni.Communicator) -> Any:
        group = world.sub([0, 1])
        if world.rank == 1:
            group.close()
            ended_by(ClosedError, group.barrier)
        else:
            error = ended_by(PeerLost, group.barrier)
            assert (error.ranks, error.communicator) == ((1,), "world.sub(0,1)")
        return world.all_reduce(1)

    assert list(run_ranks(live, 2)) == [2, 2]


def test_children_leave_with_their_parent() -> None:
    def live(world: uni.Communicator) -> Any:
        child = world.split(0)
        assert child is not None
        grandchild = child.split(0)
        assert grandchild is not None
        if world.rank == 1:
            world.recv_bytes(0)
            world.close()
            return [
                isinstance(ended_by(ClosedError, comm.barrier), ClosedError) for comm in (child, grandchild)
            ]
        world.send(b"go", 1)
        return [ended_by(PeerLost, comm.barrier).ranks for comm in (grandchild, child, world)]

    worlds = uni.local(2)
    assert run_each(live, worlds).values() == [[(1,)] * 3, [True, True]]
    close_all(worlds)


def test_a_forgotten_communicator_is_lost_to_the_others() -> None:
    worlds = uni.local(3)
    works = [worlds[0].start.recv_bytes(2), worlds[1].start.all_reduce(1)]
    with heard_in_time():
        worlds.pop()
        gc.collect()
        for work in works:
            error = ended_by(PeerLost, lambda work=work: work.wait(PATIENCE_S))
            assert error.ranks == (2,)
            assert "left" in error.cause
    close_all(worlds)


# -- the root cause wins ----------------------------------------------------------------------------------


@contextmanager
def held_up(world: uni.Communicator, by: uni.Communicator) -> Iterator[Callable[[], None]]:
    """Hold a rank's ear: a thread is busy handing it a message, and whatever comes now waits behind.

    Gives a function that lets it hear again.
    """
    group, hears, may_go = world._group, threading.Event(), threading.Event()
    on_control_message = group.on_control_message

    def slowly(sender: int, news: Any) -> None:
        if isinstance(news, StallQuery) and not hears.is_set():
            hears.set()
            may_go.wait(PATIENCE_S)
        on_control_message(sender, news)

    group.on_control_message = slowly  # type: ignore[method-assign]
    query = StallQuery(group.context, 1 << 40, bytes(16))
    talker = threading.Thread(target=by._group.control.send, args=([world.rank], query))
    talker.start()
    assert hears.wait(PATIENCE_S)
    try:
        yield may_go.set
    finally:
        may_go.set()
        talker.join(PATIENCE_S)


@pytest.mark.parametrize("what", ["a message", "a collective"])
def test_a_rank_that_gave_up_is_heard_before_it_is_missed(what: str) -> None:
    """Rank 0 fails, says so and leaves while rank 1 is deaf for a moment: what it said comes first."""
    worlds = uni.local(3)
    work: uni.Work[Any] = worlds[1].start.recv_bytes(0) if what == "a message" else worlds[1].start.barrier()
    with held_up(worlds[1], by=worlds[2]) as let_go:
        with pytest.raises(ZeroDivisionError), worlds[0]:
            raise ZeroDivisionError("by rank 0")
        ended_by(DeadlineExceeded, lambda: work.wait(0.05))  # nothing is believed yet
        let_go()
        error = ended_by(PeerAborted, lambda: work.wait(PATIENCE_S))
    assert error.rank == 0
    assert "ZeroDivisionError: by rank 0" in str(error)
    close_all(worlds)


def test_a_survivor_that_leaves_because_of_a_death_is_not_the_culprit() -> None:
    """Rank 3 dies; rank 0 hears of it and leaves; rank 1 waits for rank 0 and is told of rank 3."""
    worlds = reference_local(4)
    works: list[uni.Work[Any]] = [
        worlds[1].start.recv_bytes(0),
        worlds[2].start.all_reduce(np.ones(3)),
        worlds[2].start.send(np.ones(100_000), 0),
    ]
    waiting = worlds[0].start.recv_bytes(3)
    with held_up(worlds[1], by=worlds[2]) as let_go:
        backend_of(worlds[3]).kill("struck by lightning")
        with pytest.raises(PeerLost), worlds[0]:
            waiting.wait(PATIENCE_S)
        let_go()
        for work in works:
            error = ended_by(PeerLost, lambda work=work: work.wait(PATIENCE_S))
            assert error.ranks == (3,)
            assert "struck by lightning" in str(error)
    close_all(worlds)


@pytest.mark.parametrize("what", ["a message", "a collective"])
def test_a_cause_in_the_world_explains_a_missing_rank_in_a_group(what: str) -> None:
    """Rank 0 fails; rank 1 leaves because of it, without having made the group where rank 2 waits for it."""

    def live(world: uni.Communicator) -> Any:
        if world.rank == 0:
            for peer in (1, 2):
                world.recv_bytes(peer)
            raise Mishap("the root of it")
        group = world.sub([1, 2]) if world.rank == 2 else world
        work = group.start.recv_bytes(0) if what == "a message" else group.start.barrier()
        world.send(b"ready", 0)
        return work.wait(PATIENCE_S)

    for _ in range(10):
        ended = run_ranks(live, 3)
        for error in ended[1:]:
            assert isinstance(error, PeerAborted), repr(error)
            assert error.rank == 0
            assert "Mishap: the root of it" in str(error)


def test_a_sendrecv_of_which_half_has_ended_ends_too() -> None:
    """When it is told to end, the receive has met its message; the send, which has not, must not wait on."""

    def live(comm: uni.Communicator) -> Any:
        turns = 0
        while True:
            if comm.rank == 3 and turns == 20:
                raise Mishap("enough of it")
            right, left = (comm.rank + 1) % 4, (comm.rank - 1) % 4
            comm.sendrecv(np.ones(20), right, np.empty(20), left)
            turns += 1

    for _ in range(40):
        for error in run_ranks(live, 4, config=Config(eager_bytes=16))[:3]:
            assert isinstance(error, PeerAborted)
            assert error.rank == 3


@pytest.mark.parametrize("what", ["a message", "a collective"])
def test_a_rank_that_dies_while_it_waits_for_a_control_message_ends_too(what: str) -> None:
    """It has seen that rank 0 is gone, but never hears why."""
    worlds = reference_local(3)
    work: uni.Work[Any] = worlds[1].start.recv_bytes(0) if what == "a message" else worlds[1].start.barrier()
    with held_up(worlds[1], by=worlds[2]) as let_go:
        worlds[0].close()
        backend_of(worlds[1]).kill()
        let_go()
        ended_by(ClosedError, lambda: work.wait(PATIENCE_S))
    close_all(worlds)


def test_the_cause_is_passed_on_through_a_chain_of_ranks_that_leave() -> None:
    """Each rank waits for the next; the last dies, and all leave, one after the other: all name the last."""

    def live(comm: uni.Communicator) -> Any:
        if comm.rank == comm.size - 1:
            for peer in range(comm.size - 1):
                comm.recv_bytes(peer, 1)
            backend_of(comm).kill()
            return None
        with comm:
            comm.send(b"ready", comm.size - 1, 1)
            comm.recv_bytes(comm.rank + 1, 2)
        return None

    for _ in range(5):
        ended = run_each(live, reference_local(6))
        for error in ended[:-1]:
            assert isinstance(error, PeerLost)
            assert error.ranks == (5,)


# -- a rank gives up --------------------------------------------------------------------------------------


class Mishap(Exception):
    pass


PENDING: dict[str, Callable[[uni.Communicator], Any]] = {
    "recv": lambda c: c.recv(np.empty(5), 3),
    "recv from another": lambda c: c.recv_bytes((c.rank + 1) % 3),
    "recv from ANY": lambda c: c.recv(np.empty(5)),
    "send": lambda c: c.send(np.ones(100_000), 3),
    "probe": lambda c: c.probe(3, 5),
    "sendrecv": lambda c: c.sendrecv(np.ones(100_000), 3, np.empty(5), 3),
    "all_reduce": lambda c: c.all_reduce(np.ones(5)),
    "barrier": lambda c: c.barrier(),
    "all_gather_v": lambda c: c.all_gather_v(np.ones(c.rank)),
    "split": lambda c: c.split(0),
    "broadcast_object": lambda c: c.broadcast_object({"a": 1}, 3),
}


@pytest.mark.parametrize("verb", PENDING)
@pytest.mark.parametrize("how", ["exception", "abort"])
def test_a_rank_that_gives_up_ends_everything_that_is_pending(verb: str, how: str) -> None:
    """Messages too, and those between other ranks: the one that gave up will not be part of anything."""
    gave_up_at: list[float] = []

    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 3:
            for peer in range(3):
                comm.recv_bytes(peer, 1)
            gave_up_at.append(time.monotonic())
            if how == "abort":
                comm.abort("Mishap: spilled coffee")
                return None
            with comm:
                raise Mishap("spilled coffee\nand more of it")
        comm.send(b"ready", 3, 1)
        error = ended_by(PeerAborted, lambda: PENDING[verb](comm))
        heard_at = time.monotonic()
        with pytest.raises(PeerAborted):  # nothing works on it any more
            comm.send(b"x", (comm.rank + 1) % 3)
        return error, heard_at

    worlds = uni.local(4)
    ended = run_each(live, worlds)
    for error, heard_at in ended[:3]:
        assert error.rank == 3
        assert "Mishap: spilled coffee" in str(error)
        assert "and more" not in str(error)
        assert is_in_time(gave_up_at[0], heard_at)
    assert (ended[3] is None) if how == "abort" else isinstance(ended[3], Mishap)
    close_all(worlds)


def test_ctrl_c_in_one_rank_reaches_the_others() -> None:
    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv_bytes(1)
            raise KeyboardInterrupt
        comm.send(b"ready", 0)
        comm.barrier()

    ended = run_ranks(live, 2)
    assert isinstance(ended[0], KeyboardInterrupt)
    assert isinstance(ended[1], PeerAborted)
    assert (ended[1].rank, "KeyboardInterrupt" in str(ended[1])) == (0, True)


def test_a_reduce_function_that_raises_is_reported_on_every_rank() -> None:
    def live(comm: uni.Communicator) -> Any:
        def add(left: Any, right: Any) -> Any:
            if comm.rank == 2:
                raise Mishap("cannot add")
            return left + right

        comm.all_reduce(np.ones(4), uni.op(add, name="add"), algorithm="tree")

    ended = run_ranks(live, 4)
    assert isinstance(ended[2], Mishap)
    for rank in (0, 1, 3):
        assert isinstance(ended[rank], PeerAborted)
        assert ended[rank].rank == 2
        assert "Mishap: cannot add" in str(ended[rank])


# -- never a wrong answer ---------------------------------------------------------------------------------


class Forgetful(LocalBackend):
    """A rank that never sends the `forgotten`-th message of a plan to rank 4, as if it had taken it back."""

    forgotten: int | None = None
    sent = 0

    def start_send(self, dst: int, context: int, tag: int, *args: Any, **how: Any) -> Request:
        if dst == 4 and tag == Tags.collective(0, 1):
            self.sent += 1
            if self.sent == self.forgotten:
                request = Request(dst)
                request.withdraw_by(lambda r: r.cancelled() or True)  # type: ignore[func-returns-value]
                return request
        return super().start_send(dst, context, tag, *args, **how)


@pytest.mark.parametrize("forgotten", [1, 2, 4])
def test_a_gap_in_what_was_sent_is_never_filled_with_what_came_later(forgotten: int) -> None:
    """Rank 0 scatters; rank 4 passes pieces on to 5, 6 and 7, who must not get what belongs elsewhere."""
    backends = Forgetful.create(8, Config(segment_bytes=256, eager_bytes=1024))
    backends[0].forgotten = forgotten  # type: ignore[attr-defined]
    x = np.stack([ramp(128, rank, 1) for rank in range(8)])

    def live(comm: uni.Communicator) -> Any:
        try:
            got = comm.scatter(x if comm.rank == 0 else None, timeout=0.5, algorithm="tree")
        except DeadlineExceeded:
            return "gave up"
        np.testing.assert_array_equal(got, x[comm.rank])
        return "right"

    worlds = [uni.Communicator.world(backend) for backend in backends]
    ended = run_each(live, worlds).values()
    assert ended[0] == ended[4] == "gave up"
    close_all(worlds)


# -- any of it, at any time -------------------------------------------------------------------------------


def endings(seed: int) -> tuple[int, dict[int, tuple[str, int]]]:
    """A size, and which ranks end how and at which turn."""
    rng = random.Random(f"endings {seed}")
    size = rng.randint(2, 7)
    who = rng.sample(range(size), rng.randint(1, min(3, size)))
    return size, {rank: (rng.choice(["die", "leave", "raise", "abort"]), rng.randint(0, 12)) for rank in who}


def live_until_the_end(comm: uni.Communicator, seed: int, struck: dict[int, str]) -> None:
    """Collectives, messages and groups, until this rank's own end or somebody else's."""
    rng, (size, ends) = random.Random(seed), endings(seed)
    rank = comm.rank
    for turn in range(300):
        how, when = ends.get(rank, ("", -1))
        if turn == when:
            struck[rank] = how
            if how == "die":
                backend_of(comm).kill()
            elif how == "leave":
                comm.close()
                return
            elif how == "abort":
                comm.abort(f"Mishap: of rank {rank}")
            raise Mishap(f"of rank {rank}")
        if turn % 5 == 3:
            got = np.empty(30)
            comm.sendrecv(ramp(30, rank, turn), (rank + 1) % size, got, (rank - 1) % size, tag=turn)
            np.testing.assert_array_equal(got, ramp(30, (rank - 1) % size, turn))
        elif turn % 7 == 6:
            group = comm.split(rank % 2)
            assert group is not None
            assert group.all_reduce(1) == group.size
        else:
            one_collective(comm, rng, turn)


def live_and_leave(comm: uni.Communicator, seed: int, struck: dict[int, str]) -> Any:
    with comm:
        return live_until_the_end(comm, seed, struck)


@seeds(80, 20)
def test_whatever_happens_no_rank_hangs_and_only_ended_ranks_are_named(first: int) -> None:
    for seed in range(first, first + 20):
        size, _ = endings(seed)
        struck: dict[int, str] = {}
        ended = run_each(
            lambda comm, seed=seed, struck=struck: live_and_leave(comm, seed, struck),
            reference_local(size, SMALL),
        )
        lost = {rank for rank, how in struck.items() if how in ("die", "leave")}
        gave_up = set(struck) - lost
        for rank, error in enumerate(ended):
            where = f"seed {seed}, rank {rank} of {size}, {struck}: {error!r}"
            if rank in struck:
                assert error is None or isinstance(error, Mishap), where
            elif isinstance(error, PeerLost):
                assert set(error.ranks) <= lost, where
            else:
                assert isinstance(error, PeerAborted), where
                assert error.rank in gave_up, where
                assert f"Mishap: of rank {error.rank}" in str(error), where


def test_who_hears_that_a_rank_gave_up_tells_the_others_before_its_own_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its user may leave at once, and nothing follows a goodbye: the others would miss the wrong rank."""
    comms = uni.local(3)
    group = comms[1]._group
    send, told = group.control.send, []

    def send_abort(ranks: Any, message: Any, *lane: Any) -> None:
        if isinstance(message, GroupFailure):
            group.check_usable(is_collective=True)
            told.append(tuple(ranks))
        send(ranks, message, *lane)

    monkeypatch.setattr(group.control, "send", send_abort)
    comms[0].abort("Mishap: of rank 0")
    for comm in comms[1:]:
        with pytest.raises(PeerAborted, match="Mishap: of rank 0"):
            comm.barrier()
    assert told == [(0, 1, 2)]
    for comm in comms:
        comm.close()


# -- deadlocks --------------------------------------------------------------------------------------------

WATCHFUL = Config(deadlock_after_s=0.15, stall_query_s=0.05)


def test_a_deadlock_in_a_circle_names_which_rank_waits_for_which() -> None:
    ended = run_ranks(lambda comm: comm.recv_bytes((comm.rank + 1) % 3, 4), 3, config=WATCHFUL)
    for error in ended:
        assert isinstance(error, Deadlock)
        for rank in range(3):
            assert f"rank {rank} waits for rank {(rank + 1) % 3} in recv_bytes" in str(error)


def test_a_collective_and_a_message_that_wait_for_each_other_are_a_deadlock() -> None:
    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv_bytes(1)
        comm.barrier()

    ended = run_ranks(live, 3, config=WATCHFUL)
    assert all(isinstance(error, Deadlock) for error in ended), ended
    assert "rank 0 waits for rank 1 in recv_bytes" in str(ended[0])
    assert "barrier #0" in str(ended[2])


def test_large_sends_to_each_other_without_receives_are_a_deadlock() -> None:
    ended = run_ranks(lambda comm: comm.send(np.ones(100_000), 1 - comm.rank), 2, config=WATCHFUL)
    assert all(isinstance(error, Deadlock) for error in ended), ended
    assert "rank 0 waits for rank 1 in send" in str(ended[1])


PATIENT_S = 0.6  # four times the patience of the watch


@pytest.mark.parametrize("busy", ["computes", "sleeps", "waits for a lock", "waits with a limit"])
def test_no_deadlock_while_one_rank_is_busy_elsewhere(busy: str) -> None:
    lock = threading.Lock()

    def be_busy(comm: uni.Communicator) -> None:
        until = time.monotonic() + PATIENT_S
        if busy == "computes":
            while time.monotonic() < until:
                np.ones(1000).sum()
        elif busy == "sleeps":
            time.sleep(PATIENT_S)
        elif busy == "waits for a lock":
            lock.acquire(timeout=PATIENT_S)
        else:
            ended_by(DeadlineExceeded, lambda: comm.recv_bytes(0, 7, timeout=PATIENT_S))

    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            be_busy(comm)
            comm.send(b"go", 1)
        if comm.rank == 1:
            comm.recv_bytes(2)
            comm.send(b"go", 0)
        if comm.rank == 0:
            comm.recv_bytes(1)
        return comm.all_reduce(comm.rank)

    with lock:
        assert list(run_ranks(live, 3, config=WATCHFUL)) == [3, 3, 3]


def test_no_deadlock_while_a_third_thread_will_send_later() -> None:
    """Every rank has a thread that waits for ever, and yet help comes, from a thread that never waited."""
    worlds = uni.local(2, WATCHFUL)

    def help_later() -> None:
        time.sleep(PATIENT_S)
        worlds[0].send(b"help", 1)

    def live(comm: uni.Communicator) -> Any:
        got = comm.recv_bytes(1 - comm.rank)
        if comm.rank == 1:
            comm.send(b"back", 0)
        return got

    helper = threading.Thread(target=help_later)
    helper.start()
    assert run_each(live, worlds).values() == [b"back", b"help"]
    helper.join(PATIENCE_S)
    close_all(worlds)


def on_threads(*lives: Callable[[], object]) -> None:
    """Each on a thread of its own, one after the other."""
    for live in lives:
        thread = threading.Thread(target=live)
        thread.start()
        thread.join(PATIENCE_S)


DESERTED = {
    "a message": lambda comm: comm.recv_bytes(2, 9),
    "a message of anybody": lambda comm: comm.recv_bytes(tag=9),
    "a collective": lambda comm: comm.barrier(),
    "a send": lambda comm: comm.send(np.ones(100_000), 2),
}


@pytest.mark.parametrize("waits_for", DESERTED)
def test_a_rank_whose_threads_have_ended_is_named_in_a_deadlock(waits_for: str) -> None:
    """A thread that has nothing to do with it runs meanwhile: what it may do for others is not asked."""
    worlds, stop = uni.local(3, WATCHFUL), threading.Event()
    elsewhere = threading.Thread(target=stop.wait, args=(PATIENCE_S,))
    elsewhere.start()
    on_threads(lambda: worlds[2].send(b"", 0, 1), lambda: worlds[2].send(b"", 1, 1))
    if waits_for == "a message of anybody":
        worlds[1].close()
    waiting = [comm for comm in worlds[:2] if comm.rank == 0 or waits_for != "a message of anybody"]
    ended = run_each(lambda comm: str(ended_by(Deadlock, lambda: DESERTED[waits_for](comm))), waiting)
    for text in ended.values():
        assert text.startswith("rank 2 will not come")
        assert "every thread that used rank 2 has ended without closing it; rank" in text
        assert "waits for any rank" in text or "waits for rank 2 in" in text
    assert any("Next: use `with comm:` in the thread of each rank" in text for text in ended)
    stop.set()
    elsewhere.join(PATIENCE_S)
    close_all(worlds)


def returns_early(comm: uni.Communicator) -> Any:
    """Rank 1 does nothing at all, and nobody closes anything."""
    return comm.recv_bytes(1) if comm.rank == 0 else None


def in_a_pool(worlds: list[uni.Communicator]) -> BaseException | None:
    with ThreadPoolExecutor(len(worlds)) as pool:
        first, _ = [pool.submit(returns_early, comm) for comm in worlds]
        return first.exception()


def in_threads(worlds: list[uni.Communicator]) -> BaseException | None:
    ended: list[Future[Any]] = [Future() for _ in worlds]

    def live(comm: uni.Communicator) -> None:
        try:
            ended[comm.rank].set_result(returns_early(comm))
        except uni.UnisonoError as error:
            ended[comm.rank].set_exception(error)

    threads = [threading.Thread(target=live, args=(comm,)) for comm in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended[0].exception(timeout=0)


@pytest.mark.parametrize("on", [in_a_pool, in_threads])
def test_a_rank_that_nobody_ever_used_is_named_in_a_deadlock(on: Callable[..., BaseException | None]) -> None:
    worlds = uni.local(2, WATCHFUL)
    error = on(worlds)
    assert isinstance(error, Deadlock)
    assert "rank 0 waits for rank 1 in recv_bytes" in str(error)
    assert "no thread uses rank 1" in str(error)
    close_all(worlds)


def test_no_deadlock_while_the_main_thread_is_about_to_start_a_rank() -> None:
    worlds, go = uni.local(2, WATCHFUL), threading.Event()

    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            go.wait(PATIENCE_S)
            return comm.send(b"late", 0)
        return comm.recv_bytes(1)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(live, worlds[0])
        time.sleep(PATIENT_S)
        second = pool.submit(live, worlds[1])
        time.sleep(PATIENT_S)
        go.set()
        assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (b"late", None)
    close_all(worlds)


def test_a_rank_whose_threads_have_ended_is_named_when_all_wait_for_each_other() -> None:
    worlds = uni.local(3, WATCHFUL)
    on_threads(lambda: worlds[2].send(b"", 0, 1))
    waits = [lambda: worlds[0].recv_bytes(tag=9), lambda: worlds[1].recv_bytes(0)]
    for text in run_each(lambda wait: str(ended_by(Deadlock, wait)), waits).values():
        assert "rank 0 waits for any rank in recv_bytes" in text
        assert "rank 1 waits for rank 0 in recv_bytes" in text
        assert "every thread that used rank 2 has ended without closing it" in text
    close_all(worlds)


def test_no_deadlock_if_a_new_thread_uses_a_rank_whose_threads_have_ended() -> None:
    worlds = uni.local(2, Config(deadlock_after_s=1.0))
    on_threads(lambda: worlds[1].send(b"first", 0))

    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            return comm.recv_bytes(1, 0), comm.recv_bytes(1, 0)
        comm.send(b"", 0, 5)  # it is here, and takes its time
        time.sleep(2.5)
        return comm.send(b"second", 0)

    assert run_each(live, worlds).values() == [(b"first", b"second"), None]
    close_all(worlds)


def test_no_deadlock_while_a_started_work_outlives_its_thread() -> None:
    worlds, works = uni.local(3, WATCHFUL), []
    on_threads(lambda: works.append(worlds[1].start.all_reduce(1)))

    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            time.sleep(PATIENT_S)
        return comm.all_reduce(comm.rank)

    assert run_each(live, [worlds[0], worlds[2]]).values() == [3, 3]
    assert works[0].wait(timeout=PATIENCE_S) == 3
    close_all(worlds)


def test_no_deadlock_while_nobody_has_used_a_rank_yet() -> None:
    worlds = uni.local(2, WATCHFUL)

    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            time.sleep(PATIENT_S)
        return comm.all_reduce(comm.rank + 1)

    assert run_each(live, worlds).values() == [3, 3]
    close_all(worlds)


# -- time runs out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5, 8])
@pytest.mark.parametrize("algorithm", ["ring", "doubling", "tree", "halving_doubling", "flat", "ordered"])
def test_a_deadline_names_the_rank_that_did_not_come(algorithm: str, size: int) -> None:
    """Not the neighbour that waits itself: the ranks ask each other.

    The question goes from rank to rank, each of which must be let run before the deadline: where the machine
    has no time for that, the same holds with a later one.
    """
    absent = size - 2
    config = Config(stall_query_s=0.05)

    def live(comm: uni.Communicator, timeout: float) -> Any:
        comm.barrier()
        if comm.rank == absent:
            for peer in range(size):
                if peer != absent:
                    comm.recv_bytes(peer, 1)
            return None
        error = ended_by(
            DeadlineExceeded, lambda: comm.all_reduce(np.ones(50), timeout=timeout, algorithm=algorithm)
        )
        comm.send(b"done", absent, 1)
        return error.waiting_on

    for timeout in (0.4, 1.6, 6.4):
        worlds = uni.local(size, config)
        ended = run_each(functools.partial(live, timeout=timeout), worlds).values()
        close_all(worlds)
        named = [on for rank, on in enumerate(ended) if rank != absent]
        if named == [(absent,)] * (size - 1):
            break
    assert named == [(absent,)] * (size - 1)


def test_a_rank_that_was_late_is_not_blamed_for_one_that_never_came() -> None:
    def live(comm: uni.Communicator) -> Any:
        if comm.rank == 2:
            for peer in (0, 1, 3):
                comm.recv_bytes(peer, 1)
            return None
        if comm.rank == 1:
            time.sleep(0.25)  # late enough to be asked for, and to be found absent
        error = ended_by(DeadlineExceeded, lambda: comm.all_reduce(np.ones(9), timeout=1.0, algorithm="ring"))
        comm.send(b"done", 2, 1)
        return error.waiting_on

    worlds = uni.local(4, Config(stall_query_s=0.05))
    assert run_each(live, worlds).values() == [(2,), (2,), None, (2,)]
    close_all(worlds)


def test_a_wait_that_gives_up_leaves_the_work_going() -> None:
    worlds = uni.local(2)
    work = worlds[0].start.all_reduce(np.arange(5.0))
    for _ in range(3):
        error = ended_by(DeadlineExceeded, lambda: work.wait(0.02))
        assert error.waiting_on == (1,)
        assert not work.done()
    other = worlds[1].start.all_reduce(np.ones(5))
    np.testing.assert_array_equal(work.wait(PATIENCE_S), np.arange(5.0) + 1)
    other.wait(PATIENCE_S)
    close_all(worlds)


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_a_receive_that_ended_early_leaves_its_message_to_the_next(how: str) -> None:
    worlds = uni.local(2)
    first, second = np.zeros(2), np.zeros(2)
    if how == "expired":
        assert ended_by(DeadlineExceeded, lambda: worlds[0].recv(first, 1, timeout=0.02)).waiting_on == (1,)
    else:
        work = worlds[0].start.recv(first, 1)
        assert work.cancel()
        ended_by(PeerAborted, lambda: work.wait(PATIENCE_S))
    worlds[1].send(np.array([4.0, 5.0]), 0)
    assert worlds[0].recv(second, 1, timeout=PATIENCE_S).nbytes == 16
    assert (first.tolist(), second.tolist()) == ([0, 0], [4, 5])
    assert worlds[0].start.all_reduce(1).cancel()  # a receive poisons nothing, so this could begin
    close_all(worlds)


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_a_collective_that_ended_early_ends_the_communicator_and_messages_pass(how: str) -> None:
    kind: type[UnisonoError] = DeadlineExceeded if how == "expired" else PeerAborted
    worlds = uni.local(3)
    works = [world.start.all_reduce(np.ones(9)) for world in worlds[:2]]
    if how == "cancelled":
        assert works[1].cancel()
    else:
        works.append(worlds[1].start.barrier(timeout=0.05))
    with heard_in_time():
        for work in works:
            ended_by(kind, lambda work=work: work.wait(PATIENCE_S))
    texts = set()
    for world in worlds:  # also the rank that never called it
        error = ended_by(kind, lambda world=world: world.all_reduce(1, timeout=PATIENCE_S))
        assert error.operation == ("barrier" if how == "expired" else "all_reduce")
        texts.add(error.what)
    assert len(texts) == 1, texts
    got = worlds[2].start.recv_bytes(0)
    worlds[0].send(b"still talking", 2)
    assert got.wait(PATIENCE_S) == b"still talking"
    child = worlds[0].sub([0])
    assert child.all_reduce(3) == 3
    close_all(worlds)


# -- several threads --------------------------------------------------------------------------------------


def test_two_threads_on_one_communicator_are_ordered_and_never_mixed() -> None:
    """Which call meets which is up to chance; that a sum holds one contribution per rank is not."""
    size, turns = 3, 60
    worlds = uni.local(size, SMALL)

    def live(place: tuple[uni.Communicator, int]) -> list[int]:
        comm, base = place
        return [int(comm.all_reduce(np.full(70, base))[0]) for _ in range(turns)]

    ended = run_each(live, [(world, base) for world in worlds for base in (1, 1000)]).values()
    sums = [tuple(sorted(ended[2 * rank] + ended[2 * rank + 1])) for rank in range(size)]
    assert sums[0] == sums[1] == sums[2], "every rank saw the same sums"
    assert sum(sums[0]) == turns * size * 1001, "every contribution is in exactly one of them"
    assert all(total % 1000 + total // 1000 == size for total in sums[0])
    close_all(worlds)


def test_two_threads_with_different_calls_get_the_right_answer_or_a_mismatch() -> None:
    for _ in range(10):
        worlds = uni.local(2, Config(stall_query_s=0.02))

        def live(place: tuple[uni.Communicator, str]) -> Any:
            comm, verb = place
            for turn in range(20):
                if verb == "sum":
                    assert comm.all_reduce(turn + comm.rank) == 2 * turn + 1
                else:
                    gathered = comm.all_gather(np.array([comm.rank, turn], np.int32))
                    assert gathered.tolist() == [[0, turn], [1, turn]]

        ended = run_each(live, [(world, verb) for world in worlds for verb in ("sum", "gather")])
        for result in ended:
            assert result is None or isinstance(result, CollectiveMismatch), repr(result)
        close_all(worlds)


def test_many_communicators_and_threads_at_once_do_not_meet() -> None:
    """Four ranks, six communicators of different members each, a thread per communicator and rank."""
    size, turns = 4, 25
    groups: list[list[uni.Communicator]] = []

    def make(world: uni.Communicator) -> list[uni.Communicator]:
        made = [world.split(world.rank % 2), world.split(0, -world.rank), world.split(world.rank // 2)]
        others = [world.sub(range(size)), world.sub([world.rank, (world.rank + 2) % size]), world]
        return [comm for comm in (*made, *others) if comm is not None]

    worlds = uni.local(size, SMALL)
    groups = run_each(make, worlds).values()

    def live(place: tuple[int, uni.Communicator]) -> None:
        number, comm = place
        rng = random.Random(f"{number} {comm.size} {comm.name}")
        for turn in range(turns):
            one_collective(comm, rng, turn + number)
            right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            got = np.empty(40)
            comm.sendrecv(ramp(40, comm.rank + number, turn), right, got, left, tag=turn)
            np.testing.assert_array_equal(got, ramp(40, left + number, turn))

    run_each(live, [(i, comm) for made in groups for i, comm in enumerate(made)]).values()
    close_all(worlds)


def test_a_verb_inside_a_reduce_function_is_carried_on() -> None:
    """The thread that waits there is the only one that could: it must not wait for itself."""

    def live(comm: uni.Communicator) -> Any:
        inner = comm.split(0)
        assert inner is not None

        def add(left: Any, right: Any) -> Any:
            return left + right + inner.all_reduce(0.0, timeout=PATIENCE_S)

        return comm.all_reduce(np.ones(3), uni.op(add, name="nested"), algorithm="doubling").tolist()

    assert list(run_ranks(live, 2)) == [[2, 2, 2], [2, 2, 2]]


# -- Ctrl-C -----------------------------------------------------------------------------------------------

INTERRUPTED = """
import signal, sys, threading, time
import numpy as np
import unisono as uni

VERBS = {
    "recv": lambda c: c.recv(np.empty(3), 1),
    "recv from ANY": lambda c: c.recv_bytes(),
    "send": lambda c: c.send(np.ones(100_000), 1),
    "sendrecv": lambda c: c.sendrecv(np.ones(100_000), 1, np.empty(3), 1),
    "probe": lambda c: c.probe(1),
    "barrier": lambda c: c.barrier(),
    "all_reduce": lambda c: c.all_reduce(np.ones(100_000)),
    "split": lambda c: c.split(0),
    "scatter_v": lambda c: c.scatter_v(None, 1),
    "broadcast_object": lambda c: c.broadcast_object(None, 1),
    "with a timeout": lambda c: c.barrier(timeout=60),
    "wait": lambda c: c.start.all_reduce(1).wait(),
}
main = threading.main_thread().ident


def is_blocked():
    frame = sys._current_frames()[main]
    while frame is not None:
        if frame.f_code.co_name == "block":
            return True
        frame = frame.f_back
    return False


def interrupt(when):
    while not is_blocked():
        time.sleep(0.001)
    when.append(time.monotonic())
    signal.pthread_kill(main, signal.SIGINT)


for verb, call in VERBS.items():
    worlds, when = uni.local(2), []
    thread = threading.Thread(target=interrupt, args=(when,))
    thread.start()
    work = None
    try:
        with worlds[0]:
            call(worlds[0])
        print(f"{verb}: ended well")
    except KeyboardInterrupt:
        print(f"{verb}: {metronome.fair_s(when[0], time.monotonic()):.3f}")
    thread.join()
    try:
        worlds[1].barrier()
    except uni.PeerAborted as error:
        assert error.rank == 0, error
    worlds[1].close()
"""

HAMMERED = """
import random, signal, threading, time
import numpy as np
import unisono as uni

main = threading.main_thread().ident
rng = random.Random(5)

for turn in range(60):
    worlds = uni.local(2)
    ready, when = threading.Event(), []

    def echo(comm):
        try:
            with comm:
                while True:
                    comm.all_reduce(np.ones(50))
                    comm.sendrecv(np.ones(5), 0, np.empty(5), 0)
        except uni.UnisonoError:
            pass

    def interrupt(pause):
        ready.wait()
        time.sleep(pause)
        when.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    threads = [
        threading.Thread(target=echo, args=(worlds[1],)),
        threading.Thread(target=interrupt, args=(rng.random() * 0.01,)),
    ]
    for thread in threads:
        thread.start()
    try:
        with worlds[0]:
            ready.set()
            while True:
                worlds[0].all_reduce(np.ones(50))
                worlds[0].sendrecv(np.ones(5), 1, np.empty(5), 1)
    except KeyboardInterrupt:
        print(f"turn {turn}: {metronome.fair_s(when[0], time.monotonic()):.3f}")
    worlds[0].close()
    for thread in threads:
        thread.join()
"""


def run_script(source: str) -> list[str]:
    rhythm = f"import itertools, threading, time\n{inspect.getsource(Metronome)}\nmetronome = Metronome()\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", rhythm + source],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_ctrl_c_ends_every_blocking_verb_at_once() -> None:
    lines = run_script(INTERRUPTED)
    assert len(lines) == 12, lines
    for line in lines:
        verb, _, took = line.rpartition(": ")
        assert float(took) < CTRL_C_WITHIN_S, f"{verb} took {took} s to hear of Ctrl-C"


def test_ctrl_c_in_the_midst_of_the_work_ends_it_too() -> None:
    """Wherever the signal strikes in our own code: it comes out, and nothing hangs afterwards."""
    lines = run_script(HAMMERED)
    assert len(lines) == 60, lines
    for line in lines:
        assert float(line.rpartition(": ")[2]) < CTRL_C_WITHIN_S, line


def test_a_signal_in_a_wait_leaves_the_receive_withdrawn() -> None:
    """In this very process: a handler that raises, as Ctrl-C does, while the main thread waits."""
    worlds = uni.local(2)
    buffer = np.zeros(2)

    def handler(*_: Any) -> None:
        raise Mishap("the handler's own")

    previous = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        work = worlds[0].start.recv(buffer, 1)
        with pytest.raises(Mishap):
            work.wait(PATIENCE_S)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
    assert not work.done()  # a started work goes on
    worlds[1].send(np.array([1.0, 2.0]), 0)
    work.wait(PATIENCE_S)
    assert buffer.tolist() == [1, 2]
    close_all(worlds)


# -- what an error says -----------------------------------------------------------------------------------


def errors_of_all_kinds() -> Iterator[tuple[str, UnisonoError, bool]]:
    """Each with its name and whether a collective raised it."""
    quick = Config(deadlock_after_s=0.1, stall_query_s=0.05)

    worlds = reference_local(2, quick)
    yield "expired collective", ended_by(DeadlineExceeded, lambda: worlds[0].all_reduce(1, timeout=0.1)), True
    yield "expired receive", ended_by(DeadlineExceeded, lambda: worlds[0].recv_bytes(1, timeout=0.02)), False
    work = worlds[0].start.recv_bytes(1)
    yield "impatient wait", ended_by(DeadlineExceeded, lambda: work.wait(0.02)), False
    backend_of(worlds[1]).kill("flood")
    yield "lost message", ended_by(PeerLost, lambda: work.wait(PATIENCE_S)), False
    close_all(worlds)

    worlds = reference_local(2, quick)
    works: list[uni.Work[Any]] = [worlds[0].start.all_reduce(1), worlds[0].start.recv_bytes(1)]
    worlds[1].abort("had enough")
    yield "aborted collective", ended_by(PeerAborted, lambda: works[0].wait(PATIENCE_S)), True
    yield "aborted message", ended_by(PeerAborted, lambda: works[1].wait(PATIENCE_S)), False
    close_all(worlds)

    worlds = reference_local(2, quick)
    works = [worlds[0].start.all_reduce(1), worlds[1].start.barrier()]
    for work in works:
        yield "mismatch", ended_by(CollectiveMismatch, lambda work=work: work.wait(PATIENCE_S)), True
    close_all(worlds)

    worlds = reference_local(2, quick)
    works = [world.start.all_reduce(1) for world in worlds[:1]]
    worlds[1].close()
    yield "left", ended_by(PeerLost, lambda: works[0].wait(PATIENCE_S)), True
    close_all(worlds)

    ended = run_ranks(lambda comm: comm.recv_bytes(1 - comm.rank), 2, config=quick)
    yield "deadlock", ended[0], False


def test_every_error_says_what_where_when_and_why() -> None:
    names = []
    for name, error, is_collective in errors_of_all_kinds():
        names.append(name)
        assert isinstance(error, UnisonoError), name
        assert error.operation in ("all_reduce", "recv_bytes", "barrier"), name
        assert error.communicator == "world", name
        assert error.epoch == 0, name
        assert (error.sequence == 0) == is_collective, name
        assert error.elapsed_s is not None, name
        assert 0 <= error.elapsed_s < 10, name
        assert error.cause, name
        number = " #0" if is_collective else ""
        where = f'during {error.operation}{number} on "world", epoch 0, after '
        assert where in str(error), name
        assert error.cause in str(error), name
    assert len(names) == 10


def test_a_later_call_on_a_broken_communicator_shows_what_broke_it() -> None:
    worlds = uni.local(2)
    worlds[0].barrier, worlds[1].close()
    first = ended_by(PeerLost, lambda: worlds[0].all_reduce(1))
    again = ended_by(PeerLost, lambda: worlds[0].broadcast(np.ones(2)))
    assert (again.ranks, again.operation, again.sequence) == (first.ranks, "all_reduce", 0)
    close_all(worlds)


# -- control itself fails ---------------------------------------------------------------------------------


def test_a_rank_whose_control_fails_says_so_and_hears_on(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = uni.local(3)
    group = worlds[1]._group
    heard: list[int] = []

    def fail_once(sender: int, query: StallQuery) -> None:
        heard.append(sender)
        raise RuntimeError("no threads left")

    monkeypatch.setattr(group._stalls, "on_query", fail_once)

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 1:
            comm.recv_bytes(0)  # the others wait in the barrier meanwhile, and ask
        elif comm.rank == 0:
            with pytest.raises(PeerAborted) as caught:
                comm.barrier()
            comm.send(np.arange(3), 1)
            return str(caught.value)
        return str(ended_by(PeerAborted, comm.barrier))

    texts = run_each(program, worlds).values()
    assert heard
    assert all("rank 1" in text and "no threads left" in text for text in texts), texts
    close_all(worlds)
