"""Groups: split the world into rows, and arrange it in a mesh. Every group is a communicator of its own.

unisono run -n 4 examples/split.py
"""

import unisono as uni

with uni.init() as world:
    if world.size != 4:
        raise SystemExit("this example has four ranks: unisono run -n 4 examples/split.py")

    row = world.split(color=world.rank // 2)
    total = row.all_reduce(world.rank)

    mesh = world.mesh((2, 2), names=("dp", "tp"))
    along_dp = mesh["dp"].all_reduce(world.rank)

    swapped = None
    if world.rank in (0, 3):
        with world.sub([0, 3]) as pair:  # only its members call it
            swapped = pair.all_gather_object(f"rank {world.rank}")

    for turn in range(world.size):
        if turn == world.rank:
            here = f"rank {world.rank} at {mesh.coords}"
            print(
                f"{here}: its row adds to {total}, its dp axis to {along_dp}, its pair {swapped}", flush=True
            )
        world.barrier()
