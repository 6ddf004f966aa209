"""Group plans: a communicator that `split`, `sub` or `mesh` made has one until it is used first.

Making a group costs more than a split: many programs split often and use few of the groups.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.backends.sub import SubBackend
from unisono.comm.group import Group

__all__ = ["GroupPlan"]


class GroupPlan(NamedTuple):
    """The values from which a group is made. `members` are world ranks."""

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
        """Close the communicator without making its group.

        False if messages wait for it, or if the backend cannot say: then the group must be made.
        """
        is_left = parent.backend.end_unused(self.context)
        if is_left:
            parent.control.leave_soon(self.members, self.context)
        return is_left
