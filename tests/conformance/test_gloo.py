"""The gloo backend in processes: the cases and properties of every backend, and tests for Gloo alone."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.conformance.test_properties import PROPERTIES, reduced
from tests.support.bounds import REPORTED_WITHIN_S
from tests.support.lost_ranks import lose_rank
from tests.support.processes import Failed, forked, run_processes
from tests.support.rank_pool import ended_in_pool

import unisono as uni
from unisono.backends.foreign import ForeignRequest
from unisono.backends.gloo.backend import GlooBackend, UnconnectedGloo
from unisono.backends.gloo.collectives import REDUCTIONS
from unisono.backends.registry import BindSpec
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.errors import CollectiveMismatch, DeadlineExceeded, UnisonoError, UsageError
from unisono.testing import CASES

pytestmark = pytest.mark.more


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_case_holds_on_gloo(name: str) -> None:
    assert ended_in_pool("gloo", "cases", 4)[name] == "ok"


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_holds_on_gloo(name: str) -> None:
    assert ended_in_pool("gloo", "properties", 6)[name] == "ok"


def test_gloo_runs_what_it_can_and_plans_do_the_rest() -> None:
    def program(comm: Communicator) -> list[tuple[str, bool]]:
        backend, seen = comm.backend, []
        real = backend.run_collective

        def spy(problem: Any, stage: Any) -> Any:
            request = real(problem, stage)
            seen.append((problem.collective, request is not None))
            return request

        backend.run_collective = spy  # type: ignore[method-assign]
        x = np.arange(600, dtype=np.float32) + comm.rank
        comm.all_reduce(x.copy())
        comm.all_reduce(x.copy(), "max")  # Gloo would lose a NaN
        comm.all_reduce(x[:6].copy(), "max")  # so short that it travels with the agreement
        comm.all_reduce(x.astype(np.float16))
        comm.all_reduce(x.astype(np.int64), "max")
        comm.all_reduce(x.copy(), algorithm="ring")
        comm.scan(x)
        comm.all_gather_v(x[: comm.rank])
        comm.all_gather_v(np.arange(1000 * comm.rank))
        comm.barrier()
        return seen

    for seen in run_processes(program, 2, kind="gloo"):
        assert seen == [
            ("all_reduce", True),
            ("all_reduce", False),
            ("all_reduce", True),
            ("all_reduce", False),
            ("all_reduce", True),
            ("scan", False),
            ("all_gather", True),  # short rows, which include the parts
            ("all_gather", True),  # the lengths of long parts
            ("all_gather", False),  # the long parts
            ("barrier", True),
        ]


def test_every_reduction_that_gloo_does_is_right() -> None:
    """Integers that wrap around, odd counts and every root, in the world and in a smaller group."""

    def program(comm: Communicator) -> int:
        done = 0
        pair = comm.sub([2, 0]) if comm.rank != 1 else None
        for op, names in REDUCTIONS.items():
            for name in names:
                parts = [np.random.default_rng(rank).integers(0, 100, 777).astype(name) for rank in range(3)]
                if pair is not None:
                    both = pair.all_reduce(parts[comm.rank].copy(), op)
                    assert both.tobytes() == reduced([parts[0], parts[2]], op).tobytes(), (op, name)
                wanted = reduced(parts, op)
                got = comm.all_reduce(parts[comm.rank].copy(), op)
                assert got.tobytes() == wanted.tobytes(), (op, name)
                root = done % 3
                mine = parts[comm.rank].copy()
                if comm.reduce(mine, root, op) is None:
                    assert mine.tobytes() == parts[comm.rank].tobytes()
                else:
                    assert mine.tobytes() == wanted.tobytes(), (op, name, root)
                done += 1
        return done

    assert run_processes(program, 3, kind="gloo") == [sum(map(len, REDUCTIONS.values()))] * 3


def test_different_calls_of_the_world_are_a_mismatch() -> None:
    """Gloo itself would add unrelated data, or hang: it runs one of the calls, and a plan the other."""

    def program(comm: Communicator, what: str) -> str:
        odd = {"length": lambda: comm.all_reduce(np.ones(7)), "verb": lambda: comm.scan(np.ones(8))}[what]
        with pytest.raises(CollectiveMismatch) as caught:
            odd() if comm.rank == 1 else comm.all_reduce(np.ones(8))
        with pytest.raises(CollectiveMismatch):
            comm.barrier()
        return caught.value.report

    for what in ("length", "verb"):
        for report in run_processes(program, 3, what, kind="gloo"):
            assert not isinstance(report, Failed), report
            assert len(report.splitlines()) == 2


def test_a_collective_that_no_other_rank_joins_ends_at_its_deadline() -> None:
    def live(backend: GlooBackend, pipe: Connection) -> float:
        comm = Communicator.world(backend)
        started = time.monotonic()
        if comm.rank == 0:
            x = np.ones(5)
            with pytest.raises(DeadlineExceeded):
                comm.all_reduce(x, timeout=0.3)
            x[:] = 7  # the memory is the caller's again, whatever Gloo still does
        pipe.recv()
        comm.close()
        return time.monotonic() - started

    with forked(live, 2, kind="gloo") as ranks:
        time.sleep(0.5)
        for pipe in ranks.pipes:
            pipe.send("go on")
        results = [ranks.result(rank) for rank in range(2)]
    assert not [r for r in results if isinstance(r, Failed)], results


def test_a_killed_rank_is_known_to_all_within_the_bound() -> None:
    for lost in lose_rank("gloo", signal.SIGKILL):
        assert lost.ranks == (1,)
        assert "closed its connection" in lost.text
        assert lost.after_s < REPORTED_WITHIN_S


@pytest.mark.parametrize("is_given_up_first", [True, False])
def test_a_cancelled_collective_ends_as_soon_as_the_library_fails(is_given_up_first: bool) -> None:
    """The group that cancelled it knows the reason, so it does not wait for a rank to be declared dead."""
    request, failure = ForeignRequest((1,)), UnisonoError("the library failed")
    assert request.commit()
    steps = [lambda: request.abort_later(RealRuntime(), failure), lambda: request.cancel()]
    for step in reversed(steps) if is_given_up_first else steps:
        assert not request.done
        step()
    assert request.error is failure


def test_a_users_own_process_group_is_not_disturbed(tmp_path: Any) -> None:
    def program(comm: Communicator) -> list[float]:
        assert not dist.is_initialized()
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/own", rank=1 - comm.rank, world_size=2
        )
        theirs = torch.full((3,), float(comm.rank + 1))
        dist.all_reduce(theirs)
        ours = comm.all_reduce(torch.full((3,), float(comm.rank + 10)))
        dist.destroy_process_group()
        comm.barrier()
        return [*theirs.tolist(), *ours.tolist()]

    assert run_processes(program, 2, kind="gloo") == [[3.0] * 3 + [21.0] * 3] * 2


def test_links_without_encryption_are_refused_where_it_is_required() -> None:
    with pytest.raises(UsageError, match=r"no encryption.*backend='native'"):
        UnconnectedGloo(BindSpec(0, 2, "127.0.0.1", is_encrypted=True, config=Config()))


def test_an_unconnected_rank_that_is_closed_leaves_nothing() -> None:
    bind = UnconnectedGloo(BindSpec(0, 2, "127.0.0.1", is_encrypted=False, config=Config()))
    assert bind.card()
    bind.close()


def spawned(comm: Communicator) -> tuple[str, float, int]:
    total = comm.all_reduce(float(comm.rank + 1))
    return comm.backend.capabilities.name, total, os.getpid()


def test_spawn_and_the_seed_bring_gloo_ranks_together() -> None:
    results = uni.spawn(spawned, 2, backend="gloo")
    assert [(name, total) for name, total, _ in results] == [("gloo", 3.0)] * 2
