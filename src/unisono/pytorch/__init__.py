"""PyTorch on unisono: `torch.distributed.init_process_group("unisono")`.

import torch.distributed as dist
import unisono.pytorch  # not needed where torch finds it by itself

dist.init_process_group("unisono")
"""

from unisono.pytorch.registration import register

__all__ = ["register"]

register()
