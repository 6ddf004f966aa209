"""The codec: values that are refused, with the next step; and no module turns bytes into code."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.typed_values import Point, Unknown, Unregistered, same

import unisono as uni
from unisono.core.codec import pack, pack_parts, register, unpack, unpack_parts
from unisono.errors import ProtocolError, UsageError

PACKAGE = Path(uni.__file__).parent


# -- values that are refused ---------------------------------------------------------------------------


class Special(str):
    pass


class Lent(bytearray):
    pass


def _endless() -> list:
    loop: list = []
    loop.append(loop)
    return loop


def _deep(levels: int, make=lambda inner: [inner]) -> object:
    value: object = 1
    for _ in range(levels):
        value = make(value)
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Unknown(), r"^the object is .*Unknown; allowed: plain data, bytes, arrays, and dataclasses"),
        ([1, {"a": Unknown()}], r"^\[1\]\['a'\] of the object is"),
        ((1, {2: {3: Unknown}}), r"^\[1\]\[2\]\[3\] of the object is type;"),
        (Point(1.0, Unknown()), r"^.y of the object is"),
        ({"a": {frozenset({Unknown}): 1}}, r"^\['a'\].keys\(\)\[0\] of the object is type;"),
        (Unregistered(), "Unregistered; allowed: .*named tuples given to unisono.register"),
        (Special("x"), r"Special; allowed.*send str\(...\) of it"),
        (Lent(b"x"), r"Lent; allowed.*send bytearray\(...\) of it"),
        (lambda: 0, "function; allowed"),
        (range(3), "is range; allowed"),
        (np.array([{}], object), "^the object has dtype object; allowed"),
        ({"w": np.zeros(2, ">f4")}, r"^\['w'\] of the object has foreign byte order"),
        (torch.eye(2).to_sparse(), "sparse"),
        (_endless(), "nested deeper than 64 levels, or contains itself"),
        (_deep(70, lambda inner: {"k": inner}), "nested deeper than 64 levels"),
        ("\ud800", "cannot be encoded"),
        ({"\udfff": 1}, "cannot be encoded"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_that_cannot_be_packed_are_refused_with_their_position(value, words):
    with pytest.raises(UsageError, match=words):
        pack(value)


@pytest.mark.parametrize(
    "make", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}, lambda x: Point(0.0, x)]
)
def test_every_depth_that_can_be_packed_can_be_unpacked(make):
    deepest = 0
    for levels in range(1, 70):
        value = _deep(levels, make)
        try:
            packed = pack(value)
        except UsageError:
            break
        assert same(unpack(packed), value)
        deepest = levels
    assert deepest >= 60


class Refusing:
    """Raises on every access."""

    @property
    def __dlpack__(self):
        raise KeyError("not today")


@register
@dataclasses.dataclass
class Shrinking:
    """Changes its container while it is packed."""

    neighbours: object

    def __getattribute__(self, name):
        if name == "neighbours":
            found = object.__getattribute__(self, name)
            found.pop() if isinstance(found, list) else found.popitem()
            return None
        return object.__getattribute__(self, name)


def test_an_error_of_the_users_own_comes_out_as_it_is_and_nothing_is_kept():
    refusing, data = Refusing(), b"x" * 5000
    value = [data, {"k": (bytearray(5000), refusing)}, data]
    before = sys.getrefcount(data), sys.getrefcount(refusing), sys.getrefcount(value[1])
    for _ in range(20):
        with pytest.raises(KeyError, match="not today"):
            pack(value)
        with pytest.raises(KeyError, match="not today"):
            pack_parts(value)
    value[1]["k"][0].append(1)  # no reference is left
    assert (sys.getrefcount(data), sys.getrefcount(refusing), sys.getrefcount(value[1])) == before


def test_containers_that_change_while_they_are_packed_are_an_error():
    rows: list = [1, 2, 3]
    rows.insert(0, Shrinking(rows))
    with pytest.raises(RuntimeError, match="changed its length"):
        pack(rows)
    table: dict = {"a": None, "b": 2, "c": 3}
    table["a"] = Shrinking(table)
    with pytest.raises(RuntimeError, match="changed size"):
        pack(table)


def test_nothing_leaks():
    value = {"k": [1.5, "text", (b"bytes", 2**80, {3}), np.arange(5), Point(1.0, "y"), uni.Status(1, 2, 3)]}
    value["long"] = ["x" * 5000, b"y" * 5000, bytearray(5000), np.arange(5000), torch.arange(3000)]
    packed = pack(value)
    head, blobs = pack_parts(value)
    spoiled = [packed[:at] for at in range(8, 400, 7)] + [
        packed[:at] + b"\xff" + packed[at + 1 :] for at in range(400)
    ]

    def turn():
        unpack(pack(value))
        unpack(bytearray(packed))
        unpack_parts(head, [bytearray(blob) for blob in blobs])
        for data in spoiled:
            value_or_protocol_error(data)
        with pytest.raises(UsageError):
            pack([value, Unknown()])

    turn()
    tracemalloc.start()
    try:
        turn()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            turn()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4000
    finally:
        tracemalloc.stop()


def value_or_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        unpack(data)


# -- no code from the wire -----------------------------------------------------------------------------


# Modules that turn data into code, or find code by a name that data may contain.
FORBIDDEN_IMPORTS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "copyreg",
    "joblib",
    "runpy",
    "code",
}
# Subcommands are found by names in the module's own table; a spawned rank runs what its parent names.
EXEMPT = {
    "cli/__init__.py": ("import_module",),
    "launcher/program.py": ("runpy", "import_module"),
    # The measured loops are lines of its own table (bench/operations.py): no text comes from outside.
    "bench/libraries.py": ("eval", "exec", "compile"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "import_module"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.split(".")[0] in FORBIDDEN_IMPORTS]
            case ast.ImportFrom(module=str(module), names=names):
                names_of = [module.split(".")[0], *(alias.name for alias in names)]
                found += [name for name in names_of if name in FORBIDDEN_IMPORTS | FORBIDDEN_CALLS]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name, value=ast.Name(id="importlib"))):
                found += [name] if name in FORBIDDEN_CALLS else []
            case ast.Attribute(attr=name):
                found += [name] if name in ("__reduce__", "__reduce_ex__", "allow_pickle") else []
            case ast.keyword(arg="allow_pickle"):
                found.append("allow_pickle")
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_module_turns_bytes_into_code(path):
    allowed = EXEMPT.get(str(path.relative_to(PACKAGE)), ())
    assert [name for name in offences(path.read_text()) if name not in allowed] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from pickle import loads",
        "from importlib import import_module",
        "eval('1')",
        "exec(data)",
        "__import__(name)",
        "import importlib\nimportlib.import_module(name)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_scan_finds_forbidden_code(source):
    assert offences(source)


def test_nothing_of_pickle_is_loaded_by_the_codec():
    script = (
        "import sys, unisono.core.codec as c; c.unpack(c.pack([1, (2,)])); print('pickle' in sys.modules)"
    )
    clean = "import sys, numpy, msgspec; print('pickle' in sys.modules)"
    ours, theirs = (
        subprocess.run([sys.executable, "-c", s], capture_output=True, text=True, check=True).stdout
        for s in (script, clean)
    )
    assert ours == theirs  # NumPy loads its own
