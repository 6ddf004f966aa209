"""The numbers in docs/algorithms.md are those of the plans."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from tests.support.paths import ROOT

from unisono.cli import main
from unisono.core.dtypes import DTYPES, DType
from unisono.core.ops import OpCode, as_op
from unisono.errors import UsageError
from unisono.plans import (
    CATALOG,
    LINKS,
    Problem,
    bound,
    cost,
)
from unisono.plans.choose import predict_s
from unisono.plans.cost import _PIECE_COUNT, _PIECES_MAX
from unisono.plans.draw import messages
from unisono.plans.units import bytes_text, seconds_text

PAGE = ROOT / "docs" / "algorithms.md"
BUILT_IN = [*(code.name.lower() for code in OpCode), "mean"]
SIZE, COUNT = 8, 1 << 18
# The default links of `unisono plan`.
SHM = LINKS["shm"]


def table() -> list[str]:
    """The expected table; print("\\n".join(table())) to renew it."""
    lines = [
        "| collective | algorithm | ordered | rounds | messages | sent | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for collective, entries in CATALOG.items():
        for name, entry in entries.items():
            if entry.needs_hosts:
                continue
            problem = Problem(collective, SIZE, counts_of(collective))
            plans = [bound(problem, rank, name) for rank in range(SIZE)]
            itemsize = 1 if collective == "barrier" else 4
            costs = [cost(plan, SHM, itemsize) for plan in plans]
            rounds = len({message.sent_in for message in messages(plans)})
            cells = [
                collective,
                name,
                "yes" if entry.ordered else "",
                str(rounds),
                str(max(each.messages for each in costs)),
                bytes_text(max(each.bytes_sent for each in costs)),
                seconds_text(predict_s(problem, name, itemsize, SHM)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def rows_below(heading: str) -> list[str]:
    section = PAGE.read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")]


def allows(op: str, dtype: DType) -> bool:
    try:
        as_op(op).check(dtype)
    except UsageError:
        return False
    return True


def counts_of(collective: str) -> tuple[int, ...]:
    if collective == "barrier":
        return ()
    if collective in ("all_reduce", "reduce", "broadcast", "scan", "exscan"):
        return (COUNT,)
    return (COUNT // SIZE,) * (SIZE * SIZE if collective == "all_to_all" else SIZE)


def test_the_table_holds() -> None:
    assert rows_below("## In numbers") == table()


def test_the_table_of_operations_holds() -> None:
    shown = {}
    for row in rows_below("## Operations")[2:-1]:
        kind, names = (cell.strip() for cell in row.strip("|").split("|"))
        shown[kind.split()[0].removesuffix("s")] = set(names.split(", "))
    for dtype in DTYPES.values():
        assert shown[dtype.kind.value] == {op for op in BUILT_IN if allows(op, dtype)}


def test_the_command_that_draws_plans_predicts_the_same() -> None:
    for line in table()[2:]:
        collective, name, *_, predicted = (cell.strip() for cell in line.strip("|").split("|"))
        shown = CliRunner().invoke(main, ["plan", collective, "-n", str(SIZE), "--algorithm", name])
        assert shown.exit_code == 0, shown.output
        assert re.search(rf"^predicted +{re.escape(predicted)} *$", shown.output, re.MULTILINE), (
            line,
            shown.output,
        )


def test_every_family_is_described() -> None:
    text = PAGE.read_text()
    for entries in CATALOG.values():
        for entry in entries.values():
            module = entry.builder.__module__.rsplit(".", 1)[1]
            assert f"(`{module}.py`)" in text


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 11, 12, 15, 17, 31, 33])
def test_binary_blocks_cost_two_rounds_more(size: int) -> None:
    rounds = len(bound(Problem("all_reduce", size, (1000,)), 0, "halving_doubling").rounds)
    assert rounds == 2 * (size.bit_length() - 1) + 2


def test_limits_in_the_text_are_those_in_the_code() -> None:
    text = re.sub(r"\s+", " ", PAGE.read_text())
    least, most = _PIECE_COUNT // 1024, _PIECES_MAX
    assert f"segments of at least {least} Ki elements, at most {most} of them" in text
