"""docs/reference.md: every verb, function and setting, and what a communicator, a work and an agent offer.

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
from unisono.rpc.objects import Proxy

__all__ = ["PAGE", "text"]

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference.md"

_OF_WORLDS: Final = ("init", "spawn", "local", "simulate", "list_backends")
_OF_WORKS: Final = ("wait_all", "wait_any", "wait_some", "as_completed")
_OF_AGENTS: Final = (
    "expose",
    "register",
    "call",
    "start",
    "call_all",
    "notify",
    "stream",
    "remote",
    "proxy",
    "close",
)
_OF_DATA: Final = ("register", "op", "typed")
_COMPRESSORS: Final = ("TopK", "RandomK", "Int8", "Float16", "BFloat16")
_INTRODUCTION: Final = """\
# Reference

Every verb, function and setting, and what a communicator, a work and an agent offer.
`tools/reference_page.py` makes this page from the docstrings, which `help(uni.Communicator.all_reduce)` shows
as well.

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
    lines += ["## Worlds", ""]
    for name in _OF_WORLDS:
        lines += _function(f"uni.{name}", getattr(uni, name))
    for title, verbs in groups.items():
        lines += [f"## {title}", ""]
        for verb in verbs:
            lines += _verb(verb)
    lines += [
        "## Communicators",
        "",
        *_described(inspect.getdoc(uni.Communicator)),
        *_attributes(uni.Communicator),
    ]
    lines += _verb("split")
    lines += _methods(uni.Communicator, ("sub", "mesh", "close", "abort"))
    lines += ["## Mesh", "", *_described(inspect.getdoc(uni.Mesh)), *_attributes(uni.Mesh)]
    lines += ["## Work", "", *_described(inspect.getdoc(Work))]
    lines += _methods(Work, ("wait", "done", "cancel", "add_done_callback"))
    for name in _OF_WORKS:
        lines += _function(f"uni.{name}", getattr(uni, name))
    lines += ["## Objects and operations", ""]
    for name in _OF_DATA:
        lines += _function(f"uni.{name}", getattr(uni, name))
    lines += ["## Remote calls", "", "[rpc.md](rpc.md) shows how they are used.", ""]
    lines += _function("uni.rpc.Agent", uni.rpc.Agent)
    lines += _methods(uni.rpc.Agent, _OF_AGENTS, "agent.")
    lines += ["### Proxy", "", *_described(inspect.getdoc(Proxy)), *_attributes(Proxy)]
    lines += _methods(Proxy, ("release",), "proxy.")
    lines += ["### Stream", "", *_described(inspect.getdoc(uni.rpc.Stream))]
    lines += _methods(uni.rpc.Stream, ("close",), "stream.")
    lines += _function("uni.rpc.here", uni.rpc.here)
    lines += ["## Training", "", "[data_parallel.md](data_parallel.md) shows how they are used.", ""]
    lines += _function("uni.train.average_gradients", uni.train.average_gradients)
    lines += _function("uni.train.GradientAverager", uni.train.GradientAverager)
    lines += _methods(uni.train.GradientAverager, ("add", "finish"), "averager.")
    lines += _function("uni.train.broadcast_parameters", uni.train.broadcast_parameters)
    lines += _function("uni.train.ErrorFeedback", uni.train.ErrorFeedback)
    lines += _methods(uni.train.ErrorFeedback, ("all_reduce", "state_dict", "load_state_dict"), "feedback.")
    for name in _COMPRESSORS:
        lines += _function(f"uni.train.{name}", getattr(uni.train, name))
    lines += ["## Settings", "", *_described(inspect.getdoc(uni.Config)), *_settings()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def _attributes(owner: type) -> Iterator[str]:
    names = [name for name in vars(owner) if isinstance(vars(owner)[name], property) and name[0] != "_"]
    yield from ("| attribute | |", "|---|---|")
    for name in names:
        doc = " ".join((inspect.getdoc(vars(owner)[name]) or "").split())
        yield f"| `{name}` | {doc} |"
    yield ""


def _methods(owner: type, names: tuple[str, ...], prefix: str = "") -> Iterator[str]:
    for name in names:
        yield from _function(prefix + name, getattr(owner, name))


def _verb(name: str) -> Iterator[str]:
    """The signature of the reference verb, and what `help` says but for the errors of every verb."""
    # What waiting for the work gives.
    signature = re.sub(r"-> Work\[(.*)\]$", r"-> \1", _signature(name, getattr(ReferenceVerbs, name)))
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
        if parameter.kind is parameter.KEYWORD_ONLY and not any(each.startswith("*") for each in shown):
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(stars + parameter.name + _default(parameter))
    is_annotated = not isinstance(function, type) and signature.return_annotation is not signature.empty
    result = str(signature.return_annotation) if is_annotated else ""
    # A type variable says nothing without the types of the arguments.
    given = "" if not result or re.search(r"\b[A-Z]\b", result) else f" -> {result}"
    return f"{name}({', '.join(shown)}){given}"


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    return "=uni.ANY" if parameter.default is ANY else f"={parameter.default!r}".replace("'", '"')


def _described(doc: str | None, *, skip_first: bool = False) -> Iterator[str]:
    """A docstring as Markdown: sections become lists; indented lines outside them stay, as code."""
    lines = (doc or "").splitlines()
    in_section = False
    for line in lines[2:] if skip_first else lines:
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            in_section = True
            yield f"**{line[:-1]}**"
            yield ""
            continue
        in_section = in_section and (not line or line.startswith(" "))
        if not in_section:
            yield line
        elif item := re.match(r"    (\*{0,2}\w[\w, ]*): (.*)", line):
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
