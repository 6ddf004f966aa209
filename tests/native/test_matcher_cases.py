"""The matchers in Python and in the engine run the same table of cases (tests/support/matching_cases.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.matching_cases import CASES, Step, answers_in_python, random_steps, text_of
from tests.support.native_programs import built


@pytest.fixture(scope="module")
def matcher_test() -> Path:
    return built("matcher_test")


def answers_in_engine(program: Path, steps: list[Step]) -> list[str]:
    ended = subprocess.run([program], input=text_of(steps), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


@pytest.mark.parametrize("name", CASES)
def test_both_matchers_answer_as_the_table_says(matcher_test: Path, name: str) -> None:
    steps, answers = CASES[name]
    assert answers_in_python(steps) == answers
    assert answers_in_engine(matcher_test, steps) == answers


@pytest.mark.parametrize("seed", range(8))
def test_both_matchers_find_the_same_in_long_random_cases(matcher_test: Path, seed: int) -> None:
    """The cases are long enough that the engine's table grows twice."""
    steps = random_steps(seed, 5000)
    found = answers_in_python(steps)
    assert answers_in_engine(matcher_test, steps) == found
    assert len(set(found)) > 100


def test_the_program_refuses_a_step_that_it_does_not_know(matcher_test: Path) -> None:
    ended = subprocess.run([matcher_test], input="post r 1 0 5\nsing\n", capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "not a step: sing\n")
