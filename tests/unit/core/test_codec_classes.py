"""The codec: instances of registered dataclasses, named tuples and structs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from tests.support.typed_values import Point, Sealed, Unknown, Unregistered, same

import unisono as uni
from unisono.core.codec import pack, register, unpack
from unisono.errors import ProtocolError, UsageError


@register
class Span(NamedTuple):
    """A named tuple that is registered."""

    start: int
    stop: object = None


Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - one of the old kind


def test_a_status_and_registered_named_tuples_arrive_as_themselves():
    value = [uni.Status(1, 2, 3), Span(1, {"x": np.arange(3)}), {Span(0): uni.Status(0, 0, 0)}]
    got = unpack(pack(value))
    assert [type(each) for each in got] == [uni.Status, Span, dict]
    assert got[0] == value[0]
    assert same(got[1].stop, {"x": np.arange(3)})
    assert [type(key) for key in got[2]] == [Span]
    assert same(unpack(pack((1, (2,)))), (1, (2,)))  # a plain tuple stays a tuple


def test_a_status_with_forged_fields_is_packed_by_its_fields():
    with pytest.raises((AttributeError, IndexError)):
        pack(tuple.__new__(uni.Status, (1,)))
    odd = tuple.__new__(uni.Status, (1, 2, 3, 4))
    assert unpack(pack(odd)) == uni.Status(1, 2, 3)


def test_values_that_cannot_be_packed_are_refused_with_the_next_step():
    steps: list[tuple[object, str]] = [
        (Pair(1, 2), r"Next: uni.register\(Pair\) on every rank"),
        (Unregistered(), r"Next: uni.register\(Unregistered\) on every rank"),
        (torch.Size([1]), r"Next: send tuple\(...\) of it"),
        (Unknown(), "Next: send its values as plain data"),
    ]
    for value, words in steps:
        with pytest.raises(UsageError, match=words):
            pack([value])


def test_dataclasses_come_back_with_the_fields_that_were_sent_and_no_constructor_run():
    changed = Sealed("abc")
    object.__setattr__(changed, "size", 99)
    assert unpack(pack(changed)).size == 99


@register
@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    label: str
    inner: object = None


@register
class Grid(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    row_count: int
    cells: object = None


@register
class Corner(NamedTuple):
    x: int
    y: object


@register
@dataclasses.dataclass
class Bare:
    pass


@register
@dataclasses.dataclass
class Hooked:
    """A class whose own constructor and attribute setter must not be called."""

    x: int

    def __init__(self) -> None:
        raise AssertionError("not called")

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError("not called")


def _hooked(x: int) -> Hooked:
    made = object.__new__(Hooked)
    object.__setattr__(made, "x", x)
    return made


WIDE = register(dataclasses.make_dataclass("Wide", [(f"field_{i:03}", int) for i in range(300)]))
WIDE.__module__ = __name__


@pytest.mark.parametrize(
    "value",
    [
        Slotted("a", Slotted("ü" * 300, [1.5])),
        Grid(row_count=3, cells=[Corner(1, None), Corner(2, Grid(row_count=0))]),
        Corner(2**40, {"k": Bare()}),
        _hooked(5),
        WIDE(*range(300)),
        [Bare()] * 300,
        {Corner(i, i): Slotted(str(i), Corner(-i, b"x" * i)) for i in range(40)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_instances_of_registered_classes_come_back_as_themselves(value):
    back = unpack(pack(value))
    assert type(back) is type(value)
    assert back == value


def test_a_field_that_is_missing_is_the_users_own_error():
    broken = object.__new__(Slotted)
    with pytest.raises(AttributeError, match="label"):
        pack([broken])


@pytest.mark.parametrize("value", [Slotted("a", 1), Grid(row_count=1), Corner(1, 2)], ids=str)
def test_a_record_of_other_values_or_fields_is_a_protocol_error(value):
    packed = pack(value)
    field = b"label" if isinstance(value, Slotted) else b"row_count" if isinstance(value, Grid) else b"\x01x"
    renamed = packed.replace(field, b"\x01q" if len(field) == 2 else b"q" * len(field))
    with pytest.raises(ProtocolError, match=r"has other fields here.* Next: use the same definition"):
        unpack(renamed)
    with pytest.raises(ProtocolError, match=r"is not registered here\. Next: give it to uni\.register"):
        unpack(packed.replace(b"test_codec", b"test_codeq"))
    for cut in range(9, len(packed)):
        with pytest.raises(ProtocolError):
            unpack((cut << 16 | packed[0] | packed[1] << 8).to_bytes(8, "little") + packed[8:cut])


def test_only_dataclasses_are_registered():
    for wrong in (Unknown, 3, Point(1.0), "Point"):
        with pytest.raises(UsageError, match="register takes a dataclass"):
            register(wrong)


@dataclasses.dataclass
class Mapped(OrderedDict):
    """A dataclass and a dict: of the entries of a dict, the fields know nothing."""

    x: int = 1


@dataclasses.dataclass
class Failed(Exception):
    code: int = 1


@pytest.mark.parametrize(("cls", "base"), [(Mapped, "dict"), (Failed, "Exception")])
def test_a_dataclass_that_is_a_builtin_type_too_is_refused_when_it_is_registered(cls, base):
    with pytest.raises(UsageError, match=rf"not .*: it inherits from {base}, .*without this base"):
        register(cls)


def test_a_dataclass_that_is_a_dict_too_arrives_as_a_dict():
    value = Mapped()
    value["k"] = 2
    assert same(unpack(pack(value)), {"k": 2})
    with pytest.raises(UsageError, match="Failed; allowed"):
        pack(Failed())


def test_a_name_means_one_dataclass():
    again = dataclasses.make_dataclass("Point", ["x", "y"], namespace={"__module__": Point.__module__})
    assert register(again) is again  # the same fields: the module was loaded twice
    other = dataclasses.make_dataclass("Point", ["x", "z"], namespace={"__module__": Point.__module__})
    with pytest.raises(UsageError, match=r"another class is registered as '.*\.Point'"):
        register(other)
    register(Point)


def test_structs_are_packed_like_dataclasses():
    @register
    class Setting(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
        step_size: float
        names: tuple[str, ...] = ()
        table: object = None

    there = Setting(step_size=0.5, names=("a",), table=np.arange(7))
    back = unpack(pack([there, {"k": Setting(step_size=2.0)}]))
    assert type(back[0]) is Setting
    assert (back[0].step_size, back[0].names) == (0.5, ("a",))
    np.testing.assert_array_equal(back[0].table, np.arange(7))
    assert back[1] == {"k": Setting(step_size=2.0)}


def test_a_struct_that_rejects_its_fields_is_a_protocol_error():
    @register
    class Positive(msgspec.Struct):
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x: allowed: 0 or more")

    value = Positive(1)
    value.x = -1
    with pytest.raises(ProtocolError, match="allowed: 0 or more"):
        unpack(pack(value))
    with pytest.raises(UsageError, match=r"dataclass, a msgspec\.Struct or a named tuple"):
        register(msgspec.Struct)
