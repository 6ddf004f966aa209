"""Calls between two processes: unisono beside torch.distributed.rpc, gRPC and ZeroMQ, in alternating turns.

Measured: an int and back (p50, p99), calls per second with 5,000 started before the first is waited for, and
arrays of 1, 16 and 64 MiB and back (bytes both ways). Each library serves an echo in a process of its own;
libraries that are not installed are left out: `pip install grpcio pyzmq msgpack torch`. The callee's main
thread sleeps.

    python bench/rpc.py [--rounds 3] [--only unisono,torch,grpc,zmq] [--calls 2000]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import multiprocessing as mp
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import unisono as uni

STARTED = 5_000
SIZES_MIB = (1, 16, 64)
NEEDS = {"unisono": "unisono", "torch": "torch", "grpc": "grpc", "zmq": "zmq"}


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--calls", type=int, default=2_000)
    options.add_argument("--only", default=",".join(NEEDS))
    given = options.parse_args()
    names = [name for name in given.only.split(",") if importlib.util.find_spec(NEEDS[name])]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name in names:
            results[name].append(CONTESTANTS[name](given.calls))
    keys = list(results[names[0]][0])
    print(f"{'':12}" + "".join(f"{key:>14}" for key in keys) + f"   (medians of {given.rounds})")
    medians = {n: {k: statistics.median(r[k] for r in rs) for k in keys} for n, rs in results.items()}
    for name, row in medians.items():
        print(f"{name:12}" + "".join(f"{row[key]:>14,.1f}" for key in keys))
    for name, row in medians.items():
        if name != "unisono" and "unisono" in medians:
            ratios = (medians["unisono"][key] / row[key] for key in keys)
            print(f"{'/ ' + name:12}" + "".join(f"{ratio:>14.2f}" for ratio in ratios))
            # Adjacent turns, so that a slow moment of the machine affects both.
            pairs = list(zip(results["unisono"], results[name], strict=True))
            spreads = (sorted(ours[key] / theirs[key] for ours, theirs in pairs) for key in keys)
            print(f"{'  from..to':12}" + "".join(f"{f'{s[0]:.2f}..{s[-1]:.2f}':>14}" for s in spreads))


def measured(
    call: Callable[[Any], Any],
    start: Callable[[int], Any],
    wait: Callable[[Any], Any],
    calls: int,
    pipelined: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """The figures of one library in one turn."""
    for i in range(200):
        call(i)
    times = []
    for i in range(calls):
        began = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - began)
    times.sort()
    figures = {"p50 us": times[len(times) // 2] * 1e6, "p99 us": times[len(times) * 99 // 100] * 1e6}
    began = time.perf_counter()
    if pipelined is not None:
        pipelined(STARTED)
    else:
        works = [start(i) for i in range(STARTED)]
        assert [wait(work) for work in works] == list(range(STARTED))
    figures["calls/s"] = STARTED / (time.perf_counter() - began)
    for mib in SIZES_MIB:
        x = np.arange(mib << 18, dtype=np.float32)
        times = []
        for _ in range(6):
            began = time.perf_counter()
            y = call(x)
            times.append(time.perf_counter() - began)
            assert np.asarray(y)[-1] == x[-1]
        figures[f"{mib} MiB GB/s"] = 2 * x.nbytes / statistics.median(times) / 1e9
    return figures


# -- unisono ---------------------------------------------------------------------------------------------


def rank_of_unisono(world: uni.Communicator, calls: int) -> dict[str, float] | None:
    agent = uni.rpc.Agent(world)
    is_over = threading.Event()
    agent.register("echo", lambda x: x)
    agent.register("end", is_over.set)
    if world.rank == 1:
        is_over.wait()
        return None
    figures = measured(
        lambda x: agent.call(1, "echo", x),
        lambda i: agent.start(1, "echo", i),
        lambda work: work.wait(),
        calls,
    )
    agent.call(1, "end")
    return figures


def with_unisono(calls: int) -> dict[str, float]:
    figures: dict[str, float] = uni.spawn(rank_of_unisono, 2, calls, timeout=300)[0]
    return figures


# -- torch.distributed.rpc -------------------------------------------------------------------------------


def echo(x: Any) -> Any:
    return x


def rank_of_torch(rank: int, port: int, calls: int, answers: Any) -> None:
    import torch
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        answers.put(
            measured(
                lambda x: rpc.rpc_sync(
                    "worker1", echo, (torch.from_numpy(x) if isinstance(x, np.ndarray) else x,)
                ),
                lambda i: rpc.rpc_async("worker1", echo, (i,)),
                lambda future: future.wait(),
                calls,
            )
        )
    rpc.shutdown()


def with_torch(calls: int) -> dict[str, float]:
    return answered(lambda answers: [(rank_of_torch, (r, PORT, calls, answers)) for r in range(2)])


# -- gRPC ------------------------------------------------------------------------------------------------

METHOD = "/bench/echo"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def as_bytes(x: Any) -> bytes:
    return b"a" + x.tobytes() if isinstance(x, np.ndarray) else b"i" + int(x).to_bytes(8, "little")


def from_bytes(data: bytes) -> Any:
    if data[:1] == b"a":
        return np.frombuffer(data, np.float32, offset=1)
    return int.from_bytes(data[1:], "little")


def server_of_grpc(port: int, answers: Any) -> None:
    import grpc

    handler = grpc.method_handlers_generic_handler(
        "bench",
        {"echo": grpc.unary_unary_rpc_method_handler(lambda x, _: x, from_bytes, as_bytes)},
    )
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=UNLIMITED)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def client_of_grpc(port: int, calls: int, answers: Any) -> None:
    import grpc

    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED)
    grpc.channel_ready_future(channel).result(30)
    method = channel.unary_unary(METHOD, as_bytes, from_bytes)
    answers.put(measured(method, lambda i: method.future(i), lambda f: f.result(), calls))


def with_grpc(calls: int) -> dict[str, float]:
    return answered(
        lambda answers: [(client_of_grpc, (PORT, calls, answers)), (server_of_grpc, (PORT, answers))]
    )


# -- ZeroMQ ----------------------------------------------------------------------------------------------


def server_of_zmq(port: int, answers: Any) -> None:
    import zmq

    sock = zmq.Context().socket(zmq.ROUTER)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.bind(f"tcp://127.0.0.1:{port}")
    while True:
        parts = sock.recv_multipart(copy=False)
        sock.send_multipart(parts, copy=False)


def client_of_zmq(port: int, calls: int, answers: Any) -> None:
    import msgpack
    import zmq

    sock = zmq.Context().socket(zmq.DEALER)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.connect(f"tcp://127.0.0.1:{port}")

    def call(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            sock.send_multipart([b"a", x], copy=False)
            return np.frombuffer(sock.recv_multipart(copy=False)[1].buffer, np.float32)
        sock.send(msgpack.packb(x))
        return msgpack.unpackb(sock.recv())

    def pipelined(count: int) -> None:
        for i in range(count):
            sock.send(msgpack.packb(i))
        assert [msgpack.unpackb(sock.recv()) for _ in range(count)] == list(range(count))

    answers.put(measured(call, echo, echo, calls, pipelined))


def with_zmq(calls: int) -> dict[str, float]:
    return answered(
        lambda answers: [(client_of_zmq, (PORT, calls, answers)), (server_of_zmq, (PORT, answers))]
    )


# -- processes -------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


PORT = free_port()


def answered(
    plan: Callable[[Any], Iterable[tuple[Callable[..., None], tuple[Any, ...]]]],
) -> dict[str, float]:
    """Start processes, and end the servers when the first one has answered."""
    answers: Any = mp.get_context("spawn").Queue()
    processes = [mp.get_context("spawn").Process(target=fn, args=args) for fn, args in plan(answers)]
    for process in processes:
        process.start()
    figures: dict[str, float] | None = None
    while figures is None and processes[0].is_alive():
        with contextlib.suppress(queue.Empty):
            figures = answers.get(timeout=0.5)
    for process in processes[1:]:
        process.join(2)
        process.terminate()
        process.join()
    # gRPC sometimes cancels one of 5,000 started calls: that turn is repeated.
    return figures if figures is not None else answered(plan)


CONTESTANTS = {"unisono": with_unisono, "torch": with_torch, "grpc": with_grpc, "zmq": with_zmq}

if __name__ == "__main__":
    main()
