"""The line of the user's program that called the library, for errors and warnings."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from unisono import _native

__all__ = [
    "call_site",
    "caller",
    "calling_thread",
    "hide_files",
    "is_users",
    "line_of",
    "line_text",
    "on_behalf",
]

_PACKAGE: Final = Path(__file__).parents[1]
_INSIDE: Final = str(_PACKAGE)
# These folders call the library as a user does.
_EDGES: Final = tuple(str(_PACKAGE / name) for name in ("bench", "cli", "testing"))
# Frames of these files run the end of `with` blocks, and threads.
_HELPERS: Final = frozenset((contextlib.__file__, threading.__file__))
_hidden: tuple[str, ...] = ()
_behalf: ContextVar[tuple[int, str] | None] = ContextVar("unisono_on_behalf", default=None)


# Called for every frame of every call; the number of different files is small.
@lru_cache(maxsize=1024)
def is_users(filename: str) -> bool:
    """Whether a call from this file is the user's; otherwise the user's frame is further out."""
    if filename in _HELPERS or filename.startswith(_hidden):
        return False
    return not filename.startswith(_INSIDE) or filename.startswith(_EDGES)


def hide_files(path: str) -> None:
    """Show calls from a file or folder of a library that calls ours as the line that called that library."""
    global _hidden
    prefix = path if path.endswith(".py") else f"{path}/"
    if prefix not in _hidden:
        _hidden += (prefix,)
        is_users.cache_clear()
        _native.set_user_files(is_users)


def call_site() -> str:
    """The innermost line of the user's code on the stack, as "file.py:12"."""
    if (kept := _behalf.get()) is not None:
        return kept[1]
    frame = caller()
    return line_text(frame.f_code.co_filename, frame.f_lineno)


@contextlib.contextmanager
def on_behalf() -> Iterator[None]:
    """What other threads run in this context counts as called by this thread, from its line."""
    token = _behalf.set((calling_thread(), call_site()))
    try:
        yield
    finally:
        _behalf.reset(token)


def calling_thread() -> int:
    """The thread of the user that called the library."""
    kept = _behalf.get()
    return threading.get_ident() if kept is None else kept[0]


def caller() -> FrameType:
    """The innermost frame of the user's code on the stack; the outermost one if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_text(filename: str, line: int) -> str:
    """A line of a program as errors show it."""
    return f"{filename.rpartition('/')[2]}:{line}"


def line_of(code: CodeType | None, instruction: int) -> str:
    """The line of an instruction of a code object, given by its offset in bytes."""
    if code is None:
        return "?"
    positions = next(islice(code.co_positions(), max(instruction, 0) // 2, None), None)
    line = None if positions is None else positions[0]
    return line_text(code.co_filename, code.co_firstlineno if line is None else line)


_native.set_user_files(is_users)
