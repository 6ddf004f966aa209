"""Train a small transformer with torch's fully_shard, save it, and load it again.

    torchrun --nproc-per-node 4 examples/torch_fsdp.py
    unisono run -n 4 examples/torch_fsdp.py

Every rank keeps a share of the weights, gradients and moments; a layer is gathered when it is needed. The
checkpoint is written by all ranks together and may be loaded by any number of them.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unisono.pytorch  # noqa: F401  # makes the backend known

STEPS, ROWS, LENGTH, WORDS, WIDTH = 200, 16, 8, 16, 64


class Reverser(nn.Module):
    """Reads a row of words and predicts the same words in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of every word."""
        x = self.words(rows) + self.places
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.flatten(0, 1))
        return logits


def sharded() -> nn.Module:
    """Shard each layer by itself, and the remaining weights together."""
    torch.manual_seed(1)
    model = Reverser()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss on rows of words that only this rank has."""
    made = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    rows = torch.randint(0, WORDS, (ROWS, LENGTH), generator=made)
    return nn.functional.cross_entropy(model(rows), rows.flip(1).flatten())


def bar(done: int, loss: Tensor) -> None:
    """Print a progress bar of ten lines: launchers show the output of ranks line by line."""
    if done % (STEPS // 10) == 0:
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            filled = 40 * done // STEPS
            print(f"{'━' * filled}{'·' * (40 - filled)} {done:>3}/{STEPS}  loss {loss:.4f}", flush=True)


def main() -> None:
    dist.init_process_group("unisono")
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(STEPS):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar(step + 1, loss.detach())

    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    loaded = saved_and_loaded(model)
    is_equal = torch.equal(loss_of(model, STEPS), loss_of(loaded, STEPS))
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, f"{kept:,} weights, loaded as they were saved: {is_equal}")
    if dist.get_rank() == 0:
        print("\n".join(f"rank {rank} keeps {words}" for rank, words in enumerate(said)))
    dist.destroy_process_group()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """Save the weights, and load them into a new model."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # the folder of rank 0
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
        fresh = sharded()
        state = {"model": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        fresh.load_state_dict(state["model"])
        dist.barrier()  # until all ranks have read it
    return fresh


if __name__ == "__main__":
    main()
