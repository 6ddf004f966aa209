"""The catalog: the algorithms, refused requests and the texts of refusals."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import unisono.plans
from unisono.errors import UsageError
from unisono.plans import CATALOG, Problem, algorithms, bound, build, entry_of


def test_a_plan_has_its_collective_algorithm_and_rank() -> None:
    problem = Problem("all_reduce", 4, (10,))
    plan = bound(problem, 2, "ring")
    assert (plan.problem, plan.algorithm, plan.rank) == (problem, "ring", 2)
    assert (plan.in_count, plan.out_count, plan.tmp_count) == (0, 10, 0)


@pytest.mark.parametrize("collective", CATALOG)
def test_every_plan_has_the_name_of_its_request(collective: str) -> None:
    counts = {"all_to_all": (2,) * 9, "barrier": ()}.get(
        collective,
        (2,) if collective in ("all_reduce", "reduce", "broadcast", "scan", "exscan") else (2,) * 3,
    )
    for name in algorithms(collective):
        assert build(Problem(collective, 3, counts), 1, name).algorithm == name


def test_plans_are_built_once_for_all_counts() -> None:
    plan = build(Problem("all_reduce", 4, (10,)), 0, "ring")
    assert build(Problem("all_reduce", 4, (10**9,)), 0, "ring") is plan
    assert build(Problem("all_reduce", 5, (10,)), 0, "ring") is not plan


def test_reducing_collectives_have_a_reproducible_algorithm() -> None:
    for collective in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"):
        assert any(entry.ordered for entry in CATALOG[collective].values())
    assert entry_of("scan", "hillis_steele").keeps_rank_order
    assert not entry_of("scan", "hillis_steele").ordered


REFUSED = {
    "an unknown algorithm": (
        Problem("gather", 2, (1, 1)),
        0,
        "ring",
        "algorithm 'ring' is unknown for gather; allowed: tree, flat",
    ),
    "an unknown collective": (
        Problem("all_sum", 2),
        0,
        "ring",
        "collective 'all_sum' is unknown; allowed: all_reduce,",
    ),
    "no ranks": (Problem("barrier", 0), 0, "tree", "at least one rank"),
    "a rank outside": (Problem("barrier", 2), 2, "tree", "rank 2 is outside 0..1"),
    "a root outside": (Problem("broadcast", 2, (1,), root=2), 0, "tree", "root 2 is outside 0..1"),
    "too few counts": (Problem("all_gather", 3, (1, 1)), 0, "ring", "needs 3 counts, not 2"),
    "a negative count": (Problem("all_reduce", 3, (-1,)), 0, "ring", "negative count: -1"),
    "too few hosts": (Problem("barrier", 3, hosts=(0, 1)), 0, "tree", "hosts names 2 ranks of 3"),
    "uneven counts": (
        Problem("all_to_all", 2, (1, 2, 3, 4)),
        0,
        "dissemination",
        "needs equal counts; for uneven ones: pairwise, flat",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_request_is_refused(name: str) -> None:
    problem, rank, algorithm, says = REFUSED[name]
    with pytest.raises(UsageError, match=says):
        build(problem, rank, algorithm)


def test_plans_import_nothing_from_above() -> None:
    allowed = ("unisono.plans", "unisono.errors", "unisono.core.dtypes", "unisono.core.ops")
    folder = Path(unisono.plans.__file__).parent
    # Only the executor runs plans over the backend contract.
    for path in sorted(set(folder.rglob("*.py")) - {folder / "execute.py"}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unisono"):
                assert node.module.startswith(allowed), f"{path.name} imports {node.module}"
