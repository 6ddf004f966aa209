"""docs/reference.md is what tools/reference_page.py makes of the docstrings, and leaves nothing out."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from types import ModuleType

import pytest
from tests.support.paths import ROOT

import unisono as uni
from unisono.comm.verb_table import VERBS


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_page", ROOT / "tools" / "reference_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_makes(page: ModuleType) -> None:
    assert page.PAGE.read_text() == page.text(), "python tools/reference_page.py renews it"


def test_every_verb_and_every_setting_stands_on_the_page(page: ModuleType) -> None:
    text = page.text()
    assert set(VERBS) <= set(re.findall(r"^### ([\w.]+)$", text, re.MULTILINE))
    settings = [field.name for field in dataclasses.fields(uni.Config)]
    assert re.findall(r"^\| `(\w+)`<br>", text, re.MULTILINE) == settings
    assert re.findall(r"<br>`(\w+)`", text) == [f"UNISONO_{name.upper()}" for name in settings]


def test_what_a_verb_takes_returns_and_raises_is_shown(page: ModuleType) -> None:
    text = page.text()
    assert "all_reduce_object(obj, fn, *, timeout=None) -> Any" in text
    assert 'all_reduce(x, op="sum", *, out=None, timeout=None, algorithm="auto") -> Any' in text
    assert "recv(buf, src=uni.ANY, tag=uni.ANY, *, timeout=None) -> Status" in text
    assert "- `fn`: a function of two objects." in text
