"""Failure detection for iroh: datagram counts and ticks in, verdicts out; and the ends of local processes.

iroh answers a ping without Python, so a rank whose interpreter is busy is not declared dead. The kernel
reports the end of a process on this host at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["TICKS", "Pulse", "open_process", "own_process"]

# Pings that a silent peer may leave unanswered before it is declared dead.
TICKS: Final = 10


class Pulse:
    """Whether one peer is alive. Silence is counted in ticks of this process, so not while it is stopped."""

    def __init__(self) -> None:
        self._datagrams = 0
        self._ticks = 0

    def tick(self, datagrams: int) -> tuple[bool, bool]:
        """Given the datagrams received so far: whether to ping the peer now, and whether it is dead."""
        if datagrams != self._datagrams:
            self._datagrams, self._ticks = datagrams, 0
            return False, False
        self._ticks += 1
        return True, self._ticks > TICKS


def own_process() -> list[str]:
    """This process, for others on this host: boot id, pid namespace, pid and start time."""
    return [_boot(), _namespace(), str(os.getpid()), _start_of("self")]


def open_process(process: list[str]) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is on another host, or gone."""
    boot, namespace, number, start = process
    if not boot or boot != _boot() or namespace != _namespace() or not number.isdecimal():
        return None
    try:
        descriptor = os.pidfd_open(int(number))
    except OSError:
        return None
    if start and _start_of(number) == start:
        return descriptor
    os.close(descriptor)  # another process has this pid now
    return None


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(number: str) -> str:
    """When a process began, in clock ticks since boot. The name before it may contain anything."""
    fields = _read(f"/proc/{number}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
