"""Parameters that are sharded over ranks: FSDP 1 and 2, hybrid sharding, DTensor, tensor parallelism."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import torch
import torch.distributed as dist
from tests.support.training.network import STEPS, batch, loss_of, named, network, train, train_alone
from tests.support.training.pieces import Job, Tensors, piece
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

adam = partial(torch.optim.AdamW, lr=0.01)


def clipped(model: nn.Module, job: Job) -> None:
    """Train with AdamW and clipped gradients, as many programs do."""
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def clipped_alone(size: int) -> Tensors:
    model = network()
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank) / size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return named(model)


def whole(model: nn.Module) -> Tensors:
    """The full parameters, gathered from all shards; every rank must call this."""
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


@piece(alone=train_alone())
def fsdp1(job: Job) -> Tensors:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that FSDP 2 replaces it, and that CPUs are slow
        model = FullyShardedDataParallel(
            network(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        train(job, model)
        with FullyShardedDataParallel.summon_full_params(model):
            return {name.replace("_fsdp_wrapped_module.", ""): t for name, t in named(model).items()}


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    model = network()
    options = {} if policy is None else {"mp_policy": policy}
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@piece(alone=clipped_alone)
def fsdp2(job: Job) -> Tensors:
    model = sharded(init_device_mesh("cpu", (job.size,)))
    clipped(model, job)
    return whole(model)


def half_alone(size: int) -> Tensors:
    """The sum of the gradients of all ranks, divided by twice the number of ranks."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank) / (2 * size)).backward()
        optimizer.step()
    return named(model)


@piece(alone=half_alone, is_on_gloo=False)
def fsdp2_divide_factor(job: Job) -> Tensors:
    """Gradients are scaled before they are summed (PREMUL_SUM), which Gloo refuses."""
    model = sharded(init_device_mesh("cpu", (job.size,)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0 * job.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        optimizer.step()
    return whole(model)


def bfloat16_alone(size: int) -> Tensors:
    """The same types in one process: the gradient of each rank is bfloat16, the mean is float32."""
    model = network()
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            low = {name: p.detach().bfloat16().requires_grad_() for name, p in model.named_parameters()}
            x, y = batch(step, rank)
            nn.functional.mse_loss(torch.func.functional_call(model, low, x.bfloat16()), y).backward()
            for name, p in model.named_parameters():
                share = low[name].grad.float() / size
                p.grad = share if p.grad is None else p.grad + share
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return named(model)


@piece(alone=bfloat16_alone)
def fsdp2_bfloat16(job: Job) -> Tensors:
    """Parameters are sent as bfloat16, gradients as float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(init_device_mesh("cpu", (job.size,)), policy)
    clipped(model, job)
    return whole(model)


@piece(alone=clipped_alone)
def hsdp(job: Job) -> Tensors:
    """Parameters are sharded over pairs of ranks, and each pair is a replica."""
    model = sharded(init_device_mesh("cpu", (2, job.size // 2), mesh_dim_names=("replicas", "shards")))
    clipped(model, job)
    return whole(model)


# -- DTensor -------------------------------------------------------------------------------------------------

SHAPE = (7, 13, 5)
MOVES = [Shard(0), Shard(1), Shard(2), Replicate()]


def moved_alone(size: int) -> Tensors:
    x = torch.arange(7 * 13 * 5.0).reshape(SHAPE)
    parts = torch.stack([x + rank for rank in range(size)])
    sums = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.amax(0)}
    moves = {f"{a} to {b}": x for a, b in itertools.product(MOVES, MOVES)}
    return {**moves, **{f"{op} to {b}": total for op, total in sums.items() for b in MOVES}}


@piece(alone=moved_alone)
def dtensor_moves(job: Job) -> Tensors:
    """From every placement to every other, with lengths that the number of ranks does not divide."""
    mesh = init_device_mesh("cpu", (job.size,))
    x = torch.arange(7 * 13 * 5.0).reshape(SHAPE)
    out = {}
    for a, b in itertools.product(MOVES, MOVES):
        out[f"{a} to {b}"] = distribute_tensor(x, mesh, [a]).redistribute(mesh, [b]).full_tensor()
    for op, b in itertools.product(("sum", "avg", "max"), MOVES):
        part = DTensor.from_local(x + job.rank, mesh, [Partial(op)])
        out[f"{op} to {b}"] = part.redistribute(mesh, [b]).full_tensor()
    return out


def matrices() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.randn(9, 13, generator=made), torch.randn(13, 11, generator=made)


def products_alone(size: int) -> Tensors:
    a, b = (each.requires_grad_() for each in matrices())
    (a @ b).square().sum().backward()
    return {f"{name} {p} {q}": t.detach() for p, q in PLACED for name, t in _products(a, b)}


def _products(a: Tensor, b: Tensor) -> list[tuple[str, Tensor]]:
    return [("product", a @ b), ("gradient of a", a.grad), ("gradient of b", b.grad)]


PLACED: list[tuple[Placement, Placement]] = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
]


@piece(alone=products_alone)
def dtensor_products(job: Job) -> Tensors:
    """A product of matrices in several placements, and its gradients."""
    mesh = init_device_mesh("cpu", (job.size,))
    out = {}
    for p, q in PLACED:
        pairs = zip(matrices(), (p, q), strict=True)
        a, b = (distribute_tensor(each, mesh, [where]).requires_grad_() for each, where in pairs)
        (a @ b).square().sum().backward()
        out |= {f"{name} {p} {q}": t.full_tensor().detach() for name, t in _products(a, b)}
    return out


@piece(alone=lambda size: {"sums": torch.tensor([[1.0, 5.0], [2.0, 4.0], [6.0, 6.0]])})
def meshes(job: Job) -> Tensors:
    """Sums over the rows, the columns and the whole of a mesh, on rank 0 and on rank 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    groups = [mesh["columns"].get_group(), mesh["rows"].get_group(), mesh._flatten().get_group()]
    sums = torch.zeros(3, 2)
    for row, group in enumerate(groups):
        total = torch.tensor(float(job.rank))
        dist.all_reduce(total, group=group)
        ends = [torch.empty(()) for _ in range(job.size)]
        dist.all_gather(ends, total)
        sums[row] = torch.stack([ends[0], ends[3]])
    return {"sums": sums}


# -- tensor parallelism --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm and two linear layers, the first cut by columns, the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 28)
        self.down = nn.Linear(28, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


def block_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of the same rows on every rank: the layers are divided, not the rows."""
    made = torch.Generator().manual_seed(step)
    return model(torch.randn(2, 8, 12, generator=made)).square().mean()


def trained_block(job: Job, plan: dict[str, object]) -> Tensors:
    model = parallelize_module(Block(), init_device_mesh("cpu", (job.size,)), plan)
    train(job, model, block_loss, adam)
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }


block_alone = train_alone(Block, block_loss, adam)


@piece(alone=lambda size: block_alone(1))
def tensor_parallel(job: Job) -> Tensors:
    return trained_block(job, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@piece(alone=lambda size: block_alone(1))
def sequence_parallel(job: Job) -> Tensors:
    """The norm works on a share of the sequence: its output is gathered, that of the block is scattered."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    return trained_block(job, plan)


@piece(alone=train_alone(Block, lambda m, s, r: block_loss(m, 10 * s + r // 2, r), adam))
def fsdp2_and_tensor_parallel(job: Job) -> Tensors:
    """Two dimensions: the layers are divided within each pair, and the rows between the two pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(Block(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    train(job, model, lambda m, step, rank: block_loss(m, 10 * step + rank // 2, rank), adam)
    return whole(model)
