"""Memory of devices: a library that moves it stands beside a backend, which moves everything else.

Knows the verbs that take tensors of devices, and which calls are such. Does not know any library. Device
libraries compare nothing: there is no agreement before, and ranks that call different things hang.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from unisono.core.dtypes import DTYPES
from unisono.core.ops import OpLike, as_op
from unisono.errors import UsageError
from unisono.messaging.fast_path import FastPath

__all__ = ["DeviceCalls", "DevicePart"]

_VERBS: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class DevicePart(ABC):
    """Collectives on tensors of devices, among the ranks of a backend."""

    @abstractmethod
    def takes(self, tensor: Any) -> bool:
        """Whether it lies where this library works."""

    @abstractmethod
    def run(self, verb: str, given: Any, taken: Any, op: str, root: int, timeout: float | None) -> None:
        """Run a collective to its end. all_reduce and broadcast work in `taken` alone, as plans do.

        Raises:
            UsageError: it has no such operation.
            DeadlineExceeded: it did not end in time; the library is of no use any more.
        """

    @abstractmethod
    def close(self) -> None:
        """End, also in the midst of a collective."""


class DeviceCalls:
    """Stands before a communicator's verbs, and takes the calls with tensors of devices."""

    def __init__(self, part: DevicePart, size: int, inner: FastPath | None) -> None:
        self._part = part
        self._size = size
        self._inner = inner
        self.verbs = tuple(dict.fromkeys((*_VERBS, *(inner.verbs if inner is not None else ()))))

    def verb(self, name: str, slow: Callable[..., Any], slow_path: Any) -> Callable[..., Any]:
        """Take what concerns a device. The short way of others, which knows no such thing, goes first."""

        def call(*args: Any, **named: Any) -> Any:
            torch = sys.modules.get("torch")
            x = args[0] if args else named.get("x")
            if torch is None or not isinstance(x, torch.Tensor) or not self._part.takes(x):
                return slow(*args, **named)
            return self._run(name, torch, *args, **named)

        call.__name__, call.__doc__ = name, slow.__doc__
        last = call if name in _VERBS else slow
        inner = self._inner
        return last if inner is None or name not in inner.verbs else inner.verb(name, last, slow_path)

    def unclaimed(self, sequence: int) -> Sequence[tuple[int, int, bytes]]:
        """The others know."""
        return () if self._inner is None else self._inner.unclaimed(sequence)

    def unconfirmed_ranks(self) -> Sequence[int]:
        """The others know."""
        return () if self._inner is None else self._inner.unconfirmed_ranks()

    def cache_decision(self, *decision: Any) -> bool:
        """It is for the others."""
        return self._inner is not None and self._inner.cache_decision(*decision)

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
            raise UsageError(f"x on {x.device} is not contiguous; allowed: x.contiguous()")
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
        self._part.run(name, x, taken, how.name, at, timeout)
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
