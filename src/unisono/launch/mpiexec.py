"""`unisono run --backend mpi`: MPI's own launcher starts the ranks.

Knows where mpiexec is and what it must be allowed. Does not know what ranks do: from here on this process is
mpiexec, which shows their output, passes on signals and ends them all when one fails.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

from unisono.config import environment
from unisono.errors import BackendUnavailable, UsageError
from unisono.launch.run import Job

__all__ = ["become_mpiexec", "mpiexec"]

# Open MPI refuses ranks of root, and more ranks than cores, unless told. Others do not read these.
_ALLOWANCES: Final[Mapping[str, str]] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpiexec() -> str | None:
    """The launcher beside this interpreter, where the wheel puts it, else any on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def become_mpiexec(job: Job) -> NoReturn:
    """Run the job's ranks under mpiexec, in the place of this process.

    Raises:
        UsageError: the job asks for what only our own launcher does.
        BackendUnavailable: there is no mpiexec.
    """
    job.check()
    if job.nodes > 1 or job.join is not None:
        raise UsageError(
            "--nnodes and --join with --backend mpi; allowed: one host",
            next_step="on several, run mpiexec with its host file, and uni.init(backend='mpi')",
        )
    program = mpiexec()
    if program is None:
        raise BackendUnavailable(
            "backend 'mpi'", cause="mpiexec is not installed", next_step="pip install 'unisono[mpi]'"
        )
    command = [program, "-n", str(job.ranks_here), *job.command]
    os.execve(program, command, environment({**_ALLOWANCES, "PYTHONUNBUFFERED": "1", **job.env}))
