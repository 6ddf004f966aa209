"""The nccl backend: tensors on GPUs go by NCCL, everything else by the native backend.

NCCL's ranks find each other by messages of the native backend. This has not run on hardware: see
docs/backends.md.
"""

from __future__ import annotations

import datetime
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from unisono.backends.devices.backend import DeviceBackend
from unisono.backends.devices.calls import DeviceLibrary
from unisono.backends.registry import BackendInfo, Closable
from unisono.core.envelope import ANY, Lane, Tags
from unisono.core.request import Request
from unisono.errors import DeadlineExceeded, PeerLost, UsageError
from unisono.messaging.backend import Backend, Capabilities
from unisono.messaging.peer_down import PeerDown

__all__ = ["DESCRIPTION", "NcclLibrary", "missing", "store_over"]

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_OPS: Final = {
    "sum": "SUM",
    "mean": "AVG",
    "prod": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
# The context and tag of the store's messages, by which NCCL's ranks find each other.
_CONTEXT: Final = 0
_TAG: Final = Tags.CONTROL | 2
_CAPABILITIES: Final = Capabilities("nccl", run_plan=True, device_memory=True)


class NcclLibrary(DeviceLibrary):
    """Torch's process group of NCCL, made without torch.distributed's global state."""

    def __init__(self, backend: Backend) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        self._group = ProcessGroupNCCL(store_over(backend), backend.rank, backend.size, options)
        self._lost: PeerLost | None = None
        backend.watch(self._on_down)

    def takes(self, tensor: Any) -> bool:
        """Whether the tensor is on an NVIDIA GPU."""
        return bool(tensor.device.type == "cuda")

    def run(self, verb: str, given: Any, taken: Any, op: str, root: int, timeout: float | None) -> None:
        """Start it, and wait until the GPU has done it."""
        import torch.distributed as dist

        if op not in _OPS:
            raise UsageError(f"op {op!r} for a tensor on {given.device}; allowed: {', '.join(_OPS)}")
        reduce_op = getattr(dist.ReduceOp, _OPS[op])
        group = self._group
        match verb:
            case "all_reduce":
                work = group.allreduce([taken], _options(dist.AllreduceOptions(), reduceOp=reduce_op))
            case "broadcast":
                options = _options(dist.BroadcastOptions(), rootRank=root, rootTensor=0)
                work = group.broadcast([taken], options)
            case "all_gather":
                work = group._allgather_base(taken, given)
            case "reduce_scatter":
                options = _options(dist.ReduceScatterOptions(), reduceOp=reduce_op)
                work = group._reduce_scatter_base(taken, given, options)
            case _:
                work = group.alltoall_base(taken, given, [], [])
        try:
            # Without a limit, torch's wait only orders the streams; with one it waits for the GPU.
            work.wait(datetime.timedelta(seconds=timeout) if timeout is not None else _FOREVER)
        except RuntimeError as error:
            group.abort()
            if self._lost is not None:
                raise self._lost from error
            raise DeadlineExceeded(f"{verb} did not end", cause=str(error).splitlines()[0]) from error

    def close(self) -> None:
        """Abort what runs."""
        self._group.abort()

    def _on_down(self, down: PeerDown) -> None:
        if not down.left:
            self._lost = down.error()
            self._group.abort()


_FOREVER: Final = datetime.timedelta(days=365)


def _options(options: Any, **settings: Any) -> Any:
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def store_over(backend: Backend) -> Any:
    """A torch Store for the ranks of a backend: a key that one rank sets is sent to all others."""
    from torch.distributed import Store

    class MessageStore(Store):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._changed = threading.Condition()
            self._values: dict[str, bytes] = {}
            self._listen()

        def set(self, key: str, value: bytes) -> None:
            self._keep(key, bytes(value))
            data = memoryview(msgspec.msgpack.encode((key, bytes(value))))
            for peer in range(backend.size):
                if peer != backend.rank:
                    backend.start_send(peer, _CONTEXT, _TAG, data, lane=Lane.CONTROL)

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self._values[key]

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)

        def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
            with self._changed:
                seconds = None if timeout is None else timeout.total_seconds()
                if not self._changed.wait_for(lambda: self.check(keys), seconds):
                    raise TimeoutError(f"no rank has set {', '.join(keys)}")

        def _keep(self, key: str, value: bytes) -> None:
            with self._changed:
                self._values[key] = value
                self._changed.notify_all()

        def _listen(self) -> None:
            request = backend.start_recv(ANY, _CONTEXT, _TAG, None)
            request.notify(lambda: self._on_message(request))

        def _on_message(self, request: Request) -> None:
            if request.error is not None:
                return  # the backend was closed, or no other rank is left
            self._keep(*msgspec.msgpack.decode(request.data or b"", type=tuple[str, bytes]))
            self._listen()

    return MessageStore()


def _wrap(native: Closable) -> DeviceBackend:
    return DeviceBackend(native, NcclLibrary(native), "nccl")


def missing(spec_of: Callable[[str], Any] = importlib.util.find_spec, driver: Path = _DRIVER) -> str | None:
    """What this machine lacks for NCCL, None if nothing. torch is imported only if there may be a GPU."""
    spec = spec_of("torch")
    if spec is None or not spec.submodule_search_locations:
        return "torch is not installed"
    version = _version_of(Path(spec.submodule_search_locations[0]))
    name = f"torch {version.get('__version__')}"
    if version.get("cuda") is None:
        return f"{name} was built without CUDA, so without NCCL"
    if not driver.exists():
        return f"{name} has CUDA, but this machine has no NVIDIA driver ({driver})"
    import torch

    if not torch.cuda.is_available():
        return f"{name} has CUDA and there is a driver, but it finds no GPU"
    if not torch.distributed.is_nccl_available():
        return f"{name} has CUDA, but was built without NCCL"
    return None


def _version_of(folder: Path) -> dict[str, str | None]:
    """What torch says about its build."""
    spec = importlib.util.spec_from_file_location("unisono_torch_version", folder / "version.py")
    if spec is None or spec.loader is None:
        return {}
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        name: None if (value := getattr(module, name, None)) is None else str(value)
        for name in ("cuda", "__version__")
    }


DESCRIPTION = BackendInfo(
    name="nccl",
    summary="tensors on GPUs over NCCL, everything else over native",
    check=missing,
    install="a machine with an NVIDIA GPU, and pip install torch with CUDA",
    capabilities=_CAPABILITIES,
    wrap=_wrap,
)
