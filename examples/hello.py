"""Hello: every rank says who it is, in turn."""

from concurrent.futures import ThreadPoolExecutor

import unisono as uni


def main(world: uni.Communicator) -> None:
    with world:
        for turn in range(world.size):
            if turn == world.rank:
                print(f"hello from rank {world.rank} of {world.size}")
            world.barrier()


if __name__ == "__main__":
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(main, uni.local(4)))
