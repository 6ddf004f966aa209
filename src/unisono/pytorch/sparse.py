"""all_reduce of sparse COO tensors: the entries of all ranks are gathered, and each rank adds them up."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from unisono.errors import CollectiveMismatch, UsageError
from unisono.pytorch.calls import Calls
from unisono.pytorch.reductions import is_mean
from unisono.pytorch.tensors import readable
from unisono.pytorch.work import DONE, Once, Several

__all__ = ["all_reduce_sparse", "check_sparse"]

_RED: Final = ReduceOp.RedOpType


def all_reduce_sparse(calls: Calls, tensor: Tensor, opts: Any) -> dist.Work:
    """Replace a sparse tensor by its sum or mean over the ranks of a group."""
    op, size = opts.reduceOp, calls.comm.size
    with calls.errors("all_reduce"):
        check_sparse(op)
        entries = tensor.detach().coalesce()
        indices, values = readable(entries.indices().t()), readable(entries.values())
        mine = torch.tensor([op.op.value, *tensor.shape], device=tensor.device)
    gathered: dict[str, Any] = {}

    def finish(_: object) -> None:
        _check_same(gathered["calls"])
        whole = torch.sparse_coo_tensor(
            torch.cat(gathered["indices"]).t(),
            torch.cat(gathered["values"]),
            tensor.shape,
            check_invariants=False,  # each rank's tensor had them
        ).coalesce()
        if is_mean(op):
            whole = whole / size
        with torch.no_grad():  # not through detach(): a sparse tensor does not share its entries
            tensor.copy_(whole)

    begun = AllreduceOptions()
    begun.timeout, begun.asyncOp = opts.timeout, True
    work = Several(
        calls,
        [
            calls.run("all_gather", begun, [], lambda got: gathered.update(calls=got), mine),
            calls.run("all_gather_v", begun, [tensor], lambda got: gathered.update(indices=got), indices),
            calls.run("all_gather_v", begun, [], lambda got: gathered.update(values=got), values),
        ],
        Once(finish),
    )
    if opts.asyncOp:
        return calls.kept(work)
    work.wait()
    return DONE


def check_sparse(op: Any) -> None:
    """Refuse operations on sparse tensors that are no sums.

    Raises:
        UsageError: it is none.
    """
    if op.op.value not in (_RED.SUM.value, _RED.AVG.value):
        raise UsageError(f"ReduceOp.{op.op.name} of sparse tensors; allowed: SUM, AVG")


def _check_same(calls: Tensor) -> None:
    """Compare the operation and the shape of each rank, in rows.

    Raises:
        CollectiveMismatch: they differ.
    """
    if bool((calls == calls[0]).all()):
        return
    names = {code.value: name for name, code in _RED.__members__.items()}
    rows = [(names[row[0]], row[1:]) for row in calls.tolist()]
    other = next(rank for rank, row in enumerate(rows) if row != rows[0])
    ways, shapes = zip(rows[0], rows[other], strict=True)
    what, pair = ("op", ways) if ways[0] != ways[1] else ("shape", shapes)
    raise CollectiveMismatch(
        f"ranks 0 and {other} of the group called all_reduce of different sparse tensors: "
        f"{what}: {pair[0]} against {pair[1]}"
    )
