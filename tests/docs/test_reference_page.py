"""docs/reference.md is the output of tools/reference_page.py, and complete."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
from tests.support.paths import ROOT

import unisono as uni


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


def test_the_page_has_what_a_communicator_offers_beside_verbs(page: ModuleType) -> None:
    known = set(re.findall(r"^### ([\w.]+)$|^\| `(\w+)` \|", page.text(), re.MULTILINE))
    names = {name for pair in known for name in pair if name}
    methods = {name for name in vars(uni.Communicator) if not name.startswith("_")} - {"world"}
    works = {"wait", "done", "cancel", "add_done_callback"}
    assert methods | works | {"uni.wait_all", "uni.wait_any", "uni.wait_some", "uni.as_completed"} <= names
