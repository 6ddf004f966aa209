"""Batch normalisation over the batches of all ranks, on CPUs: torch's own SyncBatchNorm needs a GPU.

Works on every process group. In training, the forward pass gathers the count, mean and sum of squared
deviations of each rank, and the backward pass adds up two sums; each is one collective. Means and deviations
are merged by their true counts (Chan, Golub and LeVeque), so batches may be uneven, or empty on some ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from unisono.errors import UsageError

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]  # torch is not typed here
    """`torch.nn.SyncBatchNorm` for CPUs, with the same arguments, parameters and buffers.

    Normalises input of shape (N, C, ...) by the mean and variance that each channel has over the batches of
    all ranks of `process_group` (default: all ranks). Every rank calls it in training, with any N, also 0.
    In eval mode nothing is sent. Statistics of float16 and bfloat16 input are float32.

    The gradients of weight and bias are those of this rank's batch, as in torch: DistributedDataParallel
    averages them.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self.process_group = process_group

    def _check_input_dim(self, x: Any) -> None:
        if x.dim() < 2 or x.size(1) != self.num_features or not self.num_features:
            raise ValueError(f"expected input of shape (N, {self.num_features}, ...), got {tuple(x.shape)}")

    def forward(self, x: Any) -> Any:
        """Normalise `x`.

        Raises:
            ValueError: `x` has another number of channels; or there are fewer than two values per channel, on
                all ranks together.
        """
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(x)
        group = dist.group.WORLD if self.process_group is None else self.process_group
        if dist.get_world_size(group) == 1:
            return super().forward(x)
        self._check_input_dim(x)
        mean, variance, count = _statistics(x.detach(), group)
        if self.track_running_stats:
            self._update_running_stats(mean, variance * (count / (count - 1)))
        return _Normalize.apply(x, self.weight, self.bias, mean, variance, self.eps, count, group)

    def _update_running_stats(self, mean: Any, unbiased: Any) -> None:
        self.num_batches_tracked.add_(1)
        factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(torch.lerp(running.to(new.dtype), new, factor))


def convert_sync_batchnorm(module: Any, process_group: Any = None) -> Any:
    """Replace every batch normalisation in `module` by a SyncBatchNorm, and return the module.

    The new layers share parameters, buffers and hooks with the old ones and keep their mode. A module that
    is used in several places is replaced by one and the same. Converting again only sets the group.

    Raises:
        UsageError: a lazy layer does not know its number of features yet.
    """
    return _converted(module, process_group, {})


def _converted(module: Any, group: Any, known: dict[int, Any]) -> Any:
    if id(module) in known:
        return known[id(module)]
    result = module
    if isinstance(module, SyncBatchNorm):
        module.process_group = group
    elif isinstance(module, _BatchNorm):
        if isinstance(module, LazyModuleMixin):
            raise UsageError(
                f"a {type(module).__name__} does not know its number of features yet; allowed: known ones",
                next_step="call the model once before convert_sync_batchnorm",
            )
        result = SyncBatchNorm.__new__(SyncBatchNorm)
        # All that a module has, parameters and buffers included, lies in here.
        result.__dict__ = {**module.__dict__, "process_group": group}
    known[id(module)] = result
    for name, child in module._modules.items():
        if child is not None:
            result._modules[name] = _converted(child, group, known)
    return result


def _statistics(x: Any, group: Any) -> tuple[Any, Any, int]:
    """Mean and biased variance of each channel over all ranks, and how many values they are of."""
    wide = x if x.dtype == torch.float64 else x.float()
    channels = x.size(1)
    # In float64, counts are exact and merging adds no error of its own.
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if x.numel():
        mine[0] = x.numel() // channels
        mine[1 : channels + 1], mine[channels + 1 :] = _deviations(wide)
    gathered = mine.new_empty(dist.get_world_size(group) * mine.numel())
    dist.all_gather_single(gathered, mine, group=group)
    counts, means, deviations = gathered.view(-1, mine.numel()).split([1, channels, channels], dim=1)
    total = int(counts.sum())
    if total < 2:
        raise ValueError(
            f"expected more than 1 value per channel when training, got {total} on all ranks together"
        )
    mean = (counts * means).sum(0) / total
    variance = (deviations + counts * (means - mean) ** 2).sum(0) / total
    return mean.to(wide.dtype), variance.to(wide.dtype), total


def _deviations(x: Any) -> tuple[Any, Any]:
    """Mean and sum of squared deviations of each channel of this rank's values, in float64.

    By the corrected two-pass algorithm: the deviations from the rounded mean also tell how far it is off.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = x.numel() // x.size(1)
    mean = x.mean(dims)
    deviation = x - mean.view(1, -1, *(1,) * (x.dim() - 2))
    off = deviation.sum(dims).double() / count
    squares = deviation.mul_(deviation).sum(dims).double() - count * off * off
    return mean.double() + off, squares


class _Normalize(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on all x."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, eps: float, count: int, group: Any
    ) -> Any:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.count, ctx.group = eps, count, group
        wide = [None if each is None else each.to(mean.dtype) for each in (weight, bias)]
        return functional.batch_norm(x, mean, variance, *wide, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        # Sums over this rank's batch of dy * (x - mean) / sqrt(variance + eps), and of dy.
        sums = mean.new_zeros(2, mean.numel())
        if x.numel():  # torch ends the process by a signal otherwise
            _, sums[0], sums[1] = torch.ops.aten.native_batch_norm_backward(
                dy, x, None, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        dx = _input_gradient(ctx, dy, x, sums) if ctx.needs_input_grad[0] else None
        dweight = sums[0].to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = sums[1].to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None, None, None


def _input_gradient(ctx: Any, dy: Any, x: Any, sums: Any) -> Any:
    _, weight, mean, variance = ctx.saved_tensors
    totals = sums.to(torch.float64, copy=True)  # the sums of this rank stay: they are its weight gradients
    dist.all_reduce(totals, group=ctx.group)
    scaled_mean, dy_mean = (totals / ctx.count).to(mean.dtype)
    inverse = torch.rsqrt(variance + ctx.eps)
    factor = inverse if weight is None else inverse * weight
    by_channel = (1, -1, *(1,) * (x.dim() - 2))
    # (dy - dy_mean - x_normalised * scaled_mean) * factor, in one temporary.
    dx = x.to(mean.dtype) - mean.view(by_channel)
    dx.mul_((-scaled_mean * inverse).view(by_channel))
    dx.add_(dy).sub_(dy_mean.view(by_channel)).mul_(factor.view(by_channel))
    return dx.to(x.dtype)
