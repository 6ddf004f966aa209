"""Paths in the repository."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT", "SUPPORT", "TESTS", "file_of"]

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent


def file_of(noun: str) -> Path:
    """The test file that a table names by its noun: test_<noun>.py, in any folder."""
    found = [*TESTS.rglob(f"test_acceptance_{noun}.py"), *TESTS.rglob(f"test_{noun}.py")]
    assert found, f"there is no test_{noun}.py"
    return found[0]
