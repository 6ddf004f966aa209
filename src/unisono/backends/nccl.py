"""The nccl backend, as far as it goes: what a machine lacks for it, said exactly.

Knows what torch was built with and whether there is a device. Does not move anything yet: the verbs take
memory of the CPU only, and there was no device to try another on.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from unisono.backends.registry import BackendInfo
from unisono.contract import Capabilities

__all__ = ["DESCRIPTION"]

_DRIVER = Path("/proc/driver/nvidia/version")


def missing() -> str:
    """The first thing that is missing. torch itself is not imported: that costs seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "torch is not installed"
    version = _version_of(Path(spec.submodule_search_locations[0]))
    if version.get("cuda") is None:
        return f"torch {version.get('__version__')} was built without CUDA, so without NCCL"
    if not _DRIVER.exists():
        return (
            f"torch {version.get('__version__')} has CUDA, but this machine has no NVIDIA driver ({_DRIVER})"
        )
    return (
        "this version of unisono takes memory of the CPU only; copy device tensors, or use backend='native'"
    )


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
    summary="device tensors, over NCCL",
    check=missing,
    install="a machine with an NVIDIA GPU, and pip install torch with CUDA",
    capabilities=Capabilities("nccl", run_collective=True, wildcards=False, device_memory=True),
)
