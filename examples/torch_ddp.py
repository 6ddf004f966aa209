"""Train a network with torch's DistributedDataParallel, and check the result against one process.

    torchrun --nproc-per-node 4 examples/torch_ddp.py
    unisono run -n 4 examples/torch_ddp.py

Two lines are unisono's: the import, and the name of the backend. With "gloo" instead, the program is the
same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unisono.pytorch  # noqa: F401  # makes the backend known

STEPS, BATCH = 200, 128


def network() -> nn.Module:
    """Tells on which of two spirals a point lies. All ranks start with the same weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return points of two interleaved spirals. The step is the seed, so all ranks get the same points."""
    made = torch.Generator().manual_seed(step)
    arm = torch.randint(0, 2, (BATCH,), generator=made)
    turn = torch.rand(BATCH, generator=made) * 0.8 + 0.2
    angle = 3 * torch.pi * turn + torch.pi * arm
    return 2 * torch.stack([turn * angle.cos(), turn * angle.sin()], 1), arm


def train(model: nn.Module, share: slice, report: Callable[[int, Tensor], None]) -> None:
    """Each rank sees its share of every batch; DDP averages the gradients during backward."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x[share]), y[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step + 1, loss.detach())


def bar(done: int, loss: Tensor) -> None:
    """Print a progress bar of ten lines: launchers show the output of ranks line by line."""
    if done % (STEPS // 10) == 0:
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            filled = 40 * done // STEPS
            print(f"{'━' * filled}{'·' * (40 - filled)} {done:>3}/{STEPS}  loss {loss:.4f}", flush=True)


def main() -> None:
    dist.init_process_group("unisono")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    model = DistributedDataParallel(network())
    train(model, share, bar)
    dist.destroy_process_group()

    if rank == 0:
        alone = network()
        train(alone, slice(None), lambda done, loss: None)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        apart = max((a - b).abs().max().item() for a, b in pairs)
        print(f"{ranks} ranks and one process differ by {apart:.0e}")
        if apart > 1e-2:
            raise SystemExit("the weights differ: data-parallel training is broken")
        print("data-parallel training equals training in one process")


if __name__ == "__main__":
    main()
