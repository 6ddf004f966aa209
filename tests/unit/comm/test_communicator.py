"""The facts that a communicator gives about itself."""

from __future__ import annotations

import unisono as uni
from unisono.backends.local import LocalBackend


class OnTwoHosts(LocalBackend):
    """Ranks that alternate between two hosts."""

    def hosts(self) -> tuple[int, ...]:
        return tuple(rank % 2 for rank in range(self.size))


def test_local_ranks_count_the_ranks_of_a_host() -> None:
    worlds = [uni.Communicator.world(backend) for backend in OnTwoHosts.create(5)]
    assert [world.local_rank for world in worlds] == [0, 0, 1, 1, 2]
    assert [world.local_size for world in worlds] == [3, 2, 3, 2, 3]
    parts = {rank: worlds[rank].sub([0, 1, 4]) for rank in (0, 1, 4)}
    assert {rank: (part.local_rank, part.local_size) for rank, part in parts.items()} == {
        0: (0, 2),
        1: (0, 1),
        4: (1, 2),
    }
    for world in worlds:
        world.close()


def test_on_one_host_the_local_rank_is_the_rank() -> None:
    worlds = uni.local(3)
    assert [(world.local_rank, world.local_size) for world in worlds] == [(0, 3), (1, 3), (2, 3)]
    for world in worlds:
        world.close()
