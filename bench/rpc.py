"""Calls between processes: unisono beside torch.distributed.rpc, gRPC and ZeroMQ, with equal arguments.

Every library serves an echo in a process of its own, whose main thread sleeps. Turns alternate between the
libraries, and with `send` and `recv` of the same bytes on the same links: virtual cores may change their
distance at any time, which alone makes bytes four times as expensive.
`torch` moves large tensors on one host by shared memory, `torch-tcp` everything by TCP. gRPC and ZeroMQ carry
bytes only. Libraries that are not installed are left out: `pip install grpcio pyzmq torch`.

    python bench/rpc.py [--quick] [--parts kinds,sendrecv,steps,alike,load,busy,wakes] [--rounds 3]
        [--seconds 0.3] [--only shm,tcp,tls,torch,torch-tcp,grpc,zmq] [--rows int,bytes-1Ki] [--json FILE]
    python bench/rpc.py --tables FILE [--into PAGE]

A whole run takes long. With `--json`, several runs add to one file: make it in short pieces, by `--parts`,
`--only` and `--rows`, and print all tables from it with `--tables`; with `--into`, those of a page are
written between the lines of the page that name this file. `--rows page` are the rows of docs/rpc.md, for
which `make rpc-page` runs all pieces.

- kinds: each kind of argument there and back; also in calls with an int.
- sendrecv: echo of bytes and of an array beside the same bytes by send and recv on that link. Rows are sizes.
- steps: bytes of doubling lengths, and one byte around each threshold.
- alike: bytes, bytearray, ASCII text and an array of one size. Rows are sizes.
- load: calls per second and percentiles with many under way, from one thread and from eight, to one rank and
  to all of three. Rows are numbers of calls.
- busy: one call at a time while the callee's main thread is busy.
- wakes: how often threads go to sleep per call (voluntary context switches), by their role.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import rpc_tables
from rpc_peers import BYTES_ONLY, NEEDS, OURS, ROWS, SIZES, Load, started

from unisono._native import CERTAIN_BLOB_BYTES, FRAME_BLOB_BYTES

QUICK_ROWS = (
    "int,list-3,keywords,dataclass,named-tuple,set-3,array-8,bytes-1Ki,bytes-64Ki,bytes-1Mi,array-1Mi"
)
# Lengths from which bytes travel in another way: as a blob, and as a blob that waits for its receiver.
THRESHOLDS = (FRAME_BLOB_BYTES, CERTAIN_BLOB_BYTES)
LOADED_RANKS = 4

Clients = dict[str, Connection]
# A row and one turn of it.
Turns = Iterator[tuple[str, dict[str, Any]]]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="some rows, one short turn each")
    options.add_argument("--parts", default=",".join(rpc_tables.PARTS))
    options.add_argument("--rounds", type=int)
    options.add_argument("--seconds", type=float, help="of one turn")
    options.add_argument("--only", default=",".join(NEEDS))
    options.add_argument(
        "--rows", help="of kinds, sendrecv, alike and load; by default all, 'page': of the page"
    )
    options.add_argument("--json", type=pathlib.Path, help="add the turns to this file")
    options.add_argument("--beside", default="nothing else", help="what else ran, for the record")
    options.add_argument("--tables", type=pathlib.Path, help="measure nothing, print the tables of this file")
    options.add_argument("--into", type=pathlib.Path, help="with --tables: write those of a page into it")
    given = options.parse_args()
    parts = given.parts.split(",")
    if given.tables is not None:
        data = json.loads(given.tables.read_text())
        if given.into is None:
            show(data, parts)
        else:
            given.into.write_text(rpc_tables.into_page(given.into.read_text(), data))
        return
    rounds = given.rounds or (1 if given.quick else 3)
    seconds = given.seconds or (0.05 if given.quick else 0.3)
    rows = given.rows.split(",") if given.rows else None
    if given.rows == "page":
        rows = list(rpc_tables.PAGE_ROWS)
    names = [name for name in given.only.split(",") if importlib.util.find_spec(NEEDS[name])]
    found: dict[str, Any] = {"about": [about(names, rounds, seconds, given.beside)]}
    with contextlib.ExitStack() as stack:
        # Under load every library has the machine to itself.
        clients = {name: stack.enter_context(started(name)) for name in names if set(parts) - {"load"}}
        for _ in range(rounds):
            for part in parts:
                if part == "kinds":
                    some = rows or (QUICK_ROWS.split(",") if given.quick else list(ROWS))
                    add(found, part, kinds(clients, some, seconds))
                elif part in MEASURES:
                    add(found, part, MEASURES[part](clients, rows, seconds))
    if "load" in parts:
        names = [name for name in names if name not in BYTES_ONLY]
        for name in names:
            with started(name, LOADED_RANKS) as client:
                for _ in range(rounds):
                    add(found, "load", load(client, name, rows, 3_000 if given.quick else 10_000))
        pair_up(found["load"])
    show(found, parts)
    if given.json is not None:
        kept = json.loads(given.json.read_text()) if given.json.exists() else {}
        rpc_tables.merge(kept, found)
        given.json.write_text(json.dumps(kept))


def about(names: list[str], rounds: int, seconds: float, beside: str) -> str:
    """What a reader of the figures has to know."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "?")
    packages = {"unisono", *(NEEDS[name] for name in names)}
    known = {"grpc": "grpcio", "zmq": "pyzmq"}
    versions = [f"{one} {importlib.metadata.version(known.get(one, one))}" for one in sorted(packages)]
    return (
        f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores ({model}), "
        f"Linux {platform.release()}, Python {platform.python_version()}, {', '.join(versions)}; "
        f"{rounds} turns of {seconds} s, beside {beside}"
    )


def show(data: dict[str, Any], parts: list[str]) -> None:
    """Print the tables."""
    for line in rpc_tables.tables(data, parts):
        print(line)


def add(found: dict[str, Any], part: str, turns: Turns) -> None:
    """Keep the turns of a part."""
    for row, turn in turns:
        found.setdefault(part, {}).setdefault(row, []).append(turn)


def pair_up(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Make one turn of the k-th turns of all libraries, which had to be measured one after the other."""
    for row, turns in rows.items():
        by_name: dict[str, list[Any]] = {}
        for turn in turns:
            for name, measured in turn.items():
                by_name.setdefault(name, []).append(measured)
        longest = max(map(len, by_name.values()))
        rows[row] = [
            {name: some[k] for name, some in by_name.items() if k < len(some)} for k in range(longest)
        ]


def ask(client: Connection, what: str, about: Any, amount: float = 0) -> Any:
    """Let a client do something."""
    client.send((what, about, amount))
    return client.recv()


# -- measurements: each makes one turn of each of its rows -----------------------------------------------


def kinds(clients: Clients, rows: list[str], seconds: float) -> Turns:
    for row in rows:
        able = [name for name in clients if name not in BYTES_ONLY or row.startswith("bytes-")]
        yield row, {name: ask(clients[name], "time", row, seconds) for name in able}


def sendrecv(clients: Clients, rows: list[str] | None, seconds: float) -> Turns:
    for name in (n for n in clients if n in OURS):
        for size in rows or ("4Ki", "16Ki", "64Ki", "1Mi", "16Mi"):
            calls = {
                form: ask(clients[name], "time", f"{form}-{size}", seconds) for form in ("bytes", "array")
            }
            messages = ask(clients[name], "sendrecv", SIZES[size], seconds)
            yield f"{name}, {size}", {rpc_tables.MESSAGES: messages, **calls}


def steps(clients: Clients, rows: list[str] | None, seconds: float) -> Turns:
    doubled = [1 << power for power in range(8, 25)]
    around = [at + step for at in THRESHOLDS for step in (-1, 1)]
    for name in (n for n in clients if n in OURS):
        yield name, {str(n): ask(clients[name], "time", n, seconds / 3) for n in sorted({*doubled, *around})}


def alike(clients: Clients, rows: list[str] | None, seconds: float) -> Turns:
    for name in (n for n in clients if n in OURS):
        for size in rows or ("1Ki", "16Ki", "64Ki", "1Mi", "16Mi"):
            forms = {form: ask(clients[name], "time", f"{form}-{size}", seconds) for form in rpc_tables.FORMS}
            yield f"{name}, {size}", forms


def load(client: Connection, name: str, rows: list[str] | None, calls: int) -> Turns:
    for flight in (int(row) for row in rows or ("64", "5000")):
        for threads in (1, 8):
            for is_to_all in (False, True):
                to = f"all of {LOADED_RANKS - 1}" if is_to_all else "one rank"
                title = f"{flight:,}, {threads} thread{'s' * (threads > 1)}, to {to}"
                yield title, {name: ask(client, "load", Load(flight, threads, calls, is_to_all))}


def busy(clients: Clients, rows: list[str] | None, seconds: float) -> Turns:
    titles = {
        "sleeps": "",
        "waits in a barrier": "barrier",
        "multiplies in NumPy": "numpy",
        "holds the GIL": "python",
    }
    for name in (n for n in clients if n in OURS):
        for title, how in titles.items():
            if how:
                ask(clients[name], "occupy", how)
            yield f"{name}, {title}", {"int": ask(clients[name], "time", "int", seconds)}
            if how:
                ask(clients[name], "occupy", "free")


def wakes(clients: Clients, rows: list[str] | None, seconds: float) -> Turns:
    for name in (n for n in clients if n in OURS):
        for row in ("int", "int inline", "array-64Ki", "array-1Mi"):
            yield f"{name}, {row}", ask(clients[name], "wakes", row, 500)


MEASURES = {"sendrecv": sendrecv, "steps": steps, "alike": alike, "busy": busy, "wakes": wakes}

if __name__ == "__main__":
    main()
