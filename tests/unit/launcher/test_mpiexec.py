"""The command line for mpiexec, and the shell that it runs in each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.environment import torch_variables
from unisono.launcher.mpiexec import mpiexec_command

PRINT = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"])
def test_each_rank_has_torchs_variables_and_its_own_output(rank: int, name: str, tmp_path: Path) -> None:
    files = [os.open(tmp_path / str(i), os.O_CREAT | os.O_RDWR) for i in range(3)]
    try:
        places = [torch_variables(i, 3, i, 3) for i in range(3)]
        command = mpiexec_command(
            [sys.executable, "-c", PRINT], os.getpid(), [(file, file) for file in files], places
        )
        assert command[1:3] == ["-n", "3"]
        foreign = ("OMPI_", "PMI")
        around = {key: text for key, text in os.environ.items() if not key.startswith(foreign)}
        subprocess.run(command[3:], env={**around, name: str(rank)}, check=True)
        said = [(tmp_path / str(i)).read_text() for i in range(3)]
        assert said == [f"{rank} 3 {rank} 3\n" if i == rank else "" for i in range(3)]
    finally:
        for file in files:
            os.close(file)
