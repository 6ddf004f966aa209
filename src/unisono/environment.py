"""The environment: which launcher started this process, where it meets the others, what a new rank gets.

Only this module and config.py, which has the settings, read os.environ.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.errors import UsageError

__all__ = [
    "BARE",
    "NO_SETTINGS",
    "OPTION",
    "Launch",
    "Network",
    "environment",
    "given",
    "launch",
    "launch_variables",
    "network",
    "torch_variables",
]

# The launcher's name if only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
BARE: Final = "the environment"


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started: by which launcher, and as which of how many ranks.

    `job` identifies this job among all on the same host; empty if no variable does. `master` is the address
    of rank 0, `store` the host:port of a key-value store that all ranks can reach. `began` is the start time
    of this process in seconds since boot. It is set only if nothing but bare variables, present from the
    start, name the job: two such jobs may have the same variables, and differ only in when they started.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    is_one_host: bool = False
    job: str = ""
    master: str = ""
    store: str = ""
    began: float | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """Where and how this process meets the others: from the options of `unisono run`, else from UNISONO_JOIN,
    UNISONO_ADDRESS, UNISONO_ADVERTISE and UNISONO_BACKEND.

    `join` is a ticket, which is a secret, or the path of a file that holds one.
    """

    join: str | None = dataclasses.field(default=None, repr=False)
    address: str | None = None
    advertise: str | None = None
    folder: str = "/tmp"
    backend: str = "native"


def launch() -> Launch | None:
    """Which launcher started this process; None if none did.

    Raises:
        UsageError: the launcher's rank or size is missing, not a number, or out of range.
    """
    launcher = _launcher(os.environ)
    return None if launcher is None else _started_by(launcher, os.environ)


def network(environ: Mapping[str, str] | None = None) -> Network:
    """Where and how a process meets the others, from its environment (by default ours)."""
    environ = os.environ if environ is None else environ

    def option_or_variable(name: str) -> str | None:
        return environ.get(OPTION + name) or environ.get(f"UNISONO_{name}") or None

    return Network(
        join=environ.get("UNISONO_JOIN") or None,
        address=option_or_variable("ADDRESS"),
        advertise=option_or_variable("ADVERTISE"),
        folder=environ.get("TMPDIR") or "/tmp",
        backend=option_or_variable("BACKEND") or "native",
    )


def given() -> dict[str, str]:
    """The user's environment: ours, without the variables that launchers have set for this process.

    UNISONO_JOIN is the user's only in a process that no launcher of ours has started.
    """
    set_by_launchers = {
        name
        for launcher in _LAUNCHERS
        for name in (*launcher.signs, launcher.rank, launcher.size, launcher.local_rank, launcher.local_size)
    }
    set_by_launchers |= _IDENTITY if "UNISONO_RANK" in os.environ else _IDENTITY - {"UNISONO_JOIN"}
    outer = _launcher(os.environ)
    if outer is not None and "MASTER_PORT" in outer.job:  # its store, which no other job may use
        set_by_launchers |= {"MASTER_ADDR", "MASTER_PORT", outer.store_sign}
    environ = {
        name: text
        for name, text in os.environ.items()
        if name not in set_by_launchers and not name.startswith(OPTION)
    }
    for name, (ours, before) in json.loads(os.environ.get(_SET, "{}")).items():
        if environ.get(name) == ours:
            del environ[name]
            environ |= {} if before is None else {name: before}
    return environ


def environment(changes: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a new rank: the user's, with changes, and with defaults for what neither sets.

    The names of the defaults, and of changes that stand for options, are passed on in _SET: a launcher that
    runs inside the rank must not take them for the user's.
    """
    inherited = {name: text for name, text in given().items() if name != "UNISONO_JOIN"}
    added = {
        name: text for name, text in (defaults or {}).items() if name not in inherited and name not in changes
    }
    options = {name: text for name, text in changes.items() if name in _OPTIONS}
    ours = {name: (text, inherited.get(name)) for name, text in {**added, **options}.items()}
    return {**inherited, **changes, **added, **({_SET: json.dumps(ours)} if ours else {})}


def launch_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """What `unisono run` tells a rank about itself: for `uni.init`, and by torch's names for its programs."""
    numbers = (rank, size, local_rank, local_size)
    return {**_numbered("unisono run", *numbers), **torch_variables(*numbers)}


def torch_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """The variables from which a program of torch knows its rank."""
    return _numbered(BARE, rank, size, local_rank, local_size)


def _numbered(launcher: str, *numbers: int) -> dict[str, str]:
    each = _named(launcher)
    names = (each.rank, each.size, each.local_rank, each.local_size)
    return {name: str(number) for name, number in zip(names, numbers, strict=True)}


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher. If any of `signs` is set, it started this process.

    `job` lists the variables that together identify the job; "A|B" means the first of them that is set. The
    variable `store_sign` is "True" if the launcher's own store listens at MASTER_ADDR and MASTER_PORT.
    """

    name: str
    signs: tuple[str, ...]
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    store_sign: str = ""


# The order matters: a launcher may run under another, and the inner one counts. torchrun sets RANK, too.
_LAUNCHERS = (
    _Launcher(
        "unisono run",
        ("UNISONO_RANK", "UNISONO_SIZE"),
        "UNISONO_RANK",
        "UNISONO_SIZE",
        "UNISONO_LOCAL_RANK",
        "UNISONO_LOCAL_SIZE",
    ),
    _Launcher(
        "torchrun",
        ("TORCHELASTIC_RUN_ID",),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
        store_sign="TORCHELASTIC_USE_AGENT_STORE",
    ),
    _Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE|OMPI_MCA_ess_base_jobid|OMPI_MCA_orte_hnp_uri",),
    ),
    _Launcher(
        "Slurm",
        ("SLURM_STEP_NUM_TASKS",),
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Launcher(
        BARE,
        ("WORLD_SIZE",),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        job=("MASTER_ADDR", "MASTER_PORT"),
    ),
)

# A rank's identity, set by a launcher of ours; no variable of the user's replaces it.
_IDENTITY = frozenset(f"UNISONO_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "JOIN"))
# Variables of a user that are not settings in Config.
_PLACES = ("ADDRESS", "ADVERTISE", "BACKEND")
# Variables that have an option of `unisono run`.
_OPTIONS = frozenset(f"UNISONO_{name}" for name in (*_PLACES, "INSECURE"))
# The prefix of options of a launcher of ours; and the variables that it set, with their values before.
OPTION: Final = "UNISONO_RUN_"
_SET = "UNISONO_RUN_SET"
NO_SETTINGS: Final = (
    _IDENTITY | {_SET} | {prefix + name for prefix in ("UNISONO_", OPTION) for name in _PLACES}
)

_LOOPBACK_NAMES = ("localhost", "127.", "::1")


def _launcher(environ: Mapping[str, str]) -> _Launcher | None:
    return next((each for each in _LAUNCHERS if any(sign in environ for sign in each.signs)), None)


def _named(name: str) -> _Launcher:
    return next(each for each in _LAUNCHERS if each.name == name)


def _started_by(launcher: _Launcher, environ: Mapping[str, str]) -> Launch:
    try:
        rank, size = int(environ[launcher.rank]), int(environ[launcher.size])
    except (KeyError, ValueError):
        found = ", ".join(
            f"{name}={environ[name]!r}" if name in environ else f"{name} is missing"
            for name in (launcher.rank, launcher.size)
        )
        raise UsageError(
            f"{launcher.name} set variables of its own, but {launcher.rank} and {launcher.size} are not both "
            f"numbers: {found}",
            next_step="start it by that launcher, or unset its variables",
        ) from None
    if not 0 <= rank < size:
        raise UsageError(
            f"{launcher.name} set {launcher.rank}={rank} and {launcher.size}={size}; "
            "allowed: 0 <= rank < size"
        )
    local_rank, local_size = (_number(environ, name) for name in (launcher.local_rank, launcher.local_size))
    nodes = next((n for n in (_number(environ, name) for name in launcher.nodes) if n is not None), None)
    job = [
        next((environ[name] for name in names.split("|") if environ.get(name)), "") for names in launcher.job
    ]
    return Launch(
        launcher.name,
        rank,
        size,
        local_rank=local_rank,
        is_one_host=local_size == size
        or nodes == 1
        or (launcher.name == BARE and environ.get("MASTER_ADDR", "").startswith(_LOOPBACK_NAMES)),
        job="/".join([launcher.name, *job]) if job and all(job) else "",
        master=environ.get("MASTER_ADDR", "") if "MASTER_ADDR" in launcher.job else "",
        store=f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
        if environ.get(launcher.store_sign) == "True"
        else "",
        began=_began(environ, (launcher.rank, launcher.size, *launcher.job))
        if launcher.name == BARE
        else None,
    )


def _began(environ: Mapping[str, str], names: Sequence[str]) -> float | None:
    """When this process was started, in seconds since boot, if these variables were set by then."""
    try:
        first = Path("/proc/self/environ").read_bytes().split(b"\0")
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
    if any(f"{name}={environ.get(name)}".encode() not in first for name in names):
        return None
    return started_ticks / os.sysconf("SC_CLK_TCK")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
