"""The links of the engine: TCP, TLS, QUIC in datagrams of a network and of loopback, and iroh beside them.

    python bench/links.py [rounds] [kind ...]

Two ranks, each with a world for every kind of links, in alternating turns. Prints medians and their spread
(lowest to highest round): round trips, all_reduce, and 64 MiB one way and both ways at once, as a multiple of
TLS in the same round; then how long a first message takes where there is no link yet.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as uni
from unisono.backends.iroh.backend import UnconnectedIroh
from unisono.backends.native.backend import Credentials, NativeBackend
from unisono.backends.registry import BindSpec, Closable
from unisono.bootstrap.identity import Authority, Name, WorkerKey
from unisono.comm.communicator import Communicator

KIB, MIB = 1 << 10, 1 << 20
NETWORK_DATAGRAM = 1452
SIZES = (8, 4 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
LONG = 64 * MIB
JOB = "0123456789abcdef" * 2
KINDS: dict[str, dict[str, Any]] = {
    "tcp": {},
    "tls": {"tls": True},
    "quic 1452": {"quic": True, "datagram_bytes": NETWORK_DATAGRAM},
    "quic": {"quic": True},
    "iroh": {},
}

Call = Callable[[Communicator], None]


def worlds(base: Communicator, kinds: list[str]) -> dict[str, Communicator]:
    """A world of the same two ranks for every kind of links."""
    made: dict[str, Communicator] = {}
    for kind in kinds:
        backend: Closable
        if kind == "iroh":
            unconnected = UnconnectedIroh(
                BindSpec(base.rank, 2, "127.0.0.1", True, uni.Config(), secret=b"s")
            )
            backend = unconnected.connect(base.all_gather_object(unconnected.card()))
        else:
            backend = engine(base, KINDS[kind])
        made[kind] = Communicator.world(backend)
    return made


def engine(base: Communicator, links: dict[str, Any]) -> NativeBackend:
    folder = tempfile.mkdtemp()
    backend = NativeBackend(base.rank, 2, folder, b"secret", shm=False, neighbours=False, **links)
    cards = base.all_gather_object(tuple(backend.card()))
    backend.connect([type(backend.card())(*card) for card in cards], credentials(base) if links else None)
    return backend


def credentials(base: Communicator) -> Credentials:
    """What a seed would have given: rank 0 certifies both keys."""
    now = datetime.datetime.now(datetime.UTC)
    key = WorkerKey()
    requests = base.all_gather_object(key.request())
    signed: Any = None
    if base.rank == 0:
        authority = Authority(JOB, now)
        signed = (
            authority.certificate_pem,
            [authority.certify(request, rank, 0, now) for rank, request in enumerate(requests)],
        )
    trusted, certificates = base.broadcast_object(signed, 0)
    mine = key.identity(certificates[base.rank], trusted, now)
    names = [Name(JOB, rank, 0).uri for rank in range(2)]
    return Credentials(names, mine.key_pem, mine.certificate_pem, mine.ca_pem)


def ping(nbytes: int) -> Call:
    x = np.zeros(nbytes, np.uint8)

    def call(world: Communicator) -> None:
        if world.rank == 0:
            world.send(x, 1)
            world.recv(x, 1)
        else:
            world.recv(x, 0)
            world.send(x, 0)

    return call


def reduced(nbytes: int) -> Call:
    x = np.zeros(max(1, nbytes // 4), np.float32)
    return lambda world: world.all_reduce(x)


def one_way(nbytes: int) -> Call:
    x, answer = np.zeros(nbytes, np.uint8), np.zeros(8, np.uint8)

    def call(world: Communicator) -> None:
        if world.rank == 0:
            world.send(x, 1)
            world.recv(answer, 1)
        else:
            world.recv(x, 0)
            world.send(answer, 0)

    return call


def both_ways(nbytes: int) -> Call:
    out, into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return lambda world: world.sendrecv(out, 1 - world.rank, into, 1 - world.rank)


def turn_s(base: Communicator, world: Communicator, call: Call, count: int) -> float:
    """Median seconds of one call."""
    base.barrier()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        call(world)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def rank(rounds: int, kinds: list[str]) -> None:
    cases: dict[str, tuple[Call, int]] = {}
    for nbytes in SIZES:
        count = max(3, min(300, 8 * MIB // nbytes))
        text = (
            f"{nbytes // MIB} MiB"
            if nbytes >= MIB
            else f"{nbytes // KIB} KiB"
            if nbytes >= KIB
            else f"{nbytes} B"
        )
        cases[f"round trip {text}"] = (ping(nbytes), count)
        cases[f"all_reduce {text}"] = (reduced(nbytes), count)
    cases["64 MiB one way"] = (one_way(LONG), 3)
    cases["64 MiB both ways"] = (both_ways(LONG), 3)
    with uni.init() as base:
        began: dict[str, list[float]] = {kind: [] for kind in kinds}
        made = worlds(base, kinds)
        for kind, world in made.items():
            base.barrier()
            started = time.perf_counter()
            ping(8)(world)
            began[kind].append(time.perf_counter() - started)
        if base.rank == 0:
            print("| microseconds | " + " | ".join(kinds) + " |")
            print("|---" * (len(kinds) + 1) + "|")
            firsts = [f"{began[kind][0] * 1e6:.0f}" for kind in kinds]
            print("| first message, link included | " + " | ".join(firsts) + " |", flush=True)
        for name, (call, count) in cases.items():
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(rounds + 1):
                for kind in kinds:
                    few = 3 if kind == "iroh" else count
                    seconds = turn_s(base, made[kind], call, few)
                    if turn:
                        times[kind].append(seconds)
            if base.rank == 0:
                print(f"| {name} | " + " | ".join(shown(times, kind) for kind in kinds) + " |", flush=True)
        for world in made.values():
            world.close()


def shown(times: dict[str, list[float]], kind: str) -> str:
    text = f"{statistics.median(times[kind]) * 1e6:.1f}"
    if "tls" not in times or kind == "tls":
        return text
    ratios = sorted(mine / tls for mine, tls in zip(times[kind], times["tls"], strict=True))
    return f"{text} ({statistics.median(ratios):.2f}x, {ratios[0]:.2f}-{ratios[-1]:.2f})"


def main() -> None:
    words = sys.argv[1:]
    is_rank = words[:1] == ["--rank"]
    words = words[is_rank:]
    rounds = int(words.pop(0)) if words and words[0].isdecimal() else 7
    kinds = words or list(KINDS)
    if is_rank:
        rank(rounds, kinds)
        return
    run = [sys.executable, "-m", "unisono", "run", "-n", "2", __file__, "--rank", str(rounds), *kinds]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=1200, check=False)
    print("\n".join(line.partition("| ")[1] + line.partition("| ")[2] for line in ended.stdout.splitlines()))
    if ended.returncode != 0:
        sys.exit(ended.stderr[-2000:])


if __name__ == "__main__":
    main()
