"""Ranks under `unisono run` and other launchers meet: on one host, at a ticket file, between two hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.hosts import Hosts, hosts
from tests.support.launched import MEET, PATIENCE_S, launched, program, run

__all__ = ["hosts", "program"]


def test_ranks_of_one_host_meet_without_encryption(program) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("-n", "3", program(MEET))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] met {r} card 2 {r} False" for r in range(3)]


def test_ranks_of_two_nodes_meet_at_a_ticket_file(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = program(MEET.replace('"met", ', '"met", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], '))
    file = str(tmp_path / "job.ticket")

    def node(rank: int) -> tuple[int, str, str]:
        common = ("-n", "2", "--nnodes", "2", "--node-rank", str(rank), "--join", file)
        return run(*common, *(("--address", "::1") if rank == 0 else ()), path)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(node, (1, 0)))
    assert [code for code, _, _ in ends] == [0, 0], ends
    said = sorted(line.split() for _, out, _ in ends for line in out.splitlines())
    assert [words[:2] + words[4:] for words in said] == [
        [f"[{r}]", "met", str(r), "card", "3", str(r % 2), "False"] for r in range(4)
    ]
    ((address, _),) = {tuple(words[2:4]) for words in said}
    assert address == "::1"
    assert not Path(file).exists()


FOREIGN = {
    "torchrun": "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 MASTER_ADDR=here MASTER_PORT=1 "
    "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2",
    "Open MPI": "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-1@1",
    "Slurm": "SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID={rank} SLURM_STEP_NUM_NODES=1 "
    "SLURM_JOB_ID=1 SLURM_STEP_ID=0",
    "bare": "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} MASTER_ADDR=localhost MASTER_PORT=1",
}


@pytest.mark.parametrize("launcher", FOREIGN)
def test_ranks_of_another_launcher_meet_on_one_host(launcher: str, tmp_path: Path) -> None:
    def one(rank: int) -> subprocess.CompletedProcess[str]:
        variables = dict(pair.split("=", 1) for pair in FOREIGN[launcher].format(rank=rank).split())
        return subprocess.run(
            [sys.executable, "-c", MEET],
            env={**os.environ, **variables, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(one, (1, 0)))
    assert [end.stdout for end in ends] == [f"met {r} card 1 {r} False\n" for r in (1, 0)], ends
    # Only the folder is left, and a note of the end if another job may have the same name.
    left = [path.name for path in tmp_path.rglob("*")]
    assert left[0] == f"unisono-{os.getuid()}"
    assert [name.rpartition(".")[2] for name in left[1:]] == ["end"] * (launcher == "bare")


def test_the_ticket_is_never_on_a_command_line(program) -> None:  # type: ignore[no-untyped-def]
    path = program("print(os.environ['UNISONO_JOIN'], os.getpid(), flush=True)\nthreading.Event().wait()\n")
    with launched("-n", "2", path) as launcher:
        tickets = [line.split()[1:] for line in launcher.lines(2)]
        token = tickets[0][0].rpartition("/")[2]
        assert re.fullmatch("[0-9a-f]{64}", token)
        for pid in (launcher.process.pid, *(int(pid) for _, pid in tickets)):
            assert token not in Path(f"/proc/{pid}/cmdline").read_text()


# -- between hosts, which are network namespaces here --------------------------------------------------


def test_ranks_of_two_hosts_meet_encrypted(hosts: Hosts, program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = program(
        MEET.replace("info.local_rank,", "listens[0].bind.host,")
        .replace("lambda listen: b", "lambda listen: listens.append(listen) or b")
        .replace("\ninfo", "\nlistens = []\ninfo")
    )
    file = str(tmp_path / "job.ticket")

    def node(rank: int) -> subprocess.CompletedProcess[str]:
        words = ["-n", "2", "--nnodes", "2", "--node-rank", str(rank), "--join", file]
        words += ["--address", "10.77.0.1"] if rank == 0 else []
        command = hosts.command(rank, "-m", "unisono", "run", *words, path)
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(node, (1, 0)))
    assert [end.returncode for end in ends] == [0, 0], ends
    lines = sorted(line for end in ends for line in end.stdout.splitlines())
    assert lines == [f"[{r}] met {r} card 3 10.77.0.{1 + r // 2} True" for r in range(4)]


def test_an_unreachable_seed_is_described(hosts: Hosts) -> None:
    subprocess.run(["ip", "-n", hosts[1], "route", "add", "unreachable", "10.99.0.0/16"], check=True)
    program = (
        "from unisono.bootstrap.join import join\n"
        "from unisono.bootstrap.ticket import Ticket, TicketSource\n"
        "from unisono.bootstrap.address import Address\n"
        "from unisono.config import Config\n"
        "from unisono.core.clock import RealRuntime\n"
        "for host in ('10.99.0.1', '203.0.113.5', '10.77.0.1'):\n"
        "    source = TicketSource(Ticket.create(Address(host, 4711), bytes(32)).text())\n"
        "    try:\n"
        "        join(source, rank=1, size=2, card=b'', config=Config(), version='1',"
        " deadline=RealRuntime().deadline(0.3))\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    command = hosts.command(1, "-c", program)
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout.splitlines()
    assert "10.99.0.1:4711 no route to the host" in said[0]
    assert "203.0.113.5:4711 no route to the network" in said[1]
    assert "10.77.0.1:4711 refused the connection" in said[2]
