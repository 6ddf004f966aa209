"""Fixtures of the tests that join a seed."""

from __future__ import annotations

from tests.support.joining_ranks import make_seed, tls

__all__ = ["make_seed", "tls"]
