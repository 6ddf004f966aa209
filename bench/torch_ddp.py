"""DistributedDataParallel on Gloo and on unisono: the time of a step, and how much of it is communication.

    python bench/torch_ddp.py [-n 2,4] [--models mlp10,mlp100,transformer,cnn] [--rounds 9] [--quick]
                              [--plot chart.png]

A step is forward and backward; gradients are views of DDP's buckets. Exposed communication is the time of a
step minus that of one inside `no_sync`, where every rank keeps its gradients. Three turns alternate in the
same processes: a model on Gloo, the same on unisono, and one of them in `no_sync`. Ratios of steps are
Gloo's over ours, round by round: the median, and the least and the most; that of exposed communication is
one of medians. Cores are divided equally among the ranks: with as many ranks as cores there is none left that
could communicate while the ranks compute.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_groups import GLOO, OURS, STYLES, compete, ratios, run_ranks, save

ALONE = "no_sync"
TIMES_MAX = 20


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, 1, 1, bias=False),
            nn.BatchNorm2d(wider),
        )
        self.shortcut = nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def mlp(width: int, layers: int, rows: int) -> tuple[nn.Module, Tensor]:
    made: list[nn.Module] = []
    for _ in range(layers):
        made += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*made), torch.randn(rows, width)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(2, 64, 384)


def cnn() -> tuple[nn.Module, Tensor]:
    widths = [(3, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [Residual(*each) for each in widths]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), torch.randn(
        4, 3, 32, 32
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp10": lambda: mlp(1000, 10, 32),
    "mlp100": lambda: mlp(4096, 6, 8),
    "transformer": transformer,
    "cnn": cnn,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", default=None, help="numbers of ranks (2,4)")
    parser.add_argument("--models", default=None, help=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=None, help="turns of each (9)")
    parser.add_argument(
        "--quick", action="store_true", help="two ranks, without the largest model, five rounds"
    )
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    numbers = [int(n) for n in (args.n or ("2" if args.quick else "2,4")).split(",")]
    names = (args.models or ("mlp10,transformer,cnn" if args.quick else ",".join(MODELS))).split(",")
    rounds = args.rounds or (5 if args.quick else 9)
    turn_s = 0.3 if args.quick else 1.0
    print("ms, median; gloo / unisono: median (least to most)")
    print(f"{'model':>12} {'ranks':>5} {'million':>8} | {'no_sync':>9} {'gloo':>9} {'ours':>9}  step", end="")
    print(f"{'':>14} | exposed: gloo, ours, gloo / ours")
    measured = {}
    for ranks in numbers:
        for name in names:
            millions, seconds = run_ranks(rank, ranks, name, rounds, turn_s)
            measured[name, ranks] = seconds
            show(name, ranks, millions, seconds)
    if args.plot:
        draw(measured, args.plot)


def rank(rank: int, groups: dict[str, Any], name: str, rounds: int, turn_s: float) -> tuple[float, Any]:
    """One rank: the size of the model in millions, and seconds per step by turn."""
    torch.manual_seed(0)
    model, _ = MODELS[name]()
    torch.manual_seed(1 + rank)
    _, x = MODELS[name]()
    wrapped = {
        each: DistributedDataParallel(copy.deepcopy(model), process_group=group, gradient_as_bucket_view=True)
        for each, group in groups.items()
    }

    def step(each: str) -> None:
        wrapped[each](x).square().mean().backward()

    def alone() -> None:
        with wrapped[OURS].no_sync():
            step(OURS)

    check(wrapped, step)
    turns = {GLOO: lambda: step(GLOO), ALONE: alone, OURS: lambda: step(OURS)}
    return sum(p.numel() for p in model.parameters()) / 1e6, compete(turns, rounds, turn_s, TIMES_MAX)


def check(wrapped: dict[str, nn.Module], step: Callable[[str], None]) -> None:
    """The gradients on both are the same, but for the order of sums."""
    for each in wrapped:
        step(each)
    pairs = zip(*(each.parameters() for each in wrapped.values()), strict=True)
    if not all(torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5) for a, b in pairs):
        raise SystemExit("the gradients on Gloo and on unisono differ")


def exposed(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Seconds of communication that computing does not hide, round by round; noise may make them negative."""
    return {
        each: [a - b for a, b in zip(seconds[each], seconds[ALONE], strict=True)] for each in (GLOO, OURS)
    }


def show(name: str, ranks: int, millions: float, seconds: dict[str, list[float]]) -> None:
    bare, theirs, ours = (f"{statistics.median(seconds[each]) * 1e3:9.1f}" for each in (ALONE, GLOO, OURS))
    waits = exposed(seconds)
    theirs_ms, ours_ms = (statistics.median(waits[each]) * 1e3 for each in (GLOO, OURS))
    spread = "  ".join(
        f"{statistics.median(each) * 1e3:7.1f} ({min(each) * 1e3:.1f}-{max(each) * 1e3:.1f})"
        for each in (waits[GLOO], waits[OURS])
    )
    print(
        f"{name:>12} {ranks:>5} {millions:>8.1f} | {bare} {theirs} {ours}  "
        f"{ratios(seconds[GLOO], seconds[OURS]):<18} | {spread}  {theirs_ms / ours_ms:.2f}",
        flush=True,
    )


def draw(measured: dict[tuple[str, int], dict[str, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2 * len(measured), 3.2), layout="constrained")
    axes = figure.subplots(1, len(measured), squeeze=False)
    for panel, ((name, ranks), seconds) in zip(axes[0], measured.items(), strict=True):
        bare = statistics.median(seconds[ALONE]) * 1e3
        panel.set_title(f"{name}, {ranks} ranks", fontsize=9)
        panel.bar([GLOO, OURS], [bare, bare], color="#cccccc", label="computing")
        for each, waits in exposed(seconds).items():
            wait = max(0.0, statistics.median(waits)) * 1e3
            panel.bar(
                [each], [wait], bottom=bare, color=STYLES[each]["color"], label=f"communication, {each}"
            )
        panel.set_ylabel("ms per step", fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
