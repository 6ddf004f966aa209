"""torch's own tests of torch.distributed, DistributedTest in its wheel, on ours.

torch starts processes for every test; here ranks live on and run one test after another, each in a default
group of its own. Tests that are gated to Gloo, or (CPU all_to_all) to MPI, run because the module is imported
under that name, and groups of that name are ours.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.support.processes import Ranks, forked

import unisono.pytorch
from unisono.messaging.backend import Backend

__all__ = ["SuiteRanks", "suite_ranks"]

assert unisono.pytorch  # registers the backend
SIZE = 4
PATIENCE_S = 120.0


class SuiteRanks:
    """Ranks that run torch's tests by name."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.names: list[str] = ranks.hear(0, PATIENCE_S)
        for rank in range(1, SIZE):
            assert ranks.hear(rank, PATIENCE_S) == self.names

    def run(self, name: str) -> str:
        """Run a test: "passed", "skipped" or the tracebacks of the ranks that failed."""
        for pipe in self._ranks.pipes:
            pipe.send(name)
        said = []
        for rank, pipe in enumerate(self._ranks.pipes):
            if not pipe.poll(PATIENCE_S):
                raise TimeoutError(f"rank {rank} hangs in {name}\n{self._ranks.stacks()}")
            said.append(pipe.recv())
        failed = [
            f"rank {rank}: {text}" for rank, text in enumerate(said) if text not in ("passed", "skipped")
        ]
        return "\n".join(failed) or ("passed" if "passed" in said else "skipped")


@contextlib.contextmanager
def suite_ranks(folder: Path, gate: str) -> Iterator[SuiteRanks]:
    """Ranks for the tests of backend `gate`, gloo or mpi."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(parents=True, exist_ok=True)

    def live(own: Backend, pipe: Connection) -> None:
        warnings.simplefilter("ignore")
        case = _loaded(folder, gate, own.rank)
        pipe.send(sorted(name for name in dir(case) if name.startswith("test_")))
        while (name := pipe.recv()) is not None:
            pipe.send(_run(case, name, own.rank, folder))

    with forked(live, SIZE) as ranks:
        yield SuiteRanks(ranks)


def _loaded(folder: Path, gate: str, rank: int) -> Any:
    """torch's class of tests, with groups of the name `gate` replaced by ours."""
    os.environ.update(
        BACKEND=gate,
        INIT_METHOD=f"file://{folder}/shared",
        WORLD_SIZE=str(SIZE),
        RANK=str(rank),
        TEMP_DIR=str(folder),
        MASTER_ADDR="127.0.0.1",
    )
    # A base class of torch's own tests, for expected texts, which these do not use.
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
    sys.modules.setdefault("expecttest", stub)
    sys.argv = ["test"]
    _put_in_place_of(gate)
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = "mpi"  # lifts torch's wish for 8 ranks
    # It looks for events that C++ groups record.
    module.PROFILING_SUPPORTED_BACKENDS = module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []

    class Case(module.DistributedTest._DistTestBase, module.TestDistBackend):  # type: ignore[name-defined, misc]
        pass

    Case.module = module
    return Case


def _put_in_place_of(gate: str) -> None:
    def replaced(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **named: Any) -> Any:
            args = tuple("unisono" if arg == gate else arg for arg in args)
            if named.get("backend") == gate:
                named["backend"] = "unisono"
            return make(*args, **named)

        return made

    told = dist.get_backend

    def get_backend(group: Any = None) -> str:
        name = told(group)
        return gate if name == "unisono" else name

    dist.init_process_group = replaced(dist.init_process_group)
    dist.new_group = replaced(dist.new_group)
    dist.get_backend = get_backend


def _run(case: Any, name: str, rank: int, folder: Path) -> str:
    module, test = case.module, case(name)
    test.rank, test.file_name = rank, f"{folder}/init_dir/{name}"
    timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout))
    if getattr(getattr(test, name), "__unittest_skip__", False):
        return "skipped"
    # Before all have joined: nobody waits in a barrier of torch's, which counts files.
    module.Barrier.barrier_id = 0
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{folder}/barrier/{os.getpid()}")
    try:
        dist.init_process_group(
            backend=module.BACKEND, init_method=test.init_method, world_size=SIZE, rank=rank, timeout=timeout
        )
        test._barrier()
        getattr(test, name)()
        test._barrier()
    except (unittest.SkipTest, SystemExit):
        return "skipped"
    except BaseException:
        return traceback.format_exc()
    else:
        return "passed"
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
