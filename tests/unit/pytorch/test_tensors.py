"""Tensors as memory of the engine, and torch's reduce operations as the engine's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unisono.core.dtypes import DTYPES
from unisono.core.ops import DIVIDED_SUM, SCALED_SUM
from unisono.errors import UsageError
from unisono.pytorch.reductions import OPS, divided, is_divided, op_of, scaled
from unisono.pytorch.sparse import check_sparse
from unisono.pytorch.tensors import (
    TYPES,
    apart,
    apart_from,
    cut,
    in_a_row,
    is_plain,
    joined,
    readable,
    target,
    targets,
    updatable,
)

RED = dist.ReduceOp


def test_a_plain_tensor_is_used_as_it_is():
    for dtype in TYPES:
        x = torch.zeros(2, 3, dtype=dtype)
        assert is_plain(x)
        assert readable(x) is x
        assert updatable(x) == (x, None)
        assert target(x) == (x, None)


@pytest.mark.parametrize(
    "given",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(12.0)[::2],
        torch.arange(6.0).expand(2, 6),
        torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        torch.complex(torch.arange(3.0), torch.ones(3)).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "channels last", "conjugated", "negated"],
)
def test_what_is_not_plain_is_copied(given: torch.Tensor):
    assert not is_plain(given)
    seen = readable(given)
    assert is_plain(seen)
    assert torch.equal(seen, given.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg())


def test_a_copy_goes_back_when_the_operation_has_ended():
    base = torch.zeros(3, 2)
    memory, back = updatable(base.t())
    memory += torch.arange(6.0).reshape(2, 3)
    assert torch.equal(base, torch.zeros(3, 2))
    assert back is not None
    back()
    assert torch.equal(base.t(), torch.arange(6.0).reshape(2, 3))
    filled, back = target(base.t())
    filled.fill_(7)
    assert back is not None
    back()
    assert torch.equal(base, torch.full((3, 2), 7.0))


def test_gradients_do_not_matter():
    parameter = torch.nn.Parameter(torch.ones(3))
    memory, back = updatable(parameter)
    assert back is None
    memory.fill_(5)
    assert parameter.tolist() == [5, 5, 5]
    assert parameter.requires_grad
    assert readable(parameter).data_ptr() == parameter.data_ptr()


def test_types_without_arithmetic_are_bytes():
    x = torch.ones(2, 3).to(torch.float8_e4m3fn)
    memory, back = target(x)
    assert back is None
    assert (memory.dtype, memory.shape) == (torch.uint8, (6,))
    assert memory.data_ptr() == x.data_ptr()
    assert readable(torch.zeros((), dtype=torch.float8_e5m2)).shape == (1,)


def test_other_devices_and_layouts_are_refused():
    for tensor in (torch.zeros(2, device="meta"), torch.eye(2).to_mkldnn()):
        for use in (readable, updatable, target):
            with pytest.raises(UsageError, match="allowed: dense tensors on the CPU"):
                use(tensor)


def test_memory_that_is_shared_is_copied():
    whole = torch.arange(10.0)

    def is_copied(x, out):
        read = apart(x, out)
        assert torch.equal(read, x)
        return read is not x

    assert is_copied(whole[2:4], whole)
    assert is_copied(whole, whole[2:4])
    assert is_copied(whole[:5], whole[4:])
    assert not is_copied(whole[:5], whole[5:])
    assert not is_copied(whole[3:3], whole)


def test_tensors_in_a_row_are_one():
    whole = torch.arange(12.0)
    parts = list(whole[2:11].chunk(3))
    row = in_a_row(parts)
    assert row is not None
    assert row.data_ptr() == parts[0].data_ptr()
    assert torch.equal(row, whole[2:11])
    assert torch.equal(joined(parts), whole[2:11])
    uneven = [whole[:1], whole[1:1], whole[1:6].view(1, 5)]
    row = in_a_row(uneven)
    assert row is not None
    assert torch.equal(row, whole[:6])
    for gapped in (
        [whole[:2], whole[3:5]],
        [whole[2:4], whole[:2]],
        [whole[:2], whole[2:4].clone()],
        [whole[:4:2], whole[4:6]],
        [whole[:2], whole[2:4].view(torch.int32)],
        [torch.zeros(0), torch.zeros(0)],
    ):
        assert in_a_row(gapped) is None
    assert torch.equal(joined([whole[:4:2], whole[3:5]]), torch.tensor([0.0, 2.0, 3.0, 4.0]))


def test_every_type_of_the_engine_has_operations():
    assert {str(dtype).removeprefix("torch.") for dtype in OPS} == {*DTYPES, "complex32"}
    assert op_of(RED(RED.SUM), torch.bfloat16) == "sum"
    assert op_of(RED(RED.AVG), torch.float32) == "mean"
    assert op_of(RED(RED.AVG), torch.int32) is DIVIDED_SUM
    assert is_divided(RED(RED.AVG), torch.int32)
    assert not is_divided(RED(RED.AVG), torch.float32)
    assert op_of(RED(RED.SUM), torch.bool) == "lor"
    assert op_of(RED(RED.BXOR), torch.uint8) == "bxor"
    for op, dtype in ((RED.BAND, torch.float32), (RED.MAX, torch.complex64), (RED.AVG, torch.bool)):
        with pytest.raises(UsageError, match=rf"of {dtype}; allowed: "):
            op_of(RED(op), dtype)
    with pytest.raises(UsageError, match="a reduction of"):
        op_of(RED(RED.SUM), torch.float8_e5m2)
    with pytest.raises(UsageError, match="MIN of sparse"):
        check_sparse(RED(RED.MIN))


def test_a_scaled_sum_leaves_what_was_given():
    x = torch.arange(3.0)
    op = dist._make_nccl_premul_sum(0.5)
    assert op_of(op, torch.float32) is SCALED_SUM
    assert scaled(op, x).tolist() == [0, 0.5, 1]
    assert x.tolist() == [0, 1, 2]
    assert scaled(RED(RED.SUM), x) is x


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str
)
def test_integers_are_divided_toward_zero(dtype: torch.dtype):
    signs = [-7, 7] if dtype.is_signed else [7, 200]
    x = torch.tensor(signs, dtype=torch.int64).to(dtype)
    divided(x, 2)
    assert x.to(torch.int64).tolist() == [int(n / 2) for n in signs]


@pytest.mark.parametrize("count", [0, 1, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_tensors_of_their_own_are_joined(count: int, dtype: torch.dtype):
    parts = [((torch.arange(count) + k) % 5 == 0).to(dtype) for k in range(3)]
    whole = joined(parts)
    assert whole.numel() == 3 * count
    assert torch.equal(whole.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in parts]))


def test_rows_are_cut_into_flat_parts_of_the_same_memory():
    x = torch.arange(12.0).view(4, 3)
    parts = cut(x, [1, 0, 3])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [], list(range(3, 12))]
    parts[2].fill_(7)
    assert x[1:].eq(7).all()
    assert [part.numel() for part in cut(torch.empty(0, 3), [0, 0])] == [0, 0]


def test_what_shares_memory_with_the_outputs_is_copied_before_they_are_written():
    whole, other = torch.arange(6.0), torch.arange(3.0)
    own, separate = apart_from([whole[:3], other], [whole[3:]])
    assert separate is other
    assert own.data_ptr() != whole.data_ptr()
    assert own.tolist() == [0, 1, 2]


def test_targets_of_strided_outputs_are_copied_back():
    plain, strided = torch.zeros(3), torch.zeros(3, 2)[:, 0]
    (first, second), back = targets([plain, strided])
    assert first.data_ptr() == plain.data_ptr()
    second.copy_(torch.arange(3.0))
    assert back is not None
    back()
    assert strided.tolist() == [0, 1, 2]
    assert targets([plain])[1] is None
