"""`unisono run --backend mpi`: MPI's own launcher starts the ranks, and ours shows their output.

Knows where mpiexec is, what it must be allowed, and the command that it runs. Does not know what ranks do,
nor who watches them: mpiexec ends them all when one fails.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from unisono.errors import BackendUnavailable

__all__ = ["ALLOWANCES", "mpiexec", "mpiexec_command"]

# Open MPI refuses ranks of root, and more ranks than cores, unless told. Others do not read these.
ALLOWANCES: Final[Mapping[str, str]] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpiexec() -> str | None:
    """The launcher beside this interpreter, where the wheel puts it, else any on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpiexec_command(command: list[str], pid: int, descriptors: Iterable[tuple[int, int]]) -> list[str]:
    """How to start ranks whose output goes to the process `pid`: to two of its descriptors for each rank.

    A shell joins them, since mpiexec passes on neither descriptors nor lines with ranks that all versions
    write alike. Where it cannot, mpiexec shows the output as it is.

    Raises:
        BackendUnavailable: there is no mpiexec.
    """
    program = mpiexec()
    if program is None:
        raise BackendUnavailable(
            "backend 'mpi'", cause="mpiexec is not installed", next_step="pip install 'unisono[mpi]'"
        )
    cases = [
        f"{rank}) [ -w /proc/{pid}/fd/{out} ] && exec >/proc/{pid}/fd/{out} 2>/proc/{pid}/fd/{err};;"
        for rank, (out, err) in enumerate(descriptors)
    ]
    script = f'case ${{OMPI_COMM_WORLD_RANK-${{PMIX_RANK-$PMI_RANK}}}} in {" ".join(cases)} esac; exec "$@"'
    return [program, "-n", str(len(cases)), "/bin/sh", "-c", script, "sh", *command]
