"""The links of the engine: TCP, TLS, QUIC in datagrams of a network and of loopback, and iroh beside them.

    python bench/links.py [rounds] [kind ...] [--form N] [--plot links.png]

Two ranks, each with a world for every kind of links, in alternating turns. Prints medians and their spread
(lowest to highest round) as a multiple of TLS in the same round: how long a first round trip takes where
there is no link yet (20 links), round trips, all_reduce, 64 MiB one way and both ways at once; and 64 MiB one
way in datagrams of a network of which one in a hundred is lost. `--form N` adds how long N ranks of this host
take to start, to talk to all others and to end, and how many descriptors a rank has then. `--plot` draws the
multiples.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unisono as uni
from unisono.backends.iroh.backend import UnconnectedIroh
from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.card import Credentials
from unisono.backends.registry import BindSpec, Closable
from unisono.bootstrap.identity import Authority, Name, WorkerKey
from unisono.comm.communicator import Communicator

KIB, MIB = 1 << 10, 1 << 20
NETWORK_DATAGRAM = 1452
SIZES = (8, 4 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
LINKS = 20
LOST_OF_1000 = (0, 10)
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


def engine(base: Communicator, links: dict[str, Any], relay: str | None = None) -> NativeBackend:
    """Of two ranks. `relay`: a program through which rank 0 reaches rank 1, and what it is told to lose."""
    folder = tempfile.mkdtemp()
    backend = NativeBackend(base.rank, 2, folder, b"secret", shm=False, neighbours=False, **links)
    card = backend.card()
    if relay is not None and base.rank == 1:
        program, lost = relay.split()
        process = subprocess.Popen([program, str(card.port), lost], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        card = card._replace(port=int(process.stdout.readline()))
    cards = base.all_gather_object(tuple(card))
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


def link_up(base: Communicator, kinds: list[str]) -> dict[str, list[float]]:
    """Seconds of first round trips."""
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(LINKS):
        for kind in kinds:
            if kind == "iroh":
                continue
            world = Communicator.world(engine(base, KINDS[kind]))
            took[kind].append(turn_s(base, world, ping(8), 1))
            base.barrier()
            world.close()
    return took


def lossy(base: Communicator, rounds: int) -> dict[str, list[float]]:
    """Seconds of 64 MiB one way through a relay that loses nothing, and one that loses 1 %."""
    source = Path(__file__).with_name("lossy_relay.cpp")
    program = Path(tempfile.gettempdir()) / f"lossy_relay-{os.getpid()}"
    if base.rank == 1:
        subprocess.run(["c++", "-O2", "-std=c++20", str(source), "-o", str(program)], check=True)
    took: dict[str, list[float]] = {}
    for lost in LOST_OF_1000:
        world = Communicator.world(engine(base, KINDS["quic 1452"], f"{program} {lost}"))
        name = f"64 MiB one way, quic 1452 through a relay, {lost / 10:g} % lost"
        took[name] = [turn_s(base, world, one_way(LONG), 1) for _ in range(rounds + 1)][1:]
        base.barrier()
        world.close()
    if base.rank == 1:
        program.unlink()
    return took


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
        began = link_up(base, kinds)
        made = worlds(base, kinds)
        if base.rank == 0:
            print("| microseconds | " + " | ".join(kinds) + " |")
            print("|---" * (len(kinds) + 1) + "|")
            firsts = [shown(began, kind) if began[kind] else "" for kind in kinds]
            print("| first round trip, link included | " + " | ".join(firsts) + " |", flush=True)
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
        if "quic 1452" in kinds:
            for name, seconds in lossy(base, rounds).items():
                if base.rank == 0:
                    low, middle, high = (f"{f(seconds) * 1e6:.0f}" for f in (min, statistics.median, max))
                    print(f"| {name} | {middle} ({low}-{high}) |", flush=True)


def formed(comm: Communicator) -> int:
    """Talk to every other rank; how many descriptors this one has then."""
    comm.barrier()
    comm.all_to_all(np.zeros((comm.size, 1)))
    comm.barrier()
    return len(os.listdir("/proc/self/fd"))


def form(size: int, rounds: int) -> None:
    """Print how long a world takes to begin and to end, and its descriptors."""
    how: dict[str, uni.Config] = {
        "tls": uni.Config(shm=False, tls=True),
        "quic": uni.Config(shm=False, links="quic"),
    }
    took: dict[str, list[float]] = {kind: [] for kind in how}
    most: dict[str, int] = {}
    for _ in range(rounds):
        for kind, config in how.items():
            started = time.perf_counter()
            most[kind] = max(uni.spawn(formed, size, config=config, timeout=300))
            took[kind].append(time.perf_counter() - started)
    print(
        f"| {size} ranks: start, barrier, all_to_all, end; most descriptors | "
        + " | ".join(f"{kind}: {shown(took, kind)}; {most[kind]}" for kind in how)
        + " |"
    )


def plot(rows: dict[str, dict[str, float]], file: str) -> None:
    """The multiples of TLS by row and kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1.5))
    kinds = [kind for kind in next(iter(rows.values())) if kind != "iroh"]
    for kind in kinds:
        axes.plot([row[kind] for row in rows.values()], list(rows), "o", label=kind)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("time as a multiple of TLS")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def multiples(table: str) -> dict[str, dict[str, float]]:
    """Of a printed table, by row and kind."""
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if "|" in line
    ]
    kinds = lines[0][1:]
    rows: dict[str, dict[str, float]] = {}
    for name, *cells in lines[1:]:
        found = {kind: re.search(r"\(([\d.]+)x", cell) for kind, cell in zip(kinds, cells, strict=False)}
        if any(found.values()):
            rows[name] = {kind: 1.0 if match is None else float(match[1]) for kind, match in found.items()}
    return rows


def shown(times: dict[str, list[float]], kind: str) -> str:
    text = f"{statistics.median(times[kind]) * 1e6:.1f}"
    if "tls" not in times or kind == "tls":
        return text
    ratios = sorted(mine / tls for mine, tls in zip(times[kind], times["tls"], strict=True))
    return f"{text} ({statistics.median(ratios):.2f}x, {ratios[0]:.2f}-{ratios[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=7)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--form", type=int, default=0, metavar="N")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    if args.rank:
        rank(args.rounds, args.kinds)
        return
    run = [
        sys.executable,
        "-m",
        "unisono",
        "run",
        "-n",
        "2",
        __file__,
        str(args.rounds),
        *args.kinds,
        "--rank",
    ]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=1200, check=False)
    lines = [line.partition("| ")[1] + line.partition("| ")[2] for line in ended.stdout.splitlines()]
    table = "\n".join(line or "|---" * (len(args.kinds) + 1) + "|" for line in lines)
    print(table, flush=True)
    if ended.returncode != 0:
        sys.exit(ended.stderr[-2000:])
    if args.plot:
        plot(multiples(table), args.plot)
    if args.form:
        form(args.form, min(args.rounds, 3))


if __name__ == "__main__":
    main()
