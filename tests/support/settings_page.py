"""docs/settings.md: every setting and variable, from `unisono.Config`.

    python -m tests.support.settings_page

prints the page; tests/docs/test_settings_page.py compares.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap

from unisono import Config

__all__ = ["page"]

_INTRODUCTION = """\
# Settings and variables

Made from `unisono.Config` (`python -m tests.support.settings_page`; a test compares).

A setting is given in code, `uni.init(config=uni.Config(stall_log_s=5.0))`, by an option of `unisono run`,
or by a variable; this is also the order of precedence. All ranks must use equal settings: they are compared
when ranks join. Limits that are not settings are in [limits.md](limits.md).

In a hang, begin with `UNISONO_STALL_LOG_S=2`: every operation that has not ended by then logs the ranks it
waits for.

| setting | variable | default | allowed | what it does |
|---|---|---|---|---|
"""

_LAUNCH = """
## Variables that say where ranks meet

Options of `unisono run` set them; under another launcher, set them by hand. [launch.md](launch.md) explains
them.

| variable | what it is |
|---|---|
| `UNISONO_JOIN` | the join ticket, or the path of a file that holds it |
| `UNISONO_ADDRESS` | the address of this host where ranks listen, as HOST or HOST:PORT |
| `UNISONO_ADVERTISE` | the address under which others reach it, if that differs |
| `UNISONO_BACKEND` | the backend of `uni.init()` |
| `UNISONO_RANK`, `UNISONO_SIZE` | set by `unisono run` in each rank |
| `UNISONO_LOCAL_RANK`, `UNISONO_LOCAL_SIZE` | set by `unisono run`: the same among the ranks of the host |
"""


def page() -> str:
    """The whole page."""
    said = _texts(Config)
    rows = []
    for field in dataclasses.fields(Config):
        words = " ".join(said[field.name].split())
        shown = "none" if field.default is None else str(field.default).lower()
        allowed = _allowed(field)
        rows.append(f"| `{field.name}` | `UNISONO_{field.name.upper()}` | {shown} | {allowed} | {words} |")
    return _INTRODUCTION + "\n".join(rows) + "\n" + _LAUNCH


def _allowed(field: dataclasses.Field[object]) -> str:
    if words := field.metadata["words"]:
        return ", ".join(words)
    if field.metadata["kind"] is bool:
        return "true, false (as a variable 1, 0)"
    low, high = field.metadata["low"], field.metadata["high"]
    if low is None:
        return "text"
    return f"{low} and more" if high is None else f"{low} to {high:,}"


def _texts(kind: type) -> dict[str, str]:
    """The text below each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = after.value.value if is_text else ""  # type: ignore[union-attr]
    return found


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
