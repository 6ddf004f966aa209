"""The simulated backend passes the conformance kit on several networks."""

from __future__ import annotations

import pytest

from unisono.simulation import Network, SimBackend, run
from unisono.testing import CASES, Case, run_case

NETWORKS = {
    "rack": Network(),
    "no time at all": Network(latency_s=0.0, bytes_per_s=float("inf")),
    "far and restless": Network(latency_s=5e-3, bytes_per_s=1e8, jitter_s=1e-2),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_promise_is_kept(case: Case, network: str) -> None:
    lacking: set[str] = set()

    def program(backend: SimBackend) -> None:
        lacking.update(case.lacking(backend))
        if not lacking:
            run_case(case, backend)

    run(program, case.size, seed=1, network=NETWORKS[network]).raise_first()
    assert lacking <= {"threads"}
