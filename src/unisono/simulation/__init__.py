"""A simulator: ranks, a network and its faults in one process and in virtual time; a seed repeats it exactly.

Knows everything about time and failure in a simulation. Does not know communicators: `unisono.simulate` puts
those on top.
"""

from unisono.core.clock import Killed
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
    """What is public, and nothing else."""
    return __all__
