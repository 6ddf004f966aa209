"""The questions that torch asks a group about itself."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from unisono.comm.communicator import Communicator
from unisono.pytorch.compiling import not_compiled

__all__ = ["Identity"]

_CPU: Final = torch.device("cpu")


@not_compiled
class Identity(dist.ProcessGroup):  # type: ignore[misc]
    """The names and answers of a group whose ranks are those of a communicator."""

    def __init__(self, comm: Communicator, store: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size
        self._store = store
        self._name, self._desc = "", ""

    @property
    def communicator(self) -> Communicator:
        """The communicator; torch's calls are numbered among its collectives."""
        return self._comm

    def rank(self) -> int:
        """The rank in this group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def name(self) -> str:
        """The backend's name."""
        return "unisono"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The user's description of the group."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        """torch's name of the group, for C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """The user's description, for C++."""
        return self._desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Identity:
        return self

    @property
    def bound_device_id(self) -> None:
        """None: the group is not bound to a device."""
        return

    @property
    def supports_coalescing(self) -> bool:
        """Whether batches of messages are begun and ended by the group."""
        return False

    supports_splitting = supports_time_estimate = supports_coalescing

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the group has memory of its own for tensors."""
        return False

    def get_group_store(self) -> Any:
        """The store that torch gave this group."""
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._comm._group.next_sequence
