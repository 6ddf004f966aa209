"""Collectives on tensors of a device: the library's contract, and which calls go to it.

Device libraries compare nothing and there is no agreement before a call, so ranks that call different things
hang. This module names no library.
"""

from __future__ import annotations

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
    """A fast path in front of the general one: it takes the calls on tensors of a device."""

    verbs = _VERBS

    def __init__(self, library: DeviceLibrary, size: int, deadline_s: float | None = None) -> None:
        self._library = library
        self._size = size
        self._deadline_s = deadline_s

    def verb(self, name: str, slow: Callable[..., Any], take_over: Callable[..., None]) -> Callable[..., Any]:
        """Return a callable that replaces the verb `slow`."""

        def call(*args: Any, **named: Any) -> Any:
            torch = sys.modules.get("torch")
            x = args[0] if args else named.get("x")
            if torch is None or not isinstance(x, torch.Tensor) or not self._library.takes(x):
                return slow(*args, **named)
            return self._run(name, torch, *args, **named)

        call.__name__, call.__doc__ = name, slow.__doc__
        return call

    def cache_decision(self, *decision: Any) -> bool:
        """Nothing is cached."""
        return False

    def _run(
        self,
        name: str,
        torch: Any,
        x: Any,
        second: Any = None,
        *,
        op: OpLike | None = None,
        root: int | None = None,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str = "auto",
    ) -> Any:
        if algorithm != "auto":
            raise UsageError(f"algorithm={algorithm!r} for a tensor on {x.device}; allowed: auto")
        if not x.is_contiguous():
            raise UsageError(f"x on {x.device} is not contiguous", next_step="pass x.contiguous()")
        if name in ("all_reduce", "reduce_scatter"):
            op = second if op is None else op
        elif name == "broadcast":
            root = second if root is None else root
        how = as_op("sum" if op is None else op)
        if how.fn is not None:
            raise UsageError(f"op {how} for a tensor on {x.device}; allowed: operations by name")
        dtype = DTYPES.get(str(x.dtype).removeprefix("torch."))
        if dtype is None:
            raise UsageError(f"x has dtype {x.dtype}; allowed: {', '.join(DTYPES)}")
        if name in ("all_reduce", "reduce_scatter"):
            how.check(dtype)
        at = 0 if root is None else root
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < self._size:
            raise UsageError(f"root={at!r}; allowed: ranks 0 to {self._size - 1}")
        taken = self._result(name, torch, x, out)
        self._library.run(name, x, taken, how.name, at, self._deadline_s if timeout is None else timeout)
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
