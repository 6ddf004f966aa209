"""How torch programs start on "unisono": found by torch, under every launcher, repeatedly in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.hosts import Hosts, hosts
from tests.support.paths import SUPPORT
from tests.support.ports import free_port

__all__ = ["hosts"]

PROGRAM = str(SUPPORT / "torch_program.py")
PATIENCE_S = 120
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
UNISONO_RUN = [sys.executable, "-m", "unisono", "run"]


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, without the variables of launchers."""
    foreign = ("TORCH", "UNISONO_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    ours = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    return {**ours, "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], **more: str) -> tuple[str, str]:
    """Run a command that must succeed; return its output."""
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(**more)
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def python(program: str, **more: str) -> str:
    out, err = run([sys.executable, "-W", "error::ResourceWarning", "-c", program], **more)
    assert err == ""
    return out


def right(out: str, *ways: str, size: int = 2) -> bool:
    """Whether every rank has reported that every way worked: three times, or once beside Gloo."""
    said = sorted(line.partition("] ")[2] or line for line in out.splitlines())
    times = {way: 1 if way == "beside" else 3 for way in ways}
    return said == sorted(
        f"{way} {time} right {rank} of {size}"
        for way in ways
        for time in range(times[way])
        for rank in range(size)
    )


# -- torch finds it -----------------------------------------------------------------------------------------

FOUND = """
import sys, torch, torch.distributed as dist
print(*sorted(name for name in sys.modules if name.split(".")[0] == "unisono"))
import unisono.pytorch
unisono.pytorch.register()
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
x = torch.arange(3)
dist.all_reduce(x)
print(dist.get_backend(), dist.Backend.backend_list.count("unisono"), x.tolist())
"""

# A package without its compiled module, as an installation for another Python leaves it.
BROKEN = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "unisono._native":
            raise ImportError("no compiled part")
sys.meta_path.insert(0, Broken())
import torch, torch.distributed as dist
try:
    dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
"""


def test_torch_finds_the_backend_and_imports_nothing_for_it() -> None:
    names, used = python(FOUND).splitlines()
    assert names.split() == ["unisono", "unisono.pytorch", "unisono.pytorch.registration", "unisono.version"]
    assert used == "unisono 1 [0, 1, 2]"


EARLY = """
import unisono.pytorch
from torch.distributed import monitored_barrier, init_process_group, HashStore
init_process_group("unisono", store=HashStore(), rank=0, world_size=1)
monitored_barrier()
print("passed")
"""


def test_a_monitored_barrier_that_was_imported_before_any_group_is_ours() -> None:
    assert python(EARLY) == "passed\n"


@pytest.mark.more
def test_without_looking_torch_learns_it_by_an_import() -> None:
    names, used = python(FOUND, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert names == ""
    assert used == "unisono 1 [0, 1, 2]"


def test_a_broken_install_does_not_break_torch() -> None:
    assert python(BROKEN) == "no compiled part\n"


# -- the launchers ------------------------------------------------------------------------------------------


def test_a_program_of_torch_starts_under_unisono_run_and_may_end_without_a_word(tmp_path: Path) -> None:
    out, err = run([*UNISONO_RUN, "-n", "2", PROGRAM, "env", f"file={tmp_path / 'store'}", "stay"])
    assert right(out, "env", "file")
    assert err == ""


@pytest.mark.more
def test_under_torchrun_the_keys_of_its_store_come_back() -> None:
    out, err = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", PROGRAM, "env", "stay"])
    assert right(out, "env")
    assert err == ""


BESIDE_MPI = """
import torch, torch.distributed as dist, unisono as uni
with uni.init() as world:
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    x = torch.arange(5) + dist.get_rank()
    dist.all_reduce(x)
    print(type(world.backend).__name__, x.tolist())
    dist.destroy_process_group()
"""


@pytest.mark.more
def test_a_program_of_torch_finds_its_ranks_under_mpiexec_too(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(BESIDE_MPI)
    out, _ = run([*UNISONO_RUN, "-n", "2", "--backend", "mpi", str(tmp_path / "beside.py")])
    assert sorted(out.splitlines()) == [f"[{rank}] MpiBackend [1, 3, 5, 7, 9]" for rank in range(2)]


@pytest.mark.more
def test_groups_of_ours_stand_beside_another_backend() -> None:
    out, _ = run([*UNISONO_RUN, "-n", "3", PROGRAM, "beside"])
    assert right(out, "beside", size=3)


@pytest.mark.more
def test_processes_that_torch_spawns_meet_by_master_port_and_tcp() -> None:
    program = (
        "import sys\n"
        "import torch.multiprocessing as mp\n"
        "from tests.support.torch_program import main\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, (sys.argv[1:], 2), 2)\n"
    )
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    words = ["env", f"tcp=127.0.0.1:{free_port()}", "stay"]
    out, err = run([sys.executable, "-c", program, *words], **place)
    assert right(out, "env", "tcp")
    assert err == ""


@pytest.mark.more
def test_under_torchrun_on_several_hosts() -> None:
    """Two agents of torchrun with one rank each, so that the ranks take themselves to be on two hosts."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *place, "--local-addr", "127.0.0.1"]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda _: run([*command, PROGRAM, "env", "stay"])[0], range(2)))
    assert right("".join(said), "env")


@pytest.mark.more
def test_a_program_of_torch_on_two_hosts_is_encrypted(hosts: Hosts, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('unisono')\n"
        "x = torch.full((300_001,), 0x5a17c3d2 + dist.get_rank(), dtype=torch.int64)\n"
        "dist.broadcast(x, 0)\n"
        "print(bool((x == 0x5a17c3d2).all()), dist.get_rank(), flush=True)\n"
    )

    def node(number: int) -> tuple[str, str]:
        words = ["-n", "2", "--nnodes", "2", "--node-rank", str(number), "--join", str(tmp_path / "ticket")]
        words += ["--address", "10.77.0.1"] if number == 0 else []
        return run(hosts.command(number, "-m", "unisono", "run", *words, str(path)))

    with hosts.captured(tmp_path / "capture"), ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(node, (1, 0)))
    said = sorted(line for out, _ in ends for line in out.splitlines())
    assert said == [f"[{rank}] True {rank}" for rank in range(4)]
    capture = (tmp_path / "capture").read_bytes()
    assert len(capture) > 2_000_000, "the data was captured"
    assert (0x5A17C3D2).to_bytes(8, "little") * 4 not in capture
    assert b"unisono1://" not in capture, "torch's store is not encrypted, but the ticket in it is"
    assert b"sealed:" in capture


BOTH = """
import numpy as np, torch, torch.distributed as dist, unisono as uni
with uni.init() as world:
    dist.init_process_group("unisono")
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    x, y = torch.arange(5) + dist.get_rank(), np.arange(5) * world.rank
    dist.all_reduce(x)
    world.all_reduce(y)
    print(x.tolist(), y.tolist())
    dist.destroy_process_group()
"""


@pytest.mark.more
def test_under_unisono_run_a_program_may_use_both(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    out, _ = run([*UNISONO_RUN, "-n", "2", str(tmp_path / "both.py")])
    assert sorted(out.splitlines()) == [f"[{rank}] [1, 3, 5, 7, 9] [0, 1, 2, 3, 4]" for rank in range(2)]


# -- failures -----------------------------------------------------------------------------------------------

ALONE = """
import sys
from datetime import timedelta
import torch.distributed as dist
try:
    dist.init_process_group(
        "unisono", init_method=f"file://{sys.argv[1]}", rank=0, world_size=3, timeout=timedelta(seconds=0.5)
    )
except dist.DistBackendError as error:
    print(error)
"""


@pytest.mark.more
def test_ranks_that_have_not_come_are_named(tmp_path: Path) -> None:
    out, err = run([sys.executable, "-c", ALONE, str(tmp_path / "store")])
    assert out.startswith("[rank 0] init_process_group at")
    assert "rank 0 of 3 could not join within 0." in out
    assert (
        " s: 1 of 3 ranks joined (0); missing: 1-2. Next: see why the missing ranks have not started" in out
    )
    assert err == ""


REBUILT = """
import os, signal, sys
import torch, torch.distributed as dist
rank, dead, way, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

def begin(size, rank):
    dist.init_process_group("unisono", init_method=f"file://{where}-{size}", rank=rank, world_size=size)
    x = torch.arange(5) * 10 ** rank
    dist.all_reduce(x)
    return x.tolist()

assert begin(3, rank) == [0, 111, 222, 333, 444]
if rank == dead:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.all_reduce(torch.arange(5))
except dist.DistBackendError as error:
    assert f"rank {dead} is gone" in str(error), error
if way == "abort":
    dist.distributed_c10d._abort_process_group()
else:
    dist.destroy_process_group()
print(begin(2, [each for each in range(3) if each != dead].index(rank)))
dist.destroy_process_group()
"""


@pytest.mark.more
@pytest.mark.parametrize(("dead", "way"), [(1, "destroy"), (0, "abort")])
def test_survivors_begin_a_smaller_world(dead: int, way: str, tmp_path: Path) -> None:
    def rank(number: int) -> subprocess.CompletedProcess[str]:
        words = [str(number), str(dead), way, str(tmp_path / "store")]
        command = [sys.executable, "-c", REBUILT, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment())

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(rank, range(3)))
    assert ends[dead].returncode == -9
    for end in ends[:dead] + ends[dead + 1 :]:
        assert (end.returncode, end.stdout, end.stderr) == (0, "[0, 11, 22, 33, 44]\n", "")
