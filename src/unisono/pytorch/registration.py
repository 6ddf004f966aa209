"""How torch finds the backend."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Make the name "unisono" known to torch.distributed, once."""
    if "UNISONO" not in dist.Backend._plugins:
        dist.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from unisono.pytorch.process_group import ProcessGroup

    return ProcessGroup.create(options)
