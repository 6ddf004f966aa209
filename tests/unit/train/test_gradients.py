"""uni.train: trees of arrays are averaged and broadcast in buckets, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.train.tree import leaves_of


class Layer(NamedTuple):
    weight: Any
    bias: Any


@dataclass
class Model:
    name: Any
    layers: list[Any]
    head: dict[Any, Any]


def tree(rank: int) -> Model:
    """Arrays of several types, some not contiguous, one twice; a dict filled in another order per rank."""
    rng = np.random.default_rng(rank)
    shared = rng.standard_normal((3, 5))
    layers = [
        Layer(rng.standard_normal((7, 11)).astype(np.float32), rng.standard_normal(11).astype(np.float32)),
        Layer(rng.standard_normal((4, 6)).T, shared),
        (rng.standard_normal((8, 8)).astype(np.float32)[::2, 1::3], np.array(rng.standard_normal())),
        [None, np.zeros(0), rng.standard_normal(1021).astype(np.complex64) * (1 + 2j)],
    ]
    head = {"half": rng.standard_normal(9).astype(np.float16), 3: shared, (1, "x"): rng.standard_normal(2)}
    keys = list(head)[:: 1 if rank % 2 else -1]
    return Model(None, layers, {key: head[key] for key in keys})


def arrays(model: Model) -> list[Any]:
    """The arrays in a fixed order, found without leaves_of."""
    weights = [each for layer in model.layers for each in layer if each is not None]
    return [*weights, model.head["half"], model.head[(1, "x")]]


def means(size: int) -> list[Any]:
    every = [arrays(tree(rank)) for rank in range(size)]
    return [
        np.mean([np.asarray(each, complex) for each in same], axis=0) for same in zip(*every, strict=True)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 4096, 25 * 2**20])
def test_every_array_becomes_its_mean_where_it_lies(bucket_bytes: int) -> None:
    def program(comm: Communicator) -> None:
        model = tree(comm.rank)
        mine = arrays(model)
        assert uni.train.average_gradients(comm, model, bucket_bytes) is model
        for got, given, wanted in zip(arrays(model), mine, means(comm.size), strict=True):
            assert got is given
            np.testing.assert_allclose(got, wanted, rtol=2e-3 if got.dtype == np.float16 else 1e-5, atol=1e-6)

    run_ranks(program, 3).values()


def test_torch_tensors_are_leaves_too() -> None:
    import torch

    def program(comm: Communicator) -> None:
        straight = torch.arange(6.0).reshape(2, 3) + comm.rank
        crossed = (torch.arange(6.0).reshape(2, 3) * comm.rank).T.requires_grad_()
        half = torch.full((5,), comm.rank, dtype=torch.bfloat16)
        uni.train.average_gradients(comm, {"a": straight, "b": [crossed, half]})
        assert torch.equal(straight, torch.arange(6.0).reshape(2, 3) + 1)
        assert torch.equal(crossed.detach(), torch.arange(6.0).reshape(2, 3).T)
        assert half.tolist() == [1.0] * 5

    run_ranks(program, 3).values()


def test_gradients_are_averaged_while_others_are_computed() -> None:
    def program(comm: Communicator) -> None:
        averager = uni.train.GradientAverager(comm, bucket_bytes=1000)
        for turn in range(3):
            layers = [np.arange(60.0) * layer + comm.rank + turn for layer in range(9)]
            for layer in layers:
                averager.add({"w": layer[:50], "b": layer[50:]})
            averager.finish()
            for number, layer in enumerate(layers):
                np.testing.assert_allclose(layer, np.arange(60.0) * number + 1 + turn)
        averager.finish()

    run_ranks(program, 3).values()


def test_buckets_are_started_when_they_are_full_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (comm,) = uni.local(1)
    with comm:
        averager = uni.train.GradientAverager(comm, bucket_bytes=800)
        started: list[int] = []
        monkeypatch.setattr(averager, "_start", lambda bucket: started.append(len(bucket)))
        averager.add([np.ones(40), np.ones(50)])
        assert started == []
        averager.add(np.ones(10))
        assert started == [3]
        averager.add([np.ones(1000), np.ones(1)])
        assert started == [3, 1]
        averager.finish()
        assert started == [3, 1, 1]


@pytest.mark.parametrize(
    "compressor", [uni.train.TopK(0.05), uni.train.RandomK(0.1), uni.train.Int8()], ids=repr
)
def test_compressed_buckets_lose_nothing_over_many_steps(compressor: uni.train.Compressor) -> None:
    shapes = [(7, 11), (11,), (30, 3), (2,), (500,)]

    def gradients(rank: int, step: int) -> list[Any]:
        rng = np.random.default_rng([rank, step])
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def program(comm: Communicator) -> None:
        feedback = uni.train.ErrorFeedback(compressor)
        got = [np.zeros(shape) for shape in shapes]
        for step in range(20):
            mine = gradients(comm.rank, step)
            uni.train.average_gradients(comm, mine, 300, compression=feedback)
            for sum_, each in zip(got, mine, strict=True):
                sum_ += each
        left = [comm.all_reduce(residual.astype(np.float64)) for residual in feedback.residuals.values()]
        assert len(left) == 3
        put = [np.zeros(shape) for shape in shapes]
        for rank in range(comm.size):
            for step in range(20):
                for sum_, each in zip(put, gradients(rank, step), strict=True):
                    sum_ += each
        flat = [np.concatenate([each.ravel() for each in many]) for many in (got, left, put)]
        np.testing.assert_allclose(flat[0] * comm.size + flat[1], flat[2], atol=1e-4)

    run_ranks(program, 3).values()


@pytest.mark.parametrize("compression", [None, uni.train.TopK(0.5)])
def test_averaging_has_one_deadline_for_all_buckets(compression: uni.train.Compressor | None) -> None:
    def program(comm: Communicator) -> None:
        feedback = None if compression is None else uni.train.ErrorFeedback(compression)
        given = [np.full(5, comm.rank, np.float32), np.full(3, comm.rank * 2.0)]
        uni.train.average_gradients(comm, given, 1, compression=feedback, timeout=100)
        if comm.rank == 0:
            with pytest.raises(uni.DeadlineExceeded):
                uni.train.average_gradients(comm, given, 1, compression=feedback, timeout=0.05)
            comm.send(b"late", 1)
        else:
            assert comm.recv_bytes(0) == b"late"

    run_ranks(program, 2).values()


def test_a_broadcast_of_parameters_has_a_deadline() -> None:
    def program(comm: Communicator) -> None:
        given = [np.full(5, comm.rank, np.float32), np.full(3, comm.rank * 2.0)]
        uni.train.broadcast_parameters(comm, given, 1, timeout=100)
        assert [each.tolist() for each in given] == [[1.0] * 5, [2.0] * 3]
        if comm.rank == 1:
            with pytest.raises(uni.DeadlineExceeded):
                uni.train.broadcast_parameters(comm, given, 1, timeout=0.05)
            comm.send(b"late", 0)
        else:
            assert comm.recv_bytes(1) == b"late"

    run_ranks(program, 2).values()


@pytest.mark.parametrize("root", [0, 2])
def test_parameters_of_root_are_copied_to_all_ranks(root: int) -> None:
    def program(comm: Communicator) -> None:
        model = tree(comm.rank)
        extra = {
            "steps": np.arange(5) * comm.rank,
            "flags": np.array([comm.rank == root]),
            "large": np.full(4_000_000, comm.rank, np.float64),  # a bucket of its own
        }
        assert uni.train.broadcast_parameters(comm, (model, extra), root)[0] is model
        for got, wanted in zip(arrays(model), arrays(tree(root)), strict=True):
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(extra["steps"], np.arange(5) * root)
        assert extra["flags"].all()
        assert (extra["large"] == root).all()

    run_ranks(program, 3).values()


def test_trees_that_differ_are_refused_on_all_ranks() -> None:
    def program(comm: Communicator) -> None:
        for mine, other in (
            ({"a": np.ones(2)}, {"b": np.ones(2)}),
            ([np.ones(4)], [np.ones((2, 2))]),
            ([np.ones(4)], [np.ones(2), np.ones(2)]),
            ([np.ones(4)], [np.ones(4, np.int64)]),
        ):
            with pytest.raises(uni.CollectiveMismatch, match=r"ranks \[1\] differ from those of rank 0"):
                uni.train.broadcast_parameters(comm, other if comm.rank == 1 else mine)
        assert comm.all_reduce(1) == 3

    run_ranks(program, 3).values()


def test_what_cannot_be_averaged_is_refused_before_anything_is_sent() -> None:
    locked = np.ones((2, 2))
    locked.flags.writeable = False
    wrong: list[tuple[Any, str]] = [
        ({"w": [np.ones(2), np.ones(2, np.int32)]}, r"arrays\['w'\]\[1\] has dtype int32"),
        ([np.ones(2), np.ones(2, bool)], r"arrays\[1\] has dtype bool"),
        (Layer(np.ones(2), 1.5), r"arrays.bias is a number, float"),
        ([np.float32(1)], r"arrays\[0\] is a number"),
        ([locked], r"arrays\[0\] is read-only"),
        ([locked.T[:1]], r"arrays\[0\] is read-only"),
        (["text"], r"arrays\[0\] is str"),
        ({object(): np.ones(2)}, r"key of type object"),
    ]
    (comm,) = uni.local(1)
    with comm:
        for arrays_, why in wrong:
            with pytest.raises(uni.UsageError, match=why):
                uni.train.average_gradients(comm, arrays_)
        with pytest.raises(uni.UsageError, match="allowed: floating-point types"):
            uni.train.average_gradients(
                comm, np.ones(2, complex), compression=uni.train.ErrorFeedback(uni.train.Int8())
            )
        with pytest.raises(uni.UsageError, match=r"TopK.* allowed: an ErrorFeedback"):
            uni.train.average_gradients(comm, np.ones(2), compression=uni.train.TopK(0.5))
        with pytest.raises(uni.UsageError, match="bucket_bytes"):
            uni.train.average_gradients(comm, np.ones(2), 0)
        for nothing in ([], {}, None, [None, ()]):
            assert uni.train.average_gradients(comm, nothing) is nothing


def test_leaves_have_the_order_of_their_keys() -> None:
    leaves = leaves_of({"b": np.ones(1), "a": {2: np.ones(2), 10: np.ones(3)}, 1: np.ones(4)}, "x")
    assert [str(leaf) for leaf in leaves] == [
        "x[1] float64[4]",
        "x['a'][10] float64[3]",
        "x['a'][2] float64[2]",
        "x['b'] float64[1]",
    ]
