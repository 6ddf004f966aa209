"""Calls between two processes: unisono beside torch.distributed.rpc, gRPC and ZeroMQ, with equal arguments.

Every library serves an echo in a process of its own, whose main thread sleeps. Each row is one kind of
argument, there and back, and its turns alternate between the libraries; gRPC and ZeroMQ carry bytes only.
Shown are medians in microseconds, the ratio of ours to torch's with the least and the most of consecutive
turns, calls per second with 64 and with 5,000 under way, and the voluntary context switches (wake-ups) that a
call costs in both processes of ours. Libraries that are not installed are left out: `pip install grpcio pyzmq
torch`.

    python bench/rpc.py [--rounds 3] [--only shm,tcp,torch,grpc,zmq] [--rows int,bytes-1Ki] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import multiprocessing as mp
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np

import unisono as uni

NEEDS = {"shm": "unisono", "tcp": "unisono", "torch": "torch", "grpc": "grpc", "zmq": "zmq"}
BYTES_ONLY = ("grpc", "zmq")
SIZES = {"1Ki": 1 << 10, "4Ki": 1 << 12, "16Ki": 1 << 14, "64Ki": 1 << 16, "1Mi": 1 << 20, "16Mi": 1 << 24}
KEY = b"bench"

ROWS: dict[str, Callable[[], Any]] = {
    "int": lambda: 7,
    "text-100": lambda: "x" * 100,
    "list-3": lambda: [1, 2, 3],
    "dict-3": lambda: {"a": 1, "b": 2, "c": 3},
    "tuple-20": lambda: tuple(range(20)),
    "keywords": lambda: 7,
    "floats-1000": lambda: [i / 3 for i in range(1000)],
    "array-8": lambda: np.zeros(1),
    **{f"bytes-{name}": lambda n=n: b"x" * n for name, n in SIZES.items()},
    **{f"array-{name}": lambda n=n: np.zeros(n // 8) for name, n in SIZES.items()},
    **{f"text-{name}": lambda n=n: "x" * n for name, n in SIZES.items()},
    "bytearray-1Mi": lambda: bytearray(1 << 20),
}
RATES = {"64 under way, calls/s": 64, "5,000 under way, calls/s": 5_000}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=0.3, help="of one turn")
    options.add_argument("--only", default=",".join(NEEDS))
    options.add_argument("--rows", default=",".join(ROWS))
    given = options.parse_args()
    names = [name for name in given.only.split(",") if importlib.util.find_spec(NEEDS[name])]
    with contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(started(name)) for name in names}
        print(f"{'us, there and back':26}" + "".join(f"{name:>10}" for name in names) + "   ours / torch")
        for row in given.rows.split(","):
            able = [n for n in names if n not in BYTES_ONLY or row.startswith("bytes-")]
            turns = [turn(clients, able, ("time", row, given.seconds)) for _ in range(given.rounds)]
            show(row, able, names, turns)
        for title, flight in RATES.items():
            able = [n for n in names if n not in BYTES_ONLY]
            turns = [turn(clients, able, ("rate", "int", flight)) for _ in range(given.rounds)]
            show(title, able, names, turns)
        for name in (n for n in names if n in ("shm", "tcp")):
            mine, theirs = ask(clients[name], ("wakes", "int", 1000))
            print(f"wake-ups per call over {name}: {mine:.2f} at the caller, {theirs:.2f} at the callee")


def ask(client: Connection, question: tuple[str, str, float]) -> Any:
    client.send(question)
    return client.recv()


def turn(
    clients: dict[str, Connection], able: list[str], question: tuple[str, str, float]
) -> dict[str, float]:
    """One turn of every library, one after the other."""
    return {name: ask(clients[name], question) for name in able}


def show(title: str, able: list[str], names: list[str], turns: list[dict[str, float]]) -> None:
    cells = [f"{statistics.median(t[n] for t in turns):>10,.1f}" if n in able else f"{'':>10}" for n in names]
    ratios = []
    for ours in ("shm", "tcp"):
        if ours in able and "torch" in able:
            each = sorted(t[ours] / t["torch"] for t in turns)
            ratios.append(f"{ours} {statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})")
    print(f"{title:26}" + "".join(cells) + "   " + ", ".join(ratios), flush=True)


# -- measuring -------------------------------------------------------------------------------------------


def serve_questions(
    address: Any,
    call: Callable[..., Any],
    start: Callable[[Any], Callable[[], Any]] | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
    peer_switches: Callable[[], int] | None = None,
) -> None:
    """A client: does what main asks, until main leaves."""
    with Client(address, authkey=KEY) as asked:
        while True:
            try:
                what, row, amount = asked.recv()
            except EOFError:
                return
            value = convert(ROWS[row]())
            arguments, named = ((), {"x": value}) if row == "keywords" else ((value,), {})
            if what == "time":
                asked.send(timed(lambda: call(*arguments, **named), amount))  # noqa: B023
            elif what == "rate":
                assert start is not None
                asked.send(rate(start, int(amount)))
            else:
                assert peer_switches is not None
                before = switches(), peer_switches()
                for _ in range(int(amount)):
                    call(value)
                after = switches(), peer_switches()
                asked.send([(now - then) / amount for then, now in zip(before, after, strict=True)])


def timed(call: Callable[[], Any], seconds: float) -> float:
    """The median of the calls in some seconds, in microseconds."""
    times: list[float] = []
    call()
    end = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def rate(start: Callable[[Any], Callable[[], Any]], flight: int) -> float:
    """Calls per second with so many under way."""
    total = 5_000
    began = time.perf_counter()
    waits = [start(i) for i in range(flight)]
    for i in range(flight, total):
        waits[i % flight]()
        waits[i % flight] = start(i)
    for wait in waits:
        wait()
    return total / (time.perf_counter() - began)


def switches() -> int:
    """How often threads of this process have gone to sleep."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


# -- the libraries ---------------------------------------------------------------------------------------


def rank_of_unisono(world: uni.Communicator, address: Any) -> None:
    agent = uni.rpc.Agent(world)
    is_over = threading.Event()
    agent.register("echo", lambda x: x)
    agent.register("switches", switches)
    agent.register("end", is_over.set)
    world.barrier()
    if world.rank == 1:
        is_over.wait()
        return
    serve_questions(
        tuple(address),
        lambda *args, **kwargs: agent.call(1, "echo", *args, **kwargs),
        lambda value: agent.start(1, "echo", value).wait,
        peer_switches=lambda: agent.call(1, "switches"),
    )
    agent.call(1, "end")


def spawn_unisono(address: Any, shm: str) -> None:
    uni.spawn(rank_of_unisono, 2, list(address), env={"UNISONO_SHM": shm})


def echo(x: Any) -> Any:
    return x


def rank_of_torch(address: Any, rank: int, port: int) -> None:
    import torch
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        serve_questions(
            address,
            lambda *args, **kwargs: rpc.rpc_sync("worker1", echo, args, kwargs),
            lambda value: rpc.rpc_async("worker1", echo, (value,)).wait,
            lambda value: torch.from_numpy(value) if isinstance(value, np.ndarray) else value,
        )
    rpc.shutdown()


def server_of_grpc(port: int) -> None:
    import grpc

    handler = grpc.method_handlers_generic_handler(
        "bench", {"echo": grpc.unary_unary_rpc_method_handler(lambda data, _: data)}
    )
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=UNLIMITED)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def client_of_grpc(address: Any, port: int) -> None:
    import grpc

    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED)
    grpc.channel_ready_future(channel).result(30)
    serve_questions(address, channel.unary_unary("/bench/echo"))


def server_of_zmq(port: int) -> None:
    import zmq

    sock = zmq.Context().socket(zmq.ROUTER)
    sock.bind(f"tcp://127.0.0.1:{port}")
    while True:
        sock.send_multipart(sock.recv_multipart(copy=False), copy=False)


def client_of_zmq(address: Any, port: int) -> None:
    import zmq

    sock = zmq.Context().socket(zmq.DEALER)
    sock.connect(f"tcp://127.0.0.1:{port}")

    def call(data: bytes) -> bytes:
        sock.send(data, copy=False)
        received: bytes = sock.recv()
        return received

    serve_questions(address, call)


# -- processes -------------------------------------------------------------------------------------------


def programs(name: str, address: Any, port: int) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """What the processes of a library run; the one that ends by itself comes first."""
    match name:
        case "shm" | "tcp":
            return [(spawn_unisono, (address, str(int(name == "shm"))))]
        case "torch":
            return [(rank_of_torch, (address, rank, port)) for rank in range(2)]
        case "grpc":
            return [(client_of_grpc, (address, port)), (server_of_grpc, (port,))]
        case _:
            return [(client_of_zmq, (address, port)), (server_of_zmq, (port,))]


@contextlib.contextmanager
def started(name: str) -> Any:
    """The processes of a library, and a connection to its client."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        processes = [
            mp.get_context("spawn").Process(target=fn, args=args)
            for fn, args in programs(name, listener.address, port)
        ]
        for process in processes:
            process.start()
        with listener.accept() as client:
            yield client
    processes[0].join(10)
    for process in processes:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
