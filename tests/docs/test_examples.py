"""Every example, and the program in the README, runs and prints the expected text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from unisono.testing import CASES

EXAMPLES = ROOT / "examples"

# The output of four ranks, and of a single process without a launcher.
SAYS = {
    "hello": ["hello from rank 0 of 4", "hello from rank 3 of 4"],
    "send_recv": ["came back from rank 3 and counts 4 ranks", "27 bytes wait from rank 3"],
    "all_reduce": ["sum 10 in all 1,000,003 elements", "largest rank 3", "squares [0 1 4 9]"],
    "split": [
        "rank 0 at (0, 0): its row adds to 1, its dp axis to 2, its pair ['rank 0', 'rank 3']",
        "rank 2 at (1, 0): its row adds to 5, its dp axis to 2, its pair None",
    ],
    "overlap": ["mean of the last element 250,005", "one=4.0 two=8.0"],
    "parameter_server": ["4 ranks trained 20 weights; the largest error is 0.0"],
    "train": [
        "4 ranks ━━",
        "the 4 ranks differ by 0",
        "data-parallel training equals training in one process",
    ],
}
SAYS_ALONE = {
    "hello": ["hello from rank 0 of 1"],
    "send_recv": ["came back from rank 0 and counts 1 ranks", "27 bytes wait from rank 0"],
    "all_reduce": ["sum 1 in all 1,000,003 elements"],
    "overlap": ["mean of the last element 100,002", "one=1.0 two=2.0"],
    "parameter_server": ["1 ranks trained 20 weights; the largest error is 0.0"],
    "own_backend": ["our own backend: [6, 6, 6]", f"{len(CASES)} cases passed"],
    "simulate": ["64 ranks agree on 31.5", "63 ranks raised PeerLost, naming (3,)", "replayed: True"],
}

# The output of two ranks, under two launchers only: importing torch takes longer than training.
SAYS_WITH_TORCH = {
    "torch_ddp": ["━━ 200/200 loss 0.0", "data-parallel training equals training in one process"],
    "torch_fsdp": ["━━ 200/200 loss 0.", "rank 1 keeps 34,760 weights, loaded as they were saved: True"],
}
LAUNCHERS = {
    "unisono run": ("-m", "unisono", "run", "-n", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}
QUICK = ("torch_ddp", "unisono run")  # the others are for test-more


def run(*command: str, **env: str) -> str:
    around = {name: text for name, text in os.environ.items() if not name.startswith("UNISONO_")}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**around, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, *SAYS_ALONE, *SAYS_WITH_TORCH}


@pytest.mark.parametrize("name", SAYS)
def test_four_ranks_say_what_they_should(name: str) -> None:
    said = " ".join(run("-m", "unisono", "run", "-n", "4", f"examples/{name}.py").split())
    for words in SAYS[name]:
        assert words in said


@pytest.mark.parametrize("name", SAYS_ALONE)
def test_one_process_says_what_it_should(name: str) -> None:
    said = " ".join(run(f"examples/{name}.py").split())
    for words in SAYS_ALONE[name]:
        assert words in said


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        pytest.param(name, launcher, marks=() if (name, launcher) == QUICK else pytest.mark.more)
        for name in SAYS_WITH_TORCH
        for launcher in LAUNCHERS
    ],
)
def test_an_example_with_torch_says_what_it_should(name: str, launcher: str) -> None:
    said = run(*LAUNCHERS[launcher], f"examples/{name}.py").replace("[0] ", "")
    for words in SAYS_WITH_TORCH[name]:
        assert words in " ".join(said.split())


def first_program(document: str, folder: Path) -> str:
    """Write the first program of a document to a file; return its path."""
    program = re.search(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert program is not None
    path = folder / "program.py"
    path.write_text(program[1])
    return str(path)


def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    assert run(first_program("README.md", tmp_path)) == "[6.0, 6.0, 6.0, 6.0]\n"


@pytest.mark.parametrize("document", ["docs/data_parallel.md", "docs/failure.md", "docs/simulation.md"])
def test_the_program_of_a_page_runs(document: str, tmp_path: Path) -> None:
    run(first_program(document, tmp_path))


def test_the_program_about_remote_calls_runs(tmp_path: Path) -> None:
    said = run("-m", "unisono", "run", "-n", "2", first_program("docs/rpc.md", tmp_path))
    assert [line.split()[-1] for line in said.splitlines()][:2] == ["5", str(sum(range(1, 1001)))]
    assert "[2, 2]" in said


def test_the_program_about_torch_runs(tmp_path: Path) -> None:
    said = run(*LAUNCHERS["unisono run"], first_program("docs/torch.md", tmp_path))
    assert sorted(said.splitlines()) == [f"[{r}] rank {r} of 2: [1.0, 3.0, 5.0, 7.0]" for r in range(2)]
