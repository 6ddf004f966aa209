"""Groups: split the world into rows, and arrange it in a mesh. Every group is a communicator of its own."""

from concurrent.futures import ThreadPoolExecutor

import unisono as uni


def main(world: uni.Communicator) -> None:
    with world:
        row = world.split(color=world.rank // 2)
        total = row.all_reduce(world.rank)

        mesh = world.mesh((2, 2), names=("dp", "tp"))
        along_dp = mesh["dp"].all_reduce(world.rank)

        if world.rank in (0, 3):
            pair = world.sub([0, 3])  # called by its members only
            swapped = pair.all_gather_object(f"rank {world.rank}")
            pair.close()
        else:
            swapped = None

        for turn in range(world.size):
            if turn == world.rank:
                place = f"rank {world.rank} at {mesh.coords}"
                print(f"{place}: its row adds to {total}, its dp axis to {along_dp}, its pair {swapped}")
            world.barrier()


if __name__ == "__main__":
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(main, uni.local(4)))
