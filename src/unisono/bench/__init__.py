"""Measuring collectives of unisono beside those of other libraries, on this machine, in turns.

Nothing here prints: `unisono bench` and the scripts in bench/ do.

    results = contest(options, progress=print)
    results.ratio(case, "unisono", "mpi")
"""

from unisono.bench.cases import Case
from unisono.bench.contest import Options, contest
from unisono.bench.figures import Ratio, Results, Summary
from unisono.bench.operations import OPERATIONS
from unisono.bench.systems import SYSTEMS

__all__ = ["OPERATIONS", "SYSTEMS", "Case", "Options", "Ratio", "Results", "Summary", "contest"]
