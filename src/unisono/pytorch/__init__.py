"""unisono as a backend of torch.distributed: `init_process_group("unisono")` after importing this package."""

from unisono.pytorch.registration import register

__all__: list[str] = []

register()
