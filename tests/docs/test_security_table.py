"""The tests that SECURITY.md names for each threat exist."""

from __future__ import annotations

import re

import pytest
from tests.support.paths import ROOT, file_of

NAMED = re.findall(r"`(test_\w+)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())


def test_every_threat_has_its_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_named_test_exists(file: str, name: str) -> None:
    assert f"\ndef {name}(" in file_of(file.removeprefix("test_")).read_text()
