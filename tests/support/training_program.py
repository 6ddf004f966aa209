"""Ranks that run one piece after another, each on Gloo and on our backend.

    python -m tests.support.training_program SIZE RESULTS OURS PIECE...

Everything is imported once; then the ranks are forked. For each piece, every rank reports the distance of its
results from Gloo's and from those of one process, or the exception. The reports are written to a file as
JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tests.support.forked_ranks import fork_ranks
from tests.support.training import checkpoints, data_parallel, functional, pipelines, sharded  # noqa: F401
from tests.support.training.pieces import GLOO, PIECES, Job, Piece, Tensors, distance

import unisono.pytorch  # noqa: F401

# The longest piece, on a busy machine.
PIECE_S = 200.0


def main() -> None:
    size, results, ours, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    torch.set_num_threads(1)
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        codes = fork_ranks(size, lambda rank: be_rank(rank, size, Path(folder), ours, names))
        ended = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("ended.*"))]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    by_name = {name: [each[name] for each in ended] for name in names}
    results.write_text(json.dumps({"registered": sorted(PIECES), "ended": by_name}))


def be_rank(rank: int, size: int, folder: Path, ours: str, names: list[str]) -> None:
    """The program of a forked rank."""
    faulthandler.enable()
    ended: dict[str, Any] = {}
    for name in names:
        faulthandler.dump_traceback_later(PIECE_S, exit=True)
        began = time.monotonic()
        ended[name] = end_of(PIECES[name], name, rank, size, folder, ours)
        ended[name]["seconds"] = round(time.monotonic() - began, 2)
    faulthandler.cancel_dump_traceback_later()
    (folder / f"ended.{rank}").write_text(json.dumps(ended))


def end_of(piece: Piece, name: str, rank: int, size: int, folder: Path, ours: str) -> dict[str, Any]:
    """The outcome of a piece on this rank."""
    try:
        got = run(piece, Job(rank, size, ours, folder / f"{name}.ours"))
        apart: dict[str, Any] = {}
        if piece.is_on_gloo:
            apart["gloo"] = distance(got, run(piece, Job(rank, size, GLOO, folder / f"{name}.gloo")))
        if piece.alone is not None:
            apart["alone"] = distance(got, piece.alone(size))
    except Exception:
        return {"error": traceback.format_exc()}
    return apart


def run(piece: Piece, job: Job) -> Tensors:
    job.folder.mkdir(exist_ok=True)
    torch.manual_seed(job.rank)
    if piece.makes_worlds:
        return piece.run(job)
    with job.world():
        return piece.run(job)


if __name__ == "__main__":
    main()
