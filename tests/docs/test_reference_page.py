"""docs/reference.md is the output of tools/reference_page.py, and complete."""

from __future__ import annotations

import importlib.util
import inspect
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
    mesh = {name for name in vars(uni.Mesh) if not name.startswith("_")}
    assert methods | works | mesh <= names


def test_the_page_has_every_public_function_and_what_an_agent_offers(page: ModuleType) -> None:
    known = set(re.findall(r"^### ([\w.]+)$", page.text(), re.MULTILINE))
    functions = {f"uni.{name}" for name in uni.__all__ if inspect.isfunction(getattr(uni, name))}
    agent = {f"agent.{name}" for name in vars(uni.rpc.Agent) if not name.startswith("_")} - {"agent.name"}
    train = {f"uni.train.{name}" for name in uni.train.__all__ if name != "Compressor"}
    assert functions | agent | train <= known


def test_a_function_without_annotations_is_shown_without_a_result(page: ModuleType) -> None:
    assert page._signature("wait", lambda timeout=None: None) == "wait(timeout=None)"


def test_a_drawing_in_a_docstring_stays_as_it_is(page: ModuleType) -> None:
    doc = "What.\n\n    row 0    1: 2\n    row 1    3\n\nArgs:\n    *rest: words\n        more.\n"
    assert list(page._described(doc))[2:] == [
        "    row 0    1: 2",
        "    row 1    3",
        "",
        "**Args**",
        "",
        "- `*rest`: words",
        "  more.",
        "",
    ]
