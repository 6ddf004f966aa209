"""Ranks killed at random: worlds of eight ranks compute, some ranks die, and the survivors are checked.

    python -m tests.soak.kills.kills [kills] [seed]

A world runs random collectives on the slow and the fast path, and checks their values. One to five of its
ranks get SIGKILL at a random moment, or during the handshakes. Every survivor must end with PeerLost, whose
last report names exactly the dead ranks, and no process, file or shared memory may be left.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from tests.support.bounds import REPORTED_WITHIN_S
from tests.support.failing_ranks import one_collective
from tests.support.metronome import Metronome
from tests.support.processes import BINDERS, KINDS, Failed, forked

from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import PeerLost
from unisono.messaging.backend import Backend

SIZE = 8
NATIVE = [kind for kind in KINDS if kind not in BINDERS]
CONFIGS = (
    {},
    {"segment_bytes": 1024, "eager_bytes": 128, "eager_credit_bytes": 1024, "window_segments": 2},
    {"segment_bytes": 1024, "eager_bytes": 0, "eager_credit_bytes": 0},
)


def program(backend: Backend, pipe: Connection, seed: int) -> tuple[tuple[int, ...], float]:
    """Compute until a rank dies, and report that; return the dead ranks, and the seconds until the report."""
    rng, metronome = random.Random(seed), Metronome()
    began = time.monotonic()
    with Communicator.world(backend) as comm:
        try:
            for turn in itertools.count():
                one_collective(comm, rng, turn)
                known_calls(comm, rng)
                if turn == 0:
                    pipe.send("ready")
        except PeerLost as error:
            reported_at = time.monotonic()
            pipe.send(error.ranks)
        dead, killed_at = pipe.recv()
        named, deadline = (), time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                comm.barrier()
            except PeerLost as error:
                named = error.ranks
                if named == dead:
                    return named, metronome.fair_s(max(began, killed_at), reported_at)
                time.sleep(0.01)
        links = backend.links() if isinstance(backend, NativeBackend) else ""
        raise AssertionError(f"{dead} are dead, and it names {named}; {links}")


def known_calls(comm: Communicator, rng: random.Random) -> None:
    """Repeat one call, which the engine then runs on the fast path, without Python."""
    count, rank, size = rng.choice((1, 700, 20_000)), comm.rank, comm.size
    ramp = np.arange(count, dtype=np.int64)
    for turn in range(rng.randrange(20)):
        total = comm.all_reduce(ramp * (rank + 1) + turn)
        np.testing.assert_array_equal(total, ramp * (size * (size + 1) // 2) + turn * size)


def kill_some(seed: int, most: int, kind: str = "") -> int:
    """Run one world and kill up to `most` of its ranks; returns how many. Native ranks, unless it is said."""
    rng = random.Random(f"kills {seed}")
    chosen, config = rng.choice(NATIVE), Config(**rng.choice(CONFIGS))
    kind = kind or chosen
    size = 4 if kind in BINDERS else SIZE  # of backends whose ranks take a second to start
    victims = rng.sample(range(size), min(most, size - 1, rng.choice((1, 1, 2, 3, 5))))
    # Foreign libraries connect ranks by themselves: a rank that dies meanwhile is a RendezvousError.
    is_early = rng.random() < 0.2 and kind not in BINDERS
    what = f"seed {seed}: {kind}, {victims} killed{' early' if is_early else ''}"
    with forked(lambda backend, pipe: program(backend, pipe, seed), size, kind=kind, config=config) as ranks:
        if not is_early:
            for rank in range(size):
                assert ranks.receive(rank) == "ready", what
        time.sleep(rng.random() * 0.05)
        killed_at = time.monotonic()
        for victim in victims:
            ranks.signal(victim, signal.SIGKILL)
            time.sleep(rng.choice((0.0, 0.0, 0.002)))
        dead = sorted(victims)
        survivors = [rank for rank in range(size) if rank not in victims]
        for rank in survivors:
            named = "ready"
            while named == "ready":
                named = ranks.receive(rank)
            assert set(named) <= set(dead), f"{what}; rank {rank} blames {named}"
            ranks.pipes[rank].send((tuple(dead), killed_at))
        for rank in survivors:
            ended = ranks.result(rank)
            assert not isinstance(ended, Failed), f"{what}; rank {rank}: {ended}"
            named, late_s = ended
            assert list(named) == dead, f"{what}; rank {rank} blames {named}"
            assert late_s < REPORTED_WITHIN_S, f"{what}; rank {rank} got the error after {late_s:.2f} s"
            assert ranks.code(rank) == 0, what
        for victim in victims:
            assert ranks.code(victim) == -signal.SIGKILL, what
        # Survivors remove the files of dead ranks of their host; if all ranks of a host died, its launcher
        # does.
        hosts = [KINDS[kind](rank).get("host") for rank in range(size)]
        hosts_alive = {hosts[rank] for rank in survivors}
        sockets = [name for name in os.listdir(ranks.folder) if name.endswith(".sock")]
        left = [name for name in sockets if hosts[int(name[1 : name.index("-")])] in hosts_alive]
        assert not left, f"{what}; left behind: {left}"
    return len(victims)


def main(kills: int = 1000, seed: int = 0) -> None:
    begun, before, done = time.monotonic(), set(os.listdir("/dev/shm")), 0
    for world in itertools.count():
        if done >= kills:
            break
        done += kill_some(seed + world, kills - done)
        if world % 20 == 0:
            print(
                f"{done} of {kills} killed in {world + 1} worlds, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    assert set(os.listdir("/dev/shm")) <= before, "shared memory is left"
    print(f"{done} ranks killed in {world} worlds and {time.monotonic() - begun:.0f} s: all as it should be")


if __name__ == "__main__":
    given: list[Any] = [int(word) for word in sys.argv[1:]]
    main(*given)
