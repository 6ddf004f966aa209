"""A group plan: what a communicator that was not used yet has instead of its group."""

from __future__ import annotations

from typing import NamedTuple

from unisono.backends.sub import SubBackend
from unisono.comm.group import Group

__all__ = ["GroupPlan"]


class GroupPlan(NamedTuple):
    """What a group is made from when its communicator is used first. `members` are ranks of the parent."""

    members: tuple[int, ...]
    context: int
    descriptor: bytes
    name: str
    is_introduced: bool

    def world_ranks(self, parent: Group) -> tuple[int, ...]:
        """The members, by their ranks in the world."""
        ranks = parent.world_ranks
        return tuple([ranks[member] for member in self.members])

    def make(self, parent: Group) -> Group:
        """Make the group."""
        return Group(
            SubBackend.of(parent.backend, self.members),
            parent.control,
            self.context,
            self.name,
            self.descriptor,
            self.world_ranks(parent),
            is_introduced=self.is_introduced,
            epoch=parent.epoch,
            parent=parent,
        )

    def leave_unused(self, parent: Group) -> bool:
        """Leave a communicator without a group; False if messages wait for it, or the backend cannot tell."""
        is_left = parent.backend.end_unused(self.context)
        if is_left:
            parent.control.leave_soon(self.world_ranks(parent), self.context)
        return is_left
