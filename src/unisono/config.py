"""All settings, with their defaults and limits, and all that is read from the environment.

No other module reads os.environ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import UsageError

__all__ = [
    "Config",
    "Launch",
    "Network",
    "as_options",
    "environment",
    "given",
    "launch",
    "launch_variables",
    "network",
    "torch_variables",
]

KIB = 1024
MIB = 1024 * KIB


def _setting(
    default: Any, low: float | None = None, high: float | None = None, words: tuple[str, ...] = ()
) -> Any:
    # A setting that may be None is a number of seconds.
    kind = float if default is None else type(default)
    return dataclasses.field(
        default=default, metadata={"low": low, "high": high, "kind": kind, "words": words}
    )


@dataclass(frozen=True, init=False)
class Config:
    """What a user may set. An unknown name or a value out of range is a UsageError.

    Every setting can also be given by a variable, such as `UNISONO_SEGMENT_BYTES=65536`. A value in code wins
    over an option of `unisono run`, which wins over the variable. All ranks must use equal settings: they
    compare `digest()` when they join.
    """

    reproducible: bool = _setting(False)
    """Reduce in one fixed order: the same bits whatever the transport, the message size or the timing."""

    segment_bytes: int = _setting(256 * KIB, 64, 1 << 30)
    """Bytes of one segment: a long message of a collective is cut into segments, so that sending, receiving
    and reducing overlap."""

    window_segments: int = _setting(8, 1, 4096)
    """How many segments of one peer may be under way at once, which hides the latency of the link."""

    eager_bytes: int = _setting(16 * KIB, 0, MIB)
    """The eager limit in bytes: a message up to this length is sent before its receive is posted. In a
    collective over TCP it is four times as much, which saves a round trip."""

    eager_credit_bytes: int = _setting(256 * KIB, 0, 1 << 30)
    """Bytes of eager messages that one peer may have waiting here; it bounds the memory they take."""

    message_bytes_max: int = _setting(1 << 40, 1)
    """The longest message in bytes; a longer one is refused before anything is sent."""

    recv_bytes_max: int = _setting(1 << 30, 1)
    """The longest message in bytes that is received without a buffer of the user's, by `recv_bytes` or as an
    object: a peer must not be able to make this rank allocate more."""

    deadline_s: float | None = _setting(None, 0.001)
    """Seconds for each operation of a communicator whose `timeout=` is not given; None (as a variable: none)
    is no limit. A single call without a limit gives `timeout=math.inf`."""

    stall_query_s: float = _setting(0.25, 0.001)
    """Seconds after which a collective that has not ended asks the ranks it waits for what they called, to
    detect mismatches and missing ranks."""

    stall_log_s: float = _setting(30.0, 0.001)
    """Seconds after which an operation that has not ended logs the ranks it waits for."""

    flush_s: float = _setting(5.0, 0.0)
    """Seconds that `close` waits for started sends whose receive was not posted yet."""

    silence_s: float = _setting(2.5, 0.01, 1e6)
    """Seconds without a heartbeat after which a peer is declared dead."""

    shm: bool = _setting(True)
    """Use shared memory between ranks of one host; otherwise they use the links of different hosts."""

    links: str = _setting("auto", words=("auto", "tcp", "quic"))
    """What the native backend uses between hosts: tcp, or quic (one UDP port per rank, always encrypted).
    auto is TCP, and QUIC for `backend="quic"`, which uses it between all ranks."""

    insecure: bool = _setting(False)
    """Do not encrypt links between hosts; only for a network that nobody else can reach."""

    tls: bool = _setting(False)
    """Encrypt TCP links within a host, too; links between hosts are always encrypted unless `insecure`."""

    iroh_streams: int = _setting(4, 1, 64)
    """How many streams of an iroh connection share the segments of long messages."""

    iroh_relay: str = _setting("off")
    """Relays that iroh may use where two hosts cannot connect directly: off, default (the public ones of the
    iroh project), or addresses separated by commas."""

    iroh_discovery: bool = _setting(False)
    """Let iroh publish the addresses of ranks, and look them up, at the servers of the iroh project."""

    deadlock_after_s: float = _setting(2.0, 0.0)
    """Seconds of waiting after which ranks check whether they are in a deadlock; 0 turns the check off."""

    def __init__(self, **settings: Any) -> None:
        fields = {f.name: f for f in dataclasses.fields(self)}
        for name in settings:
            if name in _RENAMED:
                raise _renamed("setting", name, _RENAMED[name])
            if name not in fields:
                raise _unknown("setting", name, list(fields))
        given = {**_from_environment(os.environ), **settings}
        for name, field in fields.items():
            object.__setattr__(self, name, _checked(field, given.get(name, field.default)))
        if self.insecure and self.tls:
            raise UsageError("insecure=True and tls=True contradict each other; allowed: one of them")
        if self.insecure and self.links == "quic":
            raise UsageError(
                'insecure=True and links="quic" contradict each other: QUIC is always encrypted',
                next_step="remove one of them",
            )

    @classmethod
    def inherited(cls, changes: Mapping[str, str]) -> Config:
        """The settings that a child process will read if its environment has these changes."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        return cls(**{**defaults, **_from_environment({**given(), **changes})})

    def changed(self, **changes: Any) -> Config:
        """The same settings but for these."""
        return Config(**{**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **changes})

    def chosen(self, prefix: str) -> list[str]:
        """The settings with this prefix that differ from their defaults."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.name.startswith(prefix) and getattr(self, field.name) != field.default
        ]

    def digest(self) -> str:
        """A hash of the settings, which must be equal on all ranks."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()


# Old names of settings, which are refused with the new one.
_RENAMED = {f"quic_{name}": f"iroh_{name}" for name in ("streams", "relay", "discovery")}

# The launcher's name if only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
BARE = "the environment"


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
        return environ.get(_OPTION + name) or environ.get(f"UNISONO_{name}") or None

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
        if name not in set_by_launchers and not name.startswith(_OPTION)
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
    """What programs of torch are told of a rank."""
    return _numbered(BARE, rank, size, local_rank, local_size)


def _numbered(launcher: str, *numbers: int) -> dict[str, str]:
    each = _named(launcher)
    names = (each.rank, each.size, each.local_rank, each.local_size)
    return {name: str(number) for name, number in zip(names, numbers, strict=True)}


def as_options(options: Mapping[str, str | None], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that pass options of a launcher to ranks: {"BACKEND": "gloo"} wins over UNISONO_BACKEND.

    An option has a variable name of its own (UNISONO_RUN_BACKEND), because UNISONO_BACKEND belongs to the
    user: a process that a rank starts reads that, not the option. `variables` are those that the user set for
    the ranks by --env.

    Raises:
        UsageError: an option contradicts one of `variables`.
    """
    chosen = {name: text for name, text in options.items() if text is not None}
    for name, text in chosen.items():
        other = variables.get(f"UNISONO_{name}")
        kind = type(getattr(Config, name.lower(), ""))
        if other is not None and _parsed(name, other, kind) != _parsed(name, text, kind):
            raise UsageError(
                f"--env UNISONO_{name}={other} contradicts --{name.lower()}", next_step="give one of them"
            )
    return {_OPTION + name: text for name, text in chosen.items()}


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
_OPTION = "UNISONO_RUN_"
_SET = "UNISONO_RUN_SET"
_NO_SETTINGS = _IDENTITY | {_SET} | {prefix + name for prefix in ("UNISONO_", _OPTION) for name in _PLACES}

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


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {f.name: f for f in dataclasses.fields(Config)}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith("UNISONO_") or variable in _NO_SETTINGS:
            continue
        name = variable.removeprefix(_OPTION).removeprefix("UNISONO_").lower()
        if name in _RENAMED:
            raise _renamed("variable", variable, f"UNISONO_{_RENAMED[name].upper()}")
        if name not in names:
            raise _unknown("variable", variable, list(names), "UNISONO_")
        if variable.startswith(_OPTION) or _OPTION + name.upper() not in environ:
            is_none = names[name].default is None and text.lower() == "none"
            found[name] = None if is_none else _parsed(variable, text, names[name].metadata["kind"])
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
            f"{variable}={text!r} is not {'a number' if kind is float else 'an integer'}",
            next_step="correct the variable, or unset it",
        ) from None


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    if value is None and field.default is None:
        return None
    kind = field.metadata["kind"]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise UsageError(f"{field.name}={value!r} is {type(value).__name__}; allowed: {kind.__name__}")
    if (words := field.metadata["words"]) and value not in words:
        raise UsageError(f"{field.name}={value!r}; allowed: {', '.join(words)}")
    low, high = field.metadata["low"], field.metadata["high"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise UsageError(f"{field.name}={value!r} is out of range; allowed: {bounds}")
    return value


def _renamed(what: str, name: str, new: str) -> UsageError:
    return UsageError(f"{what} {name!r} is now {new!r}", next_step=f"write {new}")


def _unknown(what: str, name: str, known: list[str], prefix: str = "") -> UsageError:
    import difflib  # slow to import, and only needed for an error

    close = difflib.get_close_matches(name.removeprefix(prefix).lower(), known, n=1)
    shown = [f"{prefix}{n.upper()}" if prefix else n for n in (close or known)]
    hint = f"did you mean {shown[0]}?" if close else f"allowed: {', '.join(shown)}"
    step = f"write {shown[0]}" if close else f"correct the {what}, or leave it out"
    return UsageError(f"{what} {name!r} is unknown; {hint}", next_step=step)
