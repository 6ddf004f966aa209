"""Error feedback: what a compressor has not sent is added to what it gets the next time.

Nothing is lost, only late; that is what lets training with 1 % of the gradients converge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.core import buffers
from unisono.core.buffers import Array
from unisono.core.dtypes import Kind
from unisono.core.kernels import narrow, widen
from unisono.errors import UsageError
from unisono.train.compression import Call, Compressor
from unisono.train.pipeline import Exchange, FloatArray, Pipeline, collectives_of

__all__ = ["ErrorFeedback", "read_wide", "write_narrow"]

T = TypeVar("T")


class ErrorFeedback:
    """Compressed sums and means over ranks, with a residual for each array.

        feedback = uni.train.ErrorFeedback(uni.train.TopK(0.01))
        feedback.all_reduce(comm, gradient, "mean", key="weights")

    The result is the same on all ranks, bit for bit. Over all ranks, what was put in equals the sum of the
    results plus the residuals. If the result of a call is not finite, because a rank put in NaN or Inf or
    float16 overflowed, then all residuals stay as they were before: the call has not happened, as for a
    training step that is skipped.

    One object serves one communicator or process group. Each key is one array of fixed length.

    Attributes:
        compressor: what decides what is sent.
        residuals: by key, what this rank has not sent yet: float64 for arrays of float64, else float32.
            `state_dict` saves them with a checkpoint; without them one step's remainder is lost.
    """

    def __init__(self, compressor: Compressor) -> None:
        if not isinstance(compressor, Compressor):
            raise UsageError(
                f"ErrorFeedback got {compressor!r}; allowed: a compressor",
                next_step="ErrorFeedback(uni.train.TopK(0.01))",
            )
        self.compressor = compressor
        self.residuals: dict[str | int, FloatArray] = {}
        self._calls: dict[str | int, int] = {}

    def all_reduce(
        self, comm: Communicator, x: T, op: str = "sum", *, key: str | int, timeout: float | None = None
    ) -> T:
        """Replace `x` by its compressed sum or mean over all ranks, in place, and return it.

        Args:
            comm: the ranks; all of them call it, with the same key, op and length.
            x: an array of floats.
            op: "sum" or "mean".
            key: the name of the array, whose residual is kept.
            timeout: seconds for all of it.

        Raises:
            DeadlineExceeded: it took longer than `timeout`.
            UsageError: another op, another type, or another length than before; nothing was sent.
        """
        array = buffers.view(x, "x", writable=True)
        runtime = comm.backend.runtime
        deadline = runtime.deadline(timeout)
        pipeline = Pipeline(collectives_of(comm, lambda: deadline.remaining(runtime.now())))
        exchange = self.exchange(read_wide(array), op, key=key, rank=comm.rank, size=comm.size)
        pipeline.add(exchange, lambda result: write_narrow(array, result))
        pipeline.finish()
        return x

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank keeps, as copies: its residuals, and how often each key was used."""
        return {
            "residuals": {key: residual.copy() for key, residual in self.residuals.items()},
            "calls": dict(self._calls),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, of the same rank in as many ranks.

        Raises:
            UsageError: it is no such state; nothing was changed.
        """
        try:
            residuals = {key: _checked(key, residual) for key, residual in state["residuals"].items()}
            calls = {key: int(number) for key, number in state["calls"].items()}
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"a state that ErrorFeedback cannot load ({error}); allowed: what `state_dict` gave"
            ) from error
        self.residuals, self._calls = residuals, calls

    def exchange(self, x: FloatArray, op: str, *, key: str | int, rank: int, size: int) -> Exchange:
        """The steps of a compressed sum of `x`, a flat array of float32 or float64 that it may overwrite."""
        if op not in ("sum", "mean"):
            raise UsageError(
                f'op {op!r} cannot be compressed: what is not sent counts as 0; allowed: "sum", "mean"'
            )
        residual = self.residuals.get(key)
        if residual is not None and residual.size != x.size:
            raise UsageError(
                f"{key!r} had {residual.size} elements before and has {x.size} now; allowed: one length",
                next_step="use another key",
            )
        number = self._calls.get(key, 0)
        return self._steps(x, residual, Call(rank, size, key, number, size if op == "mean" else 1))

    def _steps(self, x: FloatArray, residual: FloatArray | None, call: Call) -> Exchange:
        self._calls[call.key] = call.number + 1
        if residual is not None:
            with np.errstate(over="ignore"):  # seen below
                x += residual
        if not np.isfinite(x).all():
            x.fill(np.nan)  # so that all ranks see it now, whichever elements are sent
        result = yield from self.compressor.exchange(x, call)
        if np.isfinite(result).all():
            self.residuals[call.key] = x
        return result


def _checked(key: str | int, residual: Any) -> FloatArray:
    """A copy of a residual that was saved."""
    own = np.array(residual)
    if own.dtype not in (np.float32, np.float64) or own.ndim != 1:
        raise ValueError(f"{key!r} has shape {own.shape} of {own.dtype}")
    return own


def read_wide(array: Array) -> FloatArray:
    """A copy of an array as float32, or float64 if it is.

    Raises:
        UsageError: it does not hold floats, or is a number, which a result cannot be written to.
    """
    dtype = array.dtype
    if array.is_value:
        raise UsageError("x is a number; allowed: arrays", next_step="np.array(x)")
    if dtype.kind is not Kind.FLOAT:
        raise UsageError(
            f"x has dtype {dtype}, which cannot be compressed; allowed: float16, bfloat16, float32, float64"
        )
    return widen(array.flat, dtype) if dtype.is_half else array.flat.copy()


def write_narrow(array: Array, values: FloatArray) -> None:
    """Write values into an array, rounded to its type."""
    if array.dtype.is_half:
        narrow(np.ascontiguousarray(values, np.float32), array.flat, array.dtype)
    else:
        array.flat[:] = values
