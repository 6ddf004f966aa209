"""docs/reference.md: what a communicator and a work offer beside the verbs.

Made from the docstrings: `python tools/reference_page.py` writes the page, and a test compares it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import unisono as uni
from unisono.core.envelope import ANY
from unisono.core.work import Work

__all__ = ["PAGE", "text"]

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference.md"

_OF_WORKS: Final = ("wait_all", "wait_any", "wait_some", "as_completed")
_INTRODUCTION: Final = """\
# Communicators and works

Verbs are in [verbs.md](verbs.md), settings in [settings.md](settings.md). `tools/reference_page.py` makes
this page from the docstrings.
"""


def text() -> str:
    """The page."""
    lines = [_INTRODUCTION, "## Communicator", "", *_described(inspect.getdoc(uni.Communicator))]
    lines += _members(uni.Communicator, ("sub", "mesh", "close", "abort"))
    lines += ["## Work", "", *_described(inspect.getdoc(Work))]
    lines += _members(Work, ("wait", "done", "cancel", "add_done_callback"))
    for name in _OF_WORKS:
        lines += _function(f"uni.{name}", getattr(uni, name))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def _members(owner: type, methods: tuple[str, ...]) -> Iterator[str]:
    names = [name for name in vars(owner) if isinstance(vars(owner)[name], property) and name[0] != "_"]
    if names:
        yield from ("| attribute | |", "|---|---|")
        for name in names:
            doc = " ".join((inspect.getdoc(vars(owner)[name]) or "").split())
            yield f"| `{name}` | {doc} |"
        yield ""
    for name in methods:
        yield from _function(name, getattr(owner, name))


def _function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield from (f"### {name}", "", "```python", _signature(name, function), "```", "")
    yield from _described(inspect.getdoc(function))


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    shown: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(parameter.name + _default(parameter))
    result = signature.return_annotation
    given = "" if result is signature.empty else f" -> {_result(str(result))}"
    return f"{name}({', '.join(shown)}){given}"


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    return "=uni.ANY" if parameter.default is ANY else f"={parameter.default!r}".replace("'", '"')


def _result(annotation: str) -> str:
    """What waiting for a work gives."""
    work = re.fullmatch(r"Work\[(.*)\]", annotation)
    return work[1] if work else annotation


def _described(doc: str | None) -> Iterator[str]:
    """A docstring as Markdown: sections become lists."""
    for line in (doc or "").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Yields):", line):
            yield f"**{line[:-1]}**"
            yield ""
        elif item := re.match(r"    (\w[\w, ]*): (.*)", line):
            yield f"- `{item[1]}`: {item[2]}"
        else:
            yield re.sub(r"^ {4}( {2})?\s*", r"\1", line)
    yield ""


if __name__ == "__main__":
    PAGE.write_text(text())
