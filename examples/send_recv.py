"""Messages between two ranks: a token goes round, then a message whose length nobody knew."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import unisono as uni


def main(world: uni.Communicator) -> None:
    with world:
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size

        token = np.zeros(1, np.int64)
        if world.rank == 0:
            world.send(token + 1, dst=right)
        status = world.recv(token, src=left)
        if world.rank != 0:
            world.send(token + 1, dst=right)
        else:
            print(f"the token came back from rank {status.source} and counts {token[0]} ranks")

        if world.rank == 1:
            world.send(b"a message of unknown length", dst=0, tag=7)
        if world.rank == 0:
            found = world.probe(tag=7)
            print(f"{found.nbytes} bytes wait from rank {found.source}: {world.recv_bytes(tag=7).decode()!r}")


if __name__ == "__main__":
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(main, uni.local(4)))
