"""Hello: the ranks print their numbers, one after the other.

unisono run -n 4 examples/hello.py
"""

import unisono as uni

with uni.init() as world:
    for turn in range(world.size):
        if turn == world.rank:
            print(f"hello from rank {world.rank} of {world.size}", flush=True)
        world.barrier()
