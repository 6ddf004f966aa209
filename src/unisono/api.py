"""The public names of `import unisono`, all in one place.

A module of its own, because `import unisono` runs also where nothing of it is used yet: torch imports
`unisono.pytorch.registration` with itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from unisono import rpc

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
    "typed",
    "wait_all",
    "wait_any",
    "wait_some",
]
