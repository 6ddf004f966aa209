"""How the ranks of a process group meet: through the store that torch gives them."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.world import init, local

__all__ = ["join_world"]


def join_world(store: Any, rank: int, size: int, timeout: timedelta, name: str) -> Communicator:
    """The world of the ranks that share this store."""
    if size == 1:
        return local(1)[0]
    if rank == 0:
        store.set("unisono", str(Path(tempfile.mkdtemp()) / "ticket"))
    path = store.get("unisono").decode()
    return init("native", rank=rank, size=size, join=path, timeout=timeout.total_seconds())
