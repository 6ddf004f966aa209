"""Ranks of torch.distributed that fail in one way: what each of them saw, and when.

python -m tests.support.torch_failures FAILURE SIZE RESULTS
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import unisono.pytorch  # noqa: F401


def killed_in_backward(rank: int, folder: Path, hook: Any = None) -> None:
    """Rank 1 is killed in its third step, between two buckets of gradients."""
    model = DDP(nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)]), bucket_cap_mb=0.5)
    if hook is not None:
        model.register_comm_hook(None, hook)
    step = 0

    def die(gradient: Tensor) -> None:
        if rank == 1 and step == 2:
            (folder / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    model.module[3].weight.register_hook(die)
    for step in range(1000):  # noqa: B007  # the hook reads it
        model(torch.ones(4, 300)).sum().backward()


def killed_in_hook(rank: int, folder: Path) -> None:
    """The same, with gradients that a hook of Python's compresses: its callback fails."""
    killed_in_backward(rank, folder, fp16_compress_hook)


def killed_in_all_reduce(rank: int, folder: Path) -> None:
    """Rank 1 is killed while the others wait for it."""
    x = torch.full((1 << 16,), float(rank))
    dist.all_reduce(x)
    if rank == 1:
        (folder / "killed").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)


def other_call(rank: int, folder: Path) -> None:
    """Rank 1 calls something else."""
    x = torch.ones(12)
    if rank == 1:
        dist.broadcast(x, 0)  # this line is named
    else:
        dist.all_reduce(x)  # and this one


def other_length(rank: int, folder: Path) -> None:
    """Rank 1 has one element more; Gloo ends the process, or gives wrong sums."""
    dist.all_reduce(torch.ones(1001 if rank == 1 else 1000))


def other_type(rank: int, folder: Path) -> None:
    dist.all_reduce(torch.ones(64, dtype=torch.float64 if rank == 1 else torch.float32), async_op=True).wait()


def other_root(rank: int, folder: Path) -> None:
    dist.broadcast(torch.ones(7), 1 if rank == 1 else 0)


FAILURES: dict[str, Callable[[int, Path], None]] = {
    each.__name__: each
    for each in (
        killed_in_backward,
        killed_in_hook,
        killed_in_all_reduce,
        other_call,
        other_length,
        other_type,
        other_root,
    )
}


def main() -> None:
    size, results, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    results.write_text(json.dumps({name: ended(FAILURES[name], size) for name in names}))


def ended(failure: Callable[[int, Path], None], size: int) -> dict[str, Any]:
    """How new ranks ended, and what those that were not killed saw."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                be_rank(failure, rank, size, folder)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        killed = folder / "killed"
        return {
            "codes": codes,
            "killed": float(killed.read_text()) if killed.exists() else None,
            "ended": [json.loads(file.read_text()) for file in sorted(folder.glob("ended.*"))],
        }


def be_rank(failure: Callable[[int, Path], None], rank: int, size: int, folder: Path) -> None:
    code = 1
    try:
        dist.init_process_group(
            "unisono",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()
        said: dict[str, Any] = {"rank": rank, "error": None, "text": ""}
        try:
            failure(rank, folder)
        except RuntimeError as error:
            said |= {"error": type(error).__name__, "text": str(error)}
        said["when"] = time.time()
        (folder / f"ended.{rank}").write_text(json.dumps(said))
        dist.destroy_process_group()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
