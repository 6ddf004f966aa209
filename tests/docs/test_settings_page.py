"""docs/settings.md has every setting, with its variable, default and range."""

from __future__ import annotations

import re

from tests.support.paths import ROOT
from tests.support.settings_page import page

PAGE = ROOT / "docs" / "settings.md"


def test_the_page_is_made_from_the_settings() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.settings_page > docs/settings.md"


def test_the_page_has_every_variable_that_the_code_reads() -> None:
    source = (ROOT / "src/unisono/config.py").read_text()
    # UNISONO_RUN_*: how `unisono run` passes its options on.
    named = set(re.findall(r'"(UNISONO_(?!RUN)[A-Z_]*[A-Z])"', source))
    assert named - set(re.findall(r"`(UNISONO_[A-Z_]+)`", PAGE.read_text())) == set()
