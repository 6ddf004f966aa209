"""Ranks forked by tests: when one fails, the ranks that wait for it are terminated."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.paths import ROOT

PROGRAM = """
import signal, sys
from tests.support.forked_ranks import fork_ranks

def be_rank(rank):
    if rank == {failing}:
        raise SystemError("as told")
    if {failing} is not None:
        signal.pause()

print(fork_ranks(3, be_rank))
"""


@pytest.mark.parametrize(("failing", "codes"), [(None, [0, 0, 0]), (1, [-15, 1, -15])])
def test_no_rank_outlives_one_that_failed(failing: int | None, codes: list[int]) -> None:
    program = PROGRAM.format(failing=failing)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert ended.stdout == f"{codes}\n"
    assert ("as told" in ended.stderr) == (failing is not None)
