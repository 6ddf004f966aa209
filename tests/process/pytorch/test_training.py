"""Training with torch on our backend gives the same results as on Gloo, and as in one process.

The same ranks run all pieces, because importing torch takes longer than most pieces. Two ranks have only one
order of sums, so their results must equal Gloo's bit by bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT

BACKEND = "unisono"
PATIENCE_S = 280


@dataclass(frozen=True)
class Piece:
    """The largest distance from the result of one process and, with 4 ranks, from Gloo's. None: unchecked."""

    alone: float | None
    gloo: float | None = 2e-6
    ranks: tuple[int, ...] = (2, 4)
    is_quick: bool = True


# Adam divides by the root of squared gradients, which magnifies an error of 1e-8 in a small gradient a
# hundredfold.
ADAM = 2e-5

PIECES = {
    "ddp_overlaps": Piece(2e-6),
    "ddp_static_graph": Piece(2e-6),
    "ddp_compiled": Piece(2e-6),
    "ddp_unused_parameters": Piece(2e-6),
    "ddp_no_sync": Piece(2e-6),
    "ddp_join": Piece(2e-6),
    "ddp_sparse": Piece(2e-6),
    "ddp_built_in_hook": Piece(2e-6),
    "ddp_fp16_hook": Piece(2e-3, gloo=2e-3),  # gradients with eleven bits
    "ddp_power_sgd_hook": Piece(None, gloo=2e-4),
    "ddp_power_sgd_hook_with_buckets": Piece(None, gloo=None),
    "ddp_buffers": Piece(None),
    "zero_optimizer": Piece(ADAM, gloo=ADAM),
    "post_local_sgd": Piece(2e-6),
    "fsdp1": Piece(2e-6),
    "fsdp2": Piece(ADAM, gloo=ADAM),
    "fsdp2_bfloat16": Piece(ADAM, gloo=ADAM),
    "fsdp2_divide_factor": Piece(2e-6, gloo=None),
    "hsdp": Piece(ADAM, gloo=ADAM, ranks=(4,)),
    "fsdp2_and_tensor_parallel": Piece(ADAM, gloo=ADAM, ranks=(4,)),
    "dtensor_moves": Piece(0.0, gloo=0.0),
    "dtensor_products": Piece(2e-4, gloo=2e-4),  # of values around 100
    "meshes": Piece(0.0, gloo=0.0, ranks=(4,)),
    "tensor_parallel": Piece(ADAM, gloo=ADAM),
    "sequence_parallel": Piece(ADAM, gloo=ADAM),
    "pipeline_gpipe": Piece(2e-6, gloo=0.0),
    "pipeline_1f1b": Piece(2e-6, gloo=0.0),
    "pipeline_interleaved": Piece(2e-6, gloo=0.0),
    "checkpoint": Piece(None, gloo=ADAM),
    "checkpoint_async": Piece(None, gloo=ADAM),
    "checkpoint_of_another_size": Piece(None, gloo=ADAM),
    "checkpoint_of_fewer_ranks": Piece(None, gloo=ADAM),
    "checkpoint_of_another_backend": Piece(None, gloo=ADAM),
    "forked_workers": Piece(0.0, gloo=0.0),
    "functional_collectives": Piece(2e-6),
    "functional_gradients": Piece(1e-4, gloo=1e-4),  # of values around 50
    "compiled_eagerly": Piece(2e-6),
    "compiled_by_inductor": Piece(2e-6, ranks=(2,), is_quick=False),
}
CASES = [
    pytest.param(name, ranks, marks=() if piece.is_quick and ranks == 2 else pytest.mark.more)
    for name, piece in PIECES.items()
    for ranks in piece.ranks
]


@cache
def ended(ranks: int, is_quick: bool) -> dict[str, Any]:
    """The outcomes of all pieces on this number of ranks, by name, and the names of all pieces."""
    names = [name for name, piece in PIECES.items() if ranks in piece.ranks and (is_quick == piece.is_quick)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        around = {name: text for name, text in os.environ.items() if not name.startswith("UNISONO_")}
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.training_program", str(ranks), results, BACKEND, *names],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=ROOT,
            env={
                **around,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "default::ResourceWarning",
                "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".venv/cache/inductor"),
            },
        )
        assert done.returncode == 0, done.stderr
        for noise in ("ResourceWarning", "Exception ignored"):
            assert noise not in done.stderr, done.stderr
        said: dict[str, Any] = json.loads(results.read_text())
        return said


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_piece_of_training_gives_the_results_of_gloo_and_of_one_process(name: str, ranks: int) -> None:
    piece = PIECES[name]
    for rank, apart in enumerate(ended(ranks, piece.is_quick)["ended"][name]):
        assert "error" not in apart, f"rank {rank}: {apart['error']}"
        wanted = {"gloo": piece.gloo if ranks > 2 or piece.gloo is None else 0.0, "alone": piece.alone}
        for other, near in wanted.items():
            assert (other in apart) == (near is not None)
            assert near is None or apart[other] <= near, f"rank {rank} and {other}: {apart}"


def test_every_piece_is_run() -> None:
    assert ended(2, True)["registered"] == sorted(PIECES)
