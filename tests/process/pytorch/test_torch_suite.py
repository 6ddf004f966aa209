"""torch's own tests, DistributedTest in its wheel: more of them run on ours than on Gloo, and all pass."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.torch_suite import suite_ranks

LEFT_OUT = {
    "test_SyncBatchNorm_process_group",  # needs torchvision
    "test_ddp_logging_data_cpu",  # asks for the name "gloo"; ours is "unisono"
}


@pytest.mark.more
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("gate", "part", "least"),
    [
        ("gloo", "", 114),
        ("mpi", "all_to_all", 12),
    ],  # Gloo itself runs 115 of the first and none of the second
)
def test_the_tests_of_torch_pass(tmp_path: Path, gate: str, part: str, least: int) -> None:
    with suite_ranks(tmp_path, gate) as ranks:
        outcomes = {name: ranks.run(name) for name in ranks.names if part in name and name not in LEFT_OUT}
    failed = {name: text for name, text in outcomes.items() if text not in ("passed", "skipped")}
    assert failed == {}, "\n".join(f"{name}: {text}" for name, text in failed.items())
    assert sum(text == "passed" for text in outcomes.values()) >= least
