# ruff: noqa: T201 - a program
"""What ranks on two hosts do, for tests/process/test_two_hosts.py: every collective, checked against NumPy.

`python hosts_program.py <folder>` writes its secrets into the folder: the test searches the captured packets
for them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import unisono as uni
from unisono.bootstrap.join import View
from unisono.comm import world as world_module

PATTERN = b"\xa5to be or not \x5a!"


def ramp(rank: int, *shape: int) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    return ((np.arange(count, dtype=np.int64) * 31 + rank * 1009) % 997).reshape(shape)


def keep_secrets(folder: Path) -> None:
    """Write down the bytes that must never appear in the captured packets."""
    given = os.environ["UNISONO_JOIN"]
    if given.startswith("unisono1://"):
        (folder / "ticket").write_text(given)
    real = world_module._credentials

    def spy(view: View) -> Any:
        (folder / f"secret {view.rank}").write_bytes(view.secret)
        if view.identity is not None:
            (folder / f"key {view.rank}").write_bytes(view.identity.key_pem)
        return real(view)

    world_module._credentials = spy


def same(found: Any, expected: Any, what: str) -> None:
    assert np.array_equal(np.asarray(found), np.asarray(expected)), what


def collectives(world: uni.Communicator, n: int) -> None:
    me, size = world.rank, world.size
    mine = [ramp(r, n) for r in range(size)]
    tables = [ramp(r, size, n) for r in range(size)]
    total = sum(mine)
    same(world.all_reduce(mine[me].copy()), total, "all_reduce")
    reduced = world.reduce(mine[me].copy(), size - 1)
    if me == size - 1:
        same(reduced, total, "reduce")
    same(world.broadcast(mine[me].copy(), 1), mine[1], "broadcast")
    same(world.all_gather(mine[me]), mine, "all_gather")
    gathered = world.gather(mine[me], 0)
    if me == 0:
        same(gathered, mine, "gather")
    same(world.scatter(tables[1] if me == 1 else None, 1), tables[1][me], "scatter")
    same(world.reduce_scatter(tables[me]), sum(tables)[me], "reduce_scatter")
    same(world.all_to_all(tables[me]), [tables[r][me] for r in range(size)], "all_to_all")
    same(world.scan(mine[me]), sum(mine[: me + 1]), "scan")
    same(world.exscan(mine[me]), sum(mine[:me]) if me else np.zeros(n, np.int64), "exscan")
    parts = world.all_gather_v(ramp(me, n + me))
    for r in range(size):
        same(parts[r], ramp(r, n + r), "all_gather_v")
    swapped = world.all_to_all_v([ramp(me + r, r + n) for r in range(size)])
    for r in range(size):
        same(swapped[r], ramp(r + me, me + n), "all_to_all_v")
    assert world.all_gather_object({"rank": me}) == [{"rank": r} for r in range(size)]
    world.barrier()


def main() -> None:
    keep_secrets(Path(sys.argv[1]))
    with uni.init() as world:
        for n in (1, 5, 1021, 50_021):
            collectives(world, n)
        rows = world.split(color=world.rank % 2, key=world.rank)
        assert rows is not None
        same(rows.all_reduce(np.array([world.rank])), [sum(range(world.rank % 2, world.size, 2))], "split")
        text = np.frombuffer(PATTERN * 8192, np.uint8).copy()
        same(world.broadcast(text if world.rank == 0 else np.zeros_like(text), 0), text, "a pattern")
        if world.rank == 0:
            world.send(PATTERN * 16, world.size - 1)
        if world.rank == world.size - 1:
            assert world.recv_bytes(0, 0) == PATTERN * 16
        world.barrier()
        print("right", world.rank, flush=True)


if __name__ == "__main__":
    main()
