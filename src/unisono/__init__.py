"""Processes that work together: messages, collectives and groups in Python.

import numpy as np
import unisono as uni

def program(world):
    x = np.full(1_000_003, world.rank, np.float32)
    world.all_reduce(x)
    return x[0]

print(uni.simulate(program, 4).results)
"""

from unisono.buffers import Typed, typed
from unisono.codec import register
from unisono.communicator import Communicator
from unisono.config import Config
from unisono.errors import (
    BackendUnavailable,
    ClosedError,
    CollectiveMismatch,
    DeadlineExceeded,
    Deadlock,
    PeerAborted,
    PeerLost,
    ProtocolError,
    QuorumLost,
    RemoteError,
    RendezvousError,
    Revoked,
    StaleEpoch,
    UnisonoError,
    UsageError,
)
from unisono.mesh import Mesh
from unisono.session import init, list_backends, local, simulate, spawn
from unisono.values import ANY, ReduceOp, Status, op
from unisono.version import VERSION
from unisono.work import Work, wait_all

__version__ = VERSION

__all__ = [
    "ANY",
    "BackendUnavailable",
    "ClosedError",
    "CollectiveMismatch",
    "Communicator",
    "Config",
    "DeadlineExceeded",
    "Deadlock",
    "Mesh",
    "PeerAborted",
    "PeerLost",
    "ProtocolError",
    "QuorumLost",
    "ReduceOp",
    "RemoteError",
    "RendezvousError",
    "Revoked",
    "StaleEpoch",
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
    "simulate",
    "spawn",
    "typed",
    "wait_all",
]
