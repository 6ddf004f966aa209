"""Compressed sums: results plus residuals equal the inputs, and all ranks get the same bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.train import BFloat16, Compressor, ErrorFeedback, Float16, Int8, RandomK, TopK
from unisono.train.compression import largest, stratified

COMPRESSORS: list[Compressor] = [
    TopK(0.1),
    TopK(1.0),
    RandomK(0.25),
    RandomK(1.0),
    Float16(),
    BFloat16(),
    Int8(),
]
# Counts around the blocks and parts of int8, and with less than one element per rank.
COUNTS = (0, 1, 2, 7, 1021, 3 * 1024, 3 * 1024 + 1, 7001)

every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def gradient(rank: int, step: int, count: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([rank, step, count])
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)).astype(np.float32)


def total(comm: Communicator, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return comm.all_reduce(x.astype(np.float64))


@every_compressor
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_over_many_steps_results_and_residuals_are_what_was_put_in(compressor: Compressor, op: str) -> None:
    steps = 30

    def program(comm: Communicator) -> None:
        for count in COUNTS:
            feedback = ErrorFeedback(compressor)
            put, got = np.zeros(count), np.zeros(count)
            for step in range(steps):
                x = gradient(comm.rank, step, count)
                put += x
                assert feedback.all_reduce(comm, x, op, key=count) is x
                got += x
                for other in comm.all_gather(x):
                    assert other.tobytes() == x.tobytes(), "ranks differ"
            left = total(comm, feedback.residuals[count])
            scale = np.abs(total(comm, np.abs(put))).max(initial=1)
            factor = comm.size if op == "mean" else 1
            np.testing.assert_allclose(got * factor + left, total(comm, put), rtol=0, atol=3e-6 * scale)

    run_ranks(program, 3).values()


@every_compressor
def test_a_restored_state_goes_on_as_if_nothing_had_happened(compressor: Compressor) -> None:
    def program(comm: Communicator) -> None:
        straight, broken = ErrorFeedback(compressor), ErrorFeedback(compressor)
        for step in range(6):
            if step == 3:
                state = broken.state_dict()
                broken.all_reduce(comm, gradient(comm.rank, 99, 1021), key="w")  # the state has no such key
                broken = ErrorFeedback(compressor)
                broken.load_state_dict(state)
            results = []
            for feedback in (straight, broken):
                for key, count in (("w", 1021), (2, 7)):
                    results.append(feedback.all_reduce(comm, gradient(comm.rank, step, count), key=key))
            assert [each.tobytes() for each in results[:2]] == [each.tobytes() for each in results[2:]]
        assert all(np.array_equal(straight.residuals[key], broken.residuals[key]) for key in ("w", 2))

    run_ranks(program, 3).values()


@pytest.mark.parametrize(
    "state", [{}, {"residuals": {"w": [1, 2]}, "calls": {}}, {"residuals": {}, "calls": {"w": "x"}}, None]
)
def test_what_is_no_state_is_not_loaded(state: Any) -> None:
    feedback = ErrorFeedback(TopK(0.5))
    feedback.residuals["w"] = np.ones(3, np.float32)
    with pytest.raises(uni.UsageError, match="state_dict"):
        feedback.load_state_dict(state)
    assert feedback.residuals["w"].tolist() == [1, 1, 1]


def test_topk_sends_the_largest_of_what_is_left() -> None:
    def program(comm: Communicator) -> None:
        feedback = ErrorFeedback(TopK(0.02))
        lefts = [np.zeros(100, np.float32) for _ in range(comm.size)]
        for step in range(6):
            wanted = np.zeros(100, np.float32)
            for rank, left in enumerate(lefts):
                left += gradient(rank, step, 100)
                places = np.argsort(-np.abs(left), kind="stable")[:2]
                wanted[places] += left[places]
                left[places] = 0
            x = gradient(comm.rank, step, 100)
            feedback.all_reduce(comm, x, key="x")
            np.testing.assert_array_equal(x, wanted)
            np.testing.assert_array_equal(feedback.residuals["x"], lefts[comm.rank])

    run_ranks(program, 3).values()


def test_among_equal_magnitudes_the_first_are_chosen() -> None:
    x = np.array([1, -3, 2, 3, -2, 2, 0, 0], np.float32)
    assert [largest(x, k).tolist() for k in (1, 2, 3, 4, 6, 7, 8)] == [
        [1],
        [1, 3],
        [1, 2, 3],
        [1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6],
        list(range(8)),
    ]
    assert largest(np.zeros(5), 3).tolist() == [0, 1, 2]
    assert largest(np.full(5, np.nan), 3).tolist() == [0, 1, 2]


def test_random_places_are_different_in_every_part_and_every_call() -> None:
    for n, k in ((1, 1), (10, 3), (1000, 7), (1000, 1000), (0, 0)):
        places = stratified(n, k, seed=5)
        assert len(places) == k
        for part, place in enumerate(places):
            assert part * n // k <= place < (part + 1) * n // k
    assert stratified(1000, 10, 1).tolist() != stratified(1000, 10, 2).tolist()
    seen = np.unique(np.concatenate([stratified(50, 5, seed) for seed in range(200)]))
    assert seen.tolist() == list(range(50)), "every element has its turn"


def test_random_k_of_different_calls_is_refused_instead_of_added() -> None:
    def program(comm: Communicator) -> None:
        feedback = ErrorFeedback(RandomK(0.1, seed=comm.rank))
        with pytest.raises(uni.CollectiveMismatch, match="random-k"):
            feedback.all_reduce(comm, np.ones(100, np.float32), key="x")

    run_ranks(program, 2).values()


@pytest.mark.parametrize(
    ("compressor", "error"), [(Float16(), 2.0**-11), (BFloat16(), 2.0**-8), (Int8(), 0.5 / 127)], ids=repr
)
def test_a_quantised_sum_is_as_exact_as_its_bits(compressor: Compressor, error: float) -> None:
    def program(comm: Communicator) -> None:
        x = gradient(comm.rank, 0, 5000)
        exact = total(comm, x)
        largest_input = comm.all_reduce(np.abs(x).max(), "max")
        ErrorFeedback(compressor).all_reduce(comm, x, key="x")
        bound = error * (comm.size * largest_input + np.abs(exact).max())
        assert np.abs(x - exact).max() <= bound
        assert np.abs(x - exact).max() > 0, "nothing was compressed"

    run_ranks(program, 3).values()


def test_a_mean_of_float16_does_not_overflow_and_a_sum_says_so() -> None:
    def program(comm: Communicator) -> None:
        feedback = ErrorFeedback(Float16())
        x = np.full(10, 60_000, np.float32)
        np.testing.assert_array_equal(feedback.all_reduce(comm, x.copy(), "mean", key="mean"), x)
        assert np.isinf(feedback.all_reduce(comm, x.copy(), "sum", key="sum")).all()
        assert "sum" not in feedback.residuals

    run_ranks(program, 3).values()


def test_sums_beyond_the_largest_number_are_infinite_without_a_warning() -> None:
    def program(comm: Communicator) -> None:
        sign = 1 - 2 * comm.rank
        for compressor in (TopK(1.0), Float16(), BFloat16(), Int8()):
            feedback = ErrorFeedback(compressor)
            for key, value in {"alike": 3e38, "opposite": 3e38 * sign, "large": 7e4 * sign}.items():
                x = np.full(5, value, np.float32)
                feedback.all_reduce(comm, x, key=key)
                assert np.isfinite(x).all() == (key in feedback.residuals)
            assert "alike" not in feedback.residuals

    run_ranks(program, 2).values()


@every_compressor
def test_a_single_rank_compresses_too(compressor: Compressor) -> None:
    (comm,) = uni.local(1)
    with comm:
        x = gradient(0, 0, 1021)
        put = x.copy()
        feedback = ErrorFeedback(compressor)
        feedback.all_reduce(comm, x, "mean", key="x")
        np.testing.assert_allclose(x + feedback.residuals["x"], put, rtol=1e-5, atol=1e-7)


def test_int8_keeps_tiny_and_zero_blocks() -> None:
    def program(comm: Communicator) -> None:
        x = np.zeros(4096, np.float32)
        x[1024:2048] = np.float32(1e-45) * (comm.rank + 170)
        x[2048:3072] = 1e-30
        x[3072:] = 3e38 / comm.size
        wanted = total(comm, x)
        ErrorFeedback(Int8()).all_reduce(comm, x, key="x")
        assert not x[:1024].any()
        np.testing.assert_allclose(x[2048:], wanted[2048:], rtol=0.02)

    run_ranks(program, 2).values()


@every_compressor
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_all_ranks_at_once_and_no_residual(
    compressor: Compressor, bad: float
) -> None:
    def program(comm: Communicator) -> None:
        feedback = ErrorFeedback(compressor)
        for step in range(3):
            feedback.all_reduce(comm, gradient(comm.rank, step, 3000), "mean", key="x")
        before = feedback.residuals["x"].copy()
        x = gradient(comm.rank, 3, 3000)
        if comm.rank == 1:
            x[1234] = bad
        feedback.all_reduce(comm, x, "mean", key="x")
        assert not np.isfinite(x).all()
        np.testing.assert_array_equal(feedback.residuals["x"], before)
        x = gradient(comm.rank, 4, 3000)
        feedback.all_reduce(comm, x, "mean", key="x")
        assert np.isfinite(x).all()

    run_ranks(program, 3).values()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64", "torch bfloat16", "typed"])
def test_every_kind_of_float_is_compressed_and_comes_back_in_its_kind(kind: str) -> None:
    def program(comm: Communicator) -> None:
        values = np.arange(8) * (comm.rank + 1.0) - 4
        wanted = total(comm, values)
        match kind:
            case "torch bfloat16":
                import torch

                x: Any = torch.tensor(values, dtype=torch.bfloat16)
            case "bfloat16":
                x = values.astype(ml_dtypes.bfloat16)
            case "typed":
                x = uni.typed((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), "bfloat16")
            case _:
                x = values.astype(kind)
        got = ErrorFeedback(TopK(1.0)).all_reduce(comm, x, key="x")
        assert got is x
        if kind == "typed":
            got = (x.data.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(np.asarray([float(each) for each in got]), wanted)

    run_ranks(program, 2).values()


def test_float64_keeps_its_bits() -> None:
    def program(comm: Communicator) -> None:
        x = np.array([1.0 + 2.0**-40, 0.0]) * (comm.rank + 1)
        ErrorFeedback(TopK(0.5)).all_reduce(comm, x, key="x")
        assert x.tolist() == [3 * (1.0 + 2.0**-40), 0.0]

    run_ranks(program, 2).values()


def test_only_sums_and_means_of_floats_are_compressed() -> None:
    (comm,) = uni.local(1)
    with comm:
        feedback = ErrorFeedback(TopK(0.5))
        x = np.ones(4, np.float32)
        for op in ("max", "prod", "min", "band"):
            with pytest.raises(uni.UsageError, match='allowed: "sum", "mean"'):
                feedback.all_reduce(comm, x, op, key="x")
        for wrong in (np.ones(4, np.int32), np.ones(4, np.complex64), np.ones(4, bool)):
            with pytest.raises(uni.UsageError, match="cannot be compressed"):
                feedback.all_reduce(comm, wrong, key="x")
        with pytest.raises(uni.UsageError, match="x is a number"):
            feedback.all_reduce(comm, 1.5, key="x")
        assert feedback.residuals == {}
        feedback.all_reduce(comm, x, key="x")
        with pytest.raises(uni.UsageError, match="had 4 elements before and has 5 now"):
            feedback.all_reduce(comm, np.ones(5, np.float32), key="x")
        for ratio in (0, -1, 1.01, np.nan):
            for kind in (TopK, RandomK):
                with pytest.raises(uni.UsageError, match="ratio"):
                    kind(ratio)
        with pytest.raises(uni.UsageError, match="a compressor"):
            ErrorFeedback(TopK)  # type: ignore[arg-type]
