"""DistributedDataParallel on Gloo and on unisono: the time of a step, and how much of it is communication.

    python bench/torch_ddp.py [-n 2,4] [--models mlp10,mlp100,transformer,cnn] [--rounds 9] [--quick]
                              [--keep torch.json [--again]] [--seconds 100]

A step is forward and backward; gradients are views of DDP's buckets. Exposed communication is the time of a
step minus that of one inside `no_sync`, where every rank keeps its gradients. Three turns alternate in the
same processes: a model on Gloo, the same on unisono, and one of them in `no_sync`. Ratios of steps are
Gloo's over ours, round by round: the median, and the least and the most; that of exposed communication is
one of medians. Cores are divided equally among the ranks: with as many ranks as cores there is none left that
could communicate while the ranks compute. `--keep` and `--seconds` as in torch_collectives.py.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_figures import ALONE, Figures, Model, Seconds, Slice, add_arguments
from torch_groups import GLOO, OURS, compete, ratios, run_ranks

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
    add_arguments(parser)
    parser.add_argument("--models", default=None, help=",".join(MODELS))
    parser.add_argument(
        "--quick", action="store_true", help="two ranks, without the largest model, short rounds"
    )
    args = parser.parse_args()
    numbers = [int(n) for n in (args.n or ("2" if args.quick else "2,4")).split(",")]
    names = (args.models or ("mlp10,transformer,cnn" if args.quick else ",".join(MODELS))).split(",")
    rounds = args.rounds or (5 if args.quick else 9)
    turn_s = args.turn or (0.3 if args.quick else 1.0)
    print("ms, median; gloo / unisono: median (least to most)")
    print(f"{'model':>12} {'ranks':>5} {'million':>8} | {'no_sync':>9} {'gloo':>9} {'ours':>9}  step", end="")
    print(f"{'':>14} | exposed: gloo, ours, gloo / ours")
    here = Slice(args, "torch_ddp.py")
    for case in here.missing(Model(ranks, name, millions(name)) for ranks in numbers for name in names):
        if here.left_s() > 0:
            here.figures.steps[case] = run_ranks(rank, case.ranks, case.name, rounds, turn_s)
            show(case, here.figures)
    here.end()


def millions(name: str) -> float:
    """Parameters of a model."""
    with torch.device("meta"):
        model, _ = MODELS[name]()
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 1)


def rank(rank: int, groups: dict[str, Any], name: str, rounds: int, turn_s: float) -> Seconds:
    """One rank: seconds per step by turn."""
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
    return compete(turns, rounds, turn_s, TIMES_MAX)


def check(wrapped: dict[str, nn.Module], step: Callable[[str], None]) -> None:
    """The gradients on both are the same, but for the order of sums."""
    for each in wrapped:
        step(each)
    pairs = zip(*(each.parameters() for each in wrapped.values()), strict=True)
    if not all(torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5) for a, b in pairs):
        raise SystemExit("the gradients on Gloo and on unisono differ")


def show(case: Model, figures: Figures) -> None:
    seconds = figures.steps[case]
    bare, theirs, ours = (f"{statistics.median(seconds[each]) * 1e3:9.1f}" for each in (ALONE, GLOO, OURS))
    spread = "  ".join(
        f"{statistics.median(each) * 1e3:7.1f} ({min(each) * 1e3:.1f}-{max(each) * 1e3:.1f})"
        for each in figures.exposed(case).values()
    )
    print(
        f"{case.name:>12} {case.ranks:>5} {case.millions:>8.1f} | {bare} {theirs} {ours}  "
        f"{ratios(seconds[GLOO], seconds[OURS]):<18} | {spread}  {figures.exposed_ratio(case):.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
