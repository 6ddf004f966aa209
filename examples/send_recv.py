"""Messages between two ranks: a token goes around the ring, then a message of unknown length arrives.

unisono run -n 4 examples/send_recv.py
"""

import numpy as np

import unisono as uni

with uni.init() as world:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    token = np.zeros(1, np.int64)
    if world.rank == 0:
        world.send(token + 1, dst=right)
    status = world.recv(token, src=left)
    if world.rank != 0:
        world.send(token + 1, dst=right)
    else:
        print(f"the token came back from rank {status.source} and counts {token[0]} ranks")

    if world.rank == world.size - 1:
        world.send(b"a message of unknown length", dst=0, tag=7)
    if world.rank == 0:
        found = world.probe(tag=7)
        print(f"{found.nbytes} bytes wait from rank {found.source}: {world.recv_bytes(tag=7).decode()!r}")
