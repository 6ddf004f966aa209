"""Checks of torch programs, all on ranks that are started once; either backend is the default group."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_processes
from tests.support.ranks import PATIENCE_S
from tests.support.torch_ranks import join_torch

from unisono.comm.communicator import Communicator

__all__ = ["RUNS", "Check", "run_checks"]

# Backends and numbers of ranks: the first is for `make test`, the others are for `make test-more`.
RUNS = [
    ("unisono", 2),
    pytest.param("unisono", 3, marks=pytest.mark.more),
    pytest.param("gloo", 2, marks=pytest.mark.more),
    pytest.param("gloo", 3, marks=pytest.mark.more),
]

Check = Callable[[Communicator], None]


def run_checks(checks: Mapping[str, Check], size: int, backend: str) -> dict[str, str]:
    """Run each check on all ranks, with `backend` as the default group; return "ok" or the failure of each.

    A check also gets a communicator of the same ranks. After a check that fails no further check is run.
    """

    def program(comm: Communicator, folder: str) -> dict[str, str]:
        join_torch(comm.rank, comm.size, folder, backend)
        ended: dict[str, str] = {}
        for name, check in checks.items():
            torch.manual_seed(comm.rank)
            try:
                check(comm)
                ended[name] = "ok"
            except Exception:
                ended[name] = f"rank {comm.rank}: {traceback.format_exc()}"
            if any(each != "ok" for each in comm.all_gather_object(ended[name])):
                break
        else:
            dist.destroy_process_group()
        return ended

    with tempfile.TemporaryDirectory() as folder:
        ended: list[Any] = run_processes(program, size, folder, patience_s=PATIENCE_S)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return {name: _together([each.get(name, "not run") for each in ended]) for name in checks}


def _together(ended: list[str]) -> str:
    """The outcome of one check over all ranks; the first error is not always on rank 0."""
    return "ok" if set(ended) == {"ok"} else "\n".join(each for each in ended if each != "ok")
