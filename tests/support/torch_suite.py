"""torch's own DistributedTest, which is in torch's wheel, on a given backend.

    python -m tests.support.torch_suite BACKEND RESULTS [NAME...]

torch starts new processes for each test. Here four ranks are forked once and run one test after another, each
in a new process group. torch skips tests by the name of the backend: most tests run for Gloo, those of
all_to_all on CPUs only for MPI. Therefore the module is imported three times, under BACKEND's own name, as
for Gloo and as for MPI, and a test runs under the first name that does not skip it; under every name
`init_process_group` makes BACKEND.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.forked_ranks import fork_ranks

import unisono.pytorch  # noqa: F401

RANKS = 4
TEST_S = 100.0  # the longest test, on a busy machine
MODULE = "torch.testing._internal.distributed.distributed_test"

KNOWN = ("gloo", "mpi")


def main() -> None:
    backend, results, wanted = sys.argv[1], Path(sys.argv[2]), set(sys.argv[3:])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = collected(backend, folder)
        chosen = [name for name in sorted(cases) if not wanted or name in wanted]
        meeting = mp.get_context("fork").Barrier(RANKS)
        run_of = {name: cases[name] for name in chosen}
        codes = fork_ranks(RANKS, lambda rank: be_rank(rank, backend, Path(folder), run_of, meeting))
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        ended = [json.loads((Path(folder) / f"ended.{rank}").read_text()) for rank in range(RANKS)]
    results.write_text(json.dumps({name: verdict([each[name] for each in ended]) for name in chosen}))


def collected(backend: str, folder: str) -> dict[str, type[Any]]:
    """The class from which each test is run, by the name of the test."""
    stub = types.ModuleType("expecttest")  # torch uses it only for a base class
    stub.TestCase, stub.ACCEPT = unittest.TestCase, False  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stub)
    os.environ.update(WORLD_SIZE=str(RANKS), INIT_METHOD=f"file://{folder}/unused", TEMP_DIR=folder)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    common = importlib.import_module("torch.testing._internal.common_distributed")
    for feature in ("plugin", "ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature].add(backend)
    cases: dict[str, type[Any]] = {}
    for name in (backend, *KNOWN):
        os.environ["BACKEND"] = name
        sys.modules.pop(MODULE, None)
        module = importlib.import_module(MODULE)
        case = type(name, (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
        case.module = module  # type: ignore[attr-defined]
        for test in unittest.TestLoader().getTestCaseNames(case):
            if test not in cases or is_skipped(cases[test], test):
                cases[test] = case
    # Read while tests run: under the name of MPI they do not require eight ranks.
    os.environ["BACKEND"] = "mpi"
    return cases


def is_skipped(case: type[Any], test: str) -> str | None:
    method = getattr(case, test)
    return (
        getattr(method, "__unittest_skip_why__", "") if getattr(method, "__unittest_skip__", False) else None
    )


def be_rank(rank: int, backend: str, folder: Path, cases: dict[str, type[Any]], meeting: Any) -> None:
    """The program of a forked rank."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # tests print
    init = dist.init_process_group

    def init_ours(backend_asked: Any = None, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.pop("backend", backend_asked)
        init(backend if asked in KNOWN else asked, *args, **kwargs)

    dist.init_process_group = init_ours
    ended = {}
    for test, case in cases.items():
        faulthandler.dump_traceback_later(TEST_S, exit=True)
        how = is_skipped(case, test)
        ended[test] = f"skipped: {how}" if how is not None else run(rank, folder, case, test, meeting)
        if rank == 0:
            print(f"{time.monotonic():.1f} {test}: {ended[test][:80]}", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    (folder / f"ended.{rank}").write_text(json.dumps(ended))


def run(rank: int, folder: Path, case: type[Any], test: str, meeting: Any) -> str:
    """Run one test in a new process group; return its outcome on this rank."""
    module = case.module
    sys.modules[MODULE] = module  # its classes are pickled by name
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # tests change it and do not restore it
    dist.set_debug_level_from_env()
    own = folder / test
    for name in ("barrier", "test_dir", "init_dir"):
        (own / name).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(own)
    module.Barrier.barrier_id = 0
    self = case(test)
    self.rank, self.file_name = rank, str(own / "init_dir" / "store")
    random.seed(1234)
    torch.manual_seed(1234)
    meeting.wait(TEST_S)
    timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(test, module.default_pg_timeout))
    dist.init_process_group(
        backend=module.BACKEND,
        init_method=f"file://{self.file_name}",
        world_size=RANKS,
        rank=rank,
        timeout=timeout,
    )
    try:
        getattr(self, test)()
        how = "passed"
    except unittest.SkipTest as why:
        how = f"skipped: {why}"
    except SystemExit as exited:  # with this exit torch skips a test that already runs
        how = next(
            (f"skipped: {s.message}" for s in module.TEST_SKIPS.values() if s.exit_code == exited.code),
            repr(exited),
        )
    except BaseException:
        how = f"failed: {traceback.format_exc()}"
        print(f"rank {rank}, {test}: {how}", file=sys.stderr, flush=True)
    meeting.wait(TEST_S)
    if dist.is_initialized():
        dist.destroy_process_group()
    return how


def verdict(ended: list[str]) -> str:
    """The outcome of a test over all ranks: failed if it failed on any rank."""
    others = [how for how in ended if how != "passed"]
    failed = [how for how in others if not how.startswith("skipped")]
    return (failed or others or ["passed"])[0]


if __name__ == "__main__":
    main()
