"""Distributed checkpoints, loaded by the same or another number of ranks, or on Gloo; forked data loaders."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.training.network import STEPS, loss_of
from tests.support.training.pieces import GLOO, Job, Tensors, piece
from tests.support.training.sharded import adam, sharded, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, job: Job) -> None:
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        optimizer.step()


def made(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(init_device_mesh("cpu", (job.size,)))
    return model, adam(model.parameters())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def load(folder: str, job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made(job)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


@piece()
def checkpoint(job: Job) -> Tensors:
    """Training that is saved, loaded and continued gives the weights of uninterrupted training."""
    model, optimizer = made(job)
    steps(model, optimizer, 0, job)
    folder = str(job.folder / "saved")
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    steps(model, optimizer, STEPS, job)
    loaded, its_optimizer = load(folder, job)
    steps(loaded, its_optimizer, STEPS, job)
    for name, tensor in whole(loaded).items():
        assert torch.equal(tensor, whole(model)[name]), name
    return whole(loaded)


@piece()
def checkpoint_async(job: Job) -> Tensors:
    """A thread saves through a separate group while training goes on."""
    model, optimizer = made(job)
    steps(model, optimizer, 0, job)
    before = whole(model)
    folder = str(job.folder / "saved")
    saving = dcp.async_save(
        state_of(model, optimizer), checkpoint_id=folder, process_group=dist.new_group(backend=job.backend)
    )
    steps(model, optimizer, STEPS, job)
    saving.result(timeout=60)
    loaded, _ = load(folder, job)
    for name, tensor in whole(loaded).items():
        assert torch.equal(tensor, before[name]), name
    return whole(model)


@piece(makes_worlds=True)
def checkpoint_of_another_size(job: Job) -> Tensors:
    """All ranks save; a world of fewer ranks loads exactly the same values."""
    folder = str(job.folder / "saved")
    saved: Tensors = {}
    with job.world() as all_ranks:
        assert all_ranks is not None
        model, optimizer = made(all_ranks)
        steps(model, optimizer, 0, all_ranks)
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        saved = whole(model)
    for size in range(1, job.size):
        with job.world(size) as some:
            if some is not None:
                loaded, _ = load(folder, some)
                for name, tensor in whole(loaded).items():
                    assert torch.equal(tensor, saved[name]), (size, name)
    return saved


@piece(makes_worlds=True)
def checkpoint_of_fewer_ranks(job: Job) -> Tensors:
    """Half of the ranks save; all of them load exactly the same values."""
    folder = str(job.folder / "saved")
    with job.world(job.size // 2) as some:
        if some is not None:
            model, optimizer = made(some)
            steps(model, optimizer, 0, some)
            dcp.save(state_of(model, optimizer), checkpoint_id=folder)
            torch.save(whole(model), job.folder / f"weights.{some.rank}")
    with job.world() as all_ranks:
        assert all_ranks is not None
        dist.barrier()  # until the weights are written
        loaded, _ = load(folder, all_ranks)
        for name, tensor in torch.load(job.folder / "weights.0").items():
            assert torch.equal(whole(loaded)[name], tensor), name
        return whole(loaded)


@piece(makes_worlds=True)
def checkpoint_of_another_backend(job: Job) -> Tensors:
    """A checkpoint saved on our backend is loaded on Gloo, and one saved on Gloo is loaded on ours."""
    folder = str(job.folder / "saved")
    with job.world() as here:
        assert here is not None
        model, optimizer = made(here)
        steps(model, optimizer, 0, here)
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        saved = whole(model)
    other = replace(job, backend="unisono" if job.backend == GLOO else GLOO)
    with other.world(name="other") as there:
        assert there is not None
        loaded, its_optimizer = load(folder, there)
        for name, tensor in whole(loaded).items():
            assert torch.equal(tensor, saved[name]), name
        steps(loaded, its_optimizer, STEPS, there)
        return whole(loaded)


# -- workers that load data ----------------------------------------------------------------------------------


class Squares(Dataset[Tensor]):
    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, index**2])


def squares_alone(size: int) -> Tensors:
    return {"all": torch.tensor([[i, i**2] for i in range(47)])}


@piece(alone=squares_alone)
def forked_workers(job: Job) -> Tensors:
    """Data-loading workers are forked twice while the engine's threads run and collectives go on."""
    sampler = DistributedSampler(Squares(), shuffle=True, seed=3)
    loader = DataLoader(
        Squares(), batch_size=5, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    seen: dict[int, int] = {}
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows in loader:
            rows = rows.contiguous()
            shapes = [torch.empty(2, dtype=torch.int64) for _ in range(job.size)]
            dist.all_gather(shapes, torch.tensor(rows.shape))
            assert len({tuple(shape.tolist()) for shape in shapes}) == 1  # the sampler pads
            every = [torch.empty_like(rows) for _ in range(job.size)]
            dist.all_gather(every, rows)
            seen.update(row.tolist() for row in torch.cat(every))
    return {"all": torch.tensor(sorted(seen.items()))}
