"""For tests: the conformance kit for backends, and in-process ranks for programs.

Knows how to run ranks inside a test and what a backend must keep. Does not know any test framework.
"""

from unisono.testing.case import Case, ConformanceError
from unisono.testing.conformance import CASES, check_backend, run_case
from unisono.testing.ranks import run_local

__all__ = ["CASES", "Case", "ConformanceError", "check_backend", "run_case", "run_local"]


def __dir__() -> list[str]:
    """What is public, and nothing else."""
    return __all__
