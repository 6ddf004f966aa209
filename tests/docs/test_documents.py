"""Facts in documents are compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.paths import ROOT, file_of

from unisono import errors
from unisono.config import Config
from unisono.messaging.backend import Backend

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def text_of(name: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / name).read_text())


def test_every_error_stands_in_the_table_of_errors() -> None:
    rows = re.findall(r"^\| `(\w+)`", (ROOT / "docs/failure.md").read_text(), re.MULTILINE)
    wanted = set(errors.__all__) - {"UnisonoError", "Location"}
    assert set(rows) == wanted


def test_a_backend_has_the_methods_that_the_page_names() -> None:
    page = (ROOT / "docs/backends.md").read_text().partition("# Writing a backend")[2]
    table = "".join(line for line in page.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)`", table))
    assert named == Backend.__abstractmethods__
    assert len(named) == 10
    assert "with ten methods" in text_of("docs/backends.md")
    assert "ten methods, three of which move messages" in text_of("README.md")


def test_calls_run_ahead_as_far_as_the_pages_say() -> None:
    source = (ROOT / "native/python/native_group.cpp").read_text()
    calls = re.search(r"run_ahead_max = (\d+);", source)[1]
    link = (ROOT / "native/link/tcp_link.hpp").read_text()
    factor = re.search(r"certain_eager_factor\(\) const override \{ return (\d+); \}", link)[1]
    kib = Config().eager_bytes >> 10
    assert f"up to {calls} calls before it waits for the receivers" in text_of("docs/failure.md")
    limits = f"a collective of up to {kib} KiB (over sockets {kib * int(factor)} KiB)"
    assert limits in text_of("docs/failure.md")
    assert f"by up to {calls} calls, each no longer than a collective sends eagerly" in text_of(
        "ARCHITECTURE.md"
    )
    assert f"up to {calls} calls; a mismatch" in text_of("CHANGELOG.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_and_names_of_files_lead_somewhere(document: Path) -> None:
    """A path of a file starts at the root of the repository or of the package: `comm/group.py`."""
    text = document.read_text()
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (document.parent / link).exists(), link
    for name in re.findall(r"`([a-z]+/[\w./-]+\.(?:py|md|hpp|cpp|json))(?:::\w+)?`", text):
        assert (ROOT / name).exists() or (ROOT / "src/unisono" / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_test_that_a_document_names_exists(document: Path) -> None:
    """The form is `test_file.py::test_name`, and `::test_name` for a further test of the same file."""
    source = ""
    for file, name in re.findall(
        r"`(?:tests/[\w/]+/)?(test_\w+\.py)?(?:::(test_\w+))?`", document.read_text()
    ):
        if file:
            source = file_of(file.removeprefix("test_").removesuffix(".py")).read_text()
        if name:
            assert f"\ndef {name}(" in source, f"{file}::{name}"


def test_the_walk_through_a_backend_quotes_the_example() -> None:
    page = (ROOT / "docs/backends.md").read_text().partition("## The smallest one")[2].partition("\n## ")[0]
    quotes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(quotes) == 2
    example = (ROOT / "examples/own_backend.py").read_text()
    assert [quote for quote in quotes if quote not in example] == []
