"""Does training with compressed gradients converge as well as without, and how much does it send?

    python bench/compression.py [-n 4] [--steps 600] [--seeds 2] [--lr 0.3] [--momentum 0] [--backend unisono]
        [--plot curves.png]

A classifier of 85,000 parameters learns what a random network of the same kind says, by
DistributedDataParallel and SGD, once plain and once with each compressor, from the same weights and the same
batches. The table shows the loss over the last tenth of the steps (mean of the seeds,
and the least and the most), the accuracy on data that was not trained on, and what one rank sends per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import unisono as uni
from unisono.train.compression import Call, Compressor
from unisono.train.pipeline import Exchange, FloatArray

FEATURES, WIDTH, CLASSES, BATCH = 64, 256, 10, 32
VARIANTS = {
    "plain": None,
    "top-k 1 %": uni.train.TopK(0.01),
    "random-k 1 %": uni.train.RandomK(0.01),
    "random-k 10 %": uni.train.RandomK(0.1),
    "int8": uni.train.Int8(),
    "float16": uni.train.Float16(),
    "bfloat16": uni.train.BFloat16(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", type=int, default=4, help="number of ranks")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--backend", default="unisono", help="of torch.distributed")
    parser.add_argument("--plot", type=Path, help="write the loss curves here")
    args = parser.parse_args()
    env = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = uni.spawn(
            rank,
            args.n,
            os.path.join(folder, "store"),
            args.backend,
            args.steps,
            args.seeds,
            {"lr": args.lr, "momentum": args.momentum},
            env=env,
            timeout=1800,
        )
    runs = ranks[0]
    print(f"{args.n} ranks, {args.steps} steps, {args.seeds} seeds, lr {args.lr}, momentum {args.momentum}\n")
    print("| gradients | loss at the end | accuracy | bytes sent per rank and step | of plain |")
    print("|---|---|---:|---:|---:|")
    for name, (curves, accuracies, nbytes) in runs.items():
        ends = [statistics.fmean(curve[-args.steps // 10 :]) for curve in curves]
        loss = f"{statistics.fmean(ends):.3f} ({min(ends):.3f}-{max(ends):.3f})"
        share = nbytes / runs["plain"][2]
        print(f"| {name} | {loss} | {statistics.fmean(accuracies):.1%} | {nbytes:,.0f} | {share:.1%} |")
    if args.plot is not None:
        draw(runs, args.plot)


def rank(
    comm: uni.Communicator, store: str, backend: str, steps: int, seeds: int, sgd: dict[str, float]
) -> dict[str, tuple[list[list[float]], list[float], float]]:
    """All variants, one after another: loss curves, accuracies, and the bytes of a step."""
    import torch
    import torch.distributed as dist

    import unisono.pytorch  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    files = dist.FileStore(store, comm.size)
    dist.init_process_group(backend, store=files, rank=comm.rank, world_size=comm.size)
    results = {}
    for name, compressor in VARIANTS.items():
        curves, accuracies = [], []
        for seed in range(seeds):
            losses, accuracy, nbytes = train(comm, compressor, steps, seed, sgd)
            curves.append(losses)
            accuracies.append(accuracy)
        results[name] = (curves, accuracies, nbytes)
    dist.destroy_process_group()
    return results


def train(
    comm: uni.Communicator, compressor: Any, steps: int, seed: int, sgd: dict[str, float]
) -> tuple[list[float], float, float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from unisono.pytorch import CompressionState, compression_hook

    torch.manual_seed(seed)
    teacher, student = network(), network()
    ddp = DistributedDataParallel(student, bucket_cap_mb=0.15)
    sent = 4 * sum(p.numel() for p in student.parameters()) * 2 * (comm.size - 1) / comm.size * steps
    if compressor is not None:
        counted = Counted(compressor)
        ddp.register_comm_hook(CompressionState(counted), compression_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), **sgd)
    batches = torch.Generator().manual_seed(1000 * seed + comm.rank + 1)
    losses = np.empty(steps)
    for step in range(steps):
        x = torch.randn(BATCH, FEATURES, generator=batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x), answers(teacher, x))
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    unseen = torch.randn(2000, FEATURES, generator=torch.Generator().manual_seed(seed))
    accuracy = (student(unseen).argmax(1) == answers(teacher, unseen)).float().mean().item()
    sent = sent if compressor is None else counted.bytes_sent
    return comm.all_reduce(losses, "mean").tolist(), accuracy, sent / steps


def network() -> Any:
    from torch import nn

    layers = [
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    ]
    return nn.Sequential(*layers)


def answers(teacher: Any, x: Any) -> Any:
    logits = teacher(x).detach()
    return (logits - logits.mean(0)).argmax(1)


class Counted(Compressor):
    """A compressor of which we count what one rank sends, as the algorithms for long vectors send it."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.bytes_sent = 0.0

    def exchange(self, x: FloatArray, call: Call) -> Exchange:
        share = {"all_reduce": 2 / call.size, "all_gather": 1.0, "all_to_all": 1 / call.size}
        inner = self.compressor.exchange(x, call)
        try:
            asked = next(inner)
            while True:
                self.bytes_sent += (call.size - 1) * share[asked.verb] * asked.x.nbytes
                asked = inner.send((yield asked))
        except StopIteration as end:
            return end.value


def draw(runs: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for name, (curves, _, _) in runs.items():
        mean = np.mean(curves, axis=0)
        window = max(1, len(mean) // 40)
        smooth = np.convolve(mean, np.ones(window) / window, "valid")
        style = {"color": "black", "linewidth": 2.5} if name == "plain" else {"linewidth": 1.2}
        panel.plot(np.arange(len(smooth)) + window, smooth, label=name, **style)
    panel.set_xlabel("step")
    panel.set_ylabel("training loss, mean of all ranks and seeds")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
