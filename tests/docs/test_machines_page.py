"""docs/machines.md draws the tables that the engine runs."""

from __future__ import annotations

import re

import pytest
from tests.support.machines import MACHINES, page, rows_of
from tests.support.paths import ROOT


def test_the_page_is_drawn_from_the_tables() -> None:
    assert (ROOT / "docs/machines.md").read_text() == page(), (
        "python -m tests.support.machines > docs/machines.md"
    )


def test_every_table_of_the_engine_is_drawn() -> None:
    headers = [*(ROOT / "native").rglob("*.hpp")]
    tables = sum(len(re.findall(r"TransitionTable<\w+, \w+, \w+, \d+", each.read_text())) for each in headers)
    assert tables == len(MACHINES)


@pytest.mark.parametrize(("header", "table"), [each[:2] for each in MACHINES])
def test_every_row_of_a_table_is_read(header: str, table: str) -> None:
    """The number of rows is that in the braces of the table in the source."""
    text = (ROOT / header).read_text()
    begin = text.index(f" {table}")
    ends = [text.find(end, begin) for end in ("});", "}};")]
    body = text[begin : min(end for end in ends if end >= 0)]
    assert len(rows_of(header, table)) == len(re.findall(r"^\s+\{\w+::", body, re.MULTILINE)) > 3
