"""The iroh backend beside iroh itself: long messages and a bare stream of iroh, in the same processes.

    python bench/iroh_stream.py [rounds] [MiB]

Both send the same bytes one way over loopback, in turns: our messages of 64 MiB, and one stream written and
read 256 KiB at a time, with the same repair of iroh's copy. Prints the rates and the ratio of each round, and
their medians; then the time of a short all_reduce, alone and while a long message is in flight.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import iroh
import numpy as np

import unisono as uni
from unisono.backends.iroh.iroh_repairs import repair

MESSAGE = 64 << 20
PART = 256 << 10
ALPN = b"unisono/bench"


class Bare:
    """A bare iroh connection, with one stream in each direction."""

    def __init__(self, world: uni.Communicator) -> None:
        repair()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.endpoint = self.run(self._bind())
        own = (bytes(self.endpoint.id().to_bytes()), list(self.endpoint.addr().direct_addresses()))
        key, addresses = world.all_gather_object(own)[1 - world.rank]
        self.connection = self.run(self._accept() if world.rank == 0 else self._dial(key, addresses))
        self.out, self.into = self.run(self._streams())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _bind(self) -> Any:
        builder = iroh.EndpointBuilder()
        builder.apply_minimal()
        builder.relay_mode(iroh.RelayMode.disabled())
        builder.alpns([ALPN])
        builder.bind_addr("127.0.0.1:0")
        builder.bind_addr("[::1]:0")
        return await builder.bind()

    async def _accept(self) -> Any:
        return await (await (await self.endpoint.accept_next()).accept()).connect()

    async def _dial(self, key: bytes, addresses: list[str]) -> Any:
        there = iroh.EndpointAddr(iroh.EndpointId.from_bytes(key), None, addresses[:1])
        return await self.endpoint.connect(there, ALPN)

    async def _streams(self) -> tuple[Any, Any]:
        out = await self.connection.open_uni()
        await out.write_all(b"?")
        into = await self.connection.accept_uni()
        await into.read(1)
        return out, into

    async def send(self, data: memoryview, count: int) -> None:
        for _ in range(count):
            for at in range(0, len(data), PART):
                await self.out.write_all(data[at : at + PART])
        await self.into.read(1)

    async def receive(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= len(await self.into.read(min(PART, nbytes)))
        await self.out.write_all(b"!")


def rank(rounds: int, total: int) -> None:
    with uni.init() as world:
        bare = Bare(world)
        count = max(1, total // MESSAGE)
        data = np.random.default_rng(world.rank).integers(0, 256, MESSAGE, np.uint8)
        done = np.zeros(1)

        def ours() -> None:
            for _ in range(count):
                if world.rank == 0:
                    world.send(data, 1)
                else:
                    world.recv(data, 0)
            world.recv(done, 1) if world.rank == 0 else world.send(done, 0)

        def theirs() -> None:
            work = bare.send(memoryview(data), count) if world.rank == 0 else bare.receive(count * MESSAGE)
            bare.run(work)

        def rate(send: Any) -> float:
            world.barrier()
            started = time.perf_counter()
            send()
            return count * MESSAGE / (time.perf_counter() - started) / 1e6

        rates = []
        for turn in range(rounds + 1):
            pair = (ours, theirs) if turn % 2 else (theirs, ours)
            found = {send: rate(send) for send in pair}
            if turn:
                rates.append((found[ours], found[theirs]))
            if turn and world.rank == 0:
                print(f"ours {found[ours]:.0f} MB/s, bare {found[theirs]:.0f} MB/s, ", end="")
                print(f"ratio {found[ours] / found[theirs]:.2f}", flush=True)
        alone = [timed(world.all_reduce, 0.0)[1] for _ in range(100)]
        work = world.start.send(data, 1) if world.rank == 0 else world.start.recv(data, 0)
        beside = []
        while True:
            done_by, seconds = timed(world.all_reduce, float(work.done()))
            if done_by:
                break
            beside.append(seconds)
        work.wait()
        if world.rank == 0:
            ratios = sorted(a / b for a, b in rates)
            print(
                f"median: ours {statistics.median(a for a, _ in rates):.0f} MB/s, "
                f"bare {statistics.median(b for _, b in rates):.0f} MB/s, "
                f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )
            print(f"all_reduce of 8 bytes: {shown(alone)}; {shown(beside)} beside {MESSAGE >> 20} MiB")
        world.barrier()
        bare.run(bare.endpoint.close())


def timed(call: Any, argument: float) -> tuple[float, float]:
    started = time.perf_counter()
    return call(argument), time.perf_counter() - started


def shown(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.1f} ms (at most {max(times) * 1e3:.1f}, {len(times)} times)"


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), int(sys.argv[3]) << 20)
        return
    rounds, mebibytes = [*sys.argv[1:3], *("7", "128")[len(sys.argv) - 1 :]][:2]
    run = [sys.executable, "-m", "unisono", "run", "--backend", "iroh", "-n", "2"]
    subprocess.run([*run, __file__, "--rank", rounds, mebibytes], check=True)


if __name__ == "__main__":
    main()
