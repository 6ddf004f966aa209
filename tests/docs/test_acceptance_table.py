"""docs/acceptance.md: every test that it names exists, and no case of the other projects is missing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT, file_of

TABLE = ROOT / "docs" / "acceptance.md"

# The number of cases of each kind in ferrotorch's suite.
FERROTORCH = {
    "BK": 12, "CO": 24, "AS": 3, "PP": 5, "DD": 3, "FS": 21, "DM": 10, "DT": 8, "PI": 4, "BN": 6, "RP": 6,
    "CK": 27, "GB": 3, "MP": 6, "UC": 7, "GT": 5, "GC": 5, "GR": 8, "GE": 6, "GP": 8, "NC": 1,
    "CF": 61, "SC": 1,
}  # fmt: skip
# The number of integration tests in each file of nexar.
NEXAR = {
    "allreduce": 7, "barrier": 3, "broadcast": 3, "compressed": 4, "exchange": 8, "iov": 3, "nonblocking": 4,
    "reduce": 5, "rpc": 1, "rs_ag_allreduce": 3, "scan": 5, "split": 1, "tagged": 4, "elastic": 2,
    "fault_injection": 5, "recovery": 4, "sparse": 15,
}  # fmt: skip
WEAKNESSES = {"F": 38, "N": 34}


def cells() -> list[tuple[str, str]]:
    """The rows of all tables, without their heads."""
    rows = [line.split("|")[1:3] for line in TABLE.read_text().splitlines() if line.startswith("|")]
    return [
        (left.strip(), right.strip())
        for left, right in rows
        if left.strip() not in ("their case", "entry", "---")
    ]


@cache
def functions_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def cases_named() -> Counter[str]:
    named: Counter[str] = Counter()
    for left, _ in cells():
        if "/" in left:
            named.update(left.split())
            continue
        found = re.fullmatch(r"([A-Z]+)(\d+)(?:-\1(\d+))?", left)
        assert found is not None, f"row {left!r} names no case"
        kind, first, last = found.groups()
        numbers = range(int(first), int(last or first) + 1)
        named.update(f"{kind}{number:02d}" if len(kind) == 2 else f"{kind}{number}" for number in numbers)
    return named


def test_every_test_named_in_the_table_exists() -> None:
    named = re.findall(r"`(\w+)::(test_\w+)`", TABLE.read_text())
    assert len(named) > 150
    missing = [f"{noun}::{name}" for noun, name in named if name not in functions_in(file_of(noun))]
    assert missing == []


def test_every_case_of_others_stands_in_the_table_once() -> None:
    wanted = {f"{kind}{n:02d}" for kind, count in FERROTORCH.items() for n in range(1, count + 1)}
    wanted |= {f"{kind}{n}" for kind, count in WEAKNESSES.items() for n in range(1, count + 1)}
    named = cases_named()
    assert [case for case, times in named.items() if times > 1] == []
    assert {case for case in named if "/" not in case} == wanted
    files = Counter(case.split("/")[0] for case in named if "/" in case)
    assert dict(files) == NEXAR


def test_a_row_without_a_test_says_why() -> None:
    reasons = (
        "not there yet", "not part of this design", "not a backend here", "assert nothing", "fixture file",
        "bench/", "test_acceptance_table.py",
    )  # fmt: skip
    bare = [
        left for left, right in cells() if "::test_" not in right and not any(r in right for r in reasons)
    ]
    assert bare == []


def test_every_acceptance_test_of_the_published_cases_is_in_the_table() -> None:
    """Each regression test exists for an entry of the table, which must name the test."""
    text = TABLE.read_text()
    own = {"test_a_rank_that_came_late_is_not_blamed_for_one_that_never_came"}  # first found in this project
    tests = {name for name in functions_in(file_of("regressions")) if name.startswith("test_")}
    assert sorted(name for name in tests - own if f"`regressions::{name}`" not in text) == []
