"""A group plan: what a communicator that was not used yet has instead of its group."""

from __future__ import annotations

from typing import NamedTuple

from unisono.backends.sub import SubBackend
from unisono.comm.group import Group

__all__ = ["GroupPlan"]


class GroupPlan(NamedTuple):
    """What a group is made from when its communicator is used first. `members` are world ranks."""

    members: tuple[int, ...]
    context: int
    descriptor: bytes
    name: str
    is_introduced: bool

    def make(self, parent: Group) -> Group:
        """Make the group."""
        return Group(
            SubBackend.of(parent.control.backend, self.members),
            parent.control,
            self.context,
            self.name,
            self.descriptor,
            is_introduced=self.is_introduced,
            epoch=parent.epoch,
            parent=parent,
        )

    def leave_unused(self, parent: Group) -> bool:
        """Leave a communicator without a group; False if messages wait for it, or the backend cannot tell."""
        is_left = parent.backend.end_unused(self.context)
        if is_left:
            parent.control.leave_soon(self.members, self.context)
        return is_left
