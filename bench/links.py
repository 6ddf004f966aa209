"""The links of the engine: TCP, TLS, QUIC in datagrams of a network and of loopback, and iroh beside them.

    python bench/links.py [--json FILE] [--seconds S] [--kinds tls,quic] [--rows TEXT] [--form N]
                          [--into docs/backends.md] [--plot links.png]

Two ranks, each with a world for every kind of links, in alternating turns: how long a first round trip takes
where there is no link yet, round trips, all_reduce, 64 MiB one way and both ways at once; and 64 MiB through
a relay that loses none or one in a hundred of the datagrams of a network. `--form N` measures instead how
long N ranks of this host take to have links with all others, and how many Internet sockets a rank has then.

A run takes S seconds: it adds rounds to FILE, first to the rows that have the fewest there. Then it prints
the table of all rounds in FILE, and which goals they miss. `--seconds 0` only prints. `--into` puts the same
between the lines of a page that name this file, with the picture of `--plot`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
LONG = 64 * MIB
VISIT_S = 0.5  # of a row, before the next row has its turn
JOB = "0123456789abcdef" * 2
KINDS: dict[str, dict[str, Any]] = {
    "tcp": {},
    "tls": {"tls": True},
    "quic 1452": {"quic": True, "datagram_bytes": NETWORK_DATAGRAM},
    "quic": {"quic": True},
    "iroh": {},
}
LINK_UP = "first round trip, link included"
RELAY = "64 MiB one way, 1452, through a relay"
RELAYS = {"none lost": 0, "1 % lost": 10}  # of 1,000 datagrams
BEGIN, END = "<!-- bench/links.py: begin -->", "<!-- bench/links.py: end -->"

Call = Callable[[Communicator], None]
Round = dict[str, float]  # seconds by kind
Rounds = dict[str, list[Round]]  # by row


def in_words(nbytes: int) -> str:
    if nbytes >= MIB:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes // KIB} KiB" if nbytes >= KIB else f"{nbytes} B"


# What a row's rounds are compared with: the kind, of which kind its time is how much at most.
GOALS: dict[str, dict[str, tuple[str, float]]] = {
    **{
        f"{call} {size}": {"quic": ("tls", 1.3), "quic 1452": ("tls", 1.3)}
        for call in ("round trip", "all_reduce")
        for size in ("8 B", "64 KiB")
    },
    **{
        f"{call} {in_words(size)}": {"quic": ("tls", 1.0)}
        for call in ("round trip", "all_reduce")
        for size in SIZES
        if size >= MIB
    },
    "64 MiB one way": {"quic": ("tls", 1.0), "quic 1452": ("tls", 1 / 0.7)},
    "64 MiB both ways": {"quic": ("tls", 1.0), "quic 1452": ("tls", 1 / 0.6)},
    RELAY: {"1 % lost": ("none lost", 6.0)},
}
LINK_UP_GOAL_S = 3e-3
# The kinds that `--form` compares.
FORMED = {"tls": uni.Config(shm=False, tls=True), "quic": uni.Config(shm=False, links="quic")}
ALL_LINKS, WHOLE, SOCKETS = "all links", "start, all links, end", "sockets of a rank"
EXPLAINED = (
    "Medians, and in brackets the multiple of TLS in the same round: its median and its quartiles. "
    '"quic 1452" is QUIC in the datagrams of a network of 1,500 bytes, "quic" in those of loopback.'
)


# ---- worlds ----


def world_of(base: Communicator, kind: str) -> Communicator:
    """A world of the same two ranks."""
    backend: Closable
    if kind == "iroh":
        unconnected = UnconnectedIroh(BindSpec(base.rank, 2, "127.0.0.1", True, uni.Config(), secret=b"s"))
        backend = unconnected.connect(base.all_gather_object(unconnected.card()))
    else:
        backend = engine(base, KINDS[kind])
    return Communicator.world(backend)


def engine(base: Communicator, links: dict[str, Any], relay: list[str] | None = None) -> NativeBackend:
    """Of two ranks. `relay`: a program by which rank 0 reaches rank 1, and how many of 1,000 it loses."""
    folder = tempfile.mkdtemp()
    backend = NativeBackend(base.rank, 2, folder, b"secret", shm=False, neighbours=False, **links)
    card = backend.card()
    if relay is not None and base.rank == 1:
        program, lost = relay
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


# ---- calls ----


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


# ---- rows ----


@dataclass
class Bench:
    """Two ranks and what they measure; a row is a name and a function that measures one round of it."""

    base: Communicator
    kinds: list[str]

    def __post_init__(self) -> None:
        self._worlds: dict[str, Communicator] = {}
        self._relay: str | None = None

    def rows(self) -> dict[str, Callable[[], Round]]:
        made: dict[str, Callable[[], Round]] = {LINK_UP: self.link_up}
        for nbytes in SIZES:
            count = max(3, min(300, 8 * MIB // nbytes))
            made[f"round trip {in_words(nbytes)}"] = self.row(ping(nbytes), count)
            made[f"all_reduce {in_words(nbytes)}"] = self.row(reduced(nbytes), count)
        made[f"{in_words(LONG)} one way"] = self.row(one_way(LONG), 3)
        made[f"{in_words(LONG)} both ways"] = self.row(both_ways(LONG), 3)
        if "quic 1452" in self.kinds:
            made[RELAY] = self.relayed
        return made

    def row(self, call: Call, count: int) -> Callable[[], Round]:
        def measure() -> Round:
            took = {}
            for kind in self.kinds:
                turn_s(self.base, self.world(kind), call, 1)
                took[kind] = turn_s(
                    self.base, self.world(kind), call, min(count, 3 if kind == "iroh" else count)
                )
            return took

        return measure

    def world(self, kind: str) -> Communicator:
        if kind not in self._worlds:
            self._worlds[kind] = world_of(self.base, kind)
        return self._worlds[kind]

    def link_up(self) -> Round:
        took = {}
        for kind in self.kinds:
            if kind == "iroh":  # connects when it begins
                continue
            world = world_of(self.base, kind)
            took[kind] = turn_s(self.base, world, ping(8), 1)
            self.base.barrier()
            world.close()
        return took

    def relayed(self) -> Round:
        if self._relay is None:
            self._relay = tempfile.mkdtemp() + "/lossy_relay"
            source = Path(__file__).with_name("lossy_relay.cpp")
            if self.base.rank == 1:
                subprocess.run(["c++", "-O2", "-std=c++20", str(source), "-o", self._relay], check=True)
        for name, lost in RELAYS.items():
            if name not in self._worlds:
                backend = engine(self.base, KINDS["quic 1452"], [self._relay, str(lost)])
                self._worlds[name] = Communicator.world(backend)
                turn_s(self.base, self._worlds[name], one_way(LONG), 1)
        return {name: turn_s(self.base, self._worlds[name], one_way(LONG), 1) for name in RELAYS}

    def close(self) -> None:
        for world in self._worlds.values():
            self.base.barrier()
            world.close()


def rank(kinds: list[str], text: str, seconds: float, known: Rounds) -> None:
    """One of the two ranks: measure the row with the fewest rounds until the time is over. Rank 0 decides."""
    with uni.init() as base:
        ends = time.monotonic() + seconds
        bench = Bench(base, kinds)
        rows = {name: measure for name, measure in bench.rows().items() if text in name}
        made: Rounds = {name: [] for name in rows}
        while True:
            name = min(rows, key=lambda row: len(known.get(row, [])) + len(made[row]))
            name = base.broadcast_object(name if time.monotonic() < ends else None, 0)
            if name is None:
                break
            began, is_over = time.monotonic(), False
            while not is_over:
                made[name].append(rows[name]())
                is_over = base.broadcast_object(time.monotonic() - began > VISIT_S, 0)
        bench.close()
        if base.rank == 0:
            print("ROUNDS " + json.dumps(made), flush=True)


def measured(kinds: list[str], text: str, seconds: float, known: Rounds) -> Rounds:
    """Run both ranks for some seconds."""
    given = json.dumps([kinds, text, seconds, known])
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(given)
        file.flush()
        run = [sys.executable, "-m", "unisono", "run", "-n", "2", __file__, "--rank", file.name]
        ended = subprocess.run(run, capture_output=True, text=True, timeout=seconds + 300, check=False)
    for line in ended.stdout.splitlines():
        if "ROUNDS " in line:
            made: Rounds = json.loads(line.partition("ROUNDS ")[2])
            return made
    sys.exit(ended.stdout[-2000:] + ended.stderr[-2000:])


# ---- many ranks ----


def formed(comm: Communicator) -> tuple[float, int]:
    """Talk to every other rank: how long that took, and how many Internet sockets this one has then."""
    started = time.perf_counter()
    comm.barrier()
    comm.all_to_all(np.zeros((comm.size, 1)))
    comm.barrier()
    return time.perf_counter() - started, len(list(internet_sockets()))


def internet_sockets() -> Iterator[int]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as same:
                    if same.family in (socket.AF_INET, socket.AF_INET6):
                        yield int(entry)


def forming(size: int, seconds: float) -> Iterator[tuple[str, Round]]:
    """Rows of ranks that make links with all others: over TLS, over QUIC, in turns."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        links: Round = {}
        whole: Round = {}
        sockets: Round = {}
        for kind, config in FORMED.items():
            started = time.perf_counter()
            ranks = uni.spawn(formed, size, config=config, timeout=300)
            whole[kind] = time.perf_counter() - started
            links[kind] = max(took for took, _ in ranks)
            sockets[kind] = max(count for _, count in ranks)
        yield f"{size} ranks: {ALL_LINKS}", links
        yield f"{size} ranks: {WHOLE}", whole
        yield f"{size} ranks: {SOCKETS}", sockets


# ---- the table ----


def multiples(rounds: list[Round], kind: str, of: str = "tls") -> list[float]:
    return sorted(took[kind] / took[of] for took in rounds if kind in took and of in took)


def cell(name: str, rounds: list[Round], kind: str) -> str:
    """Median, and the multiple of TLS with its quartiles."""
    values = [took[kind] for took in rounds if kind in took]
    if not values:
        return ""
    if name.endswith(SOCKETS):
        return f"{max(values):.0f}"
    middle = statistics.median(values) * 1e6
    text = f"{middle:,.1f}" if middle < 100 else f"{middle:,.0f}"
    if kind == "tls" or not (ratios := multiples(rounds, kind)):
        return text
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{text} ({statistics.median(ratios):.2f}, {low:.2f}-{high:.2f})"


def table(all_rounds: Rounds) -> str:
    """Every row, with the kinds that were measured and the number of rounds."""
    rows = {name: rounds for name, rounds in all_rounds.items() if rounds and name != RELAY}
    kinds = [kind for kind in KINDS if any(kind in took for rounds in rows.values() for took in rounds)]
    lines = ["| microseconds | " + " | ".join(kinds) + " | rounds |", "|---" * (len(kinds) + 2) + "|"]
    lines += [
        f"| {name} | " + " | ".join(cell(name, rounds, kind) for kind in kinds) + f" | {len(rounds)} |"
        for name, rounds in rows.items()
    ]
    if relayed := all_rounds.get(RELAY):
        none, some = ([took[name] * 1e3 for took in relayed] for name in RELAYS)
        text = (
            f"{RELAY}: {statistics.median(none):.0f} ms with none lost, {statistics.median(some):.0f} ms "
            f"({min(some):.0f}-{max(some):.0f}) with 1 % lost; {len(relayed)} rounds."
        )
        lines += ["", text]
    return "\n".join(lines)


def missed(all_rounds: Rounds) -> Iterator[str]:
    """The goals that the medians of all rounds miss."""
    goals = GOALS | {name: {"quic": ("tls", 1.0)} for name in all_rounds if name.endswith(ALL_LINKS)}
    for name, of_kinds in goals.items():
        for kind, (of, most) in of_kinds.items():
            ratios = multiples(all_rounds.get(name, []), kind, of)
            if ratios and statistics.median(ratios) > most:
                yield f"{name}, {kind}: {statistics.median(ratios):.2f} of {of}, goal {most:.2f}"
    for kind in ("quic", "quic 1452"):
        ups = [took[kind] for took in all_rounds.get(LINK_UP, []) if kind in took]
        if ups and (middle := statistics.median(ups)) > LINK_UP_GOAL_S:
            yield f"{LINK_UP}, {kind}: {middle * 1e3:.1f} ms, goal {LINK_UP_GOAL_S * 1e3:.0f} ms"
    for name, rounds in all_rounds.items():
        if name.endswith(SOCKETS) and any(took["quic"] != 1 for took in rounds):
            yield f"{name}: {max(took['quic'] for took in rounds):.0f}, goal 1"


def section(all_rounds: Rounds, picture: str | None) -> str:
    """What a page shows: the table, the goals that are missed, the picture."""
    goals = list(missed(all_rounds))
    parts = [EXPLAINED, table(all_rounds)]
    parts.append(
        "\n".join(["Goals that this run misses:", "", *(f"- {goal}" for goal in goals)]) if goals else ""
    )
    parts.append(f"![Time as a multiple of TLS]({picture})" if picture else "")
    return "\n\n".join(part for part in parts if part)


def plot(all_rounds: Rounds, file: str) -> None:
    """The multiples of TLS by row and kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: rounds for name, rounds in all_rounds.items() if multiples(rounds, "quic")}
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1.5))
    for kind in KINDS:
        shown = {name: multiples(rounds, kind) for name, rounds in rows.items()}
        if kind != "iroh" and any(shown.values()):
            points = {name: statistics.median(ratios) for name, ratios in shown.items() if ratios}
            axes.plot(list(points.values()), list(points), "o", label=kind)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("time as a multiple of TLS")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="keep the rounds here")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--form", type=int, default=0, metavar="N")
    parser.add_argument("--into", metavar="PAGE")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(*json.loads(Path(args.rank).read_text()))
        return
    kept = Path(args.json) if args.json else None
    rounds: Rounds = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    if args.seconds > 0:
        if args.form:
            for name, took in forming(args.form, args.seconds):
                rounds.setdefault(name, []).append(took)
        else:
            for name, more in measured(args.kinds.split(","), args.rows, args.seconds, rounds).items():
                rounds.setdefault(name, []).extend(more)
    if kept is not None:
        kept.write_text(json.dumps(rounds))
    print(table(rounds), *(f"missed: {goal}" for goal in missed(rounds)), sep="\n")
    if args.plot:
        plot(rounds, args.plot)
    if args.into:
        page = Path(args.into)
        before, _, rest = page.read_text().partition(BEGIN)
        shown = section(rounds, args.plot and os.path.relpath(args.plot, page.parent))
        page.write_text(f"{before}{BEGIN}\n\n{shown}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
