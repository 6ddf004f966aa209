"""Collectives on tensors of a device: the library's contract, and which calls go to it.

Device libraries do not compare calls, and there is no agreement before a call, so ranks that call different
things hang. This module names no library.
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from unisono.core.dtypes import DTYPES
from unisono.core.ops import OpLike, as_op
from unisono.errors import UsageError

__all__ = ["DeviceCalls", "DeviceLibrary"]

_VERBS: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class DeviceLibrary(ABC):
    """Collectives on tensors of a device, among the ranks of a backend."""

    @abstractmethod
    def takes(self, tensor: Any) -> bool:
        """Whether the tensor lies in memory that this library works on."""

    @abstractmethod
    def run(self, verb: str, given: Any, taken: Any, op: str, root: int, timeout: float | None) -> None:
        """Run a collective to its end.

        Args:
            verb: all_reduce, broadcast, all_gather, reduce_scatter or all_to_all.
            given: the operand, contiguous. all_reduce and broadcast do not read it: they work in `taken`.
            taken: the result, of the right shape.
            op: the name of a reduction; ignored by verbs that do not reduce.
            root: the root of a broadcast; ignored by other verbs.
            timeout: seconds, or None for no limit.

        Raises:
            UsageError: the library has no such operation.
            DeadlineExceeded: it did not end in time; the library is unusable from now on.
            PeerLost: a rank died.
        """

    @abstractmethod
    def close(self) -> None:
        """End, also during a collective."""


class DeviceCalls:
    """The verbs of a communicator that take tensors of a device, too."""

    def __init__(self, library: DeviceLibrary, size: int, deadline_s: float | None = None) -> None:
        self._library = library
        self._size = size
        self._deadline_s = deadline_s

    def verb(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """A callable that takes what the blocking verb `reference` takes."""
        name = reference.__name__
        if name not in _VERBS:
            return reference
        signature = inspect.signature(reference)

        @functools.wraps(reference)
        def call(*args: Any, **named: Any) -> Any:
            torch = sys.modules.get("torch")
            x = args[0] if args else named.get("x")
            if torch is None or not isinstance(x, torch.Tensor) or not self._library.takes(x):
                return reference(*args, **named)
            given = signature.bind(*args, **named)
            given.apply_defaults()
            return self._run(name, torch, **given.arguments)

        return call

    def _run(
        self,
        name: str,
        torch: Any,
        x: Any,
        op: OpLike = "sum",
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | None,
        algorithm: str,
    ) -> Any:
        if algorithm != "auto":
            raise UsageError(f"algorithm={algorithm!r} for a tensor on {x.device}; allowed: auto")
        if not x.is_contiguous():
            raise UsageError(f"x on {x.device} is not contiguous", next_step="pass x.contiguous()")
        how = as_op(op)
        if how.fn is not None:
            raise UsageError(f"op {how} for a tensor on {x.device}; allowed: operations by name")
        dtype = DTYPES.get(str(x.dtype).removeprefix("torch."))
        if dtype is None:
            raise UsageError(f"x has dtype {x.dtype}; allowed: {', '.join(DTYPES)}")
        if name in ("all_reduce", "reduce_scatter"):
            how.check(dtype)
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self._size:
            raise UsageError(f"root={root!r}; allowed: ranks 0 to {self._size - 1}")
        taken = self._result(name, torch, x, out)
        self._library.run(name, x, taken, how.name, root, self._deadline_s if timeout is None else timeout)
        return taken

    def _result(self, name: str, torch: Any, x: Any, out: Any) -> Any:
        if name == "broadcast" or (name == "all_reduce" and out is None):
            return x
        if name in ("reduce_scatter", "all_to_all") and (not x.shape or x.shape[0] != self._size):
            raise UsageError(
                f"x has shape {tuple(x.shape)}; allowed: a leading axis of {self._size}, one per rank"
            )
        shape = tuple(x.shape)
        if name == "all_gather":
            shape = (self._size, *shape)
        elif name == "reduce_scatter":
            shape = shape[1:]
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device:
            raise UsageError(
                f"out is {out.dtype}{list(out.shape)} on {out.device}; "
                f"allowed: {x.dtype}{list(shape)} on {x.device}"
            )
        if name == "all_reduce":
            out.copy_(x)
        return out
