"""The line of the user's program that called us: what an error shows beside a collective.

Knows which files are the library's own. Does not know what was called.
"""

from __future__ import annotations

import contextlib
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

__all__ = ["call_site", "is_users"]

_PACKAGE: Final = Path(__file__).parents[1]
_INSIDE: Final = str(_PACKAGE)
# The edges call as a user does, and are worth as much speed.
_EDGES: Final = tuple(str(_PACKAGE / name) for name in ("bench", "cli", "pytorch", "testing", "train"))


# Asked for every frame of every call, of which there are few.
@lru_cache(maxsize=1024)
def is_users(filename: str) -> bool:
    """Whether a call from this file is made by the user; otherwise its user is further out."""
    is_ours = filename.startswith(_INSIDE) or filename == contextlib.__file__  # which ends `with` blocks
    return not is_ours or filename.startswith(_EDGES)


def call_site() -> str:
    """The innermost line that is the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
