"""Registration: torch learns the name "unisono", and nothing else is imported until a group is made.

torch finds `register` by the entry-point group `torch.backends` at every `import torch` (2.13), later
versions by `torch.distributed.backends` when the name is first asked for. So this module, and what is
imported on the way to it, imports only what torch has imported itself, and a broken install is an error of
`init_process_group`, never of `import torch`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Make the backend known to `init_process_group` and `new_group`; twice is once."""
    import torch.distributed as dist

    if dist.is_available():  # some builds of torch have no torch.distributed
        dist.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    """Called by torch for each group, on its members."""
    from unisono.pytorch.process_group import ProcessGroup

    return ProcessGroup.create(options)
