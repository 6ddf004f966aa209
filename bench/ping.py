"""Ping-pong between two processes: one-way latency of a message, and bandwidth of long ones.

Two loops, each over shared memory and TCP: in C++ (Engine.ping) and from Python (start_send, start_recv).
Every figure is the best and the median of several runs.

    python bench/ping.py [--rounds 20000] [--runs 5] [--only shm|tcp]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import secrets
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Card
from unisono.core.request import Request

SIZES = (8, 64, 1024, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 128 << 20)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=20_000)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--only", choices=("shm", "tcp"))
    given = options.parse_args()
    for kind in ("shm", "tcp") if given.only is None else (given.only,):
        print(f"\n{kind}: one way, best / median of {given.runs} runs")
        print(f"{'bytes':>12} {'engine us':>18} {'python us':>18} {'engine GB/s':>12}")
        for nbytes, engine, python in measure(kind, given.rounds, given.runs):
            best = min(engine)
            print(
                f"{nbytes:>12} {best * 1e6:>8.2f} /{statistics.median(engine) * 1e6:>8.2f} "
                f"{min(python) * 1e6:>8.2f} /{statistics.median(python) * 1e6:>8.2f} "
                f"{nbytes / best / 1e9:>12.2f}"
            )


def measure(kind: str, rounds: int, runs: int) -> list[tuple[int, list[float], list[float]]]:
    """Both loops at every size: one-way seconds, per run."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        secret = secrets.token_bytes(32)
        ours, theirs = context.Pipe()
        other = context.Process(target=serve, args=(1, kind, folder, secret, theirs, rounds, runs))
        other.start()
        try:
            return serve(0, kind, folder, secret, ours, rounds, runs)
        finally:
            other.join(30)


def serve(rank: int, kind: str, folder: str, secret: bytes, pipe: Connection, rounds: int, runs: int) -> Any:
    """One of the two processes."""
    backend = NativeBackend(rank, 2, folder, secret, shm=kind == "shm")
    pipe.send(tuple(backend.card()))
    other = Card(*pipe.recv())
    backend.connect([backend.card(), other] if rank == 0 else [other, backend.card()])
    rows = []
    for nbytes in SIZES:
        count = max(4, min(rounds, (1 << 30) // nbytes))
        backend._engine.ping(1 - rank, nbytes, max(2, count // 10), rank == 0)
        engine = [backend._engine.ping(1 - rank, nbytes, count, rank == 0) / count / 2 for _ in range(runs)]
        python = [ping(backend, nbytes, max(2, count // 4)) / 2 for _ in range(runs)]
        rows.append((nbytes, engine, python))
    backend.close()
    return rows


def ping(backend: NativeBackend, nbytes: int, count: int) -> float:
    """Seconds per round from Python."""
    peer = 1 - backend.rank
    out, into = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    started = time.perf_counter()
    for _ in range(count):
        receive = backend.start_recv(peer, 1, 0, into)
        if backend.rank == 0:
            send = backend.start_send(peer, 1, 0, out)
            wait(backend, receive)
        else:
            wait(backend, receive)
            send = backend.start_send(peer, 1, 0, out)
        wait(backend, send)
    return (time.perf_counter() - started) / count


def wait(backend: NativeBackend, request: Request) -> None:
    if not request.done:
        event = backend.runtime.event()
        request.notify(event.set)
        backend.runtime.block(event, None, lambda: None)  # type: ignore[arg-type,return-value]
    if request.error is not None:
        raise request.error


if __name__ == "__main__":
    main()
