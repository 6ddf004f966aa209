"""unisono: messages, collectives, groups and remote calls between Python processes.

import numpy as np
import unisono as uni

def program(world):
    x = np.full(1_000_003, world.rank, np.float32)
    world.all_reduce(x)
    return x[0]

print(uni.simulate(program, 4).results)
"""

from typing import TYPE_CHECKING, Any

from unisono.comm.communicator import Communicator
from unisono.comm.mesh import Mesh
from unisono.comm.world import init, list_backends, local, simulate, spawn
from unisono.config import Config
from unisono.core.buffers import Typed, typed
from unisono.core.codec import register
from unisono.core.envelope import ANY, Status
from unisono.core.ops import ReduceOp, op
from unisono.core.waits import as_completed, wait_all, wait_any, wait_some
from unisono.core.work import Work
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
from unisono.version import VERSION

if TYPE_CHECKING:
    from unisono import rpc, train

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
    "as_completed",
    "init",
    "list_backends",
    "local",
    "op",
    "register",
    "rpc",
    "simulate",
    "spawn",
    "train",
    "typed",
    "wait_all",
    "wait_any",
    "wait_some",
]


def __dir__() -> list[str]:
    """The public names only."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import `unisono.rpc` and `unisono.train` on first use, which keeps `import unisono` fast."""
    if name == "rpc":
        import unisono.rpc as rpc_module

        return rpc_module
    if name == "train":
        import unisono.train as train_module

        return train_module
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")
