"""A simulator: ranks, a network and its faults in one process and virtual time; a seed repeats a run exactly.

It runs programs on backends; `unisono.simulate` puts communicators on top.
"""

from unisono.core.runtime import Killed
from unisono.simulation.backend import SimBackend
from unisono.simulation.faults import Drop, Fault, Kill, Partition, Pause, Resume, Slow
from unisono.simulation.network import Link, Network
from unisono.simulation.result import SimResult
from unisono.simulation.runtime import now, sleep
from unisono.simulation.simulator import run
from unisono.simulation.trace import TraceEvent

__all__ = [
    "Drop",
    "Fault",
    "Kill",
    "Killed",
    "Link",
    "Network",
    "Partition",
    "Pause",
    "Resume",
    "SimBackend",
    "SimResult",
    "Slow",
    "TraceEvent",
    "now",
    "run",
    "sleep",
]


def __dir__() -> list[str]:
    """Only the public names."""
    return __all__
