"""All settings, with their defaults and limits, from code, options and the environment."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from unisono.environment import NO_SETTINGS, OPTION, given
from unisono.errors import UsageError

__all__ = ["Config", "as_options"]

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
    """The settings. An unknown name or a value out of range is a UsageError.

    Every setting can also be given by a variable, such as `UNISONO_SEGMENT_BYTES=65536`. A value in code
    takes precedence over an option of `unisono run`, and the option over the variable. All ranks must use
    equal settings: they compare `digest()` when they join.
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
    """Do not encrypt links between hosts; only for a network that no other users can reach."""

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

    _given: ClassVar[frozenset[str]] = (
        frozenset()
    )  # of each instance: the names of settings that the user chose

    def __init__(self, **settings: Any) -> None:
        fields = {f.name: f for f in dataclasses.fields(self)}
        for name in settings:
            if name in _RENAMED:
                raise _renamed("setting", name, _RENAMED[name])
            if name not in fields:
                raise _unknown("setting", name, list(fields))
        chosen = {**_from_environment(os.environ), **settings}
        for name, field in fields.items():
            object.__setattr__(self, name, _checked(field, chosen.get(name, field.default)))
        # All of them: a copy, such as dataclasses.replace makes.
        is_copy = chosen.keys() >= fields.keys()
        self._as_given(n for n in chosen if not is_copy or getattr(self, n) != fields[n].default)
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
        found = _from_environment({**given(), **changes})
        return cls(**{**defaults, **found})._as_given(found)

    def changed(self, **changes: Any) -> Config:
        """The same settings but for these."""
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Config(**{**kept, **changes})._as_given([*self._given, *changes])

    def chosen(self, prefix: str) -> list[str]:
        """The settings with this prefix that were given, in code or by a variable, whatever their value."""
        return [
            f.name for f in dataclasses.fields(self) if f.name.startswith(prefix) and f.name in self._given
        ]

    def _as_given(self, names: Iterable[str]) -> Config:
        object.__setattr__(self, "_given", frozenset(names))
        return self

    def packed(self) -> dict[str, Any]:
        """For another process: `unpacked` makes the same settings of it, whatever the variables there."""
        return {"values": dataclasses.asdict(self), "given": sorted(self._given)}

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> Config:
        """What `packed` has packed."""
        return cls(**packed["values"])._as_given(packed["given"])

    def digest(self) -> str:
        """A hash of the settings, which must be equal on all ranks."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()


# Old names of settings, which are refused with the new one.
_RENAMED = {f"quic_{name}": f"iroh_{name}" for name in ("streams", "relay", "discovery")}


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
    return {OPTION + name: text for name, text in chosen.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {f.name: f for f in dataclasses.fields(Config)}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith("UNISONO_") or variable in NO_SETTINGS:
            continue
        name = variable.removeprefix(OPTION).removeprefix("UNISONO_").lower()
        if name in _RENAMED:
            raise _renamed("variable", variable, f"UNISONO_{_RENAMED[name].upper()}")
        if name not in names:
            raise _unknown("variable", variable, list(names), "UNISONO_")
        if variable.startswith(OPTION) or OPTION + name.upper() not in environ:
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
    hint = f"did you mean {shown[0]}" if close else f"allowed: {', '.join(shown)}"
    step = f"write {shown[0]}" if close else f"correct the {what}, or leave it out"
    return UsageError(f"{what} {name!r} is unknown; {hint}", next_step=step)
