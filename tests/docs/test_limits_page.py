"""docs/limits.md lists every default limit with the value in the code."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from typing import Any

import pytest
from tests.support.paths import ROOT

import unisono as uni
from unisono.bootstrap import limits
from unisono.cli.run import command
from unisono.launcher.job import Job

PAGE = ROOT / "docs" / "limits.md"
UNITS = {"s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "": 1}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and line.count("|") == 6 and "in the code" not in line
]
NAMED = {row[4].strip("`"): row[1] for row in ROWS}


def in_words(text: str) -> float | None:
    if text == "none":
        return None
    number, _, unit = text.partition(" ")
    return float(number) * UNITS[unit]


def in_code(name: str) -> Any:
    """The value of a constant or default: `module.NAME`, `Dataclass.field` or `function(argument)`."""
    if "pp:" in name:
        return in_engine(*name.split(":"))
    path, argument = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", name).groups()  # type: ignore[union-attr]
    owner, _, last = path.rpartition(".")
    holder = pkgutil.resolve_name(owner)
    if argument is not None:
        return inspect.signature(getattr(holder, last)).parameters[argument].default
    if dataclasses.is_dataclass(holder):
        return next(field.default for field in dataclasses.fields(holder) if field.name == last)
    return getattr(holder, last)


def in_engine(file: str, name: str) -> float:
    """The value of a constant of the engine: a product of numbers and units of time."""
    text = re.search(rf"constexpr \S+ {name} = ([^;]+);", (ROOT / file).read_text())
    assert text is not None, f"{name} is no longer in {file}"
    units = {"second": 1.0, "millisecond": 1e-3}
    value = 1.0
    for factor in text[1].split(" * "):
        value *= units[factor] if factor in units else float(factor)
    return value


@pytest.mark.parametrize("name", NAMED)
def test_a_limit_on_the_page_is_the_codes(name: str) -> None:
    assert in_words(NAMED[name]) == in_code(name)


def test_the_page_has_every_setting_and_every_limit_of_the_join_port() -> None:
    settings = [
        f"unisono.Config.{field.name}"
        for field in dataclasses.fields(uni.Config)
        if type(field.default) in (int, float)
    ]
    ports = [f"unisono.bootstrap.limits.{name}" for name in vars(limits) if name.isupper()]
    assert set(settings + ports) - set(NAMED) == set()


def test_no_operation_has_a_limit_of_its_own() -> None:
    (world,) = uni.local(1)
    with world:
        verbs = {name: getattr(world.start, name) for name in dir(world.start) if not name.startswith("_")}
        limited = {
            name: inspect.signature(verb).parameters["timeout"].default
            for name, verb in verbs.items()
            if callable(verb) and "timeout" in inspect.signature(verb).parameters
        }
    assert len(limited) > 20
    assert set(limited.values()) == {None}


def test_the_command_line_has_the_jobs_grace() -> None:
    (option,) = (parameter for parameter in command.params if parameter.name == "grace_s")
    assert option.default == next(f.default for f in dataclasses.fields(Job) if f.name == "grace_s")
