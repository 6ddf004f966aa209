"""The arguments that an exposed function accepts, compared with what `inspect` reports."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

from unisono.rpc.registry import Signature


def none() -> Any: ...
def two(a, b) -> Any: ...
def defaults(a, b=2, c=3) -> Any: ...
def only_positional(a, b=2, /) -> Any: ...
def only_by_name(*, a, b=2) -> Any: ...
def mixed(a, /, b, c=3, *, d, e=5) -> Any: ...
def rest(a, *args) -> Any: ...
def named_rest(a=1, **kwargs) -> Any: ...
def everything(a, /, b=2, *args, c, **kwargs) -> Any: ...
def annotated(a: int, b: str = "b", *, c: float = 1.0) -> Any: ...


FUNCTIONS = [
    none,
    two,
    defaults,
    only_positional,
    only_by_name,
    mixed,
    rest,
    named_rest,
    everything,
]
NAMES = [
    names for count in range(4) for names in itertools.combinations(("a", "b", "c", "d", "e", "z"), count)
]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("count", range(5))
def test_a_function_takes_what_inspect_says(fn, count):
    signature, parameters = Signature(fn), inspect.signature(fn)
    args = [100 + i for i in range(count)]
    for names in NAMES:
        kwargs = {name: 200 + i for i, name in enumerate(names)}
        try:
            expected = parameters.bind(*args, **kwargs).arguments
        except TypeError:
            with pytest.raises(TypeError):
                signature.bind(args, kwargs)
        else:
            given, named = signature.bind(args, kwargs)
            assert parameters.bind(*given, **named).arguments == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1,), {}, (1, "b", 1.0)),
        ((1, "x"), {"c": 2}, (1, "x", 2.0)),
        ((1,), {"b": "y", "c": 2.5}, (1, "y", 2.5)),
        ((), {"a": 3}, (3, "b", 1.0)),
        ((np.int64(4),), {"c": np.float32(2)}, (4, "b", 2.0)),
        ((np.bool_(True),), {}, "argument 'a'"),
        ((True,), {}, "argument 'a'"),
        (("1",), {}, "argument 'a'"),
        ((1,), {"b": 5}, "argument 'b'"),
        ((1,), {"c": "x"}, "argument 'c'"),
        ((), {"a": "x", "b": "y"}, "argument 'a'"),
        ((1,), {"a": 1}, "a"),
        ((), {}, "a"),
    ],
)
def test_arguments_are_checked_and_converted_by_position_and_by_name(args, kwargs, expected):
    signature = Signature(annotated)
    if isinstance(expected, str):
        with pytest.raises(TypeError, match=expected):
            signature.bind(args, kwargs)
        return
    given, named = signature.bind(args, kwargs)
    bound = inspect.signature(annotated).bind(*given, **named)
    bound.apply_defaults()
    assert tuple(bound.arguments.values()) == expected
    assert [type(value) for value in bound.arguments.values()] == [int, str, float]


def stores(data: bytes, more: list[bytes] | None = None) -> Any: ...


def test_a_text_is_no_bytes() -> None:
    """It could be base64."""
    signature = Signature(stores)
    assert signature.bind([bytearray(b"YWJj")], {"more": [b"YWJj"]}) == ([b"YWJj"], {"more": [b"YWJj"]})
    for args in (["YWJj"], [b"", ["YWJj"]]):
        with pytest.raises(TypeError, match="Expected `bytes`, got `str`"):
            signature.bind(args, {})
