"""Waits of several threads for one work, and of one thread for several works."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from tests.support.metronome import stopwatch
from tests.support.ranks import PATIENCE_S, run_each, run_ranks
from tests.support.stepped_works import gate, in_thread, start

import unisono as uni
from unisono.core.call import await_requests
from unisono.core.request import Request
from unisono.core.waits import wait_all
from unisono.errors import DeadlineExceeded, PeerLost, UnisonoError, UsageError

# -- several waiting threads ---------------------------------------------------------------------------


def test_every_waiter_is_notified():
    for error in (None, PeerLost("gone")):
        request, steps = gate("shared", error)
        work = start(steps)

        def ask(_, work=work):
            try:
                return work.wait(timeout=PATIENCE_S)
            except PeerLost as lost:
                return str(lost.what)

        threading.Timer(0.02, request.complete).start()
        assert run_each(ask, list(range(12))) == ["shared" if error is None else "gone"] * 12


def test_waiters_with_and_without_time_share_a_work():
    requests = [Request(0) for _ in range(30)]

    def steps(call):
        for request in requests:
            yield from await_requests(call, [request])
        return "end"

    work = start(steps)

    def ask(timeout):
        try:
            return work.wait(timeout)
        except DeadlineExceeded:
            return "late"

    def open_all(_):
        for request in requests:
            time.sleep(0.002)
            request.complete()

    jobs = [None, 0.0, 0.001, 0.01, 0.03, PATIENCE_S]
    ended = run_each(lambda job: open_all(0) if job == "open" else ask(job), [*jobs, "open"])
    assert ended[0] == ended[5] == "end"
    assert set(ended[1:5]) <= {"late", "end"}
    assert work.wait(0) == "end"


def test_wait_all_gives_the_results_in_order():
    gates = [gate(i) for i in range(6)]
    works = [start(steps) for _, steps in gates]
    for i in (5, 0, 3, 1, 4, 2):
        gates[i][0].complete()
    assert wait_all(iter(works)) == list(range(6))
    assert wait_all([]) == []


def test_wait_all_reports_the_first_error_after_all_ended():
    gates = [gate("a"), gate(error=ValueError("first")), gate(error=PeerLost("second")), gate("b")]
    works = [start(steps) for _, steps in gates]
    ended: list[bool] = []

    def ask() -> None:
        with pytest.raises(ValueError, match="first"):
            wait_all(works)
        ended.extend(work.done() for work in works)

    waiter = in_thread(ask)
    for request, _ in gates[:3]:
        request.complete()
    waiter.join(0.05)
    assert waiter.is_alive(), "the last work has not ended"
    gates[3][0].complete()
    waiter.join(PATIENCE_S)
    assert ended == [True] * 4


def test_wait_all_has_one_deadline_for_all():
    gates = [gate(i) for i in range(5)]
    works = [start(steps) for _, steps in gates]
    gates[0][0].complete()
    with stopwatch() as seconds:
        with pytest.raises(DeadlineExceeded, match="the work goes on"):
            wait_all(works, timeout=0.1)
        assert seconds() < 2.0
    assert not works[1].done()
    for request, _ in gates[1:]:
        request.complete()
    assert wait_all(works) == list(range(5))


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_and_works_lose_no_wake_up(seed):
    """60 works of 20 requests; threads end them in any order while others wait, time out and wait again."""
    rng = random.Random(seed)
    operations = []
    for i in range(60):
        requests = [Request(0) for _ in range(20)]

        def steps(call, requests=requests, i=i):
            for request in requests:
                request.notify(call.wake)
            total = 0
            while not all(r.done for r in requests):
                total += 1
                yield
            return i

        operations.append((requests, start(steps)))
    todo = [request for requests, _ in operations for request in requests]
    rng.shuffle(todo)
    works = [work for _, work in operations]

    def end(part) -> None:
        for request in part:
            request.complete()

    def ask(order) -> list[int]:
        results = []
        for work in order:
            while True:
                try:
                    results.append(work.wait(timeout=rng.choice([0.0, 1e-4, 1e-2, None])))
                    break
                except DeadlineExceeded:
                    continue
        return sorted(results)

    parts = [("end", todo[k::3]) for k in range(3)]
    asks = [("ask", rng.sample(works, len(works))) for _ in range(5)]
    ended = run_each(lambda job: end(job[1]) if job[0] == "end" else ask(job[1]), [*parts, *asks]).values()
    assert ended[3:] == [list(range(60))] * 5


@pytest.mark.parametrize("seed", range(3))
def test_cancelling_from_many_threads_ends_each_work_once(seed):
    rng = random.Random(seed)
    requests = [Request(0, lambda r: False) for _ in range(80)]
    ends: list[int] = []

    def steps_of(i):
        def steps(call):
            requests[i].notify(call.wake)
            try:
                while not requests[i].done:
                    yield
            except UnisonoError:
                ends.append(i)
                raise
            ends.append(i)

        return steps

    works = [start(steps_of(i)) for i in range(80)]
    order = list(range(80))
    rng.shuffle(order)

    def act(job) -> list[bool]:
        if job == "end":
            return [bool(requests[i].complete()) for i in order]
        return [works[i].cancel() for i in reversed(order)]

    run_each(act, ["end", "cancel", "cancel", "cancel"]).values()
    assert sorted(ends) == list(range(80))
    assert all(work.done() for work in works)


def test_started_collectives_of_many_threads_give_the_right_sums():
    """Each thread of a rank has its own communicator; all threads share the world's inboxes and control."""
    threads, rounds = 3, 15

    def program(comm):
        children = [comm.split(0) for _ in range(threads)]

        def one(t: int) -> list[float]:
            sums = []
            for i in range(rounds):
                works = [
                    children[t].start.all_reduce(np.full(7, 100.0 * t + i + k + comm.rank)) for k in range(3)
                ]
                sums += [float(x[3]) for x in wait_all(works)]
            return sums

        return run_each(one, list(range(threads))).values()

    for results in run_ranks(program, 3).values():
        for t in range(threads):
            assert results[t] == [3 * (100.0 * t + i + k) + 3 for i in range(rounds) for k in range(3)]


# -- waits for several ---------------------------------------------------------------------------------


def test_wait_any_and_some_and_as_completed():
    gates = [gate(i, ValueError("mine") if i == 4 else None) for i in range(6)]
    works = [start(steps) for _, steps in gates]
    for timeout in (0, 0.01):
        with pytest.raises(DeadlineExceeded, match="none of 6 works"):
            uni.wait_any(works, timeout=timeout)
    threading.Timer(0.02, gates[4][0].complete).start()
    assert uni.wait_any(works) == 4, "a failure is an end"
    with pytest.raises(ValueError, match="mine"):
        works[4].wait()
    gates[1][0].complete()
    assert uni.wait_some(iter(works)) == [1, 4]
    given = uni.as_completed(works, timeout=PATIENCE_S)
    assert [next(given), next(given)] == [works[1], works[4]]
    for i in (5, 0, 3, 2):
        gates[i][0].complete()
        assert next(given) is works[i]
    assert list(given) == []
    with pytest.raises(UsageError, match="at least one"):
        uni.wait_any([])
    with pytest.raises(UsageError, match="allowed: works"):
        uni.wait_some([works[0], "no work"])


def test_a_wait_for_any_leaves_nothing_behind_in_works_that_go_on():
    first, steps = gate()
    last, later = gate()
    ended, work = start(steps), start(later)
    first.complete()
    for _ in range(10):
        assert uni.wait_any([work, ended]) == 1
    assert work._task._callbacks == []
    last.complete()
