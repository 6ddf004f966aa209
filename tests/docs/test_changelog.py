"""CHANGELOG.md accounts for every public name that has moved, and every new name in it exists."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest
from tests.docs.old_names import OLD_NAMES
from tests.support.paths import ROOT


def rows(title: str) -> list[tuple[str, list[str], list[str]]]:
    """The rows of the table under this title: the old cell, the old names in it, and the new names."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"| {title} |")) + 2
    found = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        cells = line.strip("|").split(" | ")
        old = [name.partition("(")[0] for name in re.findall(r"`([^`]+)`", cells[0])]
        found.append((cells[0], old, re.findall(r"`([^`]+)`", cells[1])))
    return found


MODULES = {old[0]: new for _, old, new in rows("old module")}
NAMES = {name: new for _, old, new in rows("old name") for name in old}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"unisono.{name}") is not None
    except ModuleNotFoundError:
        return False


def has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(f"unisono.{module}" if module else "unisono"), name)
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("module", sorted({name for new in MODULES.values() for name in new}))
def test_a_new_module_exists(module: str) -> None:
    assert is_module(module)


@pytest.mark.parametrize("name", sorted({name for new in NAMES.values() for name in new}))
def test_a_new_name_can_be_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert has(module, attribute)


@pytest.mark.parametrize("module", OLD_NAMES)
def test_every_old_name_is_where_it_was_or_in_the_tables(module: str) -> None:
    """A name is in its old module, in a table, or in one of the modules that replaced its old module."""
    prefix = "" if module == "unisono" else f"{module}."
    now = MODULES.get(module, [prefix[:-1]])
    lost = [
        name
        for name in OLD_NAMES[module]
        if f"{prefix}{name}" not in NAMES
        and not has(prefix[:-1], name)
        and not any(has(new, name) for new in now)
    ]
    assert lost == []


def test_no_row_is_about_a_name_that_never_was() -> None:
    known = {
        name if module == "unisono" else f"{module}.{name}"
        for module in OLD_NAMES
        for name in OLD_NAMES[module]
    }
    assert set(NAMES) <= known
    assert set(MODULES) <= set(OLD_NAMES)
