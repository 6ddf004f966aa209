"""Who is still there: counts of datagrams and the time in ticks in, verdicts out; and the ends of processes.

Knows that iroh answers a ping by itself, whatever Python does over there, so that a rank whose interpreter is
busy is not taken for dead; and that the kernel tells of the end of a process on this host at once. Does not
know connections.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["TICKS", "Pulse", "open_process", "own_process"]

# A silent peer is asked so often before it is taken for dead.
TICKS: Final = 10


class Pulse:
    """One peer. Time is counted in ticks of our own: a process that was stopped itself blames nobody."""

    def __init__(self) -> None:
        self._datagrams = 0
        self._ticks = 0

    def tick(self, datagrams: int) -> tuple[bool, bool]:
        """Whether to ping it now, and whether it was silent for too long."""
        if datagrams != self._datagrams:
            self._datagrams, self._ticks = datagrams, 0
            return False, False
        self._ticks += 1
        return True, self._ticks > TICKS


def own_process() -> list[str]:
    """This process, for others on this host: host, namespace, number and start."""
    return [_boot(), _namespace(), str(os.getpid()), _start_of("self")]


def open_process(process: list[str]) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is elsewhere, or gone already."""
    boot, namespace, number, start = process
    if not boot or boot != _boot() or namespace != _namespace() or not number.isdecimal():
        return None
    try:
        descriptor = os.pidfd_open(int(number))
    except OSError:
        return None
    if start and _start_of(number) == start:
        return descriptor
    os.close(descriptor)  # another process has got the number
    return None


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(number: str) -> str:
    """When a process began, in the kernel's own unit; the name before may hold anything."""
    fields = _read(f"/proc/{number}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
