"""A seed repeats a simulation exactly; random programs under faults end with right data or an error."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.core.envelope import ANY
from unisono.core.request import Request
from unisono.core.runtime import Waiting
from unisono.errors import Deadlock, PeerLost
from unisono.simulation import (
    Drop,
    Fault,
    Kill,
    Killed,
    Link,
    Network,
    Partition,
    Pause,
    Resume,
    SimBackend,
    SimResult,
    Slow,
    run,
    sleep,
)


class Chaos:
    """A random program with a random network and random faults, all from one seed.

    Every rank sends its messages with pauses in between, and receives all messages to it, some by source and
    tag, some by wildcard. The payload of a message is its own identity, repeated.
    """

    def __init__(self, seed: int, with_faults: bool = True) -> None:
        self.seed = seed
        chance = random.Random(f"chaos {seed}")
        self.n = chance.randint(1, 6)
        self.use_wildcards = chance.random() < 0.3
        ranks = range(self.n)
        self.sends: list[list[tuple[int, int, int, bool, float]]] = [
            [
                (
                    chance.choice(ranks),
                    chance.randint(0, 2),
                    chance.choice([0, 1, 100, 5_000, 16_384, 16_385, 200_000]),
                    chance.random() < 0.3,
                    chance.choice([0.0, 0.0, 1e-5, 0.3]),
                )
                for _ in range(chance.randint(0, 8))
            ]
            for _ in ranks
        ]
        links = {(a, b): Link(latency_s=chance.random()) for a in ranks for b in ranks if a != b}
        chosen = {way: link for way, link in links.items() if chance.random() < 0.2}
        self.network = Network(chance.choice([0.0, 1e-5, 0.01]), 1e7, chance.choice([0.0, 1e-3]), chosen)
        self.faults = [self._fault(chance) for _ in range(chance.randint(0, 3))] if with_faults else []

    def run(self, seed: int = 0) -> SimResult:
        return run(self.program, self.n, seed=seed, network=self.network, faults=self.faults)

    def program(self, backend: SimBackend) -> list[bytes]:
        me = backend.rank
        receives = [
            backend.start_recv(
                ANY if self.use_wildcards else src, 1, ANY if self.use_wildcards else tag, None
            )
            for src, sends in enumerate(self.sends)
            for dst, tag, *_ in sends
            if dst == me
        ]
        sends = []
        for number, (dst, tag, nbytes, sync, pause_s) in enumerate(self.sends[me]):
            data = memoryview(_payload(me, tag, number, nbytes))
            sends.append(backend.start_send(dst, 1, tag, data, sync=sync))
            sleep(pause_s)
        for request in receives + sends:
            _wait(backend, request)
        return [bytes(request.data or b"") for request in receives]

    def check(self, result: SimResult) -> None:
        """A rank that completed its program has received every message, complete and in order."""
        for rank, received in enumerate(result.results):
            if isinstance(received, BaseException):
                # Only a receive from any source may wait without end: a lost rank does not end it.
                allowed = (PeerLost, Killed, Deadlock) if self.use_wildcards else (PeerLost, Killed)
                assert isinstance(received, allowed), received
                continue
            due = [
                _payload(src, tag, number, nbytes)
                for src, sends in enumerate(self.sends)
                for number, (dst, tag, nbytes, *_) in enumerate(sends)
                if dst == rank
            ]
            assert sorted(received) == sorted(due)
            if not self.use_wildcards:
                assert received == due
            for src in range(self.n):
                # Messages of one sender do not overtake each other, wildcards or not.
                numbers = [data[2] for data in received if len(data) > 2 and data[0] == src]
                assert numbers == sorted(numbers) or not self.use_wildcards

    def _fault(self, chance: random.Random) -> Fault:
        rank, other = chance.randrange(self.n), chance.randrange(self.n)
        when: dict[str, Any] = (
            {"at_s": chance.choice([0.0, 0.1, 0.5])}
            if chance.random() < 0.7
            else {"at_step": chance.randint(1, 9)}
        )
        for_s = chance.choice([0.2, 1.0, 3.0, None])
        kinds = [
            lambda: Kill(rank, **when),
            lambda: Pause(rank, for_s=for_s, **when),
            lambda: Resume(rank, **when),
        ]
        if rank != other:
            kinds += [
                lambda: Drop(rank, other, for_s=for_s, **when),
                lambda: Slow(rank, other, 10.0, for_s=for_s, **when),
                lambda: Partition([[rank], [other]], for_s=for_s, **when),
            ]
        return chance.choice(kinds)()


def _payload(src: int, tag: int, number: int, nbytes: int) -> bytes:
    return (bytes([src, tag, number]) * (nbytes // 3 + 1))[:nbytes]


def _wait(backend: SimBackend, request: Request) -> None:
    event = backend.runtime.event()
    request.notify(event.set)
    backend.runtime.block(event, None, lambda: Waiting(backend.rank, (), "wait"))
    if request.error is not None:
        raise request.error


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_programs_under_random_faults_end_with_right_data_or_an_error(seed: int) -> None:
    chaos = Chaos(seed)
    chaos.check(chaos.run(seed))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_without_faults_every_random_program_succeeds(seed: int) -> None:
    chaos = Chaos(seed, with_faults=False)
    result = chaos.run(seed).raise_first()
    assert not [r for r in result.results if isinstance(r, BaseException)]
    chaos.check(result)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    first, second = Chaos(seed).run(seed), Chaos(seed).run(seed)
    assert first.trace == second.trace
    assert first.trace_hash == second.trace_hash
    assert first.time_s == second.time_s


def test_another_seed_may_let_ranks_run_in_another_order() -> None:
    def race(backend: SimBackend) -> Any:
        if backend.rank:
            _wait(backend, backend.start_send(0, 1, 0, memoryview(bytes([backend.rank]))))
            return None
        requests = [backend.start_recv(ANY, 1, ANY, None) for _ in range(3)]
        for request in requests:
            _wait(backend, request)
        return tuple((request.data or b"")[0] for request in requests)

    results = [run(race, 4, seed=seed) for seed in range(30)]
    assert len({result.trace_hash for result in results}) > 5
    assert len({result.results[0] for result in results}) > 3


def test_the_text_of_a_trace_has_a_line_for_every_event() -> None:
    result = Chaos(7).run()
    lines = result.trace_text().splitlines()
    assert len(lines) == len(result.trace) > 0
    assert any("send" in line and "rank" in line for line in lines)


IN_ANOTHER_PROCESS = """
import numpy as np
import unisono as uni
from unisono.simulation import Drop, Kill, Network, Pause

def train(world):
    x = np.arange(3001, dtype=np.float32) + world.rank
    row, *others = [world.split(world.rank % 2) for _ in range(5)]
    dropped = world.sub(range(world.size))
    del dropped
    for step in range(5):
        world.all_reduce(x, op="mean")
        row.broadcast(x, step % row.size)
    return float(x[7])

faults = [Kill(3, 0.6), Drop(0, 1, 0.001, 0.5), Pause(2, at_step=9, for_s=0.1)]
network = Network(1e-4, 1e8, 1e-5)
for faults in ((), faults):
    print(uni.simulate(train, 6, seed=11, network=network, faults=faults).trace_hash)
"""


def test_the_trace_hash_is_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(IN_ANOTHER_PROCESS, "train.py", "exec"), {})
    hashes = [capsys.readouterr().out]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
        hashes.append(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        )
    assert [len(line) for line in hashes[0].splitlines()] == [64, 64]
    assert len(set(hashes)) == 1
