"""Ranks under the launchers of other projects: the real torchrun and mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ports import free_port

from unisono.bench.systems import mpiexec
from unisono.bootstrap import store as store_module
from unisono.bootstrap.address import Address
from unisono.bootstrap.launch_info import decide
from unisono.bootstrap.store import StoreSource
from unisono.bootstrap.ticket import Ticket
from unisono.environment import Launch, Network
from unisono.errors import RendezvousError

pytestmark = pytest.mark.more

PROGRAM = """
import numpy as np
import unisono as uni

with uni.init(timeout=60) as world:
    x = np.arange(1003, dtype=np.float64) * (world.rank + 1)
    world.all_reduce(x)
    right = bool((x == np.arange(1003) * 3.0).all())
    ranks = [int(r) for r in world.all_gather(np.array([world.rank]))[:, 0]]
    if world.rank == 0:
        print(f"{world.size} ranks {ranks}, {right}", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def environment(folder: Path) -> dict[str, str]:
    foreign = ("OMPI_", "PMIX_", "PRTE_", "TORCH", "UNISONO_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    ours = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    return {**ours, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder)
    )


def ended(process: subprocess.Popen[str]) -> str:
    """Wait for the success of a process; return its output."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    return out


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def test_under_torchrun_on_one_host(program: str, tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", program]
    assert "2 ranks [0, 1], True" in ended(start(command, tmp_path))


def test_under_torchrun_on_several_hosts_ranks_join_by_its_store(program: str, tmp_path: Path) -> None:
    """Two agents of torchrun with one rank each, so that the ranks take themselves to be on two hosts."""
    address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    port = free_port()
    address[3] = f"127.0.0.1:{port}"
    agents = [
        start([*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *address, program], tmp_path)
        for _ in range(2)
    ]
    said = "".join(ended(agent) for agent in agents)
    assert "2 ranks [0, 1], True" in said
    assert not list(tmp_path.glob("unisono-*/*.ticket"))


def test_under_mpiexec(program: str, tmp_path: Path) -> None:
    launcher = mpiexec()
    assert launcher is not None, "make setup installs Open MPI"
    command = [launcher, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, program]
    assert "2 ranks [0, 1], True" in ended(start(command, tmp_path))


# -- with a fake store ------------------------------------------------------------------------------------


class FakeStore(dict[str, bytes]):
    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, text: str) -> None:
        self[key] = text.encode()

    def delete_key(self, key: str) -> None:
        del self[key]

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def test_a_ticket_is_put_into_the_store_read_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    monkeypatch.setattr(store_module, "_client", lambda address: store)
    source = StoreSource.of_job("host:1", "torchrun/a/0", insecure=False)
    with pytest.raises(FileNotFoundError):
        source.read()
    ticket = Ticket.create(Address("127.0.0.1", 4711))
    remove = source.write(ticket)
    assert source.read() == ticket
    other = StoreSource.of_job("host:1", "torchrun/a/1", insecure=False)
    with pytest.raises(FileNotFoundError):
        other.read()
    remove()
    assert store == {}
    assert ticket.token.hex() not in repr(source) + str(source)


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> None:
        raise RuntimeError("connection refused\nand much more")

    monkeypatch.setattr(store_module, "_client", refuse)
    source = StoreSource.of_job("host:1", "torchrun/a/0", insecure=False)
    with pytest.raises(RendezvousError, match="torchrun's store at host:1 does not answer"):
        source.read()


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_on_several_hosts_is_decided_for_the_store(rank: int) -> None:
    started = Launch("torchrun", rank, 2, job="torchrun/a/0", master="node0", store="node0:29500")
    info = decide(started, Network())
    assert str(info.source) == "torchrun's store at node0:29500"
    assert info.seed_address == ("node0" if rank == 0 else None)
    named = decide(started, Network(join="/f"))
    assert str(named.source) == "ticket file /f"
