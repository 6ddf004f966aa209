"""Every setting in one frozen value, and the only reader of the environment.

Knows names, defaults, limits and UNISONO_* variables. Does not know who uses a setting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.errors import UsageError

__all__ = ["Config", "Launch", "Network", "environment", "launch", "network"]

KIB = 1024
MIB = 1024 * KIB


def _setting(default: Any, low: float | None = None, high: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, init=False)
class Config:
    """What a user may set. Unknown names and senseless values are refused with a UsageError.

    Every field can also be set by a variable: `UNISONO_SEGMENT_BYTES=65536`. A value given in code wins.
    All ranks must use equal settings wherever `digest()` covers them.
    """

    reproducible: bool = _setting(False)
    """The same bits whatever transport, size or timing."""

    segment_bytes: int = _setting(256 * KIB, 64, 1 << 30)
    """The piece in which a long message of a collective travels."""

    window_segments: int = _setting(8, 1, 4096)
    """How many pieces from one peer may be under way at once."""

    eager_bytes: int = _setting(16 * KIB, 0, MIB)
    """A message up to this length is sent before a receive asks for it; four times as much in a
    collective over TCP."""

    eager_credit_bytes: int = _setting(256 * KIB, 0, 1 << 30)
    """How much a peer may have sent in this way before it must wait."""

    message_bytes_max: int = _setting(1 << 40, 1)
    """The longest message that is accepted."""

    stall_query_s: float = _setting(0.25, 0.001)
    """After this time without an end, a collective asks the others what they are doing."""

    stall_log_s: float = _setting(30.0, 0.001)
    """After this time without an end, an operation logs who is missing."""

    flush_s: float = _setting(5.0, 0.0)
    """How long `close` waits for sends that were started and have not met their receive."""

    silence_s: float = _setting(2.5, 0.01)
    """A peer that is silent for so long is taken for dead."""

    shm: bool = _setting(True)
    """Whether ranks on one host share memory; else they use TCP."""

    insecure: bool = _setting(False)
    """Let ranks on different hosts talk without encryption; for a network that nobody else can reach."""

    tls: bool = _setting(False)
    """Encrypt TCP on loopback, too, where nobody else can listen; between hosts it always is."""

    quic_streams: int = _setting(4, 1, 64)
    """How many streams of a QUIC connection carry the pieces of long messages."""

    quic_relay: str = _setting("off")
    """Which relays QUIC may use where no direct way is found: off, default (those of iroh's makers), or
    addresses, separated by commas."""

    quic_discovery: bool = _setting(False)
    """Let iroh publish where a rank is, and look up others, at its makers' servers."""

    deadlock_after_s: float = _setting(2.0, 0.0)
    """In-process ranks that all wait for each other are told so after this time; 0 turns it off."""

    def __init__(self, **settings: Any) -> None:
        fields = {f.name: f for f in dataclasses.fields(self)}
        for name in settings:
            if name not in fields:
                raise UsageError(_unknown("setting", name, list(fields)))
        given = {**_from_environment(os.environ), **settings}
        for name, field in fields.items():
            object.__setattr__(self, name, _checked(field, given.get(name, field.default)))
        if self.insecure and self.tls:
            raise UsageError("insecure=True and tls=True contradict each other; allowed: one of them")

    @classmethod
    def inherited(cls, changes: Mapping[str, str]) -> Config:
        """What a child of this process reads if its environment is changed in this way."""
        return cls(**_from_environment({**os.environ, **changes}))

    def digest(self) -> str:
        """A fingerprint of the settings; ranks that differ in it must not work together."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started: by whom, and as which of how many ranks.

    `job` tells this start from every other on the same host; it is empty if nothing does. `master` is the
    address that was named for rank 0, `store` the host:port of a key-value store that all ranks can reach.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    is_one_host: bool = False
    job: str = ""
    master: str = ""
    store: str = ""


@dataclass(frozen=True, slots=True)
class Network:
    """Where and how this process meets the others: what UNISONO_JOIN, _ADDRESS, _ADVERTISE and _BACKEND say.

    `join` is a ticket, which is a secret, or the path of a file that holds one.
    """

    join: str | None = dataclasses.field(default=None, repr=False)
    address: str | None = None
    advertise: str | None = None
    folder: str = "/tmp"
    backend: str = "native"


def launch() -> Launch | None:
    """Read from the environment who started this process; None if it was started alone.

    Raises:
        UsageError: the environment names a rank and a size that make no sense.
    """
    for launcher in _LAUNCHERS:
        if any(sign in os.environ for sign in launcher.signs):
            return _started_by(launcher, os.environ)
    return None


def network() -> Network:
    """Read from the environment where this process meets the others."""
    return Network(
        join=os.environ.get("UNISONO_JOIN") or None,
        address=os.environ.get("UNISONO_ADDRESS") or None,
        advertise=os.environ.get("UNISONO_ADVERTISE") or None,
        folder=os.environ.get("TMPDIR") or "/tmp",
        backend=os.environ.get("UNISONO_BACKEND") or "native",
    )


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a new rank: ours, without what says who we are, and with the changes."""
    foreign = {
        name
        for launcher in _LAUNCHERS
        for name in (*launcher.signs, launcher.rank, launcher.size, launcher.local_rank, launcher.local_size)
    }
    ours = {name: text for name, text in os.environ.items() if name not in foreign | _LAUNCH_VARIABLES}
    return {**ours, **changes}


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher. Any of `signs` means that it started us.

    `job` lists what names the job, all of it needed; "A|B" means the first of them that is set. `store_sign`
    is "True" if a store of the launcher's own listens at MASTER_ADDR and MASTER_PORT.
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


# In this order: a launcher may run under another, and the inner one counts. torchrun sets RANK too.
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
        "the environment",
        ("WORLD_SIZE",),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        job=("MASTER_ADDR", "MASTER_PORT"),
    ),
)

# What a launcher of ours tells a rank about itself; it is no setting that ranks share.
_LAUNCH_VARIABLES = frozenset(
    f"UNISONO_{name}"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "JOIN", "ADDRESS", "ADVERTISE", "BACKEND")
)

_LOOPBACK_NAMES = ("localhost", "127.", "::1")


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
            f"numbers: {found}"
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
        or (
            launcher.name == "the environment" and environ.get("MASTER_ADDR", "").startswith(_LOOPBACK_NAMES)
        ),
        job="/".join([launcher.name, *job]) if job and all(job) else "",
        master=environ.get("MASTER_ADDR", "") if "MASTER_ADDR" in launcher.job else "",
        store=f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
        if environ.get(launcher.store_sign) == "True"
        else "",
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {f.name: f for f in dataclasses.fields(Config)}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith("UNISONO_") or variable in _LAUNCH_VARIABLES:
            continue
        name = variable.removeprefix("UNISONO_").lower()
        if name not in names:
            raise UsageError(_unknown("variable", variable, list(names), "UNISONO_"))
        found[name] = _parsed(variable, text, type(names[name].default))
    return found


def _parsed(variable: str, text: str, kind: type) -> Any:
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
        if text.lower() not in words:
            raise UsageError(f"{variable}={text!r} is not a switch; allowed: 1, true, yes, 0, false, no")
        return words[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise UsageError(
            f"{variable}={text!r} is not {'a number' if kind is float else 'an integer'}"
        ) from None


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    kind = type(field.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise UsageError(f"{field.name}={value!r} is {type(value).__name__}; allowed: {kind.__name__}")
    low, high = field.metadata["low"], field.metadata["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise UsageError(f"{field.name}={value!r} is out of range; allowed: {bounds}")
    return value


def _unknown(what: str, name: str, known: list[str], prefix: str = "") -> str:
    import difflib  # only a mistake needs it

    close = difflib.get_close_matches(name.removeprefix(prefix).lower(), known, n=1)
    shown = [f"{prefix}{n.upper()}" if prefix else n for n in (close or known)]
    hint = f"did you mean {shown[0]}?" if close else f"allowed: {', '.join(shown)}"
    return f"{what} {name!r} is unknown; {hint}"
