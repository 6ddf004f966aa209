"""A stage of a collective, as the backend that runs it below Python gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from unisono._native import RankMap
from unisono.core.dtypes import DType
from unisono.core.ops import ReduceOp

__all__ = ["FINGERPRINT_BYTES", "Stage"]

# Of the record that describes a collective call: see comm/fingerprint.py.
FINGERPRINT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a collective, for the backend that runs it.

    `memory` holds the flat arrays of the plan's buffers (plans.Buf). `header` is the fingerprint that goes
    with the first message to each peer and is compared. `rank_map` leads from the plan's ranks to those of
    the backend, if they differ. `row_bytes`: what travels are rows of announcements, of
    this length (comm/announcement.py); a backend that knows them may leave out what is not used.
    """

    context: int
    tag: int
    dtype: DType
    op: ReduceOp | None
    memory: Mapping[Any, Any]
    header: bytes
    rank_map: RankMap | None = None
    row_bytes: int = 0
