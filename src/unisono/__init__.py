"""Processes that work together: messages, collectives and groups in Python.

import numpy as np
import unisono as uni

def program(world):
    x = np.full(1_000_003, world.rank, np.float32)
    world.all_reduce(x)
    return x[0]

print(uni.simulate(program, 4).results)
"""

from typing import TYPE_CHECKING, Any

from unisono.buffers import Typed, typed
from unisono.codec import register
from unisono.communicator import Communicator
from unisono.config import Config
from unisono.errors import (
    BackendUnavailable,
    BadArguments,
    ClosedError,
    CollectiveMismatch,
    DeadlineExceeded,
    Deadlock,
    NotExposed,
    PeerAborted,
    PeerLost,
    ProtocolError,
    RemoteError,
    RendezvousError,
    UnisonoError,
    UsageError,
)
from unisono.mesh import Mesh
from unisono.session import init, list_backends, local, simulate, spawn
from unisono.values import ANY, ReduceOp, Status, op
from unisono.version import VERSION
from unisono.work import Work, wait_all

if TYPE_CHECKING:
    from unisono import rpc

__version__ = VERSION

__all__ = [
    "ANY",
    "BackendUnavailable",
    "BadArguments",
    "ClosedError",
    "CollectiveMismatch",
    "Communicator",
    "Config",
    "DeadlineExceeded",
    "Deadlock",
    "Mesh",
    "NotExposed",
    "PeerAborted",
    "PeerLost",
    "ProtocolError",
    "ReduceOp",
    "RemoteError",
    "RendezvousError",
    "Status",
    "Typed",
    "UnisonoError",
    "UsageError",
    "Work",
    "init",
    "list_backends",
    "local",
    "op",
    "register",
    "rpc",
    "simulate",
    "spawn",
    "typed",
    "wait_all",
]


def __dir__() -> list[str]:
    """What is public, and nothing else."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Load what only some need when it is first asked for."""
    if name == "rpc":
        import unisono.rpc as asked

        return asked
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")
