"""Ranks in one process: credit, lanes, crashes, closes that race with sends, the detection of deadlocks."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
from tests.support.ranks import PATIENCE_S, run_each

from unisono.backends.local import LocalBackend
from unisono.config import Config
from unisono.core.envelope import ANY, Lane, Tags
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.errors import ClosedError, Deadlock, PeerLost, UsageError
from unisono.messaging.credit import ENVELOPE_BYTES
from unisono.messaging.peer_down import PeerDown
from unisono.testing.case_rank import payload

CONTEXT = 77


def send(backend: LocalBackend, dst: int, data: Any = b"", tag: int = 0, **how: Any) -> Request:
    return backend.start_send(dst, CONTEXT, tag, memoryview(data), **how)


def recv(backend: LocalBackend, src: Any = ANY, tag: Any = 0) -> Request:
    return backend.start_recv(src, CONTEXT, tag, None)


def wait(request: Request) -> Request:
    ended = threading.Event()
    request.notify(ended.set)
    assert ended.wait(PATIENCE_S), "a request does not end"
    return request


def close_all(backends: list[LocalBackend]) -> None:
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_a_size_that_makes_no_sense_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match="allowed: an integer >= 1"):
        LocalBackend.create(size)


def test_all_ranks_share_a_clock_and_the_settings() -> None:
    config = Config(segment_bytes=4096)
    ranks = LocalBackend.create(3, config)
    assert [(rank.rank, rank.size) for rank in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert all(rank.config is config and rank.runtime is ranks[0].runtime for rank in ranks)
    assert ranks[0].capabilities.name == "local"
    close_all(ranks)


# -- credit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "is_eager"), [(0, True), (99, True), (100, True), (101, False)])
def test_a_message_travels_at_once_up_to_the_eager_length(nbytes: int, is_eager: bool) -> None:
    ranks = LocalBackend.create(2, Config(eager_bytes=100))
    assert send(ranks[0], 1, bytes(nbytes)).done == is_eager
    close_all(ranks)


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_as_many_travel_as_the_credit_covers_empty_ones_too(nbytes: int) -> None:
    credit = 1000
    ranks = LocalBackend.create(2, Config(eager_bytes=100, eager_credit_bytes=credit))
    sends = [send(ranks[0], 1, bytes(nbytes)) for _ in range(2 * credit // ENVELOPE_BYTES)]
    assert sum(request.done for request in sends) == credit // (nbytes + ENVELOPE_BYTES)
    close_all(ranks)


def test_credit_belongs_to_a_pair_a_direction_and_a_lane() -> None:
    ranks = LocalBackend.create(3, Config(eager_bytes=100, eager_credit_bytes=100 + ENVELOPE_BYTES))
    full = bytes(100)
    assert send(ranks[0], 1, full).done
    assert not send(ranks[0], 1, b"").done
    assert send(ranks[0], 2, full).done
    assert send(ranks[1], 0, full).done
    assert send(ranks[2], 1, full).done
    assert send(ranks[0], 1, full, tag=Tags.CONTROL, lane=Lane.CONTROL).done
    close_all(ranks)


def test_control_messages_travel_at_once_even_where_data_may_not() -> None:
    """Up to a limit: a hundred messages of the largest size."""
    ranks = LocalBackend.create(2, Config(eager_bytes=0, eager_credit_bytes=0))
    control = {"tag": Tags.CONTROL, "lane": Lane.CONTROL}
    assert not send(ranks[0], 1, b"data").done
    assert not send(ranks[0], 1, bytes(16 * 1024 + 1), **control).done
    sends = [send(ranks[0], 1, bytes(16 * 1024), **control) for _ in range(200)]
    assert 90 < sum(request.done for request in sends) <= 100
    ranks[0].close()
    arrived = [recv(ranks[1], 0, Tags.CONTROL) for _ in sends]
    assert sum(request.error is None for request in arrived) == sum(
        request.error is None for request in sends
    )
    close_all(ranks)


@pytest.mark.parametrize("how", ["received", "cancelled", "dropped"])
def test_credit_comes_back(how: str) -> None:
    """Exactly as much as was used, neither less nor more."""
    ranks = LocalBackend.create(2, Config(eager_bytes=100, eager_credit_bytes=3 * (100 + ENVELOPE_BYTES)))
    for _ in range(10):
        sends = [send(ranks[0], 1, bytes(100)) for _ in range(4)]
        assert [request.done for request in sends] == [True, True, True, False]
        if how == "received":
            assert all(recv(ranks[1]).done for _ in sends)
        elif how == "cancelled":
            assert sends.pop().cancel()
            assert all(recv(ranks[1]).done for _ in sends)
        else:
            ranks[1].end_group(CONTEXT)
            assert recv(ranks[1]).done, "its sender waits"
            ranks[1].endpoint.protocol.inbox._ended.clear()
    close_all(ranks)


def test_a_rank_needs_no_credit_with_itself() -> None:
    (rank,) = LocalBackend.create(1, Config(eager_bytes=0, eager_credit_bytes=0))
    sends = [send(rank, 0, payload(0, i, 5000), tag=i) for i in range(50)]
    assert all(request.done for request in sends)
    for i in reversed(range(50)):
        assert recv(rank, 0, i).data == payload(0, i, 5000)
    rank.close()


def test_a_message_that_waits_is_read_when_it_is_met_not_before() -> None:
    ranks = LocalBackend.create(2, Config(eager_bytes=4))
    data = bytearray(b"early")
    request = send(ranks[0], 1, data)
    data[:] = b"later"  # the buffer is the request's own, so no byte was copied
    assert recv(ranks[1], 0).data == b"later"
    assert request.done
    close_all(ranks)


# -- endings ----------------------------------------------------------------------------------------------


def test_a_crash_is_reported_with_its_cause_and_is_no_goodbye() -> None:
    ranks = LocalBackend.create(3)
    reported: list[list[PeerDown]] = [[], [], []]
    for rank, downs in zip(ranks, reported, strict=True):
        rank.watch(downs.append)
    pending = recv(ranks[0], 1)
    own = recv(ranks[1], 0)
    ranks[1].kill("tripped over a cable")
    ranks[1].kill("again")
    ranks[1].close()
    assert reported == [[PeerDown(1, "tripped over a cable")], [], [PeerDown(1, "tripped over a cable")]]
    with pytest.raises(PeerLost, match="rank 1 is gone: tripped over a cable"):
        raise pending.error or AssertionError
    assert isinstance(own.error, ClosedError)
    late: list[PeerDown] = []
    ranks[2].watch(late.append)
    assert late == [PeerDown(1, "tripped over a cable")]
    close_all(ranks)


def test_a_crash_takes_back_what_was_not_received_and_leaves_what_was_sent() -> None:
    ranks = LocalBackend.create(2, Config(eager_bytes=10))
    sent, waiting = send(ranks[1], 0, b"sent", tag=1), send(ranks[1], 0, bytes(11), tag=2)
    ranks[1].kill()
    assert sent.error is None
    assert isinstance(waiting.error, ClosedError)
    assert recv(ranks[0], 1, 1).data == b"sent"
    assert isinstance(recv(ranks[0], 1, 2).error, PeerLost)
    assert isinstance(recv(ranks[0], 1, 1).error, PeerLost)
    close_all(ranks)


def test_a_backend_that_is_dropped_leaves() -> None:
    ranks = LocalBackend.create(2)
    pending = recv(ranks[0], 1)
    del ranks[1]
    gc.collect()
    with pytest.raises(PeerLost, match="left without closing"):
        raise wait(pending).error or AssertionError
    close_all(ranks)


def test_a_closed_world_leaves_nothing_behind() -> None:
    ranks = LocalBackend.create(3)
    for rank in ranks:
        recv(rank)
        rank.probe(ANY, CONTEXT, 5)
        for dst in range(3):
            send(rank, dst, bytes(100), tag=9)
            send(rank, dst, bytes(100_000), tag=9)
    close_all(ranks)
    assert all(rank.endpoint.protocol.inbox.is_idle() for rank in ranks)


@pytest.mark.parametrize("seed", range(20))
def test_sends_that_race_with_a_close_all_end(seed: int) -> None:
    """Both at the rank that closes and at a rank that sends to it."""
    rng = random.Random(seed)
    ranks = LocalBackend.create(3, Config(eager_bytes=64, eager_credit_bytes=1000))
    lengths = [rng.choice([0, 10, 64, 65, 3000]) for _ in range(200)]
    after = rng.randrange(200)
    reached = threading.Event()

    def sender(rank: LocalBackend) -> list[Request]:
        requests = []
        for i, n in enumerate(lengths):
            if i == after:
                reached.set()
            requests += [send(rank, dst, bytes(n), sync=i % 3 == 0) for dst in range(3)]
        return requests

    def closer(rank: LocalBackend) -> list[Request]:
        reached.wait(PATIENCE_S)
        rank.close()
        return []

    jobs = [(sender, ranks[0]), (sender, ranks[1]), (sender, ranks[2]), (closer, ranks[1])]
    ended = run_each(lambda job: job[0](job[1]), jobs).values()
    for rank, requests in enumerate(ended[:3]):
        for request in requests:
            if rank == 1 or request.peer == 1:
                assert request.done, f"a send from {rank} to {request.peer} does not end"
    close_all(ranks)
    assert all(request.done for requests in ended for request in requests)


@pytest.mark.parametrize("seed", range(5))
def test_every_message_is_received_once_or_taken_back_once(seed: int) -> None:
    """Four ranks, eight threads, random lengths, cancels on both sides: no message is lost or duplicated."""
    ranks = LocalBackend.create(4, Config(eager_bytes=32, eager_credit_bytes=600))
    lock, total = threading.Lock(), 150
    sent: list[bytes] = []
    taken: list[bytes] = []
    withdrawn: list[bytes] = []

    def act(place: tuple[LocalBackend, int]) -> None:
        rank, thread = place
        rng = random.Random(f"{seed} {rank.rank} {thread}")
        for i in range(total):
            word = f"{rank.rank}/{thread}/{i}/".encode() * rng.choice([1, 2, 9])
            dst, tag = rng.randrange(4), rng.randrange(3)
            request = send(rank, dst, word, tag, sync=rng.random() < 0.3)
            is_back = rng.random() < 0.3 and request.cancel()
            with lock:
                (withdrawn if is_back else sent).append(word)
            receive = recv(rank, tag=rng.choice([tag, ANY]))
            if rng.random() < 0.5:
                receive.cancel()
            if receive.done and receive.error is None:
                taken.append(bytes(receive.data or b""))
            elif not receive.done:
                receive.notify(lambda r=receive: None if r.error else taken.append(bytes(r.data or b"")))  # type: ignore[misc]

    run_each(act, [(rank, thread) for rank in ranks for thread in range(2)]).values()
    for rank in ranks:
        while (probe := rank.probe(ANY, CONTEXT, ANY)).done:
            assert probe.envelope is not None
            taken.append(bytes(wait(recv(rank, probe.envelope.source, probe.envelope.tag)).data or b""))
    close_all(ranks)
    assert Counter(taken) == Counter(sent)
    assert not set(withdrawn) & set(taken)


# -- the detection of deadlocks ---------------------------------------------------------------------------


class Waiter(threading.Thread):
    """A thread that waits for a rank, perhaps for ever."""

    def __init__(self, rank: LocalBackend, on: int, *, timeout: float | None = None) -> None:
        super().__init__(daemon=True)
        self.rank = rank
        self.event = rank.runtime.event()
        self.error: BaseException | None = None
        self.woken = False
        self._on = on
        self._timeout = timeout
        self.start()

    def run(self) -> None:
        waiting = Waiting(self.rank.rank, (self._on,), "recv")
        try:
            self.woken = self.rank.runtime.block(
                self.event, self._timeout, lambda: waiting, is_limited=self._timeout is not None
            )
        except Deadlock as error:
            self.error = error

    def ended(self) -> Waiter:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self


QUICK = Config(deadlock_after_s=0.1)


def test_a_deadlock_names_the_ranks_that_wait_for_each_other() -> None:
    ranks = LocalBackend.create(3, QUICK)
    waiters = [Waiter(rank, (rank.rank + 1) % 3) for rank in ranks]
    for waiter in waiters:
        error = waiter.ended().error
        assert isinstance(error, Deadlock)
        lines = [f"rank {rank} waits for rank {(rank + 1) % 3} in recv" for rank in range(3)]
        assert "; ".join(lines) in str(error)
    close_all(ranks)


def test_a_deadlock_among_the_ranks_that_stay_is_seen_too() -> None:
    ranks = LocalBackend.create(3, QUICK)
    gone = Waiter(ranks[2], 0, timeout=0.01).ended()
    ranks[2].close()
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 0)]
    assert all(isinstance(waiter.ended().error, Deadlock) for waiter in waiters)
    assert not gone.woken
    close_all(ranks)


def no_deadlock(waiters: list[Waiter], for_s: float = 0.35) -> bool:
    """Check that no deadlock is reported during more than three times deadlock_after_s."""
    waiters[0].join(for_s)
    return all(waiter.is_alive() for waiter in waiters)


def release(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        waiter.event.set()
    assert all(waiter.ended().woken and waiter.error is None for waiter in waiters)


def test_no_deadlock_while_a_rank_does_not_wait() -> None:
    ranks = LocalBackend.create(3, QUICK)
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 2)]
    assert no_deadlock(waiters)
    release(waiters)
    close_all(ranks)


def test_no_deadlock_while_a_rank_waits_with_a_limit() -> None:
    ranks = LocalBackend.create(2, QUICK)
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 0, timeout=PATIENCE_S)]
    assert no_deadlock(waiters)
    release(waiters)
    close_all(ranks)


@pytest.mark.parametrize("daemon", [True, False])
def test_no_deadlock_while_a_thread_that_came_later_may_help(daemon: bool) -> None:
    """The thread has never used a rank, but it may have any communicator."""
    ranks = LocalBackend.create(2, QUICK)
    go = threading.Event()
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 0)]
    helper = threading.Thread(target=lambda: go.wait(PATIENCE_S) and release(waiters), daemon=daemon)
    helper.start()
    assert no_deadlock(waiters)
    go.set()
    helper.join(PATIENCE_S)
    assert all(waiter.ended().woken for waiter in waiters)
    close_all(ranks)


def test_no_deadlock_while_a_thread_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starting thread waits without limit for the new thread, which is not alive before it runs."""
    ranks = LocalBackend.create(2, QUICK)
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 0)]
    start = threading._start_new_thread  # type: ignore[attr-defined]

    def start_late(bootstrap: Any, args: tuple[()]) -> int:
        def begin() -> None:
            time.sleep(5 * QUICK.deadlock_after_s)
            bootstrap()

        return start(begin, args)

    monkeypatch.setattr(threading, "_start_new_thread", start_late)
    helper = threading.Thread(target=release, args=[waiters])
    helper.start()
    helper.join(PATIENCE_S)
    assert all(waiter.ended().woken for waiter in waiters)
    close_all(ranks)


def test_no_deadlock_while_an_older_thread_that_has_sent_may_send_again() -> None:
    """The thread of the test, which is older than the world."""
    ranks = LocalBackend.create(2, QUICK)
    send(ranks[0], 1, b"first")
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 0)]
    assert no_deadlock(waiters)
    release(waiters)
    close_all(ranks)


def test_a_thread_that_served_only_ranks_that_left_cannot_end_a_deadlock() -> None:
    ranks = LocalBackend.create(3, QUICK)
    send(ranks[2], 0, b"goodbye")
    ranks[2].close()
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 0)]
    assert all(isinstance(waiter.ended().error, Deadlock) for waiter in waiters)
    close_all(ranks)


def test_the_watch_can_be_turned_off() -> None:
    ranks = LocalBackend.create(2, Config(deadlock_after_s=0))
    waiters = [Waiter(ranks[0], 1), Waiter(ranks[1], 0)]
    assert no_deadlock(waiters)
    release(waiters)
    close_all(ranks)
