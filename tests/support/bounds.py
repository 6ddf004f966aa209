"""The times that docs/failure.md promises, doubled: what tests assert."""

from __future__ import annotations

__all__ = ["CTRL_C_WITHIN_S", "REPORTED_WITHIN_S", "SILENT_WITHIN_S"]

REPORTED_WITHIN_S = 1.0
SILENT_WITHIN_S = 6.0
CTRL_C_WITHIN_S = 0.4
