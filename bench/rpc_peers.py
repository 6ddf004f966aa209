"""The processes of bench/rpc.py: an echo served by unisono, torch.distributed.rpc, gRPC and ZeroMQ.

Each library runs in processes of its own. One is the client: it does what the bench asks, and measures.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing as mp
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import numpy as np

import unisono as uni

NEEDS = {
    "shm": "unisono",
    "tcp": "unisono",
    "tls": "unisono",
    "torch": "torch",
    "torch-tcp": "torch",
    "grpc": "grpc",
    "zmq": "zmq",
}
OURS = ("shm", "tcp", "tls")
BYTES_ONLY = ("grpc", "zmq")
SIZES = {"1Ki": 1 << 10, "4Ki": 1 << 12, "16Ki": 1 << 14, "64Ki": 1 << 16, "1Mi": 1 << 20, "16Mi": 1 << 24}
KEY = b"bench"


@uni.register
@dataclasses.dataclass
class Point:
    """A registered dataclass."""

    x: int
    y: float


@uni.register
class Span(NamedTuple):
    """A registered named tuple."""

    start: int
    stop: int


ROWS: dict[str, Callable[[], Any]] = {
    "int": lambda: 7,
    "text-100": lambda: "x" * 100,
    "list-3": lambda: [1, 2, 3],
    "dict-3": lambda: {"a": 1, "b": 2, "c": 3},
    "set-3": lambda: {1, 2, 3},
    "tuple-20": lambda: tuple(range(20)),
    "keywords": lambda: 7,
    "dataclass": lambda: Point(1, 2.5),
    "named-tuple": lambda: Span(1, 2),
    "numpy-scalar": lambda: np.float64(2.5),
    "tensor-8": lambda: _torch().zeros(1, dtype=_torch().float64),
    "floats-1000": lambda: [i / 3 for i in range(1000)],
    "array-8": lambda: np.zeros(1),
    **{f"bytes-{name}": lambda n=n: b"x" * n for name, n in SIZES.items()},
    **{f"bytearray-{name}": lambda n=n: bytearray(n) for name, n in SIZES.items()},
    **{f"array-{name}": lambda n=n: np.zeros(n // 8) for name, n in SIZES.items()},
    **{f"text-{name}": lambda n=n: "x" * n for name, n in SIZES.items()},
}


def value_of(row: str | int) -> Any:
    """The argument of a row; a number is that many bytes."""
    return bytes(row) if isinstance(row, int) else ROWS[row]()


def _torch() -> Any:
    import torch

    return torch


class Load(NamedTuple):
    """Many calls at once: so many under way in each of some threads, to rank 1 or to all others."""

    flight: int
    threads: int
    total: int
    is_to_all: bool = False


# -- measuring -------------------------------------------------------------------------------------------


def percentiles(times: list[float]) -> tuple[float, float, float]:
    """p50, p99 and p99.9, in microseconds."""
    ordered = sorted(times)
    return (
        statistics.median(ordered) * 1e6,
        ordered[int(0.99 * (len(ordered) - 1))] * 1e6,
        ordered[int(0.999 * (len(ordered) - 1))] * 1e6,
    )


def timed(call: Callable[[], Any], seconds: float) -> tuple[float, float, float]:
    """The percentiles of the calls in some seconds, of 10 at least."""
    times: list[float] = []
    call()
    end = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return percentiles(times)


def loaded(start: Callable[[int, Any], Callable[[], Any]], load: Load, ranks: int) -> tuple[float, ...]:
    """Calls per second, then the percentiles from the start of a call until its thread has the answer."""
    times: list[list[float]] = [[] for _ in range(load.threads)]
    each, flight = load.total // load.threads, max(1, load.flight // load.threads)

    def one(number: int) -> None:
        waiting: collections.deque[tuple[float, Callable[[], Any]]] = collections.deque()
        for i in range(each):
            if len(waiting) >= flight:
                began, wait = waiting.popleft()
                wait()
                times[number].append(time.perf_counter() - began)
            dst = 1 + i % (ranks - 1) if load.is_to_all else 1
            waiting.append((time.perf_counter(), start(dst, i)))
        for began, wait in waiting:
            wait()
            times[number].append(time.perf_counter() - began)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(load.threads - 1)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    one(load.threads - 1)
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    return (each * load.threads / took, *percentiles([t for some in times for t in some]))


def switches() -> dict[str, int]:
    """How often each thread of this process has gone to sleep, by its role."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    counted: collections.Counter[str] = collections.Counter()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
            name = names.get(int(task), fields["Name"].strip())
            role = "engine" if name == "unisono-engine" else "readers" if "rpc" in name else name
            counted[role] += int(fields["voluntary_ctxt_switches"])
    return dict(counted)


def serve_questions(
    address: Any,
    call: Callable[..., Any],
    start: Callable[[int, Any], Callable[[], Any]] | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
    others: dict[str, Callable[..., Any]] | None = None,
    ranks: int = 2,
) -> None:
    """A client: does what the bench asks, until the bench leaves."""
    with Client(address, authkey=KEY) as asked:
        while True:
            try:
                what, about, amount = asked.recv()
            except EOFError:
                return
            if what == "time":
                value = convert(value_of(about))
                arguments, named = ((), {"x": value}) if about == "keywords" else ((value,), {})
                asked.send(timed(lambda: call(*arguments, **named), amount))  # noqa: B023
            elif what == "load":
                assert start is not None
                asked.send(loaded(start, Load(*about), ranks))
            else:
                assert others is not None
                asked.send(others[what](about, amount))


# -- unisono ---------------------------------------------------------------------------------------------


def rank_of_unisono(world: uni.Communicator, address: Any) -> None:
    """Rank 0 is the client. The main threads of the others do as they are told, or sleep."""
    agent = uni.rpc.Agent(world)
    orders: queue.Queue[tuple[Any, ...]] = queue.Queue()
    is_free = threading.Event()
    agent.register("echo", lambda x: x)
    agent.register("inline", lambda x: x, inline=True)
    agent.register("switches", switches)
    agent.register("order", lambda *order: orders.put(order))
    agent.register("free", is_free.set)
    world.barrier()
    if world.rank:
        follow_orders(world, orders, is_free)
        return

    def send_and_receive(nbytes: int, seconds: float) -> tuple[float, float, float]:
        """The same bytes there and back by send and recv."""
        x = np.zeros(nbytes, np.uint8)
        agent.call(1, "order", "bounce", nbytes)

        def bounce() -> None:
            world.send(x, 1)
            world.recv(x, 1)

        measured = timed(bounce, seconds)
        world.send(np.ones(max(1, nbytes), np.uint8)[:0], 1)  # an empty one is the last
        return measured

    def wakes(row: str, calls: int) -> dict[str, float]:
        value, name = value_of(row.removesuffix(" inline")), "inline" if row.endswith("inline") else "echo"
        before = switches(), agent.call(1, "switches")
        for _ in range(calls):
            agent.call(1, name, value)
        after = switches(), agent.call(1, "switches")
        found = {}
        for side, then, now in zip(("caller", "callee"), before, after, strict=True):
            for role, count in now.items():
                per_call = (count - then.get(role, 0)) / calls
                if per_call >= 0.005:
                    found[f"{side}: {role}"] = per_call
        return found

    def occupy(how: str, _: Any) -> None:
        """Occupy the main threads of the other ranks; 'free' ends it."""
        for rank in range(1, world.size):
            agent.call(rank, "free" if how == "free" else "order", *([] if how == "free" else [how]))
        if how == "free" and occupied[-1] == "barrier":
            world.barrier()
        occupied.append(how)

    occupied = [""]
    serve_questions(
        tuple(address),
        lambda *args, **kwargs: agent.call(1, "echo", *args, **kwargs),
        lambda dst, value: agent.start(dst, "echo", value).wait,
        others={"sendrecv": send_and_receive, "wakes": wakes, "occupy": occupy},
        ranks=world.size,
    )
    for rank in range(1, world.size):
        agent.call(rank, "order", "end")


def follow_orders(
    world: uni.Communicator, orders: queue.Queue[tuple[Any, ...]], is_free: threading.Event
) -> None:
    """What the main thread of a callee does."""
    matrix = np.ones((200, 200))
    while True:
        match orders.get():
            case ("end",):
                return
            case ("bounce", nbytes):
                x = np.zeros(nbytes, np.uint8)
                while world.recv(x, 0).nbytes:
                    world.send(x, 0)
            case ("barrier",):
                world.barrier()
            case ("numpy",):
                while not is_free.is_set():
                    matrix @ matrix
            case ("python",):
                while not is_free.is_set():
                    sum(range(10_000))
        is_free.clear()


def spawn_unisono(address: Any, name: str, size: int) -> None:
    config = uni.Config(shm=name == "shm", tls=name == "tls")
    uni.spawn(rank_of_unisono, size, list(address), config=config)


# -- the others ------------------------------------------------------------------------------------------


def echo(x: Any) -> Any:
    return x


def rank_of_torch(address: Any, rank: int, size: int, port: int, is_tcp: bool) -> None:
    """With `is_tcp` everything travels by TCP; else large tensors travel by shared memory on one host."""
    import torch
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = rpc.TensorPipeRpcBackendOptions()
    if is_tcp:
        options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        serve_questions(
            address,
            lambda *args, **kwargs: rpc.rpc_sync("worker1", echo, args, kwargs),
            lambda dst, value: rpc.rpc_async(f"worker{dst}", echo, (value,)).wait,
            lambda value: torch.from_numpy(value) if isinstance(value, np.ndarray) else value,
            ranks=size,
        )
    rpc.shutdown()


UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


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


def programs(
    name: str, address: Any, port: int, size: int
) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    """What the processes of a library run; the one that ends by itself comes first."""
    match name:
        case "shm" | "tcp" | "tls":
            return [(spawn_unisono, (address, name, size))]
        case "torch" | "torch-tcp":
            return [(rank_of_torch, (address, rank, size, port, name == "torch-tcp")) for rank in range(size)]
        case "grpc":
            return [(client_of_grpc, (address, port)), (server_of_grpc, (port,))]
        case _:
            return [(client_of_zmq, (address, port)), (server_of_zmq, (port,))]


@contextlib.contextmanager
def started(name: str, size: int = 2) -> Iterator[Connection]:
    """The processes of a library, and a connection to its client."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        processes = [
            mp.get_context("spawn").Process(target=fn, args=args)
            for fn, args in programs(name, listener.address, port, size)
        ]
        for process in processes:
            process.start()
        with listener.accept() as client:
            yield client
    processes[0].join(10)
    for process in processes:
        process.terminate()
        process.join()
