"""All-reduce: every rank contributes an array and gets the sum, the mean or the maximum.

unisono run -n 4 examples/all_reduce.py
"""

import numpy as np

import unisono as uni

with uni.init() as world:
    x = np.full(1_000_003, world.rank + 1, np.float32)
    world.all_reduce(x)  # in place
    largest = world.all_reduce(float(world.rank), op="max")  # a number comes back as a number
    rows = world.all_gather(np.array([world.rank, world.rank**2]))  # rows[r] is rank r's
    if world.rank == 0:
        print(f"sum {x[0]:g} in all {x.size:,} elements, largest rank {largest:g}, squares {rows[:, 1]}")
