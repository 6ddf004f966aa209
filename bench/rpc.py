"""Calls between processes: unisono beside torch.distributed.rpc, gRPC and ZeroMQ, with equal arguments.

Every library serves an echo in a process of its own, whose main thread sleeps. Turns alternate between the
libraries, and with `send` and `recv` of the same bytes on the same links: virtual cores may change their
distance at any time, which alone makes bytes four times as expensive.
`torch` moves large tensors on one host by shared memory, `torch-tcp` everything by TCP. gRPC and ZeroMQ carry
bytes only. Libraries that are not installed are left out: `pip install grpcio pyzmq torch`.

    python bench/rpc.py [--quick] [--parts kinds,steps,sendrecv,load,wakes] [--rounds 3] [--seconds 0.3]
        [--only shm,tcp,tls,torch,torch-tcp,grpc,zmq] [--rows int,bytes-1Ki]

- kinds: each kind of argument there and back. Medians in microseconds, ours as a multiple of torch's with the
  least and the most of all turns, and p99 and p99.9 of ours.
- sendrecv: echo of bytes and of an array as multiples of the same bytes by send and recv on that link.
- steps: bytes of doubling lengths and around each threshold; the worst ratio of two that follow each other.
- load: calls per second and percentiles, with many under way; and while the callee's main thread is busy.
- wakes: how often threads go to sleep per call (voluntary context switches), by their role.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
from multiprocessing.connection import Connection
from typing import Any

from rpc_peers import BYTES_ONLY, NEEDS, OURS, ROWS, SIZES, Load, started

from unisono._native import FRAME_BLOB_BYTES, FRAME_BYTES_MAX

# What each of ours is compared with.
PEERS = {"shm": ("torch",), "tcp": ("torch-tcp", "torch"), "tls": ("torch-tcp",)}
QUICK_ROWS = (
    "int,list-3,keywords,dataclass,named-tuple,set-3,array-8,bytes-1Ki,bytes-64Ki,bytes-1Mi,array-1Mi"
)
THRESHOLDS = (2_944, 7_040, FRAME_BLOB_BYTES, FRAME_BYTES_MAX, 1 << 15, 1 << 16, 1 << 17, 1 << 20)
LOADS = [
    Load(flight, threads, 20_000, is_to_all)
    for flight in (64, 5_000)
    for threads in (1, 8)
    for is_to_all in (False, True)
]
PARTS = ("kinds", "sendrecv", "steps", "load", "wakes")

Clients = dict[str, Connection]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="some rows, one short turn each")
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--rounds", type=int)
    options.add_argument("--seconds", type=float, help="of one turn")
    options.add_argument("--only", default=",".join(NEEDS))
    options.add_argument("--rows")
    given = options.parse_args()
    rounds = given.rounds or (1 if given.quick else 3)
    seconds = given.seconds or (0.05 if given.quick else 0.3)
    rows = (given.rows or (QUICK_ROWS if given.quick else ",".join(ROWS))).split(",")
    names = [name for name in given.only.split(",") if importlib.util.find_spec(NEEDS[name])]
    parts, ours = given.parts.split(","), [name for name in names if name in OURS]
    with contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(started(name)) for name in names}
        if "kinds" in parts:
            show_kinds(clients, rows, rounds, seconds)
        if "sendrecv" in parts:
            show_beside_messages(clients, ours, rounds, seconds)
        if "steps" in parts:
            show_steps(clients, ours, seconds / 3)
        if "load" in parts:
            show_rates(clients, rounds)
            show_busy(clients, ours)
        if "wakes" in parts:
            show_wakes(clients, ours)
    if "load" in parts:
        for name in (n for n in ours if n != "tls"):
            with started(name, 4) as client:
                show_load(client, name, LOADS[:2] if given.quick else LOADS)


def ask(client: Connection, what: str, about: Any, amount: float = 0) -> Any:
    client.send((what, about, amount))
    return client.recv()


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def show_kinds(clients: Clients, rows: list[str], rounds: int, seconds: float) -> None:
    print(
        f"{'us, there and back':18}"
        + "".join(f"{name:>10}" for name in clients)
        + "   ours / peer; p99, p99.9"
    )
    for row in rows:
        able = [n for n in clients if n not in BYTES_ONLY or row.startswith("bytes-")]
        turns = [{n: ask(clients[n], "time", row, seconds) for n in able} for _ in range(rounds)]
        cells = [f"{middle(turns, n):>10,.1f}" if n in able else f"{'':>10}" for n in clients]
        notes = []
        for ours in (n for n in able if n in OURS):
            notes += [
                f"{ours}/{peer} {spread([t[ours][0] / t[peer][0] for t in turns])}"
                for peer in PEERS[ours]
                if peer in able
            ]
            notes.append(f"{ours} {middle(turns, ours, 1):,.0f}, {middle(turns, ours, 2):,.0f}")
        print(f"{row:18}" + "".join(cells) + "   " + "; ".join(notes), flush=True)


def middle(turns: list[dict[str, Any]], name: str, at: int = 0) -> float:
    """The median of the turns: of their medians, or of another percentile."""
    return statistics.median(turn[name][at] for turn in turns)


def show_beside_messages(clients: Clients, ours: list[str], rounds: int, seconds: float) -> None:
    print(
        f"\n{'beside send and recv':22}{'messages us':>12}{'bytes us':>10}{'array us':>10}   ratios of both"
    )
    sizes = {name: SIZES[name] for name in ("4Ki", "16Ki", "64Ki", "1Mi", "16Mi")}
    for name in ours:
        for title, nbytes in sizes.items():
            turns = [
                {
                    "messages": ask(clients[name], "sendrecv", nbytes, seconds),
                    **{
                        kind: ask(clients[name], "time", f"{kind}-{title}", seconds)
                        for kind in ("bytes", "array")
                    },
                }
                for _ in range(rounds)
            ]
            cells = "".join(
                f"{middle(turns, kind):>{w},.1f}"
                for kind, w in (("messages", 12), ("bytes", 10), ("array", 10))
            )
            ratios = [spread([t[kind][0] / t["messages"][0] for t in turns]) for kind in ("bytes", "array")]
            print(f"{name + ' ' + title:22}{cells}   {', '.join(ratios)}", flush=True)


def show_steps(clients: Clients, ours: list[str], seconds: float) -> None:
    doubled = [1 << power for power in range(8, 25)]
    around = [at + step for at in THRESHOLDS for step in (-1, 0, 1)]
    for name in ours:
        took = {n: ask(clients[name], "time", n, seconds)[0] for n in sorted({*doubled, *around})}
        ratio, n = max((took[2 * n] / took[n], n) for n in doubled[:-1])
        print(f"\n{name}: doubling {n:,} to {2 * n:,} bytes costs most: {ratio:.2f}x")
        ratio, n = max((took[n + 1] / took[n - 1], n) for n in THRESHOLDS)
        print(
            f"{name}: of the thresholds, {n:,} bytes costs most: {ratio:.2f}x from one byte less to one more"
        )
        print("  " + ", ".join(f"{n:,}: {us:,.0f}" for n, us in took.items()), flush=True)


def show_rates(clients: Clients, rounds: int) -> None:
    print("\nints, calls per second from one thread; p50, p99, p99.9 in us from start to answer")
    for flight in (64, 5_000):
        able = [n for n in clients if n not in BYTES_ONLY]
        turns = [{n: ask(clients[n], "load", Load(flight, 1, 5_000)) for n in able} for _ in range(rounds)]
        for name in able:
            cells = ", ".join(f"{middle(turns, name, at):,.0f}" for at in (1, 2, 3))
            ratios = [
                f"{name}/{peer} {spread([t[name][0] / t[peer][0] for t in turns])}"
                for peer in PEERS.get(name, ())
                if peer in able
            ]
            print(
                f"{flight:>6,} {name:10}{middle(turns, name):>12,.0f}/s   {cells}   {'; '.join(ratios)}",
                flush=True,
            )


def show_load(client: Connection, name: str, loads: list[Load]) -> None:
    print(f"\n{name}, 4 ranks: ints, calls per second; p50, p99, p99.9 in us from start to answer")
    for load in loads:
        rate, *some = ask(client, "load", load)
        to = "all others" if load.is_to_all else "rank 1"
        title = f"{load.flight:,} under way, {load.threads} threads, to {to}"
        print(f"{title:45}{rate:>12,.0f}/s   {', '.join(f'{us:,.0f}' for us in some)}", flush=True)


def show_busy(clients: Clients, ours: list[str]) -> None:
    print("\none int at a time while the callee's main thread is busy: p50, p99, p99.9 in us")
    for name in ours:
        for how in ("sleeping", "barrier", "numpy", "python"):
            if how != "sleeping":
                ask(clients[name], "occupy", how)
            cells = ", ".join(f"{us:,.1f}" for us in ask(clients[name], "time", "int", 0.5))
            print(f"{name + ', ' + how:18}{cells}", flush=True)
            if how != "sleeping":
                ask(clients[name], "occupy", "free")


def show_wakes(clients: Clients, ours: list[str]) -> None:
    print("\nwake-ups per call")
    for name in ours:
        for row in ("int", "int inline", "array-64Ki", "array-1Mi"):
            found = ask(clients[name], "wakes", row, 500)
            print(
                f"{name + ', ' + row:22}"
                + (", ".join(f"{role} {n:.2f}" for role, n in found.items()) or "none")
            )


if __name__ == "__main__":
    main()
