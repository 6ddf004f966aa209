"""The chart of a measurement: time per call over bytes, one panel for each operation.

matplotlib is imported only when a chart is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from unisono.bench.figures import Results
from unisono.errors import UsageError

__all__ = ["draw"]

_STYLES: Final[dict[str, dict[str, Any]]] = {
    "unisono": {"color": "#0b6e4f", "marker": "o", "linewidth": 2.0},
    "unisono-tcp": {"color": "#0b6e4f", "marker": "o", "linewidth": 2.0, "linestyle": "--"},
    "mpi": {"color": "#4059ad", "marker": "s"},
    "mpi-tcp": {"color": "#4059ad", "marker": "s", "linestyle": "--"},
    "gloo": {"color": "#b0413e", "marker": "^"},
}
_WIDE: Final = 3


def draw(results: Results, path: Path) -> None:
    """Write the chart as PNG, SVG or PDF, by the suffix of the path.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib", next_step="pip install matplotlib") from None

    operations = [
        name
        for name in results.operations()
        if any(len(results.sizes(name, ranks)) > 1 for ranks in results.ranks())
    ]
    numbers = results.ranks()
    if not operations:
        raise UsageError(
            "--plot needs an operation that was measured with several sizes",
            next_step="name more --sizes, or fewer patterns in --only",
        )
    columns = min(_WIDE, len(operations))
    rows = -(-len(operations) // columns) * len(numbers)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.set_visible(False)
    for group, ranks in enumerate(numbers):
        for index, operation in enumerate(operations):
            row = group * (rows // len(numbers)) + index // columns
            _panel(axes[row][index % columns], results, operation, ranks)
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        handles.update((label, line) for line, label in zip(*panel.get_legend_handles_labels(), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5, frameon=False)
    machine = results.machine
    figure.supxlabel(f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the chart cannot be written to {path}", cause=str(error), next_step="name another file"
        ) from None


def _panel(panel: Any, results: Results, operation: str, ranks: int) -> None:
    panel.set_visible(True)
    panel.set_title(f"{operation}, {ranks} ranks", fontsize=10)
    for system, style in _STYLES.items():
        points = [
            (case.nbytes, seconds * 1e6)
            for case in results.sizes(operation, ranks)
            if (seconds := results.seconds(case, system)) is not None
        ]
        if points:
            panel.plot(*zip(*points, strict=True), label=system, markersize=4, **{"linewidth": 1.2, **style})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("bytes", fontsize=8)
    panel.set_ylabel("us per call", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
