"""SECURITY.md says which tests stand for which threat: they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NAMED = re.findall(r"`(test_\w+)::(test_\w+)`", (TESTS.parent / "SECURITY.md").read_text())


def test_every_threat_has_its_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_named_test_exists(file: str, name: str) -> None:
    assert f"\ndef {name}(" in (TESTS / f"{file}.py").read_text()
