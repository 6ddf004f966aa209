"""The canonical tree, and that every reproducible algorithm computes it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.plan_numbers import Numbers

from unisono.plans import CATALOG, Buf, Problem, Slice, bound
from unisono.plans.algorithms.canonical import blocks, fold, levels, merge_of
from unisono.plans.amounts import ONE

ORDERED = [
    (collective, name)
    for collective in ("all_reduce", "reduce", "reduce_scatter")
    for name, entry in CATALOG[collective].items()
    if entry.ordered
]


def tree(lo: int, hi: int) -> str:
    """The definition, as text."""
    if hi - lo == 1:
        return str(lo)
    width = 1
    while width * 2 < hi - lo:
        width *= 2
    return f"({tree(lo, lo + width)} {tree(lo + width, hi)})"


@pytest.mark.parametrize("size", range(1, 70))
def test_levels_seen_from_below_are_the_tree_seen_from_above(size: int) -> None:
    held = {rank: str(rank) for rank in range(size)}
    for level in range(levels(size)):
        for rank in range(0, size, 2 << level):
            if (merge := merge_of(rank, size, level)) is not None:
                held[merge.lo] = f"({held[merge.lo]} {held[merge.mid]})"
    assert held[0] == tree(0, size)


@pytest.mark.parametrize("size", range(1, 70))
def test_blocks_are_the_powers_of_two_in_the_size(size: int) -> None:
    found = blocks(size)
    assert [width for _, width in found] == [1 << bit for bit in reversed(range(8)) if size >> bit & 1]
    assert found[-1][0] + found[-1][1] == size


@pytest.mark.parametrize("size", range(1, 20))
def test_a_local_fold_gives_the_tree_wherever_it_is_kept(size: int) -> None:
    slots = [Slice(Buf.TMP, ONE * rank, ONE * (rank + 1)) for rank in range(size)]
    for keep in range(size):
        held = [str(rank) for rank in range(size)]
        for step in fold(slots, keep):
            pair = (step.src, step.dst) if step.left else (step.dst, step.src)
            left, right = (held[operand.start.units] for operand in pair)
            held[step.dst.start.units] = f"({left} {right})"
        assert held[keep] == tree(0, size)


def tree_sum(data: np.ndarray) -> np.ndarray:
    """The definition, on numbers."""
    if len(data) == 1:
        return data[0]
    width = 1 << ((len(data) - 1).bit_length() - 1)
    return tree_sum(data[:width]) + tree_sum(data[width:])


@pytest.mark.parametrize(("collective", "algorithm"), ORDERED)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8, 11, 13, 16, 21])
def test_reproducible_sums_have_the_same_bits(collective: str, algorithm: str, size: int) -> None:
    rng = np.random.default_rng(size)
    # Magnitudes far apart, so that another bracketing gives other bits.
    data = (rng.standard_normal((size, 3 * size)) * 10.0 ** rng.integers(-6, 6, (size, 3 * size))).astype(
        np.float32
    )
    expected = tree_sum(data)
    root = size // 2 if collective == "reduce" else 0
    counts = (3,) * size if collective == "reduce_scatter" else (3 * size,)
    problem = Problem(collective, size, counts, root)
    results = Numbers([bound(problem, rank, algorithm) for rank in range(size)], list(data)).run()
    for rank, result in enumerate(results):
        if collective == "reduce_scatter":
            np.testing.assert_array_equal(result, expected[3 * rank : 3 * rank + 3])
        elif collective == "all_reduce" or rank == root:
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("algorithm", CATALOG["all_reduce"])
@pytest.mark.parametrize("size", [2, 5, 8, 13])
def test_every_all_reduce_leaves_the_same_bits_on_every_rank(algorithm: str, size: int) -> None:
    rng = np.random.default_rng(size)
    data = rng.standard_normal((size, 1021)).astype(np.float32)
    problem = Problem("all_reduce", size, (1021,), hosts=tuple(rank % 3 for rank in range(size)))
    results = Numbers([bound(problem, rank, algorithm) for rank in range(size)], list(data)).run()
    np.testing.assert_allclose(results[0], data.sum(axis=0, dtype=np.float64), rtol=1e-4, atol=1e-4)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
