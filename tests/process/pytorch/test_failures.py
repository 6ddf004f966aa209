"""Failures of torch programs on our backend: killed ranks, different calls, deadlines, endings."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.metronome import Metronome
from tests.support.processes import PATIENCE_S, forked
from tests.support.torch_ranks import join_torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from unisono.messaging.backend import Backend

NAMED_WITHIN_S = 1.0


def run_torch(program: Callable[[int], Any], size: int, folder: Path, backend: str = "unisono") -> list[Any]:
    """Run a program on new ranks, inside a default group; return the result of each."""

    def live(own: Backend, pipe: Connection) -> Any:
        join_torch(own.rank, size, str(folder), backend)
        try:
            return program(own.rank)
        finally:
            dist.destroy_process_group()

    with forked(live, size) as ranks:
        return [ranks.result(rank) for rank in range(size)]


def error_of(run: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        run()
    return str(caught.value)


def train(rank: int, pipe: Connection, *, is_hooked: bool = False) -> None:
    """Train with DDP without end; report after six steps."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)),
        bucket_cap_mb=0.01,
    )
    if is_hooked:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for step in range(1_000_000):
        model(torch.randn(4, 64)).sum().backward()
        if step == 5:
            pipe.send("under way")


def reduce_again_and_again(rank: int, pipe: Connection) -> None:
    x = torch.ones(30_011)
    for step in range(1_000_000):
        dist.all_reduce(x, dist.ReduceOp.MAX, async_op=bool(step % 2))
        if step == 5:
            pipe.send("under way")
        if step % 8 == 0:
            dist.barrier()


def train_sharded(rank: int, pipe: Connection) -> None:
    """Train with FSDP2."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    mesh = init_device_mesh("cpu", (3,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    for step in range(1_000_000):
        model(torch.randn(4, 64)).sum().backward()
        if step == 5:
            pipe.send("under way")


def train_in_stages(rank: int, pipe: Connection) -> None:
    """Train as a pipeline, in which rank 0 and the killed rank 2 exchange no messages."""
    stage = PipelineStage(torch.nn.Linear(8, 8), rank, 3, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    for step in range(1_000_000):
        given = (torch.randn(8, 8),) if rank == 0 else ()
        schedule.step(*given, **({"target": torch.zeros(8, 8)} if rank == 2 else {}))
        if step == 5:
            pipe.send("under way")


def wait_for_futures(rank: int, pipe: Connection) -> None:
    x = torch.ones(30_011)
    for step in range(1_000_000):
        future = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).get_future()
        future.then(lambda ended: ended.value()[0].sum()).wait()
        if step == 5:
            pipe.send("under way")


@pytest.mark.parametrize(
    "program",
    [
        train,
        pytest.param(train_sharded, marks=pytest.mark.more),
        pytest.param(train_in_stages, marks=pytest.mark.more),
        wait_for_futures,
        pytest.param(partial(train, is_hooked=True), marks=pytest.mark.more),
        reduce_again_and_again,
    ],
)
def test_survivors_of_a_killed_rank_name_it(tmp_path: Path, program: Callable[[int, Connection], None]):
    def live(own: Backend, pipe: Connection) -> tuple[float, str]:
        join_torch(own.rank, 3, str(tmp_path))
        metronome = Metronome()
        try:
            program(own.rank, pipe)
        except RuntimeError as error:
            raised_at, text = time.monotonic(), str(error)
        else:
            raise AssertionError("the training ended without an error")
        # Time in which the machine did not run this rank does not count.
        seconds = float(metronome.fair_s(float(killed_at.read_text()), raised_at))
        metronome.is_over = True
        metronome.join()
        return seconds, text

    killed_at = tmp_path / "killed"

    with forked(live, 3) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "under way"
        killed_at.write_text(str(time.monotonic()))
        ranks.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            seconds, text = ranks.result(rank)
            # A rank that ends with its error is lost to the others, too.
            assert re.search(r"rank 2 is gone|ranks \d, 2 are gone", text), text
            assert seconds < NAMED_WITHIN_S


def test_different_calls_are_named_with_the_lines_that_made_them(tmp_path: Path):
    def program(rank: int) -> list[str]:
        texts = []
        group = dist.new_group([0, 1])

        def different_verbs() -> None:
            if rank == 0:
                dist.all_reduce(torch.ones(5), group=group)
            else:
                dist.all_gather([torch.zeros(5), torch.zeros(5)], torch.ones(5), group=group)

        texts.append(error_of(different_verbs))
        other = dist.new_group([0, 1])
        texts.append(error_of(lambda: dist.all_reduce(torch.ones(1000 + rank), group=other)))
        third = dist.new_group([0, 1])
        kind = torch.float32 if rank == 0 else torch.int32
        work = dist.all_reduce(torch.ones(7, dtype=kind), group=third, async_op=True)
        texts.append(error_of(work.wait))
        fourth = dist.new_group([0, 1])
        x, out = torch.ones(1 + rank), torch.ones(2 + 2 * rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has a newer name
            texts.append(error_of(lambda: dist.all_gather_into_tensor(out, x, group=fourth)))
        return texts

    for rank, texts in enumerate(run_torch(program, 2, tmp_path)):
        verbs, lengths, types, older = texts
        assert older.startswith(f"[rank {rank}] all_gather at test_failures.py:"), older
        assert f"[rank {rank}] " in verbs
        assert "all_reduce" in verbs
        assert "all_gather" in verbs
        assert len(set(re.findall(r"test_failures.py:\d+", verbs))) == 2, verbs
        assert "1000" in lengths
        assert "1001" in lengths
        assert "float32" in types
        assert "int32" in types
        for text in texts:
            assert not re.search(
                r"process_group.py|distributed_c10d.py|c10d_logger.py|typing_extensions.py", text
            )


def step_of_ddp(group: Any) -> Callable[[], object]:
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)),
        process_group=group,
        bucket_cap_mb=0.01,
    )
    return lambda: model(torch.ones(4, 64)).sum().backward()


def step_of_fsdp1(group: Any) -> Callable[[], object]:
    model = FullyShardedDataParallel(
        torch.nn.Linear(64, 8), process_group=group, device_id=torch.device("cpu"), use_orig_params=True
    )
    return lambda: model(torch.ones(4, 64)).sum().backward()


def step_of_fsdp2(group: Any) -> Callable[[], object]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return lambda: model(torch.ones(4, 64)).sum().backward()


STEPS = (step_of_ddp, step_of_fsdp1, step_of_fsdp2)


def test_a_step_of_training_against_another_call_is_named_with_both_lines(tmp_path: Path):
    """One rank takes its third step while the other computes a metric."""

    def program(rank: int) -> dict[str, str]:
        warnings.simplefilter("ignore", FutureWarning)  # FSDP 1 is deprecated
        texts = {}
        for make in STEPS:
            group: Any = dist.new_group([0, 1])
            step = make(group)
            step()
            step()
            other = partial(dist.all_reduce, torch.ones(3), group=group)
            texts[make.__name__] = text_of(step if rank == 0 else other)
        return texts

    for rank, texts in enumerate(run_torch(program, 2, tmp_path)):
        for name, text in texts.items():
            assert "all_reduce" in text, (name, text)
            # The error points at this rank's own line, and names the lines of both ranks: the step and the
            # metric.
            lines = re.findall(r"test_failures.py:\d+", text)
            assert len(lines) == 3, (rank, name, text)
            assert len(set(lines)) == 2, (rank, name, text)


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


# The different calls of ranks 0 and 1, selected by number; and what every error names, in either order.
MISMATCHES: dict[str, tuple[Callable[[Any, int], object], str]] = {
    "roots of broadcast": (lambda g, k: dist.broadcast(ones(5), k, group=g), "root"),
    "roots of reduce": (lambda g, k: dist.reduce(ones(5), k, group=g), "root"),
    "roots of gather": (
        lambda g, k: dist.gather(ones(5), [ones(5)] * 2 if dist.get_rank() == k else None, k, group=g),
        "root",
    ),
    "roots of scatter": (
        lambda g, k: dist.scatter(ones(5), [ones(5)] * 2 if dist.get_rank() == k else None, k, group=g),
        "root",
    ),
    "lengths of all_gather": (
        lambda g, k: dist.all_gather_single(ones(10 + 2 * k), ones(5 + k), group=g),
        "count",
    ),
    "lengths of reduce_scatter": (
        lambda g, k: dist.reduce_scatter_single(ones(5 + k), ones(10 + 2 * k), group=g),
        "shape",
    ),
    "parts of reduce_scatter": (
        lambda g, k: dist.reduce_scatter(
            ones(3 + (dist.get_rank() ^ k)), [ones(3 + k), ones(4 - k)], group=g
        ),
        "shape",
    ),
    "operations": (
        lambda g, k: dist.all_reduce(ones(5), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[k], group=g),
        "op",
    ),
    "functional collectives": (
        lambda g, k: (
            (functional.all_reduce(ones(4), "sum", g) if k else functional.all_gather_tensor(ones(4), 0, g))
            .sum()
            .item()
        ),
        "verb",
    ),
}


def test_whatever_ranks_do_differently_is_named_with_both_lines(tmp_path: Path):
    def program(rank: int) -> dict[str, str]:
        warnings.simplefilter("ignore", FutureWarning)  # torch renames functional collectives
        texts = {}
        for name, (run, _) in MISMATCHES.items():
            group: Any = dist.new_group([0, 1])
            texts[name] = text_of(partial(run, group, rank))
        return texts

    for texts in run_torch(program, 2, tmp_path):
        for name, (_, aspect) in MISMATCHES.items():
            assert f"{aspect}: " in texts[name], (name, texts[name])
            # The error points at this rank's own line, and names the lines of both ranks.
            assert len(re.findall(r"test_failures.py:\d+", texts[name])) == 3, (name, texts[name])


def text_of(run: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        run()
    return str(caught.value)


def test_models_of_ddp_that_differ_are_named(tmp_path: Path):
    """torch compares the parameters of rank 0 with those of every rank, through the group."""

    def program(rank: int) -> str:
        group: Any = dist.new_group([0, 1])
        model = torch.nn.Linear(4 + rank, 3)
        return text_of(lambda: torch.nn.parallel.DistributedDataParallel(model, process_group=group))

    first, second = run_torch(program, 2, tmp_path)
    assert "rank 1" in first, first
    assert "params[0] in this process with sizes [3, 5]" in second, second


@pytest.mark.parametrize("columns", [2, 30_001])
def test_splits_that_do_not_fit_are_named(tmp_path: Path, columns: int):
    """Rank 0 expects two rows of rank 1, which sends one: in the message with the lengths, or after it."""

    def program(rank: int) -> str:
        taken = [1, 2] if rank == 0 else [1, 1]
        run = partial(
            dist.all_to_all_single, torch.zeros(sum(taken), columns), torch.ones(2, columns), taken, [1, 1]
        )
        if rank == 0:
            return text_of(run)
        run()
        return ""

    first, _ = run_torch(program, 2, tmp_path)
    assert "all_to_all at test_failures.py:" in first
    assert f"out[1] has {2 * columns} rows; rank 1 sent {columns}" in first


def test_sums_that_are_finished_in_different_ways_are_a_mismatch(tmp_path: Path):
    """For the engine a mean of integers, a scaled sum and a sum are the same sum; their results differ."""

    def program(rank: int) -> list[str]:
        ways = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.5))
        texts = []
        for mine, other in ((0, 1), (0, 2), (1, 2)):
            op = ways[mine if rank == 0 else other]
            for run in (
                lambda group, op: dist.all_reduce(torch.ones(5, dtype=torch.int64), op, group=group),
                lambda group, op: dist.reduce(torch.ones(5, dtype=torch.int64), 0, op, group=group),
                lambda group, op: dist.reduce_scatter_single(
                    torch.ones(5, dtype=torch.int64), torch.ones(10, dtype=torch.int64), op, group=group
                ),
                lambda group, op: dist.reduce_scatter(
                    torch.ones(rank + 1, dtype=torch.int64),
                    [torch.ones(1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)],
                    op,
                    group=group,
                ),
            ):
                group: Any = dist.new_group([0, 1])
                texts.append(error_of(partial(run, group, op)))
        group = dist.new_group([0, 1])
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,), check_invariants=True)
        texts.append(error_of(lambda: dist.all_reduce(sparse, ways[rank], group=group)))
        group = dist.new_group([0, 1])
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[0]]), torch.ones(1), (4 + rank,), check_invariants=True
        )
        texts.append(error_of(lambda: dist.all_reduce(sparse, group=group)))
        return texts

    for texts in run_torch(program, 2, tmp_path):
        for text in texts[:-2]:
            assert "op: " in text, text
            assert "test_failures.py:" in text
        assert "SUM against AVG" in texts[-2]
        assert "[4]" in texts[-1]
        assert "[5]" in texts[-1]


def test_errors_name_world_ranks(tmp_path: Path):
    def program(rank: int) -> str:
        group = dist.new_group([1, 2])
        text = error_of(lambda: dist.all_reduce(torch.ones(rank), group=group)) if rank else ""
        dist.barrier()
        return text

    for rank, text in enumerate(run_torch(program, 3, tmp_path)):
        assert text == "" or text.startswith(f"[rank {rank}] "), text


def test_calls_of_a_group_that_is_shut_down_raise_what_torch_programs_catch(tmp_path: Path):
    def program(rank: int) -> None:
        group: Any = dist.new_group([0, 1])
        future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
        future.wait()
        dist.barrier()
        group.shutdown()
        for run in (
            lambda: group.allreduce([torch.ones(1)]),
            lambda: group.send([torch.ones(1)], 1 - rank, 0),
            group.monitored_barrier,
        ):
            with pytest.raises(RuntimeError):
                run()

    run_torch(program, 2, tmp_path)


def test_a_group_has_a_deadline_for_every_call(tmp_path: Path):
    def program(rank: int) -> list[str]:
        group = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))
        messages = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))
        texts = []
        if rank == 0:
            texts.append(error_of(lambda: dist.all_reduce(torch.ones(3), group=group)))
            texts.append(error_of(lambda: dist.recv(torch.ones(3), src=1, group=messages)))
            later: Any = dist.new_group([0, 1])
            later.set_timeout(timedelta(milliseconds=200))
            texts.append(error_of(lambda: dist.barrier(group=later)))
        else:
            dist.new_group([0, 1])
        dist.barrier()
        return texts

    texts, _ = run_torch(program, 2, tmp_path)
    for call, text in zip(("all_reduce", "recv", "barrier"), texts, strict=True):
        assert f"{call} at test_failures.py:" in text
        assert "Timed out" in text
        assert "0.3 s" in text or "0.2 s" in text


def test_abort_ends_what_is_under_way_everywhere_and_shutdown_may_be_repeated(tmp_path: Path):
    def program(rank: int) -> str:
        group: Any = dist.new_group([0, 1])
        work = dist.irecv(torch.zeros(2), src=1 - rank, group=group)
        dist.barrier()
        if rank == 1:
            group.abort()
            group.abort()
        text = error_of(work.wait)
        group.shutdown()
        group.shutdown()
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2
        return text

    first, second = run_torch(program, 2, tmp_path)
    assert "rank 1 aborted" in first
    assert "abort" in second or "closed" in second


def test_a_group_beside_another_default_backend_names_global_ranks(tmp_path: Path):
    def program(rank: int) -> str:
        group = dist.new_group([1, 2], backend="unisono")
        everyone = dist.new_group([0, 1, 2], backend="unisono")
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, group=everyone)
        assert x.tolist() == [3.0] * 3
        text = ""
        if rank:
            y = torch.full((3,), float(rank))
            dist.all_reduce(y, group=group)
            assert y.tolist() == [3.0] * 3
            text = error_of(lambda: dist.all_reduce(torch.ones(rank), group=group))
        dist.barrier()
        return text

    for text in run_torch(program, 3, tmp_path, backend="gloo")[1:]:
        assert "rank i of unisono is global rank [1, 2][i]" in text


def test_a_world_may_be_made_again_and_again(tmp_path: Path):
    def live(own: Backend, pipe: Connection) -> list[float]:
        sums = []
        for number in range(3):
            join_torch(own.rank, 2, str(tmp_path), name=f"store {number}")
            x = torch.full((2,), float(number + own.rank))
            dist.all_reduce(x)
            sums.append(x[0].item())
            dist.destroy_process_group()
        return sums

    with forked(live, 2) as ranks:
        assert [ranks.result(rank) for rank in range(2)] == [[1.0, 3.0, 5.0]] * 2


PROGRAM = """
import sys
import torch, torch.distributed as dist
import unisono.pytorch
rank, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("unisono", init_method=f"file://{folder}/store", rank=rank, world_size=2)
group = dist.new_group([0, 1])
x = torch.ones(3)
work = dist.all_reduce(x, async_op=True)
seen = work.get_future().then(lambda f: f.value()[0].sum())
dist.broadcast(torch.ones(2), 0, group=group)
if how == "pending":
    left = dist.irecv(torch.zeros(1), src=1 - rank)
    left.get_future().then(lambda f: None)
elif how == "dropped":
    dist.irecv(torch.zeros(1), src=1 - rank)
elif how == "destroyed":
    dist.destroy_process_group()
print(float(seen.wait()))
"""


@pytest.mark.parametrize(
    "how",
    ["pending", *(pytest.param(how, marks=pytest.mark.more) for how in ("plain", "dropped", "destroyed"))],
)
def test_a_process_may_end_without_destroying_its_groups(tmp_path: Path, how: str):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", "-c", PROGRAM, str(rank), str(tmp_path), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out, err) == (0, "6.0\n", ""), err
    assert time.monotonic() - began < PATIENCE_S
