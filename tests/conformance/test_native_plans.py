"""Plans in the engine: every algorithm against the oracle and the reference executor, and every failure."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.test_acceptance_collectives import outcome
from tests.support.collective_cases import some
from tests.support.engines import MakeWorld, found, world
from tests.support.metronome import stopwatch
from tests.support.oracle import Notes, counts_for, dtype_of, operand, result
from tests.support.paths import ROOT
from tests.support.ranks import run_each, run_ranks

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.plans import CATALOG, algorithms

pytestmark = pytest.mark.more

__all__ = ["world"]

every_kind = pytest.mark.parametrize("kind", ["shm", "rings", "tcp", "hosts"])


# -- right results ----------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_algorithm_gives_the_right_answer(world: MakeWorld, kind: str, size: int) -> None:
    segment = 64

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for turn, collective in enumerate(CATALOG):
            for algorithm in algorithms(collective):
                for name in ("int32", "bfloat16") if size < 5 else ("float64",):
                    counts = some(counts_for(size, dtype_of(name).itemsize, segment), turn, 5)
                    for count in counts if collective != "barrier" else [0]:
                        root = (count + turn) % size
                        got, want = outcome(comm, collective, name, count, root, algorithm)
                        notes.expect(got, want, collective, algorithm, name, count, "root", root)
        return notes

    assert found(world(size, kind, segment_bytes=segment), program) == []


@pytest.mark.parametrize("kind", ["shm", "rings", "tcp"])
@pytest.mark.parametrize(
    "settings", [{"window_segments": 1, "eager_bytes": 0}, {"eager_bytes": 256}], ids=str
)
def test_results_do_not_depend_on_windows_and_eager_limits(
    world: MakeWorld, kind: str, settings: dict[str, int]
) -> None:
    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for collective in CATALOG:
            for algorithm in algorithms(collective):
                for count in (0, 1, 1021, 1024, 3 * 1024 + 1) if collective != "barrier" else [0]:
                    got, want = outcome(comm, collective, "float32", count, 1, algorithm)
                    notes.expect(got, want, collective, algorithm, count)
        return notes

    assert found(world(3, kind, segment_bytes=4096, **settings), program) == []


@every_kind
def test_long_arrays_keep_every_element(world: MakeWorld, kind: str) -> None:
    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for name, count in (("float32", 1_000_003), ("complex128", 65_537), ("uint8", 524_287)):
            for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"):
                for algorithm in algorithms(collective):
                    got, want = outcome(comm, collective, name, count // 3, 0, algorithm)
                    notes.expect(got, want, collective, algorithm, name)
        return notes

    assert found(world(3, kind), program) == []


def test_every_type_and_op_is_reduced(world: MakeWorld) -> None:
    pairs = [("bool", "lxor"), ("int8", "prod"), ("uint64", "max"), ("float16", "mean"), ("bfloat16", "sum")]
    pairs += [("complex64", "prod"), ("int16", "band"), ("float64", "min"), ("uint32", "land")]

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        for name, op in pairs:
            for count in (1, 61, 4099):
                x = operand(name, op, count, comm.rank, 3).copy()
                notes.expect(comm.all_reduce(x, op), result(name, op, count, 3), name, op, count)
        return notes

    assert found(world(3, segment_bytes=256), program) == []


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("size", [3, 4])
def test_the_bits_are_those_of_the_reference_executor(world: MakeWorld, kind: str, size: int) -> None:
    """Random floats, whose sums reveal another order or bracketing of the operands."""

    def program(comm: Communicator) -> list[bytes]:
        x = np.random.default_rng(comm.rank).standard_normal(3001).astype(np.float32)
        sums = [comm.all_reduce(x.copy(), algorithm=name) for name in algorithms("all_reduce")]
        whole = np.resize(x, (size, 1000))
        sums += [comm.reduce_scatter(whole, algorithm=name) for name in algorithms("reduce_scatter")]
        sums += [comm.scan(x, algorithm=name) for name in algorithms("scan")]
        return [each.tobytes() for each in sums]

    settings = {"segment_bytes": 512}
    native = run_each(program, list(world(size, kind, **settings))).values()
    assert native == run_ranks(program, size, config=Config(**settings)).values()


@every_kind
def test_groups_run_their_plans_in_the_engine_too(world: MakeWorld, kind: str) -> None:
    def program(comm: Communicator) -> Any:
        half = comm.split(comm.rank % 2, key=-comm.rank)
        assert half is not None
        assert half.backend.capabilities.run_plan
        rows = half.all_gather(np.array([comm.rank]))
        return rows.ravel().tolist(), half.all_reduce(10**comm.rank), half.rank

    ended = run_each(program, list(world(5, kind))).values()
    assert ended == [
        ([4, 2, 0], 10101, 2),
        ([3, 1], 1010, 1),
        ([4, 2, 0], 10101, 1),
        ([3, 1], 1010, 0),
        ([4, 2, 0], 10101, 0),
    ]


# -- many at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_two_hundred_started_runs_end_in_any_order(world: MakeWorld, kind: str) -> None:
    def program(comm: Communicator) -> bool:
        xs = [np.full(1 + 37 * i, comm.rank + i, np.int64) for i in range(200)]
        works = [comm.start.all_reduce(x) for x in xs]
        for i in reversed(range(200)):
            assert (works[i].wait(timeout=30) == 3 + 3 * i).all(), i
        return True

    assert run_each(program, list(world(3, kind, segment_bytes=4096))).values() == [True] * 3


def test_a_started_run_goes_on_while_no_thread_waits(world: MakeWorld) -> None:
    def program(comm: Communicator) -> bool:
        work = comm.start.all_reduce(np.ones(3_000_000, np.float32))
        deadline = time.monotonic() + 20
        work._adopt(False)  # set by Python at the end of the run, without progress of the engine
        while not work._task.is_done() and time.monotonic() < deadline:
            time.sleep(0.001)  # not a wait for the run: no thread makes progress here
        return bool(work._task.is_done()) and float(work.wait()[-1]) == 2.0

    assert run_each(program, list(world(2))).values() == [True, True]


def test_memory_stays_as_it_is(world: MakeWorld) -> None:
    """The objects of runs and messages, and scratch memory, are reused."""
    comms = world(2)

    def program(comm: Communicator) -> int:
        x, y = np.ones(40_000, np.float32), np.ones(3, np.float32)
        for turn in range(600):
            comm.all_reduce(x, "max")
            comm.all_reduce(y, "max", algorithm="doubling")
            if turn == 200:
                before = resident()
        return resident() - before

    assert max(run_each(program, list(comms)).values()) < 2 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- mismatches -------------------------------------------------------------------------------------------

MINE = uni.op(np.maximum, name="mine")
IN_ORDER = uni.op(np.maximum, commutative=False, name="mine")
CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(5000, np.float32), algorithm="ring"),
    "another dtype": lambda comm: comm.all_reduce(np.ones(5000, np.int32), algorithm="ring"),
    "another count": lambda comm: comm.all_reduce(np.ones(5001, np.float32), algorithm="ring"),
    "another op": lambda comm: comm.all_reduce(np.ones(5000, np.float32), "max", algorithm="ring"),
    "another algorithm": lambda comm: comm.all_reduce(np.ones(5000, np.float32), algorithm="tree"),
    "another collective": lambda comm: comm.broadcast(np.ones(5000, np.float32)),
    "another root": lambda comm: comm.broadcast(np.ones(5000, np.float32), root=1),
    "a barrier": lambda comm: comm.barrier(),
    "my op": lambda comm: comm.all_reduce(np.ones(5000, np.float32), MINE, algorithm="ordered"),
    "my op in order": lambda comm: comm.all_reduce(np.ones(5000, np.float32), IN_ORDER, algorithm="ordered"),
}


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        *(("all_reduce", other) for other in CALLS if other != "all_reduce"),
        ("another collective", "another root"),
        ("my op", "my op in order"),
    ],
)
def test_a_mismatch_is_shown_to_every_rank(
    world: MakeWorld, kind: str, odd: int, ours: str, theirs: str
) -> None:
    def program(comm: Communicator) -> str:
        with stopwatch() as seconds:
            with pytest.raises(uni.CollectiveMismatch) as caught:
                call_and_meet(comm, CALLS[theirs if comm.rank == odd else ours])
            assert seconds() < 5, "the mismatch was reported too late"
        with pytest.raises(uni.CollectiveMismatch):
            comm.barrier()  # the communicator is poisoned
        return caught.value.report

    for report in run_each(program, list(world(3, kind, segment_bytes=4096))).values():
        assert len(report.splitlines()) == 2, report
        assert f"rank {odd}: " in report
        assert "test_native_plans.py" in report


def call_and_meet(comm: Communicator, call: Callable[[Communicator], Any]) -> None:
    """A rank whose peers in the plan all make the same call may succeed; it gets the error in the barrier."""
    call(comm)
    comm.barrier()


# -- deadlines, cancellation and death --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_an_expired_collective_names_the_missing_ranks(world: MakeWorld, kind: str) -> None:
    def program(comm: Communicator) -> Any:
        if comm.rank == 2:
            with pytest.raises(uni.DeadlineExceeded) as caught:
                comm.recv(np.zeros(1), src=2, timeout=2.0)  # this rank never makes the call
            return None
        with pytest.raises(uni.DeadlineExceeded) as caught:
            comm.all_reduce(np.ones(200_000), timeout=1.0)
        return caught.value.waiting_on

    # Stall queries are sent early, so that on a busy machine the replies come in time.
    results = run_each(program, list(world(3, kind, stall_query_s=0.02)))
    assert results.values()[:2] == [(2,), (2,)]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_cancelled_run_ends_everywhere(world: MakeWorld, kind: str) -> None:
    def program(comm: Communicator) -> bool:
        if comm.rank == 1:
            comm.recv(np.zeros(1), src=0)
            with pytest.raises(uni.PeerAborted) as caught:
                comm.all_gather(np.ones(100_000))
            return caught.value.rank == 0
        work = comm.start.all_gather(np.ones(100_000))
        assert work.cancel()
        comm.send(np.zeros(1), 1)
        return work.done()

    assert run_each(program, list(world(2, kind))).values() == [True, True]


def reduce_until_the_end(comm: Communicator, folder: str, count: int) -> None:
    """Reduce without end; on failure, write the error and the time to a file."""
    x = np.ones(count, np.float32)
    note = Path(folder) / str(comm.rank)
    try:
        for turn in itertools.count():
            comm.all_reduce(x, "max")
            if turn == 20:
                (Path(folder) / f"pid{comm.rank}").write_text(str(os.getpid()))
    except uni.PeerLost as error:
        note.with_suffix(".new").write_text(f"{time.monotonic()} {error.ranks}")
        note.with_suffix(".new").rename(note)


@pytest.mark.parametrize("env", [{}, {"UNISONO_SHM": "0"}], ids=["shm", "tcp"])
@pytest.mark.parametrize("count", [2, 3_000_000])
def test_a_rank_killed_in_the_middle_of_a_run_is_named_soon(
    tmp_path: Path, env: dict[str, str], count: int
) -> None:
    text = (
        "import unisono as uni; from tests.conformance.test_native_plans import reduce_until_the_end\n"
        f"uni.spawn(reduce_until_the_end, 3, {str(tmp_path)!r}, {count}, env={env!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        await_files([tmp_path / f"pid{rank}" for rank in range(3)])
        killed_at = time.monotonic()
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
        await_files([tmp_path / "0", tmp_path / "2"])
        for rank in (0, 2):
            at, ranks = (tmp_path / str(rank)).read_text().split(" ", 1)
            assert ranks == "(1,)"
            assert float(at) - killed_at < 1.0
    finally:
        parent.wait(30)


def test_an_unclosed_world_does_not_disturb_the_end_of_the_process(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    text = (
        "from unisono.backends.native.backend import NativeBackend\n"
        f"ranks = [NativeBackend(r, 2, {str(tmp_path)!r}, b'secret') for r in range(2)]\n"
        "[rank.connect([each.card() for each in ranks]) for rank in ranks]\n"
        "ranks[0].start_recv(1, 0, 0, None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")


def await_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"none of {paths}"
        time.sleep(0.005)
