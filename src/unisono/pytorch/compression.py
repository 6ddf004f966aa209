"""Compressed gradients for torch: a hook for DistributedDataParallel, and sums of tensors on a process group.

The compressors are those of `unisono.train`, here on torch's process groups: "unisono", Gloo or any other.
Annotations are not postponed here: torch reads those of a hook.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono.core import buffers
from unisono.errors import UsageError
from unisono.train.compression import Compressor
from unisono.train.error_feedback import ErrorFeedback, read_wide, write_narrow
from unisono.train.pipeline import Begin, Collective, Exchange, FloatArray, Pipeline

__all__ = ["CompressionState", "compression_hook"]


class CompressionState:
    """The state of `compression_hook`: a compressor, its residuals, and the process group.

        state = CompressionState(uni.train.TopK(0.01))
        ddp.register_comm_hook(state, compression_hook)

    All collectives are started by the thread that runs backward, in an order that all ranks share, so they
    may stand on the same group beside those of SyncBatchNorm. Residuals follow their parameters when
    DistributedDataParallel arranges its buckets anew.
    """

    def __init__(self, compressor: Compressor, process_group: Any = None) -> None:
        self.feedback = ErrorFeedback(compressor)
        self.process_group = process_group
        self._pipeline = Pipeline(collectives_on(process_group))
        # By number of the bucket: the parameters whose gradients it held, one after another.
        self._layouts: dict[int, list[Any]] = {}
        # By the id of a parameter, until a bucket with that parameter comes: the parameter and its residual.
        self._moving: dict[int, tuple[Any, FloatArray]] = {}

    def all_reduce(self, x: Any, op: str = "sum", *, key: str | int) -> Any:
        """Replace `x` by its compressed sum or mean over the process group, in place, and return it.

        See `uni.train.ErrorFeedback.all_reduce`, which does the same on a communicator.
        """
        array = buffers.view(x, "x", writable=True)
        pipeline = Pipeline(collectives_on(self.process_group))
        pipeline.add(self._exchange(array, op, key), lambda result: write_narrow(array, result))
        pipeline.finish()
        return x

    def state_dict(self, model: Any) -> dict[str, Any]:
        """The state of this rank for its checkpoint, as copies: the residuals of the parameters by name.

        By parameter, because a new DistributedDataParallel begins with other buckets. `model` is the module
        that DistributedDataParallel was given, or itself.
        """
        names = {id(parameter): name for name, parameter in _named(model)}
        kept = self.feedback.state_dict()
        residuals = kept["residuals"]
        by_name = {names[key]: part.copy() for key, (_, part) in self._moving.items() if key in names}
        for index, layout in self._layouts.items():
            if (joined := residuals.pop(_key(index), None)) is not None:
                by_name |= {names[id(p)]: part for p, part in _cut(joined, layout) if id(p) in names}
        return {"parameters": by_name, "residuals": residuals, "calls": kept["calls"]}

    def load_state_dict(self, state: Mapping[str, Any], model: Any) -> None:
        """Go on from what `state_dict` gave, of the same rank in as many ranks, for a model like that one.

        Raises:
            UsageError: it is no such state, or of another model; nothing was changed.
        """
        parameters = dict(_named(model))
        moving = {}
        for name, residual in state.get("parameters", {}).items():
            known = parameters.get(name)
            if known is None or known.numel() != len(residual):
                raise UsageError(
                    f"a residual of {len(residual)} elements for {name!r}: the model has no parameter of "
                    "that name and length; allowed: what `state_dict(model)` gave for a model like this one"
                )
            moving[id(known)] = (known, np.array(residual))
        self.feedback.load_state_dict(state)
        self._layouts, self._moving = {}, moving

    def average_bucket(self, bucket: Any) -> Any:
        """Start to average a bucket; returns its future."""
        future: Any = torch.futures.Future()
        buffer = bucket.buffer()
        array = buffers.view(buffer, "the bucket of gradients", writable=True)
        if bucket.index() == 0:
            self._pipeline.clear()  # of a backward pass that failed
        self._arrange(bucket.index(), bucket.parameters())

        def end(mean: FloatArray) -> None:
            write_narrow(array, mean)
            future.set_result(buffer)

        self._pipeline.add(self._exchange(array, "mean", _key(bucket.index())), end)
        if bucket.is_last():
            self._pipeline.finish()
        return future

    def _exchange(self, array: buffers.Array, op: str, key: str | int) -> Exchange:
        group = self.process_group
        return self.feedback.exchange(
            read_wide(array), op, key=key, rank=dist.get_rank(group), size=dist.get_world_size(group)
        )

    def _arrange(self, index: int, parameters: list[Any]) -> None:
        """Let the residual of a bucket follow its parameters: they may have been in other buckets before."""
        known = self._layouts.get(index, [])
        if [id(p) for p in known] == [id(p) for p in parameters]:
            return
        residuals = self.feedback.residuals
        # The buckets before this one are under way, as they are now.
        for other in [other for other in self._layouts if other >= index]:
            layout = self._layouts.pop(other)
            if (joined := residuals.pop(_key(other), None)) is not None:
                self._moving |= {id(p): (p, part) for p, part in _cut(joined, layout)}
        if _key(index) in residuals:
            raise UsageError(
                f"residuals of {_key(index)}, whose parameters are not known; allowed: those of this object",
                next_step="state.load_state_dict(saved, model) with what state.state_dict(model) gave",
            )
        self._layouts[index] = parameters
        found = [self._moving.pop(id(p), (p, None))[1] for p in parameters]
        if any(part is not None for part in found):
            residuals[_key(index)] = np.concatenate(
                [
                    np.zeros(p.numel(), np.float32) if part is None else part
                    for p, part in zip(parameters, found, strict=True)
                ]
            )


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in compressed form: `ddp.register_comm_hook(state, compression_hook)`."""
    return state.average_bucket(bucket)


def _named(model: Any) -> list[tuple[str, Any]]:
    """The parameters of a model by name, whether DistributedDataParallel wraps it or not."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    return list(inner.named_parameters())


def _cut(joined: FloatArray, layout: list[Any]) -> list[tuple[Any, FloatArray]]:
    """The residual of a bucket by parameter."""
    parts = np.split(joined, np.cumsum([p.numel() for p in layout])[:-1])
    return list(zip(layout, parts, strict=True))


def _key(index: int) -> str:
    return f"bucket {index}"


def collectives_on(group: Any) -> Begin:
    """How the collectives of exchanges are started on a process group; None is the default one."""

    def begin(asked: Collective) -> Callable[[], Any]:
        mine = out = torch.from_numpy(asked.x)
        if asked.verb == "all_reduce":
            work = dist.all_reduce(mine, group=group, async_op=True)
        elif asked.verb == "all_gather":
            flat = mine.new_empty(dist.get_world_size(group) * mine.numel())
            out = flat.view(-1, mine.numel()) if mine.numel() else flat.view(len(flat), 0)
            work = dist.all_gather_single(flat, mine, group=group, async_op=True)
        else:
            out = torch.empty_like(mine)
            work = dist.all_to_all_single(out, mine, group=group, async_op=True)

        def wait() -> Any:
            work.wait()
            return out.numpy()

        return wait

    return begin
