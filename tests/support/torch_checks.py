"""Checks of a torch program: each runs on all ranks of one start, and either backend is the default group."""

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

# Backends and numbers of ranks: the first in `make test`, all in `make test-more`.
RUNS = [
    ("unisono", 2),
    pytest.param("unisono", 3, marks=pytest.mark.more),
    pytest.param("gloo", 2, marks=pytest.mark.more),
    pytest.param("gloo", 3, marks=pytest.mark.more),
]

Check = Callable[[Communicator], None]


def run_checks(checks: Mapping[str, Check], size: int, backend: str) -> dict[str, str]:
    """Run each check on all ranks, with `backend` as the default process group: "ok", or what went wrong.

    A check gets a communicator of the same ranks beside it. Those after one that fails are not run.
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
    """What one check said on all ranks; the error that the others waited for is not always rank 0's."""
    return "ok" if set(ended) == {"ok"} else "\n".join(each for each in ended if each != "ok")
