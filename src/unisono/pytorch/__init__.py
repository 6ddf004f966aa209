"""PyTorch on unisono: `torch.distributed.init_process_group("unisono")`.

import torch.distributed as dist
import unisono.pytorch  # not needed where torch finds it by itself

dist.init_process_group("unisono")
"""

from typing import TYPE_CHECKING, Any

from unisono.pytorch.registration import register

if TYPE_CHECKING:
    from unisono.pytorch.compression import CompressionState, compression_hook
    from unisono.pytorch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = ["CompressionState", "SyncBatchNorm", "compression_hook", "convert_sync_batchnorm", "register"]

register()


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name on first use: torch may load this package only to find the backend."""
    if name in ("CompressionState", "compression_hook"):
        from unisono.pytorch import compression

        return getattr(compression, name)
    if name in ("SyncBatchNorm", "convert_sync_batchnorm"):
        from unisono.pytorch import sync_batch_norm

        return getattr(sync_batch_norm, name)
    raise AttributeError(f"module 'unisono.pytorch' has no attribute {name!r}")
