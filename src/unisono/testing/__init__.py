"""For tests: the conformance kit for authors of backends, and in-process ranks for tests of programs.

    def test_my_backend():
        check_backend(make_backends)        # make_backends(size) -> [Backend of rank 0, of rank 1, ...]

It needs no test framework.
"""

from unisono.testing.case import Case, ConformanceError
from unisono.testing.conformance import CASES, check_backend, run_case
from unisono.testing.ranks import run_local

__all__ = ["CASES", "Case", "ConformanceError", "check_backend", "run_case", "run_local"]


def __dir__() -> list[str]:
    """The public names only."""
    return __all__
