"""What launchers say about a process, and what follows: its rank, the size, and where the ranks meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unisono import environment
from unisono.bootstrap.launch_info import decide
from unisono.config import Config
from unisono.environment import Launch, Network
from unisono.errors import RendezvousError, UsageError

# -- launch environments -----------------------------------------------------------------------------------

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-77@1",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}
BARE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OURS = {"UNISONO_RANK": "1", "UNISONO_SIZE": "4", "UNISONO_LOCAL_RANK": "1", "UNISONO_LOCAL_SIZE": "4"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Any:
    clean: dict[str, str] = {}
    monkeypatch.setattr(environment.os, "environ", clean)
    return clean


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (OURS, ("unisono run", 1, 4, 1, True, "")),
        (TORCHRUN, ("torchrun", 1, 4, 1, True, "torchrun/none/0/node0/29500")),
        (OMPI, ("Open MPI", 2, 4, 2, True, "Open MPI/prterun-vm-77@1")),
        (SLURM, ("Slurm", 3, 4, 3, True, "Slurm/12/0")),
        (BARE, ("the environment", 1, 4, None, True, "the environment/127.0.0.1/29500")),
        (
            {**BARE, "MASTER_ADDR": "node0"},
            ("the environment", 1, 4, None, False, "the environment/node0/29500"),
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, ("torchrun", 1, 4, 1, False, "torchrun/none/0/node0/29500")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, ("Slurm", 3, 4, 3, False, "Slurm/12/0")),
    ],
)
def test_a_launcher_is_recognised(
    environ: dict[str, str], variables: dict[str, str], expected: tuple[Any, ...]
) -> None:
    environ.update(variables)
    found = environment.launch()
    assert found is not None
    assert (
        found.launcher,
        found.rank,
        found.size,
        found.local_rank,
        found.is_one_host,
        found.job,
    ) == expected


def test_the_inner_launcher_counts(environ: dict[str, str]) -> None:
    layers = [
        ("the environment", BARE),
        ("Slurm", SLURM),
        ("Open MPI", OMPI),
        ("torchrun", TORCHRUN),
        ("unisono run", OURS),
    ]
    for name, variables in layers:
        environ.update(variables)
        found = environment.launch()
        assert found is not None
        assert found.launcher == name


def test_a_process_without_a_launcher_is_alone(environ: dict[str, str]) -> None:
    assert environment.launch() is None
    environ["SLURM_JOB_ID"] = "12"  # a shell inside an allocation is not a step
    environ["SLURM_PROCID"] = "0"
    assert environment.launch() is None
    assert decide(None, Network()).size == 1


@pytest.mark.parametrize("variables", [OURS, TORCHRUN, OMPI, SLURM, BARE])
def test_an_incomplete_environment_is_an_error(environ: dict[str, str], variables: dict[str, str]) -> None:
    for name in variables:
        environ.clear()
        environ.update({key: text for key, text in variables.items() if key != name})
        if "RANK" not in name and "SIZE" not in name and "NUM_TASKS" not in name and "PROCID" not in name:
            continue
        try:
            found = environment.launch()
        except UsageError as error:
            assert "are not both numbers" in str(error)  # noqa: PT017 - some variables may be missing
        else:
            # Without the launcher's mark another launcher is recognised, or none; never a smaller world.
            assert found is None or found.size == 4


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("0", "0"), ("x", "4"), ("1.5", "4")])
def test_an_invalid_rank_is_an_error(environ: dict[str, str], rank: str, size: str) -> None:
    environ.update(RANK=rank, WORLD_SIZE=size)
    with pytest.raises(UsageError, match="RANK"):
        environment.launch()


def test_launch_variables_are_no_settings(environ: dict[str, str]) -> None:
    digest = Config().digest()
    environ.update(OURS, UNISONO_JOIN="x", UNISONO_ADDRESS="lo", UNISONO_ADVERTISE="h")
    assert Config().digest() == digest
    environ["UNISONO_RANKS"] = "1"
    with pytest.raises(UsageError, match="UNISONO_RANKS"):
        Config()


def test_a_child_does_not_inherit_its_parents_identity(environ: dict[str, str]) -> None:
    environ.update(
        OURS, **TORCHRUN, **OMPI, **SLURM, UNISONO_JOIN="secret", UNISONO_EAGER_BYTES="1", HOME="/"
    )
    child = environment.environment({"UNISONO_RANK": "0"})
    assert child["UNISONO_RANK"] == "0"
    assert child["HOME"] == "/"
    assert child["UNISONO_EAGER_BYTES"] == "1"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "UNISONO_JOIN", "OMPI_COMM_WORLD_RANK"} & child.keys()


# -- places ------------------------------------------------------------------------------------------------


def started(launcher: str, rank: int = 0, **more: Any) -> Launch:
    return Launch(launcher, rank, 4, **more)


@pytest.mark.parametrize("rank", [0, 1])
def test_on_one_host_ranks_meet_at_a_file_of_their_job(rank: int) -> None:
    info = decide(started("Slurm", rank, is_one_host=True, job="Slurm/12/0"), Network(folder="/t"))
    other = decide(started("Slurm", rank, is_one_host=True, job="Slurm/12/1"), Network(folder="/t"))
    assert info.source is not None
    assert other.source is not None
    assert str(info.source.path).startswith("/t/unisono-")
    assert info.source.path != other.source.path
    assert info.source.is_keyed
    assert info.seed_address == ("127.0.0.1" if rank == 0 else None)


@pytest.mark.parametrize("launcher", ["torchrun", "Open MPI", "Slurm", "the environment", "unisono run"])
@pytest.mark.parametrize("rank", [0, 3])
def test_several_ranks_never_become_a_world_of_one(launcher: str, rank: int) -> None:
    with pytest.raises(RendezvousError, match="UNISONO_JOIN"):
        decide(started(launcher, rank), Network())


@pytest.mark.parametrize(
    ("begun", "network", "address"),
    [
        (started("torchrun", master="node0"), Network(join="/f"), "node0"),
        (started("torchrun", master="node0"), Network(join="/f", address="eth0"), "eth0"),
        (started("Slurm", is_one_host=True), Network(join="/f"), "127.0.0.1"),
        (started("Slurm", 1), Network(join="/f"), None),
        (started("Slurm"), Network(join="unisono1://h:1/x/y"), None),
        (started("unisono run"), Network(join="/f"), None),
    ],
)
def test_rank_0_hosts_the_seed_where_no_launcher_of_ours_does(
    begun: Launch, network: Network, address: str | None
) -> None:
    info = decide(begun, network)
    assert info.source is not None
    assert info.seed_address == address


def test_a_seed_for_several_hosts_needs_an_address() -> None:
    with pytest.raises(RendezvousError, match="UNISONO_ADDRESS"):
        decide(started("Slurm"), Network(join="/shared/ticket"))


@pytest.mark.parametrize(
    "arguments",
    [{"size": 4}, {"rank": 4, "size": 4}, {"rank": -1, "size": 4}, {"rank": 1}, {"rank": True, "size": 4}],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        decide(None, Network(), **arguments)


@pytest.mark.parametrize("arguments", [{}, {"rank": 0}])
def test_a_ticket_alone_makes_no_world_of_one(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 of a world of one would host a seed, and overwrite the ticket of the intended world."""
    ticket = tmp_path / "ticket"
    for network, join in ((Network(join=str(ticket)), None), (Network(), str(ticket))):
        with pytest.raises(UsageError, match=r"neither rank nor size.*unisono run"):
            decide(None, network, join=join, **arguments)
    assert not ticket.exists()


def test_a_place_shows_no_ticket() -> None:
    secret = "ab" * 32
    info = decide(None, Network(join=f"unisono1://127.0.0.1:1/plain/{secret}"), rank=0, size=2)
    assert secret not in repr(info)
