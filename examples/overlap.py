"""Overlap: start an operation, compute, then wait for it. A started work can also be awaited.

unisono run -n 4 examples/overlap.py
"""

import asyncio

import numpy as np

import unisono as uni


async def two_at_once(world: uni.Communicator) -> list[float]:
    return [await work for work in (world.start.all_reduce(1.0), world.start.all_reduce(2.0))]


with uni.init() as world:
    gradient = np.arange(100_003, dtype=np.float64) * (world.rank + 1)
    work = world.start.all_reduce(gradient, op="mean")  # do not touch the array until the work is done
    a = np.random.default_rng(world.rank).standard_normal((200, 200))
    checksum = np.linalg.norm(a @ a.T)  # meanwhile
    work.wait(timeout=30)

    one, two = asyncio.run(two_at_once(world))
    if world.rank == 0:
        print(f"mean of the last element {gradient[-1]:,g}, computed meanwhile: {checksum > 0}")
        print(f"awaited together: {one=} {two=}")
