"""Registration: torch learns the name "unisono", and nothing else is imported until a group is made.

torch finds `register` by the entry-point group `torch.backends` at every `import torch` (2.13), later
versions by `torch.distributed.backends` when the name is first asked for. So this module, and what is
imported on the way to it, imports only what torch has imported itself, and a broken install is an error of
`init_process_group`, never of `import torch`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from datetime import timedelta
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Make the backend known to `init_process_group` and `new_group`; twice is once."""
    import torch.distributed as dist

    if dist.is_available():  # some builds of torch have no torch.distributed
        dist.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu"])
        _replace_monitored_barrier(dist)


def _create(options: Any, backend_options: Any) -> Any:
    """Called by torch for each group, on its members."""
    from unisono.pytorch.process_group import ProcessGroup

    return ProcessGroup.create(options)


def _replace_monitored_barrier(dist: Any) -> None:
    """Let `torch.distributed.monitored_barrier` take our groups; torch refuses all but Gloo's.

    Here and not with the first group: programs import the function by name before.
    """
    theirs = dist.monitored_barrier
    if getattr(theirs, "is_unisono", False):
        return

    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = dist.GroupMember.WORLD,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        ours = sys.modules.get("unisono.pytorch.process_group")
        asked = group if group is not None else dist.GroupMember.WORLD
        if ours is None or not isinstance(asked, ours.ProcessGroup):
            return theirs(group, timeout, wait_all_ranks)
        if isinstance(timeout, float):
            warnings.warn(
                "Please specify timeout arg as a timedelta. "
                f"Converting current value of {timeout} assuming it represents seconds",
                stacklevel=2,
            )
            timeout = timedelta(seconds=timeout)
        return asked.monitored_barrier(timeout, wait_all_ranks)

    monitored_barrier.is_unisono = True  # type: ignore[attr-defined]
    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
