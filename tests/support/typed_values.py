"""Values of every kind that the codec packs, and when two of them are the same."""

from __future__ import annotations

import dataclasses
import math
import struct

import ml_dtypes
import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unisono.core.codec import register
from unisono.core.dtypes import DTYPES

SOME = settings(derandomize=True, deadline=None, database=None, max_examples=80)
MANY = settings(derandomize=True, deadline=None, database=None, max_examples=300)


@register
@dataclasses.dataclass
class Point:
    x: float
    y: object = None


@register
@dataclasses.dataclass(frozen=True)
class Sealed:
    """A frozen dataclass with a field that its constructor does not accept."""

    name: str
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.name))


@register
@dataclasses.dataclass(slots=True)
class Empty:
    pass


def same(a, b) -> bool:
    """Equal in value and in type, NaN included."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    match a:
        case float():
            return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
        case complex():
            return same(a.real, b.real) and same(a.imag, b.imag)
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case dict():
            return len(a) == len(b) and all(map(same, a.items(), b.items()))
        case np.ndarray():
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        case np.generic():
            return a.tobytes() == b.tobytes()
        case torch.Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    return a == b


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return (flat.view(torch.int16) if tensor.dtype == torch.bfloat16 else flat).numpy().tobytes()


NUMPY_TYPES = [np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES]


@st.composite
def arrays(draw, types=NUMPY_TYPES):
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    kind = draw(st.sampled_from(types))
    count = math.prod(shape)
    bits = draw(st.binary(min_size=count * kind.itemsize, max_size=count * kind.itemsize))
    if kind == np.dtype(bool):
        bits = bytes(b & 1 for b in bits)
    return np.frombuffer(bits, np.uint8).view(kind).reshape(shape)


TENSORS = arrays([np.dtype(name) for name in DTYPES if name != "bfloat16"]).map(
    lambda a: torch.from_numpy(a.copy())
) | hnp.arrays(np.int16, hnp.array_shapes(max_dims=2, min_side=0, max_side=4)).map(
    lambda a: torch.from_numpy(a).view(torch.bfloat16)
)
SCALARS = st.sampled_from(NUMPY_TYPES).flatmap(
    lambda kind: st.integers(0, 1).map(lambda n: np.array([n], kind)[0])
)
INTEGERS = (
    st.integers()
    | st.integers(-(2**200), 2**200)
    | st.sampled_from([s * 2**k + d for s in (1, -1) for k in (31, 32, 62, 63, 64, 127) for d in (-1, 0, 1)])
)
HASHABLE = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9)
)
KEYS = HASHABLE | st.tuples(HASHABLE, HASHABLE) | st.frozensets(HASHABLE, max_size=2)
LEAVES = (
    HASHABLE
    | st.floats()
    | st.complex_numbers()
    | st.sets(KEYS, max_size=3)
    | st.frozensets(KEYS, max_size=3)
    | arrays()
    | TENSORS
    | SCALARS
    | st.builds(Sealed, st.text(max_size=4))
    | st.builds(Empty)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Point, st.floats(), inner)
    ),
    max_leaves=12,
)


class Unknown:
    pass


@dataclasses.dataclass
class Unregistered:
    x: int = 0
