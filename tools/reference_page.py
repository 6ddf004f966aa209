"""docs/reference.md: every verb, what a communicator and a work offer, and every setting.

Made from the table of verbs and the docstrings: `python tools/reference_page.py` writes the page, and a test
compares it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import unisono as uni
from unisono import config
from unisono.comm.verb_docs import special
from unisono.comm.verb_table import COLLECTIVES, VERBS, Fact, verbs_with
from unisono.comm.verbs import ReferenceVerbs
from unisono.core.envelope import ANY
from unisono.core.work import Work

__all__ = ["PAGE", "text"]

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference.md"

_OF_WORKS: Final = ("wait_all", "wait_any", "wait_some", "as_completed")
_INTRODUCTION: Final = """\
# Reference

Every verb, what a communicator and a work offer, and every setting. `tools/reference_page.py` makes this page
from the docstrings, which `help(uni.Communicator.all_reduce)` shows as well.

`comm.all_reduce(x)` waits and returns the result. `comm.start.all_reduce(x)` takes the same arguments and
returns a [Work](#work). Every verb may raise the errors that [failure.md](failure.md) lists; below, a verb
names only those that mean something special for it.
"""


def text() -> str:
    """The page."""
    of_objects = [verb for verb in COLLECTIVES if verb in verbs_with(Fact.OBJECTS)]
    uneven = verbs_with(Fact.ANNOUNCED | Fact.CUT | Fact.FUSED) - verbs_with(Fact.OBJECTS | Fact.BY_RANK)
    others = {*of_objects, *uneven, "split"}
    groups = {
        "Messages": [verb for verb in VERBS if verb not in COLLECTIVES],
        "Collectives": [verb for verb in COLLECTIVES if verb not in others],
        "Collectives of uneven lengths, and of many arrays": [v for v in COLLECTIVES if v in uneven],
        "Collectives of objects": of_objects,
    }
    lines = [_INTRODUCTION, *_described(inspect.getdoc(ReferenceVerbs.__base__), skip_first=True)]
    for title, verbs in groups.items():
        lines += [f"## {title}", ""]
        for verb in verbs:
            lines += _verb(verb)
    lines += ["## Communicators", ""]
    lines += _verb("split")
    lines += _members(uni.Communicator, ("sub", "mesh", "close", "abort"))
    lines += ["## Work", "", *_described(inspect.getdoc(Work))]
    lines += _members(Work, ("wait", "done", "cancel", "add_done_callback"))
    for name in _OF_WORKS:
        lines += _function(f"uni.{name}", getattr(uni, name))
    lines += ["## Settings", "", *_described(inspect.getdoc(uni.Config)), *_settings()]
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


def _verb(name: str) -> Iterator[str]:
    """The signature of the reference verb, and what `help` says but for the errors of every verb."""
    signature = _signature(name, getattr(ReferenceVerbs, name))
    yield from (f"### {name}", "", "```python", signature, "```", "")
    yield from _described(special(inspect.cleandoc(getattr(uni.Communicator, name).__doc__)))


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


def _described(doc: str | None, *, skip_first: bool = False) -> Iterator[str]:
    """A docstring as Markdown: sections become lists."""
    lines = (doc or "").splitlines()
    for line in lines[2:] if skip_first else lines:
        if re.fullmatch(r"(Args|Returns|Raises|Yields):", line):
            yield f"**{line[:-1]}**"
            yield ""
        elif item := re.match(r"    (\w[\w, ]*): (.*)", line):
            yield f"- `{item[1]}`: {item[2]}"
        else:
            yield re.sub(r"^ {4}( {2})?\s*", r"\1", line)
    yield ""


def _settings() -> Iterator[str]:
    docs = _setting_docs()
    yield from ("| setting, and its variable | default | allowed | |", "|---|---|---|---|")
    for field in dataclasses.fields(config.Config):
        rule, default = field.metadata, field.default
        low, high = (None if rule[end] is None else _number(rule[end]) for end in ("low", "high"))
        allowed = ", ".join(rule["words"])
        if low is not None:
            allowed = f"from {low} on" if high is None else f"{low} to {high}"
        elif rule["kind"] is bool:
            allowed = "True, False"
        variable = f"UNISONO_{field.name.upper()}"
        yield f"| `{field.name}`<br>`{variable}` | {_number(default)} | {allowed} | {docs[field.name]} |"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _setting_docs() -> dict[str, str]:
    """The text under each setting, which Python itself does not keep."""
    tree = ast.parse(Path(config.__file__).read_text())
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config")
    docs = {}
    for setting, text_under in pairwise(body):
        if isinstance(setting, ast.AnnAssign) and isinstance(text_under, ast.Expr):
            assert isinstance(setting.target, ast.Name)
            docs[setting.target.id] = " ".join(ast.literal_eval(text_under.value).split())
    return docs


if __name__ == "__main__":
    PAGE.write_text(text())
