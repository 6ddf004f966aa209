"""Values: element types, operations and their identities."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed
from tests.support.oracle import UFUNCS

import unisono as uni
from unisono import _native
from unisono.core.dtypes import BFLOAT16, DTYPES, Kind, dtype_named
from unisono.core.envelope import TAG_MAX
from unisono.core.ops import OpCode, ReduceOp, as_op, op
from unisono.errors import UsageError

LOCATIONS = ("maxloc", "minloc")
INTEGER_OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor", "lxor", *LOCATIONS)
FLOAT_OPS = ("sum", "prod", "min", "max", "mean", *LOCATIONS)
OPS = (*INTEGER_OPS, "mean")
# The table of DESIGN section 3, written out.
ALLOWED = {
    "bool": ("min", "max", "band", "bor", "bxor", "land", "lor", "lxor"),
    **{f"{sign}int{bits}": INTEGER_OPS for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), FLOAT_OPS),
    **dict.fromkeys(("complex64", "complex128"), ("sum", "prod", "mean")),
}


def numpy_type(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def test_the_types_are_those_of_the_design():
    assert set(DTYPES) == set(ALLOWED)


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_has_the_size_and_storage_of_numpys(name):
    dtype = dtype_named(name)
    assert dtype.itemsize == numpy_type(name).itemsize == dtype.storage.itemsize
    assert dtype.storage == (np.dtype("uint16") if name == "bfloat16" else np.dtype(name))
    assert dtype.is_half == (name in ("float16", "bfloat16"))
    assert str(dtype) == name


def test_codes_count_up_in_the_order_of_the_table():
    assert [dtype.code for dtype in DTYPES.values()] == list(range(len(DTYPES)))
    assert [code.name.lower() for code in sorted(OpCode)] == list(INTEGER_OPS)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "bool"])
def test_the_native_kernels_read_the_same_codes(name):
    """A code with another meaning there would give a result other than 3 + 2 = 5 or 3 * 2 = 6."""
    dtype, kind = DTYPES[name], numpy_type(name)
    for code, wanted in ((OpCode.SUM, 5), (OpCode.PROD, 6)):
        out = np.array([2], kind).view(dtype.storage)
        _native.reduce(out, out, np.array([3], kind).view(dtype.storage), dtype.code, code)
        assert out.view(kind)[0] == wanted


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("operation", OPS)
def test_operations_are_allowed_as_the_design_says(name, operation):
    if operation in ALLOWED[name]:
        as_op(operation).check(DTYPES[name])
        return
    with pytest.raises(UsageError, match=f"{operation!r} is not defined for {name}") as caught:
        as_op(operation).check(DTYPES[name])
    assert all(word in str(caught.value) for word in ALLOWED[name])


@pytest.mark.parametrize(
    ("name", "operation"),
    [(n, o) for n, allowed in ALLOWED.items() for o in allowed if o not in ("mean", *LOCATIONS)],
)
def test_an_identity_changes_nothing(name, operation):
    kind = numpy_type(name)
    identity = as_op(operation).identity_for(DTYPES[name])
    if name == "bool" or operation in ("land", "lor", "lxor"):
        values = [0, 1]
    elif DTYPES[name].kind is Kind.INTEGER:
        values = [np.iinfo(kind).min, 0, 1, 3, np.iinfo(kind).max]
    else:
        values = [-2.5, 0.0, 1.0, 3.0] + ([] if "complex" in name else [-np.inf, np.inf])
    x = np.array(values, kind)
    left = UFUNCS[operation](np.full_like(x, identity), x)
    right = UFUNCS[operation](x, np.full_like(x, identity))
    np.testing.assert_array_equal(left.astype(kind), x)
    np.testing.assert_array_equal(right.astype(kind), x)


@pytest.mark.parametrize("given", ["add", "SUM", "", None, 5, ["sum"], sum, np.add])
def test_an_unknown_operation_is_refused_with_the_known_ones(given):
    with pytest.raises(UsageError, match=r"is unknown; allowed: sum, prod, .*mean or one made by"):
        as_op(given)


def test_a_users_operation_is_named_after_its_function():
    def longest(left, right):
        return left

    made = op(longest, commutative=False, identity=0)
    assert made.name.endswith("test_a_users_operation_is_named_after_its_function.<locals>.longest")
    assert made.name.startswith(__name__)
    assert (made.commutative, made.identity, made.code) == (False, 0, None)
    assert as_op(made) is made
    assert op(longest, name="longest").name == "longest"
    assert op(functools.partial(longest)).name == "functools.partial"


@pytest.mark.parametrize("name", OPS)
def test_a_users_operation_may_not_have_the_name_of_a_built_in(name):
    with pytest.raises(UsageError, match=f"{name!r} is the name of a built-in"):
        op(lambda left, right: left, name=name)


def test_only_the_built_in_mean_is_divided():
    assert as_op("mean").is_mean
    assert not as_op("sum").is_mean
    assert not ReduceOp("mean", fn=lambda left, right: left).is_mean


@pytest.mark.parametrize("name", DTYPES)
def test_a_users_operation_fits_every_type(name):
    op(lambda left, right: left).check(DTYPES[name])


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ("avg", "op='mean'"),
        ("AVG", "op='mean'"),
        ("SUM", "op='sum'"),
        ("product", "op='prod'"),
        (torch.distributed.ReduceOp.AVG, "op='mean'"),
        ("argmax", "op='maxloc'"),
        ("MINLOC", "op='minloc'"),
        ("median", "choose one of these"),
        (None, "choose one of these"),
    ],
)
def test_an_operation_by_its_name_elsewhere_is_refused_with_our_name(given, step):
    with pytest.raises(UsageError, match=r"is unknown; allowed: sum, .*mean") as refused:
        as_op(given)
    assert str(refused.value).endswith(f"Next: {step}")


@pytest.mark.parametrize("given", [None, 3, "sum"])
def test_an_operation_needs_a_function(given):
    with pytest.raises(UsageError, match="op needs a function of two arrays, not"):
        op(given)


@pytest.mark.parametrize(
    ("name", "identity"),
    [("int32", 1.5), ("uint8", 300), ("uint8", -1), ("float32", "x"), ("float64", [1, 2]), ("bool", 2)],
)
def test_an_identity_that_the_type_cannot_hold_is_refused(name, identity):
    with pytest.raises(UsageError, match=f"is not a value of {name}"):
        op(lambda left, right: left, identity=identity).identity_for(DTYPES[name])


@pytest.mark.parametrize(
    ("name", "identity"),
    [("int32", -7), ("uint8", 255), ("float32", 0.1), ("bfloat16", float("inf")), ("complex64", 1j)],
)
def test_an_identity_that_fits_is_kept_as_it_is(name, identity):
    assert op(lambda left, right: left, identity=identity).identity_for(DTYPES[name]) == identity


@pytest.mark.parametrize("width", [0, -2, 1.5, "2", None, True])
def test_a_width_is_a_positive_integer(width):
    with pytest.raises(UsageError, match=r"width=.*; allowed: how many elements stay together, 1 or more"):
        op(lambda left, right: left, width=width)


@pytest.mark.parametrize("identity", [(1, 2, 3), [[1, 2]], (1.5, 2), (300, 0)])
def test_an_identity_has_one_number_or_one_for_each_element_of_an_item(identity):
    wide = op(lambda left, right: left, identity=identity, width=2, name="wide")
    with pytest.raises(UsageError, match="is not a value of uint8; allowed: one number, or 2 of them"):
        wide.identity_for(DTYPES["uint8"])


def test_an_identity_for_each_element_reads_like_one_for_all():
    same, each = (op(max, identity=x, width=2, name="wide") for x in (0, (0, 0.0)))
    assert same.shown_identity(DTYPES["float32"]) == each.shown_identity(DTYPES["float32"]) == "[0.0, 0.0]"
    assert op(max, identity=0, name="narrow").shown_identity(DTYPES["float32"]) == "0.0"


@pytest.mark.parametrize("name", DTYPES)
def test_an_item_is_as_long_as_its_elements_and_knows_their_type(name):
    dtype, item = DTYPES[name], DTYPES[name].item(3)
    assert item.itemsize == item.storage.itemsize == 3 * dtype.itemsize
    assert (item.code, item.kind, item.element) == (dtype.code, dtype.kind, dtype)
    assert dtype.item(1) is dtype.element is dtype


def test_exscan_asks_for_an_identity_that_is_missing():
    with pytest.raises(UsageError, match="identity="):
        op(lambda left, right: left).identity_for(BFLOAT16)


@pytest.mark.parametrize("name", ["float128", "object", "", "str"])
def test_an_unknown_type_is_refused_with_those_that_exist(name):
    with pytest.raises(UsageError, match=r"is not supported; allowed: bool, int8, .*complex128"):
        dtype_named(name)


def test_the_repr_of_any_is_the_public_name():
    assert repr(uni.ANY) == "unisono.ANY"
    assert TAG_MAX == 2**31 - 1
    assert uni.Status(1, 2, 3)._asdict() == {"source": 1, "tag": 2, "nbytes": 3}
